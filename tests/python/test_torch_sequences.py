"""Recurrent networks whose steps are one op or one autograd node, beside those that autograd records one by one."""

import pytest
import torch
from test_torch import error

import blocksparse
import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse._core import library
from blocksparse.torch import blocks
from blocksparse.torch.autograd import sequence
from blocksparse.torch.autograd.deep_update import DeepUpdate
from blocksparse.torch.autograd.multiplicative import Multiplicative

STEPS, N, INPUT, HIDDEN = 7, 5, 12, 48
WHY_NOT = blocksparse.cuda_status() if torch.cuda.is_available() else "PyTorch sees no CUDA device"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT))]
SPARSE = ["deep", "multiplicative"]
LENGTHS = {"all": None, "several": [7, 3, 0, 1, 7]}


def make(which, device, dtype=torch.float64, seed=1):
    torch.manual_seed(seed)
    if which == "multiplicative":
        module = bst.MultiplicativeLSTM(INPUT, HIDDEN, Layout.from_graph("random(6,6,0.5)", 8, seed=1))
    elif which == "deep":
        module = bst.DeepUpdateLSTM.from_graph(INPUT, HIDDEN, "ba(6,2)", 8, 3, ports=2)
    else:
        module = bst.DeepUpdateLSTM(INPUT, HIDDEN, None, 3, 2)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return module.to(device, dtype)


def inputs(device, dtype=torch.float64, seed=2):
    torch.manual_seed(seed)
    x = torch.randn(STEPS, N, INPUT, dtype=dtype, device=device, requires_grad=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    h = torch.randn(1, N, HIDDEN, dtype=dtype, device=device, requires_grad=True)
    c = torch.randn(1, N, HIDDEN, dtype=wide, device=device, requires_grad=True)
    return x, (h, c)


def results(module, x, state, lengths, weights=(1.0, 0.3, 0.7)):
    """What comes out, and all gradients."""
    module.zero_grad()
    lengths = None if lengths is None else torch.tensor(lengths)
    y, (h, c) = module(x, state, lengths)
    loss = sum(w * t.double().sin().sum() for w, t in zip(weights, (y, h, c), strict=True) if w)
    given = (x, *state, *module.parameters())
    return [t.detach() for t in (y, h, c)] + list(torch.autograd.grad(loss, given))


def composed(module, monkeypatch, *given):
    with monkeypatch.context() as patch:
        patch.setattr(type(module), "_is_one_op", lambda *_: False)
        patch.setattr(bst.DeepUpdateLSTM, "_is_one_node", lambda *_: False)
        return results(module, *given)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", [*SPARSE, "deep, dense"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_agrees_with_the_composed_steps(device, which, lengths, monkeypatch):
    module, (x, state) = make(which, device), inputs(device)
    given = (x, state, LENGTHS[lengths])
    expected = composed(module, monkeypatch, *given)
    for got, want in zip(results(module, *given), expected, strict=True):
        assert error(got, want) < 1e-12
    with torch.no_grad():  # where steps share their memory
        y, (h, c) = module(x, state, None if lengths == "all" else torch.tensor(LENGTHS[lengths]))
    for got, want in zip((y, h, c), expected[:3], strict=True):
        assert error(got, want) < 1e-13


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", SPARSE)
@pytest.mark.parametrize("weights", [(1.0, 0, 0), (0, 1.0, 0), (0, 0, 1.0)])
def test_gradients_of_one_output_alone(device, which, weights, monkeypatch):
    module, (x, state) = make(which, device), inputs(device)
    given = (x, state, None, weights)
    for got, want in zip(results(module, *given), composed(module, monkeypatch, *given), strict=True):
        assert error(got, want) < 1e-12


def error_beside_float64(which, device, dtype, seed):
    module, (x, state) = make(which, device, dtype, seed), inputs(device, dtype, seed)
    got = results(module, x, state, LENGTHS["several"])
    wide = make(which, device, torch.float64)
    with torch.no_grad():
        for mine, theirs in zip(wide.parameters(), module.parameters(), strict=True):
            mine.copy_(theirs)
    x, h, c = (t.detach().double().requires_grad_() for t in (x, *state))
    want = results(wide, x, (h, c), LENGTHS["several"])
    return max(error(mine, exact) for mine, exact in zip(got, want, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", SPARSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_agrees_with_float64(device, which, dtype):
    # Of several networks, for a single relu whose sum rounds to the other side of 0 changes a gradient as a whole.
    errors = sorted(error_beside_float64(which, device, dtype, seed) for seed in range(9))
    bound = {torch.float32: 1e-5, torch.bfloat16: 0.2, torch.float16: 0.03}[dtype]
    assert errors[len(errors) // 2] < bound, errors
    assert errors[0] < bound / 3, errors


@pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)
def test_a_dense_network_can_be_captured_after_a_call():
    module, (x, state) = make("deep, dense", "cuda"), inputs("cuda")
    with torch.no_grad():
        module = module.float()
        x, state = x.float().repeat(1, 8, 1), tuple(t.float().repeat(1, 8, 1) for t in state)
        expected = module(x, state)[0]
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            module(x, state)
            with torch.cuda.graph(graph, stream=stream):
                y = module(x, state)[0]
        graph.replay()
        torch.cuda.synchronize()
    assert error(y, expected) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", SPARSE)
def test_two_runs_give_the_same_bits(device, which):
    module, (x, state) = make(which, device, torch.bfloat16), inputs(device, torch.bfloat16)
    first = results(module, x, state, None)
    assert all(torch.equal(a, b) for a, b in zip(first, results(module, x, state, None), strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", [*SPARSE, "deep, dense"])
def test_what_needs_no_gradient_gets_none(device, which, monkeypatch):
    module, (x, _) = make(which, device), inputs(device)
    left_out = (module.recurrent if which == "multiplicative" else module.matrices[1]).weight
    left_out.requires_grad_(False)
    y, _ = module(x.detach())
    y.sum().backward()
    assert left_out.grad is None
    whole = [p.grad.clone() for p in module.parameters() if p.requires_grad]
    module.zero_grad()
    monkeypatch.setattr(type(module), "_is_one_op", lambda *_: False)
    module(x.detach())[0].sum().backward()
    for got, want in zip(whole, [p.grad for p in module.parameters() if p.requires_grad], strict=True):
        assert error(got, want) < 1e-12


@pytest.mark.parametrize("which", ["deep", "deep, dense"])
def test_steps_as_one_node(which, monkeypatch):
    """What dense networks on a card are trained by."""
    module, given = make(which, "cpu"), (*inputs("cpu"), None)
    expected = composed(module, monkeypatch, *given)
    monkeypatch.setattr(bst.DeepUpdateLSTM, "_is_one_op", lambda *_: False)
    with torch.no_grad():
        y, _ = module(*given)
    assert error(y, expected[0]) < 1e-12
    for got, want in zip(results(module, *given), expected, strict=True):
        assert error(got, want) < 1e-12


def test_dense_matrices_of_a_few_inputs_stay_as_they_are(monkeypatch):
    module, (x, (h, c)) = make("deep, dense", "cpu"), inputs("cpu")
    x, state = x[:1, :3], (h[:, :3].contiguous(), c[:, :3].contiguous())
    monkeypatch.setattr(blocks, "FullBlocks", None)
    with torch.no_grad():
        y, _ = module(x, state)
        monkeypatch.undo()
        assert error(y, module(x.repeat(STEPS, 10, 1), [s.repeat(1, 10, 1) for s in state])[0][:1, :3]) < 1e-12


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", ["deep", "deep, dense", "odd"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_inputs_of_a_table(device, which, dtype):
    """Beside the module itself, some steps and then others; bfloat16 is autocast's."""
    odd = which == "odd"  # units that are no multiple of 8
    module = bst.DeepUpdateLSTM(INPUT, 12, None, 3).to(device, torch.float64) if odd else make(which, device)
    narrow = dtype == torch.bfloat16
    if narrow:
        module = module.float()
    table = torch.randn(9, INPUT, device=device, dtype=module.input.dtype)
    rows = torch.randint(0, 9, (STEPS, N), device=device)
    with torch.autocast(device, torch.bfloat16, narrow):
        run, state = module.on_table(table), None
        want, (want_h, want_c) = module(table[rows])
        parts = []
        for part in (rows[:1], rows[1:]):
            y, state = run(part, state)
            parts.append(y)
    made = (torch.cat(parts), state[0], state[1])
    assert made[0].dtype == want.dtype
    assert not any(t.requires_grad for t in made)
    for got, expected in zip(made, (want, want_h[0], want_c[0]), strict=True):
        assert error(got, expected) < (3e-2 if narrow else 1e-12)


@pytest.mark.parametrize("which", [*SPARSE, "deep, dense"])
def test_without_gradients_it_is_one_call(which, monkeypatch):
    calls = []
    original = library.call
    monkeypatch.setattr(library, "call", lambda name, *given: (calls.append(name), original(name, *given))[1])
    with torch.no_grad():
        make(which, "cpu")(inputs("cpu")[0])
    assert sum(name in ("bs_deep_update_forward", "bs_multiplicative_forward") for name in calls) == 1
    assert not any(name.startswith("bs_linear") for name in calls)


@pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)
@pytest.mark.parametrize("which", SPARSE)
def test_replays_of_a_graph_follow_their_inputs(which):
    module, (x, state) = make(which, "cuda", torch.bfloat16), inputs("cuda", torch.bfloat16)
    lengths = torch.tensor(LENGTHS["several"], device="cuda")
    with torch.no_grad():
        module(x, state, lengths)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, (h, c) = module(x, state, lengths)
        x.mul_(-1)
        lengths.copy_(torch.tensor([1, 6, 2, 5, 0]))
        graph.replay()
        expected, (h2, c2) = module(x, state, lengths)
    assert torch.equal(y, expected)
    assert torch.equal(h, h2)
    assert torch.equal(c, c2)


@pytest.mark.parametrize("which", SPARSE)
def test_parameters_and_inputs_of_any_strides(which):
    module, (x, state) = make(which, "cpu"), inputs("cpu")
    strange = {
        name: p.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
        for name, p in module.named_parameters()
    }
    y, _ = torch.func.functional_call(module, strange, (x.transpose(0, 1).contiguous().transpose(0, 1), state))
    got = torch.autograd.grad(y.sin().sum(), list(strange.values()))
    expected, _ = module(x, state)
    assert error(y, expected) < 1e-13
    grads = torch.autograd.grad(expected.sin().sum(), list(module.parameters()))
    assert all(error(mine, want) < 1e-12 for mine, want in zip(got, grads, strict=True))


@pytest.mark.parametrize("which", SPARSE)
def test_tensors_without_numbers(which):
    module, (x, state) = make(which, "meta"), inputs("meta")
    y, (h, c) = module(x, state)
    assert (y.device.type, y.shape, h.shape, c.shape) == ("meta", (STEPS, N, HIDDEN), (1, N, HIDDEN), (1, N, HIDDEN))


@pytest.mark.parametrize("which", SPARSE)
def test_wrong_lengths_are_refused_by_the_op_itself(which):
    module, (x, state) = make(which, "cpu"), inputs("cpu")
    op = "deep_update" if which == "deep" else "multiplicative"
    name = type(module).__name__
    with pytest.raises(ValueError, match=rf"\[{op}_forward\] lengths\[1\] is 8, needs 0 to 7"):
        module(x, state, torch.tensor([1, STEPS + 1, 2, 3, 4]))
    with pytest.raises(ValueError, match=rf"\[{name}\] lengths are torch.int64 \[2\], needs int64 \[5\]"):
        module(x, state, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=rf"\[{name}\] lengths are torch.float32 \[5\], needs int64 \[5\]"):
        module(x, state, torch.ones(N))
    lengths, factor = torch.tensor([1, 2]), torch.zeros(STEPS, N, HIDDEN, dtype=x.dtype)
    if which == "deep":
        network = DeepUpdate([*module.matrices, module.gates], 1e-6)
        given = [factor, module.matrix_norm, module.gate_norm, *(layer.weight for layer in network.layers)]
    else:
        network = Multiplicative([module.recurrent_m, module.recurrent])
        given = [module.input(x).unflatten(-1, (4, HIDDEN)), *(layer.weight for layer in network.layers)]
    with pytest.raises(ValueError, match=rf"\[{op}\] lengths are torch.int64 \[2\], needs int64 \[5\]"):
        sequence.run(network, lengths, state[0][0], state[1][0], factor, *given)


@pytest.mark.parametrize("which", SPARSE)
def test_gradients_of_wide_weights_are_wide(which):
    """Under autocast products are narrow, but what an optimizer reads is not rounded to their type."""
    module, (x, state) = make(which, "cpu", torch.float32), inputs("cpu", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = module(x, state)
    y.float().square().sum().backward()
    for name, p in module.named_parameters():
        if any(part in name for part in ("recurrent", "matrices", "gates")):
            assert p.grad.dtype == torch.float32
            assert (p.grad != p.grad.bfloat16()).any(), name
