"""What `convert` and reports time: one layer of those that are alike, for a bounded number of calls."""

import importlib
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse.torch.sparsify.conversion import layer_times, timing
from blocksparse.torch.sparsify.conversion.timing import Seen

pytestmark = pytest.mark.usefixtures("one_thread")
convert_module = importlib.import_module(
    "blocksparse.torch.sparsify.conversion.convert"
)  # a function has its name, too


def mask_of(blocks, rows=10, columns=10):
    return (torch.arange(rows * columns) < blocks).view(rows, columns)


def counted(monkeypatch, module, pair=(2e-3, 1e-3)):
    """Pairs of layers that are timed; all are twice as fast."""
    timed = []

    def time_layers(before, after, seen):
        timed.append((before, after, seen))
        return pair

    monkeypatch.setattr(module, "time_layers", time_layers)
    return timed


def test_layers_that_are_alike_are_timed_once(monkeypatch):
    timed = counted(monkeypatch, convert_module)
    model = nn.Sequential(*(nn.Linear(160, 160) for _ in range(30)))
    masks = {str(i): mask_of(50) for i in range(30)}
    timings = {}
    bss.convert(model, masks, block_size=16, timings=timings)
    assert len(timed) == 1
    assert list(timings) == list(masks)
    assert {time.measured for time in timings.values()} == {"0"}
    assert all(isinstance(layer, bst.BlockSparseLinear) for layer in model)


def test_the_one_with_the_most_blocks_stands_for_those_with_nearly_as_many(monkeypatch):
    timed = counted(monkeypatch, convert_module)
    blocks = {"0": 45, "1": 50, "2": 44, "3": 100, "4": 90, "5": 40}
    model = nn.Sequential(*(nn.Linear(160, 160) for _ in blocks))
    timings = {}
    bss.convert(model, {name: mask_of(n) for name, n in blocks.items()}, block_size=16, timings=timings)
    assert {name: time.measured for name, time in timings.items()} == dict(
        zip(blocks, ["1", "1", "2", "3", "3", "2"], strict=True)
    )
    assert [after.layout.blocks for _, after, _ in timed] == [100, 50, 44]
    assert [time.density for time in timings.values()] == [0.45, 0.5, 0.44, 1.0, 0.9, 0.4]  # each its own


def test_layers_that_differ_are_timed_each(monkeypatch):
    timed = counted(monkeypatch, convert_module)
    layers = {
        "plain": nn.Linear(32, 32),
        "biasless": nn.Linear(32, 32, bias=False),
        "precise": nn.Linear(32, 32).double(),
        "fed": nn.Linear(32, 32),
        "cast": nn.Linear(32, 32),
        "wide": nn.Linear(32, 64),
        "conv": nn.Conv1d(32, 32, 1),
        "transposed": nn.ConvTranspose1d(32, 32, 1),
        "strided": nn.Conv1d(32, 32, 1, stride=2),
        "silu": bst.BlockSparseLinear(32, 32, mask_layout(), activation="silu"),
        "none": bst.BlockSparseLinear(32, 32, mask_layout()),
        "square": nn.Conv2d(32, 32, 3),
        "channels_last": nn.Conv2d(32, 32, 3).to(memory_format=torch.channels_last),
        "every_other": nn.Linear(32, 32),
    }
    layers["every_other"].weight = nn.Parameter(torch.randn(64, 64)[::2, ::2])
    seen = {
        "fed": Seen((7, 32), torch.float32),
        "cast": Seen((512, 32), torch.float32, torch.bfloat16),
        "plain": Seen((512, 32), torch.float32),
        "precise": Seen((512, 32), torch.float32),
    }
    masks = {name: torch.eye(4 if name == "wide" else 2, 2, dtype=torch.bool) for name in layers}
    bss.convert(nn.ModuleDict(layers), masks, block_size=16, seen=seen)
    assert len(timed) == len(layers)


def mask_layout():
    return bst.select_blocks(torch.randn(32, 32), 1.0, 16)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(160, 320, bias=False), nn.Linear(160, 320, bias=False)
        self.down_proj, self.act_fn = nn.Linear(320, 160, bias=False), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_feed_forward_parts_that_are_alike_are_timed_once(monkeypatch):
    timed = counted(monkeypatch, convert_module)
    model = nn.Sequential(*(Gated() for _ in range(8)))
    masks, timings = {}, {}
    for i in range(8):
        masks |= {f"{i}.{name}_proj": mask_of(40, 20, 10) for name in ("gate", "up")}
        masks[f"{i}.down_proj"] = mask_of(100 if i == 7 else 50, 10, 20)
    bss.convert(model, masks, block_size=16, timings=timings)
    # Of layers: gate and up, two of down. Of parts: two, each beside the dense one and beside its layers.
    assert [type(after).__name__ for _, after, _ in timed] == ["BlockSparseLinear"] * 3 + ["BlockSparseMLP"] * 4
    assert all(isinstance(part, bst.BlockSparseMLP) for part in model)
    assert {timings[str(i)].measured for i in range(7)} == {"0"}
    assert timings["7"].measured == "7"


def test_parts_that_are_alike_in_one_module_but_not_one_by_one_are_timed_each(monkeypatch):
    timed = counted(monkeypatch, convert_module)
    first, second = mask_of(40, 20, 10), mask_of(40, 20, 10).flip(0)
    masks = {f"{i}.down_proj": mask_of(50, 10, 20) for i in range(2)}
    masks |= {"0.gate_proj": first | second, "0.up_proj": first | second, "1.gate_proj": first, "1.up_proj": second}
    timings = {}
    bss.convert(nn.Sequential(Gated(), Gated()), masks, block_size=16, timings=timings)
    assert [type(after).__name__ for _, after, _ in timed].count("BlockSparseMLP") == 4
    assert (timings["0"].measured, timings["1"].measured) == ("0", "1")


class OneByOne(nn.Module):
    """Calls the layers of a feed-forward part: itself, or by calling the part."""

    def __init__(self, kind, how):
        super().__init__()
        self.mlp, self.how = kind(), how

    def forward(self, x):
        if self.how == "iterates":
            for layer in self.mlp:
                x = layer(x)
            return x
        if self.how == "indexes":
            return self.mlp[2](self.mlp[1](self.mlp[0](x)))
        if self.how == "reaches":
            return self.mlp.down_proj(self.mlp.act_fn(self.mlp.gate_proj(x)) * self.mlp.up_proj(x))
        return self.mlp(x)


@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize("how", ["iterates", "indexes", "calls", "reaches", "calls it"])
def test_a_part_that_is_not_called_whole_stays_apart(monkeypatch, how, with_example):
    def sequence():
        return nn.Sequential(nn.Linear(160, 320), nn.GELU(), nn.Linear(320, 160))

    if how == "reaches" and not with_example:
        pytest.skip("that a part is not called is seen in a run alone")
    counted(monkeypatch, convert_module)
    x, model = torch.randn(5, 160), OneByOne(Gated if how in ("reaches", "calls it") else sequence, how)
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16)
    expected = model(x)
    bss.convert(model, masks, block_size=16, example=x if with_example else None)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert isinstance(model.mlp, bst.BlockSparseMLP) == (how == "calls it" or (how == "calls" and with_example))
    assert not any(type(module) is nn.Linear for module in model.modules())


@pytest.mark.parametrize("frozen", ["weight", "bias", ""])
def test_parts_want_gradients_where_their_layers_did(monkeypatch, frozen):
    counted(monkeypatch, convert_module)
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen))  # "": all are frozen
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16)
    bss.convert(model, masks, block_size=16)
    assert isinstance(model[0], bst.BlockSparseMLP)
    wanted = {name.rpartition(".")[2] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert wanted == ({"weight", "bias"} - {frozen} if frozen else set())


def test_no_random_numbers_are_drawn():
    """A report within a training would change it."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(), nn.Linear(32, 32)).train()
    parts = nn.Sequential(model, nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), nn.LSTM(32, 32))
    pruner = bss.MagnitudePruner(bss.Constant(0.5), block_size=16)
    pruner.prepare(parts)
    before = torch.get_rng_state()
    pruner.report()
    assert torch.equal(torch.get_rng_state(), before)
    bss.convert(parts, pruner.masks(), block_size=16, tokens=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert model[1].training


def test_a_module_between_two_layers_may_refuse_what_an_activation_takes():
    class Pair(nn.Module):
        def forward(self, x):
            assert x.dim() == 2
            return x[:, : x.size(1)]

    model = nn.Sequential(nn.Linear(32, 32), Pair(), nn.Linear(32, 32))
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16)
    assert bss.convert(model, masks, block_size=16, example=torch.randn(4, 32)) is model


def test_a_report_times_layers_that_are_alike_once(monkeypatch):
    timed = counted(monkeypatch, layer_times)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)), nn.Linear(64, 32))
    pruner = bss.MagnitudePruner(bss.Constant(0.5), block_size=16)
    pruner.prepare(model)
    rows = pruner.report().rows
    assert len(timed) == 2
    assert [row.expected_s for row in rows] == [1e-3] * 7


# ---- A measurement -------------------------------------------------------------------------------------------------


class Clock:
    """Time goes on when a layer is called, and when it is asked for, as if a card were waited for."""

    def __init__(self, wait):
        self.now, self.wait = 0.0, wait

    def __call__(self):
        self.now += self.wait
        return self.now


class Layer(nn.Module):
    def __init__(self, clock, seconds):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.clock, self.seconds, self.calls = clock, seconds, 0

    def forward(self, x):
        self.calls += 1
        self.clock.now += self.seconds(self.calls) if callable(self.seconds) else self.seconds


@pytest.mark.parametrize("seconds", [18e-6, 1e-3, 0.5])
def test_a_pair_takes_a_bounded_time(monkeypatch, seconds):
    clock = Clock(10e-6)
    monkeypatch.setattr(timing, "timer", clock)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    before, after = Layer(clock, seconds), Layer(clock, seconds / 2)
    times = timing.time_layers(before, after, Seen((1, 1), torch.float32))
    assert times == pytest.approx((seconds, seconds / 2), rel=0.02)
    assert clock.now < max(0.1, 13 * seconds)
    assert before.calls >= 7


def test_a_lucky_sample_does_not_decide(monkeypatch):
    """Now and then the slower layer is fast for once, as where a core's clock changes."""
    clock = Clock(0.0)
    monkeypatch.setattr(timing, "timer", clock)
    before, after = Layer(clock, 1e-3), Layer(clock, lambda call: 0.5e-3 if 12 < call < 18 else 1.2e-3)
    assert timing.time_layers(before, after, Seen((1, 1), torch.float32)) == pytest.approx((1e-3, 1.2e-3))


def test_weights_are_narrowed_in_each_call_under_autocast():
    kept = []

    class Asked(nn.Linear):
        def forward(self, x):
            kept.append((torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()))
            return super().forward(x)

    before = torch.is_autocast_cache_enabled()
    timing.time_layers(Asked(8, 8), nn.Linear(8, 8), Seen((1, 8), torch.float32, torch.float16))
    assert set(kept) == {(torch.float16, False)}
    assert torch.is_autocast_cache_enabled() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_a_card_that_is_not_the_current_one_is_waited_for():
    large, small = nn.Linear(16384, 16384, device="cuda:1"), nn.Linear(16384, 16, device="cuda:1")
    slow, fast = timing.time_layers(large, small, Seen((4096, 16384), torch.float32))
    assert slow > 10 * fast


class Sleepy(nn.Linear):
    """Keeps the host for a tenth of a millisecond."""

    def forward(self, x):
        time.sleep(1e-4)
        return super().forward(x)


class Waiting(nn.Linear):
    """Waits for the card in each call."""

    def forward(self, x):
        return super().forward(x * float(x.sum()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_the_host_takes_no_part_on_a_card():
    sleepy, plain = (kind(64, 64, device="cuda") for kind in (Sleepy, nn.Linear))
    pair = timing.time_layers(sleepy, plain, Seen((16, 64), torch.float32))
    assert max(pair) < 2e-5
    assert pair[0] < 2 * pair[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_layers_that_wait_for_the_card_are_timed_with_the_host():
    waiting, plain = (kind(64, 64, device="cuda") for kind in (Waiting, nn.Linear))
    pair = timing.time_layers(waiting, plain, Seen((16, 64), torch.float32))
    assert pair[0] > 3 * pair[1] > 0


def test_what_layers_were_fed_may_be_a_list_and_nothing_but_a_seen():
    model = nn.Sequential(nn.Linear(64, 64))
    masks = {"0": torch.eye(2, dtype=torch.bool)}
    timings = {}
    bss.convert(model, masks, block_size=32, seen={"0": Seen([3, 64], torch.float32)}, timings=timings)
    assert timings["0"].shape == (3, 64)
    with pytest.raises(TypeError, match=r"seen\['0'\] is a tuple, needs a Seen"):
        bss.convert(nn.Sequential(nn.Linear(64, 64)), masks, block_size=32, seen={"0": (3, 64)})


@pytest.mark.parametrize("tqdm", [True, False])
def test_a_bar_where_timing_takes_long(monkeypatch, capsys, tqdm):
    if not tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    else:
        pytest.importorskip("tqdm")
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 64))
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16)
    counted(monkeypatch, convert_module, (1e-3, 2e-3))
    for delay, shown in ((60.0, False), (0.0, True)):
        monkeypatch.setattr(convert_module, "DELAY_S", delay)
        bss.convert(model, masks, block_size=16, progress=True)
        assert ("timing layers" in capsys.readouterr().err) == shown
    bss.convert(model, masks, block_size=16, progress=False)
    assert not capsys.readouterr().err


def test_no_bar_without_a_console(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    model = nn.Linear(32, 32)
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16)
    assert isinstance(bss.convert(model, masks, block_size=16, min_speedup=1e-9), bst.BlockSparseLinear)
