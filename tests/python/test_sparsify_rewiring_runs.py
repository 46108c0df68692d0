"""Runs with SET and RigL: files, steps that fail, tools of PyTorch, what is refused."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from conftest import assert_same
from test_sparsify_rewiring import METHODS, NETWORKS, OFTEN, backward, batch, masks_of, sparse_layers, started, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse import Layout
from blocksparse.torch.autograd.taps import listen, listener_of

pytestmark = pytest.mark.usefixtures("one_thread")

# ---- Files ---------------------------------------------------------------------------------------------------------


def saved(*things):
    """State dicts as they come out of a file."""
    file = io.BytesIO()
    torch.save([thing.state_dict() for thing in things], file)
    return torch.load(io.BytesIO(file.getvalue()))


@pytest.mark.parametrize("order", ["model first", "model last", "attached last"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_is_resumed_is_the_same_to_the_bit(network, method, order):
    schedule = bss.CosineDrop(end_step=30, alpha=0.4, frequency=4)
    model, optimizer, rewiring, shape = started(network, method, schedule, seed=11)
    train(model, optimizer, shape, range(10))  # two exchanges; at the end of them blocks are young
    states = saved(model, optimizer, rewiring)
    train(model, optimizer, shape, range(10, 50))
    again, of_again, resumed, _ = started(network, method, schedule, attach=order != "attached last")
    things = [again, of_again, resumed]
    for i in (2, 1, 0) if order == "model last" else (0, 1, 2):
        things[i].load_state_dict(states[i])
    if order == "attached last":  # as callbacks of trainers do
        resumed.detach()
        resumed.attach(of_again)
    assert resumed.steps == 10
    train(again, of_again, shape, range(10, 50))
    assert all(torch.equal(a, masks_of(again)[name]) for name, a in masks_of(model).items())
    assert_same(list(model.state_dict().values()), list(again.state_dict().values()))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert_same(list(optimizer.state[p].values()), list(of_again.state[q].values()))
    assert str(rewiring.report()) == str(resumed.report())


def test_the_pattern_is_saved_and_copies_are_their_own():
    model, optimizer, _, shape = started("linear", "SET")
    train(model, optimizer, shape, range(6))
    state = model.state_dict()
    for name, layer in sparse_layers(model).items():
        assert Layout.from_pattern(state[f"{name}.pattern"].numpy()) == layer.layout
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = masks_of(other)
        y = other(torch.ones(shape))
        train(model, optimizer, shape, range(6, 10))
        assert all(torch.equal(a, before[name]) for name, a in masks_of(other).items())
        assert any(not torch.equal(a, before[name]) for name, a in masks_of(model).items())
        assert torch.equal(other(torch.ones(shape)), y)
        with pytest.raises(RuntimeError, match="this layer has"):  # it is nobody's
            other.load_state_dict(model.state_dict())


def test_states_of_other_layers_are_refused():
    model, _, rewiring, _ = started("linear", "SET")
    state, before = rewiring.state_dict(), masks_of(model)
    for change, message in [
        (lambda s: s["layers"].pop("0"), "the state is of 1, this is prepared for 0, 1"),
        (lambda s: s["layers"]["1"].update(places=torch.arange(3)), "the state of 1 has 3 blocks, needs 10"),
        (lambda s: s["layers"]["1"].update(places=torch.arange(15, 25)), "at rising places below 24"),
        (lambda s: s["layers"]["1"].update(places=torch.arange(10).flip(0)), "at rising places below 24"),
        (lambda s: s["layers"]["1"].update(births=torch.arange(3)), r"births of 1 are torch.int64 \[3\], needs"),
        (lambda s: s.pop("seed"), "the state is damaged: KeyError: 'seed'"),
    ]:
        wrong = copy.deepcopy(state)
        wrong["steps"] = 77
        change(wrong)
        with pytest.raises(ValueError, match=message):
            rewiring.load_state_dict(wrong)
        assert rewiring.steps == 0
        assert all(torch.equal(a, before[name]) for name, a in masks_of(model).items())
    other = nn.Sequential(
        bst.BlockSparseLinear(90, 60, Layout.from_graph("random(4,6,0.9)", 16, out_features=60, in_features=90))
    )
    with pytest.raises(RuntimeError, match="was saved with"):  # of another number of blocks
        model.load_state_dict(other.state_dict(), strict=False)


# ---- Steps that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["gradient", "weight", "dy"])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_moves_nothing_and_is_said_once(method, what):
    model, optimizer, rewiring, shape = started("linear", method, optimizer=torch.optim.SGD)
    before = masks_of(model)

    def break_at(seed):
        optimizer.zero_grad()
        if what == "dy":
            (model(torch.ones(shape)) * float("inf")).sum().backward()
            model[0].weight.grad = model[1].weight.grad = None
        else:
            backward(model, shape, seed)
        with torch.no_grad():
            if what == "gradient":
                model[0].weight.grad[0, 1, 2] = float("nan")
            elif what == "weight":
                model[0].weight[0, 1, 2] = float("inf")
        optimizer.step()

    if what == "dy" and method == "SET":
        pytest.skip("SET reads no dy")
    train(model, optimizer, shape, range(3))
    with pytest.warns(RuntimeWarning, match="not finite at step 4 or before: no block was moved"):
        break_at(3)
    assert all(torch.equal(a, before[name]) for name, a in masks_of(model).items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, shape, range(4, 7))
        break_at(7)
    assert rewiring.report().skipped == 2
    assert "2 updates left out" in str(rewiring.report())
    assert all(torch.equal(a, before[name]) for name, a in masks_of(model).items())


@pytest.mark.parametrize("fused", [False, True])
def test_what_a_scaler_skips_does_not_count(fused):
    model, optimizer, rewiring, shape = started(
        "linear", "exact", optimizer=lambda p, lr: torch.optim.AdamW(p, lr, fused=fused)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before, counts = masks_of(model), []
    for seed in range(7):
        optimizer.zero_grad()
        loss = model(torch.randn(shape)).square().mean()
        scaler.scale(loss * (float("inf") if seed in (1, 4) else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        counts.append(rewiring.steps)
        if rewiring.steps < 4:
            assert all(torch.equal(a, before[name]) for name, a in masks_of(model).items())
    assert counts == [1, 1, 2, 3, 3, 4, 5]
    assert any(not torch.equal(a, before[name]) for name, a in masks_of(model).items())
    assert rewiring.report().skipped == 0


def test_a_backward_pass_that_breaks_leaves_nothing_behind():
    model, optimizer, _, shape = started("linear", "exact", bss.CosineDrop(end_step=50, alpha=0.4, frequency=1))
    twin, of_twin, _, _ = started("linear", "exact", bss.CosineDrop(end_step=50, alpha=0.4, frequency=1))
    x = torch.randn(shape, requires_grad=True)
    x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x).sum().backward()
    train(model, optimizer, shape, range(5))
    train(twin, of_twin, shape, range(5))
    assert all(torch.equal(a, masks_of(twin)[name]) for name, a in masks_of(model).items())


def test_autocast():
    model, optimizer, rewiring, shape = started("linear", "exact")
    before = masks_of(model)
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(shape)).float().square().mean().backward()
        optimizer.step()
    assert any(not torch.equal(a, before[name]) for name, a in masks_of(model).items())
    assert rewiring.report().skipped == 0


def test_layers_that_take_no_part():
    """They stay as they are, and that is said; where none takes part, something is wrong."""
    model, optimizer, rewiring, shape = started("linear", "exact", bss.CosineDrop(end_step=50, alpha=0.4, frequency=1))
    before = masks_of(model)
    model[0](torch.randn(shape)).sum().backward()
    with pytest.warns(UserWarning, match="no gradient came to 1 at a step that acts"):
        optimizer.step()
    assert torch.equal(masks_of(model)["1"], before["1"])
    assert not torch.equal(masks_of(model)["0"], before["0"])
    with pytest.raises(RuntimeError, match="no backward pass came by at a step that acts"):
        optimizer.step()
    with rewiring.observing():
        backward(model, shape, 0)
    optimizer.step()


def test_second_derivatives_and_other_weights_do_not_disturb():
    """Of a gradient penalty the first pass, which makes dW of the loss, and the second are one backward pass each."""
    model, optimizer, rewiring, shape = started("linear", "exact", bss.CosineDrop(end_step=50, alpha=0.4, frequency=1))
    x = torch.randn(shape, requires_grad=True)
    (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (dx.square().sum() + model(x).sum()).backward()
    optimizer.step()
    assert rewiring.report().rows[0].grown > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_heard(reentrant):
    """Passes inside of passes: each layer's score is that of its own, and those of the pass around stay."""
    schedule = bss.CosineDrop(end_step=50, alpha=0.4, frequency=1)
    (model, optimizer, _, shape), (twin, of_twin, _, _) = (started("linear", "exact", schedule) for _ in range(2))
    for seed in range(3):
        for one, its_optimizer in ((model, optimizer), (twin, of_twin)):
            x = batch(shape, seed).requires_grad_()
            if one is model:
                h = checkpoint(model[0], x, use_reentrant=reentrant)
                y = checkpoint(model[1], h, use_reentrant=reentrant) + model[1](h)
            else:
                h = twin[0](x)
                y = twin[1](h) * 2
            its_optimizer.zero_grad()
            (y.square() * batch(y.shape, 50)).sum().backward()
            its_optimizer.step()
    assert torch.equal(masks_of(model)["0"], masks_of(twin)["0"])
    assert reentrant or torch.equal(masks_of(model)["1"], masks_of(twin)["1"])


def test_compiled_models_follow():
    """SET under torch.compile is as without; RigL says what it needs."""
    (model, optimizer, _, shape), (twin, of_twin, _, _) = (started("linear", "SET") for _ in range(2))
    compiled = torch.compile(model, backend="aot_eager")
    for seed in range(10):
        for one, its_optimizer in ((compiled, optimizer), (twin, of_twin)):
            its_optimizer.zero_grad()
            backward(one, shape, seed)
            its_optimizer.step()
    assert all(torch.equal(mask, masks_of(twin)[name]) for name, mask in masks_of(model).items())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    torch.compiler.reset()
    model, optimizer, _, shape = started("linear", "exact", bss.CosineDrop(end_step=50, alpha=0.4, frequency=2))
    compiled = torch.compile(model, backend="aot_eager")
    train(compiled, optimizer, shape, [0])
    backward(compiled, shape, 1)
    with pytest.raises(RuntimeError, match="force_eager"):
        optimizer.step()
    with torch.compiler.set_stance("force_eager"):
        backward(compiled, shape, 1)
    train(compiled, optimizer, shape, [2])
    torch.compiler.reset()


class Labelled(nn.Module):
    """What transformers' Trainer trains."""

    def __init__(self):
        super().__init__()
        self.fc = bst.BlockSparseLinear(64, 64, Layout.from_graph("random(8,8,0.4)", 8, seed=1))

    def forward(self, x, labels):
        y = self.fc(x)
        return {"loss": (y - labels).square().mean(), "logits": y}


@pytest.mark.filterwarnings("ignore")
def test_the_callback_of_transformers_takes_them(tmp_path):
    """Whose optimizer is wrapped by another one."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from blocksparse.torch.sparsify.trainer import SparsifyCallback

    data = [{"x": torch.randn(64), "labels": torch.randn(64)} for _ in range(64)]
    rewiring = bss.RigL(bss.CosineDrop(end_step=20, alpha=0.4, frequency=4))
    options = {"max_steps": 16, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(tmp_path), **options)
    trainer = transformers.Trainer(Labelled(), arguments, train_dataset=data, callbacks=[SparsifyCallback(rewiring)])
    trainer.train()
    report = rewiring.report()
    assert report.steps == 16
    assert report.rows[0].grown > 0


def test_what_is_dropped_while_it_listens_is_gone():
    model, optimizer, rewiring, shape = started("linear", "exact", bss.CosineDrop(end_step=50, alpha=0.4, frequency=1))
    train(model, optimizer, shape, range(2))
    gone = weakref.ref(rewiring)
    del model, optimizer, rewiring
    gc.collect()
    assert gone() is None


def test_a_weight_that_moved_is_heard_no_more():
    """Nor is another one that lies where it lay."""
    weight, heard = nn.Parameter(torch.randn(4, 8, 8)), []
    listen(weight, lambda *pair: heard.append(pair))
    assert listener_of(weight.view_as(weight)) is not None
    former = weight.data
    weight.data = torch.randn(4, 8, 8)
    assert listener_of(former) is None
    listen(weight, lambda *pair: heard.append(pair))
    assert listener_of(weight) is not None
    listen(weight, None)
    assert listener_of(weight) is None
    listen(weight, lambda *pair: heard.append(pair))
    address = weight.detach()
    del weight
    gc.collect()
    assert listener_of(address) is None


# ---- What is refused -----------------------------------------------------------------------------------------------


def test_what_cannot_be_prepared():
    layout = Layout.from_graph("random(8,8,0.5)", 8)
    full = Layout.from_mask(torch.ones(8, 8).numpy(), 8)
    schedule = bss.CosineDrop(end_step=100)
    model = nn.ModuleDict(
        {
            "a": bst.BlockSparseLinear(64, 64, layout),
            "dense": nn.Linear(64, 64),
            "full": bst.BlockSparseLinear(64, 64, full),
            "rnn": bst.MultiplicativeLSTM(8, 64, layout),
        }
    )
    for options, message in [
        ({"targets": "nothing"}, "targets has 'nothing', which fits no weight; the model has a 64 x 64"),
        ({"targets": "dense"}, "dense is dense, needs block-sparse layers"),
        ({"targets": "full"}, "nothing can be exchanged in full"),
        ({"ignore": "full"}, "rnn.recurrent_m is multiplied inside of the one op of a MultiplicativeLSTM"),
    ]:
        with pytest.raises(ValueError, match=message):
            bss.RigL(schedule, **options).prepare(model)
    rewiring = bss.SET(schedule)
    with pytest.warns(UserWarning, match="nothing can be exchanged in full"):
        rewiring.prepare(model)
    assert [row.name for row in rewiring.report().rows] == ["a", "rnn.recurrent_m", "rnn.recurrent"]
    with pytest.raises(ValueError, match="a has a sparsifier already"):
        bss.RigL(schedule, targets="^a$").prepare(model)
    with pytest.raises(RuntimeError, match=r"\[SET\] prepare was called before: make another SET"):
        rewiring.prepare(model)
    with pytest.raises(ValueError, match="the model has no block-sparse layer"):
        bss.SET(schedule).prepare(nn.Sequential(nn.Linear(8, 8)))


def test_what_cannot_be_attached():
    layout = Layout.from_graph("random(8,8,0.5)", 8)
    model = nn.Sequential(bst.BlockSparseLinear(64, 64, layout), bst.BlockSparseLinear(64, 64, layout))
    rewiring = bss.SET(bss.CosineDrop(end_step=100))
    optimizer = torch.optim.SGD(model[0].parameters(), 1.0)
    for call in (
        lambda: rewiring.attach(optimizer),
        rewiring.step,
        rewiring.report,
        lambda: rewiring.load_state_dict({}),
    ):
        with pytest.raises(RuntimeError, match=r"has no model: prepare\(model\) first"):
            call()
    rewiring.prepare(model)
    with pytest.raises(RuntimeError, match="has no optimizer: attach"):
        rewiring.step()
    with pytest.raises(ValueError, match=r"\[SET\] the optimizer does not hold 1\.weight"):
        rewiring.attach(optimizer)
    with pytest.raises(TypeError, match=r"needs a torch\.optim\.Optimizer"):
        rewiring.attach(model)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    rewiring.attach(optimizer)
    with pytest.raises(RuntimeError, match=r"\[SET\] is attached already: call detach\(\) first"):
        rewiring.attach(optimizer)
    rewiring.detach()
    optimizer.step()
    assert rewiring.steps == 0
    with pytest.raises(TypeError, match="schedule is 100, needs a CosineDrop"):
        bss.SET(100)
    with pytest.raises(ValueError, match="grow is 'most', needs 'exact' or 'bound'"):
        bss.RigL(bss.CosineDrop(end_step=100), grow="most")


def test_without_a_hook_the_caller_steps():
    model, optimizer, hooked, shape = started("linear", "exact")
    torch.manual_seed(0)
    twin = NETWORKS["linear"][0]()
    of_twin = torch.optim.AdamW(twin.parameters(), 1e-3)
    rewiring = bss.RigL(OFTEN)
    rewiring.prepare(twin)
    rewiring.attach(of_twin, hook=False)
    train(model, optimizer, shape, range(9))
    for seed in range(9):
        train(twin, of_twin, shape, [seed])
        rewiring.step()
    assert_same(list(model.state_dict().values()), list(twin.state_dict().values()))
    assert hooked.steps == rewiring.steps == 9


def test_recurrent_networks_of_one_op_follow_set():
    """They read a layer's layout themselves."""
    torch.manual_seed(0)
    layout = Layout.from_graph("random(8,8,0.5)", 8)
    for network in (bst.MultiplicativeLSTM(6, 64, layout), bst.DeepUpdateLSTM(6, 64, [layout] * 3)):
        optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
        rewiring = bss.SET(OFTEN)
        rewiring.prepare(network)
        rewiring.attach(optimizer)
        for _ in range(5):
            optimizer.zero_grad()
            network(torch.randn(3, 2, 6))[0].square().sum().backward()
            optimizer.step()
        assert all(row.grown > 0 for row in rewiring.report().rows)
        x, layouts = torch.randn(4, 2, 6), tuple(layer.layout for layer in sparse_layers(network).values())
        fresh = type(network)(6, 64, layouts)
        fresh.load_state_dict(network.state_dict())
        assert torch.equal(network(x)[0], fresh(x)[0])


def test_transforms_of_torch_func_tell_nobody():
    """Whoever listens to whatever weight: tensors of torch.func's levels have no address."""
    layer = bst.BlockSparseLinear(32, 32, Layout.from_graph("random(4,4,0.5)", 8, seed=1))
    heard = []
    listen(layer.weight, lambda *pair: heard.append(pair))
    x, parameters = torch.randn(3, 32), dict(layer.named_parameters())

    def loss(parameters, row):
        return torch.func.functional_call(layer, parameters, (row,)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    assert not heard
    layer(x).square().sum().backward()
    assert len(heard) == 1
    torch.testing.assert_close(each["weight"].sum(0), layer.weight.grad)
    listen(layer.weight, None)
