"""Models made sparse at once: what layers are fed, and what methods do to models."""

import copy

import pytest
import torch
from torch import nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse.torch.sparsify.one_shot import sparsify as oneshot
from blocksparse.torch.sparsify.one_shot.layer_inputs import edges_of, matrix_of, rows_of, set_matrix_
from blocksparse.torch.sparsify.one_shot.scores import damped, obs_scores, refit
from blocksparse.torch.sparsify.weights.masks import live_blocks
from blocksparse.torch.sparsify.weights.targets import target_of

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- What layers are fed -------------------------------------------------------------------------------------------


def convolutions():
    yield nn.Conv1d(16, 24, 3, stride=2, padding=1), (2, 16, 11)
    yield nn.Conv2d(16, 24, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1)), (2, 16, 9, 8)
    yield nn.Conv2d(16, 24, (4, 3), padding="same"), (2, 16, 6, 5)
    yield nn.Conv2d(16, 24, 3, padding=1, padding_mode="reflect"), (2, 16, 6, 5)
    yield nn.Conv3d(16, 8, 2), (1, 16, 3, 4, 3)
    yield nn.ConvTranspose1d(16, 24, 3, stride=2, padding=1, output_padding=1), (2, 16, 5)
    yield nn.ConvTranspose2d(16, 24, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (2, 16, 4, 5)
    sparse = bst.from_dense(nn.Conv2d(16, 24, 3, padding=1), density=0.7, block_size=8)
    yield sparse, (2, 16, 5, 6)
    ordered = bst.BlockSparseConv1d(16, 24, 3, sparse.layout, padding="causal", channel_order=torch.randperm(16))
    yield ordered, (2, 16, 7)
    yield bst.from_dense(nn.ConvTranspose2d(16, 24, 3, stride=2), density=0.7, block_size=8), (2, 16, 4, 4)


@pytest.mark.parametrize(("conv", "shape"), list(convolutions()), ids=lambda v: type(v).__name__)
def test_rows_times_the_matrix_are_what_a_convolution_gives(conv, shape):
    conv, x = conv.double(), torch.randn(shape, dtype=torch.float64)
    target = target_of(conv, 8)
    rows = torch.cat(list(rows_of(target, (x,), None)))
    y = conv(x)
    expected = y.movedim(1, -1).reshape(-1, y.size(1)) - conv.bias
    torch.testing.assert_close(rows @ matrix_of(target).t(), expected)
    assert matrix_of(target).size(1) // target.grid[1] == edges_of(target)[1]
    doubled = 2 * matrix_of(target)
    set_matrix_(target, doubled)
    assert torch.equal(matrix_of(target), doubled)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_states_of_an_lstm_are_those_before_each_step(batch_first, bias):
    lstm = nn.LSTM(5, 16, num_layers=2, batch_first=batch_first, bias=bias)
    x, state = torch.randn(3, 4, 5), tuple(torch.randn(2, 4 if not batch_first else 3, 16) for _ in "hc")
    targets = bss.find_targets(lstm, 8)
    rows = [next(iter(rows_of(target, (x, state), None))) for target in targets]
    for i, found in enumerate(rows):  # by a call for each step
        h, expected = state, []
        for step in x.unbind(1 if batch_first else 0):
            expected.append(h[0][i])
            step = step.unsqueeze(1 if batch_first else 0)
            h = lstm(step, h)[1]
        torch.testing.assert_close(found, torch.cat(expected))
    with pytest.raises(ValueError, match=r'bidirectional, projects, or is fed a PackedSequence, .* take "magnitude"'):
        next(iter(rows_of(bss.find_targets(nn.LSTM(5, 16, bidirectional=True), 8)[0], (x,), None)))


# ---- sparsify_ -----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers of all kinds, in parts."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(16, 32, 3, padding=1)
        self.rnn = nn.LSTM(32, 32, batch_first=True)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        y = self.rnn(self.conv(x).transpose(1, 2))[0]
        for layer in self.layers:
            y = y + layer(y)
        return self.head(y)


NAMES = ["conv", "rnn.weight_hh_l0", "layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2"]


def calibration(count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 16, 12, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("method", ["magnitude", "wanda", "obs"])
@pytest.mark.parametrize("sparsity", [0, 0.3, 0.75, 0.99])
def test_the_density_is_hit_exactly(method, scope, sparsity):
    model = Net()
    before = copy.deepcopy(model.state_dict())
    masks = bss.sparsify_(
        model, method, sparsity=sparsity, block_size=16, calibration=calibration(), ignore="head", scope=scope
    )
    assert list(masks) == NAMES
    targets = {target.name: target for target in bss.find_targets(model, 16, ignore="head")}
    if scope == "layer":
        assert all(int(mask.sum()) == live_blocks(mask.numel(), sparsity) for mask in masks.values())
    total = sum(mask.numel() for mask in masks.values())
    if scope == "global":
        assert sum(int(mask.sum()) for mask in masks.values()) == live_blocks(total, sparsity)
    for name, mask in masks.items():
        assert torch.equal(targets[name].norms() != 0, mask)
    after = model.state_dict()
    weights = {name if "." in name and "weight" in name else f"{name}.weight" for name in NAMES}
    assert {name for name in after if not torch.equal(after[name], before[name])} <= weights
    if method != "obs":  # live blocks are left alone
        for name in weights:
            assert bool(((after[name] == before[name]) | (after[name] == 0)).all())


def test_later_layers_see_what_sparse_ones_make():
    """Of three layers in a row, the last is refitted to the inputs that the sparse ones before it give."""
    torch.manual_seed(2)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3))).double()
    dense = copy.deepcopy(model)
    x = torch.randn(200, 32, dtype=torch.float64)
    masks = bss.sparsify_(model, "obs", sparsity=0.5, block_size=8, calibration=[x[:90], x[90:]])
    for i in range(3):
        with torch.no_grad():
            fed = model[:i](x)
        h = damped(fed.t() @ fed)  # sums in another order
        assert torch.equal(bss.choose_blocks({"": obs_scores(dense[i].weight, h, 8)}, 0.5)[""], masks[str(i)])
        torch.testing.assert_close(model[i].weight.detach(), refit(dense[i].weight, h, masks[str(i)], 8))


def test_layers_of_a_part_are_sparsified_together_and_calls_end_early():
    model, calls = Net(), []
    for name, module in model.named_modules():
        if name in ("conv", "layers.0.0", "layers.0.2", "layers.1.2", "head"):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    bss.sparsify_(model, "wanda", sparsity=0.5, block_size=16, calibration=calibration(1), ignore=["head"])
    first = ["conv", "layers.0.0", "layers.0.2", "layers.1.2", "head"]  # tells who is called
    assert calls == [*first, "conv", "conv", *first[:3], *first]  # conv; rnn; layers.0; layers.1


@pytest.mark.parametrize("method", ["magnitude", "wanda", "obs"])
def test_a_sparse_model_can_be_sparsified_further(method):
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    bst.replace_linears(model, density=0.5, block_size=16)
    had = {name: target.present() for name, target in zip("02", bss.find_targets(model), strict=True)}
    masks = bss.sparsify_(model, method, sparsity=0.75, calibration=[torch.randn(300, 64)])
    for target in bss.find_targets(model):
        assert int(masks[target.name].sum()) == 4
        assert not bool((masks[target.name] & ~had[target.name]).any())
        assert torch.equal(target.norms() != 0, masks[target.name])


def test_methods_order_on_a_small_trained_model(one_thread):
    """OBS below Wanda and magnitude after training, by the formulas' own measure: the error of the model's outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
    inputs = torch.randn(2000, 64) @ torch.randn(64, 64).div(8) * torch.logspace(0, -1.5, 64)
    wanted = torch.tanh(inputs @ torch.randn(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(300):
        rows = torch.arange(step * 100, step * 100 + 100) % 1500
        loss = (model(inputs[rows]) - wanted[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    errors = {}
    for method in ("magnitude", "wanda", "obs"):
        sparse = copy.deepcopy(model)
        bss.sparsify_(sparse, method, sparsity=0.5, block_size=8, calibration=[inputs[:1500]])
        with torch.no_grad():
            errors[method] = float((sparse(inputs[1500:]) - wanted[1500:]).square().mean())
    assert errors["obs"] < 0.7 * errors["magnitude"]
    assert errors["obs"] < 0.7 * errors["wanda"]


def test_layers_of_one_input_and_of_one_lstm_have_their_own_sums():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))
            self.rnn = nn.LSTM(16, 16, 2)

        def forward(self, x):
            y = self.a(x) + self.b(x)
            x.mul_(2)  # the third layer's input is the same tensor, and not the same numbers
            return self.rnn(y + self.c(x))[0]

    model, seen = Shared(), {}
    for target in bss.find_targets(model, 8):

        def keep(module, inputs, output, target=target):
            seen[target.name] = torch.cat(list(rows_of(target, inputs, output))).double()

        target.module.register_forward_hook(keep)
    run = oneshot._Run(model, "obs", [torch.randn(5, 3, 16)], None, 0.01, bss.find_targets(model, 8))
    with torch.no_grad():
        grams = run._grams([target for part in run.parts for target in part])
    assert grams.keys() == seen.keys() == {"a", "b", "c", "rnn.weight_hh_l0", "rnn.weight_hh_l1"}
    for name, gram in grams.items():
        torch.testing.assert_close(gram, damped(seen[name].t() @ seen[name]), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(grams["b"], grams["c"])
    assert not torch.allclose(grams["rnn.weight_hh_l0"], grams["rnn.weight_hh_l1"])


def test_batches_of_all_forms():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x, scale=1):
            return self.a(x) * scale

    x, made = torch.randn(20, 16), []
    for batch, forward in (
        (x, None),
        ((x, 2), None),
        ({"x": x, "scale": 2}, None),
        ((x, "label"), lambda model, batch: model(batch[0])),
    ):
        torch.manual_seed(0)
        model = Two()
        bss.sparsify_(model, "obs", sparsity=0.5, block_size=8, calibration=iter([batch]), forward=forward)
        made.append(model.a.weight)
    assert all(torch.equal(weight, made[0]) for weight in made)


def test_modes_hooks_and_weights_are_as_before_whatever_happens():
    model = Net().train()
    model.head.eval()
    modes = [module.training for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    bad = [*calibration(1), torch.full((4, 16, 12), float("nan"))]
    options = {"sparsity": 0.5, "block_size": 16, "ignore": "head"}
    with pytest.raises(ValueError, match="conv is fed NaN or Inf"):
        bss.sparsify_(model, "obs", calibration=bad, **options)
    with pytest.raises(ValueError, match="0 is fed no rows"):
        bss.sparsify_(nn.Sequential(nn.Linear(32, 32)), "obs", calibration=[torch.ones(0, 32)], sparsity=0.5)
    model.layers[1][2].register_forward_hook(lambda *_: 1 / 0 if float(model.layers[0][2].weight[0, 0]) == 0 else None)
    with torch.no_grad():
        model.layers[0][2].weight[:16, :16].mul_(1e-6)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ZeroDivisionError):  # once layers.0 is sparse
        bss.sparsify_(model, "wanda", calibration=calibration(), **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert [len(module._forward_hooks) for module in model.modules()].count(1) == 1


def test_weights_that_are_not_finite():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with torch.no_grad():
        model[1].weight[3, 4] = float("nan")  # would be the largest of all
    for method in ("magnitude", "wanda", "obs"):
        with pytest.raises(ValueError, match="1 has weights that are NaN or Inf"):
            bss.sparsify_(model, method, sparsity=0.5, block_size=8, calibration=[torch.randn(4, 32)])
    assert bool(model[0].weight.all())


def test_a_loader_that_knows_no_length():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.ones(8, 32))

    loader = torch.utils.data.DataLoader(Stream(), batch_size=4)
    masks = bss.sparsify_(nn.Sequential(nn.Linear(32, 32)), "wanda", sparsity=0.5, block_size=8, calibration=loader)
    assert int(masks["0"].sum()) == 8


def test_wrong_calls():
    model = Net()
    x = calibration()
    for call, text in (
        (lambda: bss.sparsify_(model, "random", sparsity=0.5), "method is 'random', needs one of magnitude, wanda"),
        (lambda: bss.sparsify_(model, "wanda", sparsity=0.5), "wanda needs calibration"),
        (lambda: bss.sparsify_(model, "obs", sparsity=0.5, calibration=[]), "holds no batch"),
        (lambda: bss.sparsify_(model, "magnitude", sparsity=1.0), "sparsity is 1.0"),
        (lambda: bss.sparsify_(model, "magnitude", sparsity=-0.1), "sparsity is -0.1"),
        (lambda: bss.sparsify_(model, "magnitude", sparsity=float("nan")), "sparsity is nan"),
        (lambda: bss.sparsify_(model, "magnitude", sparsity=0.5, scope="row"), "scope is 'row'"),
        (lambda: bss.sparsify_(model, "magnitude", sparsity=0.5, targets="nothing"), "'nothing', which fits no weight"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(TypeError, match="calibration is 5, needs batches"):
        bss.sparsify_(model, "obs", sparsity=0.5, calibration=5)
    with pytest.raises(TypeError, match="calibration is one Tensor, needs a list of batches"):
        bss.sparsify_(model, "obs", sparsity=0.5, calibration=x[0])
    model.unused = nn.Linear(32, 32)
    with pytest.raises(ValueError, match="does not call unused on the calibration data"):
        bss.sparsify_(model, "wanda", sparsity=0.5, calibration=x, ignore="head")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("method", ["magnitude", "wanda", "obs"])
def test_on_a_card_as_on_the_host(method):
    torch.manual_seed(0)
    model = Net().double()
    card = copy.deepcopy(model).cuda()
    batches = [batch.double() for batch in calibration()]
    options = {"sparsity": 0.5, "block_size": 16, "calibration": batches, "ignore": "head"}
    masks, theirs = bss.sparsify_(model, method, **options), bss.sparsify_(card, method, **options)
    for name, mask in masks.items():
        assert torch.equal(mask, theirs[name].cpu())
    for own, other in zip(model.parameters(), card.parameters(), strict=True):
        torch.testing.assert_close(own, other.cpu(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("damp", [0.0, -1, float("nan")])
def test_damping_is_above_0(damp):
    with pytest.raises(ValueError, match=r"\[sparsify_\] damp is .*, needs a number above 0"):
        bss.sparsify_(nn.Sequential(nn.Linear(32, 32)), "magnitude", sparsity=0.5, damp=damp)
