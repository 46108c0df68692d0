"""What sparsifiers share: schedules, which weights there are, block norms, masks."""

import math
import re
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse import Layout

# ---- Schedules -----------------------------------------------------------------------------------------------------


def test_the_cubic_schedule():
    schedule = bss.PolynomialDecay(0.9, begin_step=200, end_step=2000, frequency=50)
    assert [schedule.sparsity(t) for t in (0, 199, 200, 2000, 5000)] == [0, 0, 0, 0.9, 0.9]
    assert schedule.sparsity(1100) == pytest.approx(0.9 - 0.9 * 0.5**3)
    values = [schedule.sparsity(t) for t in range(2100)]
    assert values == sorted(values)
    acts = [t for t in range(3000) if schedule.acts_at(t)]
    assert acts == list(range(200, 2001, 50))
    linear = bss.PolynomialDecay(0.8, 0, 10, initial_sparsity=0.2, power=1, frequency=4)
    assert linear.sparsity(5) == pytest.approx(0.5)
    assert [t for t in range(20) if linear.acts_at(t)] == [0, 4, 8, 10]  # the end acts whatever the frequency


def test_a_constant_schedule():
    schedule = bss.Constant(0.75, begin_step=5)
    assert [schedule.sparsity(t) for t in (0, 4, 5, 6)] == [0, 0, 0.75, 0.75]
    assert [t for t in range(300) if schedule.acts_at(t)] == [5]
    again = bss.Constant(0.75, begin_step=5, end_step=205)
    assert [t for t in range(300) if again.acts_at(t)] == [5, 105, 205]


def test_the_ramp_of_thresholds():
    """The paper's formulas: theta = 2 q f / (2 (ramp - start) + 3 (end - ramp)), phi = 1.5 theta."""
    ramp = bss.ThresholdRamp(0.3, begin_step=100, ramp_step=400, end_step=900, frequency=10)
    theta = 2 * 0.3 * 10 / (2 * 300 + 3 * 500)
    assert ramp.threshold(50) == ramp.threshold(100) == 0
    assert ramp.threshold(250) == pytest.approx(theta * 150 / 10)
    assert ramp.threshold(600) == pytest.approx((theta * 300 + 1.5 * theta * 200) / 10)
    assert ramp.threshold(900) == ramp.threshold(2000) == pytest.approx(0.3)
    of_blocks = bss.ThresholdRamp.from_quantile(0.1, 16, begin_step=0, ramp_step=1, end_step=2)
    assert of_blocks.final_threshold == pytest.approx(0.1 * (16 * 16) ** 0.25)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: bss.Constant(1.0), "final_sparsity is 1.0, needs 0 <= final_sparsity < 1"),
        (lambda: bss.Constant(-0.1), "final_sparsity is -0.1"),
        (lambda: bss.Constant(math.nan), "final_sparsity is nan"),
        (lambda: bss.Constant(0.5, begin_step=9, end_step=3), r"end_step is 3, needs begin_step \(9\) or more"),
        (lambda: bss.Constant(0.5, frequency=0), "frequency is 0, needs 1 or more"),
        (lambda: bss.PolynomialDecay(0.9, 20, 10), r"end_step is 10, needs begin_step \(20\) or more"),
        (lambda: bss.PolynomialDecay(0.9, -1, 10), "begin_step is -1, needs 0 or more"),
        (lambda: bss.PolynomialDecay(0.5, 0, 9, initial_sparsity=0.8), r"needs initial_sparsity \(0.8\) or more"),
        (lambda: bss.PolynomialDecay(0.5, 0, 9, power=0), "power is 0.0, needs a number above 0"),
        (lambda: bss.ThresholdRamp(0.1, 0, 20, 10), "are 0, 20, 10, needs rising numbers"),
        (lambda: bss.ThresholdRamp(0.0, 0, 5, 10), "final_threshold is 0.0, needs a number above 0"),
    ],
)
def test_wrong_schedules(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_schedules_of_the_wrong_kind():
    with pytest.raises(TypeError, match=r"final_sparsity is '0.9', needs a number"):
        bss.Constant("0.9")
    with pytest.raises(TypeError, match=r"begin_step is 0.5, needs an integer"):
        bss.PolynomialDecay(0.9, 0.5, 10)


# ---- Norms ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1, 2, math.inf])
@pytest.mark.parametrize("shape", [(64, 96), (60, 90), (8, 20), (37, 23, 3, 3), (16, 48, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_block_norms(p, shape, dtype):
    matrix = torch.randn(shape).to(dtype)
    norms = bss.block_norms(matrix, 16, p)
    assert norms.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    wanted = [
        [np.linalg.norm(part.double().flatten().numpy(), p) for part in row.split(16, 1)] for row in matrix.split(16)
    ]
    torch.testing.assert_close(norms.double(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    turned = bss.block_norms(matrix.transpose(0, 1), 16, p)
    torch.testing.assert_close(turned, norms.T)


def test_wrong_block_norms():
    for given, text in ((torch.ones(3), "matrix is torch.float32"), (torch.ones(8, 8).long(), "matrix is torch.int64")):
        with pytest.raises(ValueError, match=text):
            bss.block_norms(given, 8)
    with pytest.raises(ValueError, match=r"p is 3, needs 1, 2 or math.inf"):
        bss.block_norms(torch.ones(8, 8), 8, 3)
    with pytest.raises(ValueError, match="block_size is 0"):
        bss.block_norms(torch.ones(8, 8), 0)


# ---- Targets -------------------------------------------------------------------------------------------------------


def conv1d_of_transformers():
    """Its class by name and module, as the real one is recognised; test_sparsify_trainer.py has the real one."""
    module = types.ModuleType("transformers.pytorch_utils_like")
    kind = type("Conv1D", (nn.Module,), {"__module__": module.__name__})
    layer = kind()
    layer.weight = nn.Parameter(torch.randn(48, 32))
    return layer


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.conv = nn.Conv2d(16, 24, 3)
        self.up = nn.ConvTranspose1d(24, 16, 5)
        self.grouped = nn.Conv1d(16, 16, 3, groups=4)
        self.rnn = nn.LSTM(20, 16, num_layers=2, bidirectional=True)
        self.gpt = conv1d_of_transformers()
        self.own = bst.BlockSparseLinear(64, 32, Layout.from_graph("random(2,4,0.5)", 16, seed=1))
        self.norm = parametrizations.weight_norm(nn.Linear(16, 16))
        self.small = nn.Linear(32, 3)
        self.head = nn.Linear(32, 40)
        self.head.weight = self.embedding.weight


def test_what_a_model_has():
    model = Everything()
    with pytest.warns(UserWarning, match="left alone") as said:
        targets = {t.name: t for t in bss.find_targets(model, 8)}
    assert len(said) == 1
    for text in ("head (tied)", "norm (parametrized)", "grouped (has groups)"):
        assert text in str(said[0].message)
    hidden = {f"rnn.weight_hh_l{i}{way}" for i in (0, 1) for way in ("", "_reverse")}
    assert set(targets) == {"mlp.0", "mlp.2", "conv", "up", "gpt", "own"} | hidden
    sizes = {"mlp.0": (64, 32), "conv": (24, 16), "up": (16, 24), "gpt": (32, 48), "own": (32, 64)}
    assert {name: targets[name].sizes for name in sizes} == sizes
    assert targets["rnn.weight_hh_l0"].sizes == (64, 16)
    assert (targets["own"].block_size, targets["own"].grid) == (16, (2, 4)), "its own block size"
    assert (targets["up"].path, targets["up"].parameter_name) == ("up", "weight")


def test_norms_of_every_kind_are_those_of_the_block_sparse_layer():
    """What is pruned by norm here is what `from_dense` would keep."""
    model = Everything()
    with pytest.warns(UserWarning, match="left alone"):
        targets = {t.name: t for t in bss.find_targets(model, 8)}
    for name, keep in (("mlp.0", 0.25), ("conv", 0.5), ("up", 0.5)):
        norms = targets[name].norms()
        layer = bst.from_dense(targets[name].module, density=keep, block_size=8)
        mask = torch.from_numpy(layer.layout.mask())
        assert norms[mask].min() >= norms[~mask].max()
        torch.testing.assert_close(norms[mask], layer.weight.detach().flatten(1).norm(dim=1), rtol=1e-5, atol=1e-6)
    own = targets["own"]
    torch.testing.assert_close(own.norms(), bss.block_norms(own.module.to_dense().weight, 16))
    assert torch.equal(own.present(), torch.from_numpy(own.module.layout.mask()))
    with pytest.raises(ValueError, match="own is block-sparse already"):
        own.matrix()
    with pytest.raises(ValueError, match=r"mlp.0 is dense"):
        targets["mlp.0"].blocks()


@pytest.mark.parametrize("name", ["mlp.0", "conv", "up", "gpt", "own", "rnn.weight_hh_l0"])
def test_blocks_are_kept_scaled_and_copied(name):
    with pytest.warns(UserWarning, match="left alone"):
        target = {t.name: t for t in bss.find_targets(Everything(), 8)}[name]
    before = target.parameter.detach().clone()
    norms, mask = target.norms(), torch.rand(target.grid) < 0.5
    mask &= target.present()
    target.keep_(target.parameter.data, mask)
    torch.testing.assert_close(target.norms(), norms * mask)
    assert torch.equal(target.parameter != 0, (before != 0) & (target.parameter == before))
    target.copy_(target.parameter.data, before, ~mask)
    assert torch.equal(target.parameter, before)
    factors = torch.rand(target.grid)
    target.scale_(target.parameter.data, factors)
    torch.testing.assert_close(target.norms(), norms * factors)
    bad = torch.full_like(before, math.nan)
    target.keep_(bad, torch.zeros_like(mask))
    assert not bad.any(), "what is dead is zero, whatever it was"


def test_filters_in_channels_last():
    conv = nn.Conv2d(24, 16, 3).to(memory_format=torch.channels_last)
    (target,) = bss.find_targets(nn.Sequential(conv), 8)
    before, mask = conv.weight.detach().clone(), torch.tensor([[1, 0, 1], [0, 0, 1]]).bool()
    target.keep_(conv.weight.data, mask)
    full = mask.repeat_interleave(8, 0).repeat_interleave(8, 1)[:, :, None, None]
    assert torch.equal(conv.weight, before * full)


CHOICES = {
    "an expression": ({"targets": r"mlp"}, {"mlp.0", "mlp.2"}),
    "two": ({"targets": [r"mlp\.0", "conv"]}, {"mlp.0", "conv"}),
    "compiled": ({"targets": re.compile(r"^own$")}, {"own"}),
    "a type": ({"targets": nn.Conv2d}, {"conv"}),
    "a function": ({"targets": lambda name, module: getattr(module, "out_features", 0) == 64}, {"mlp.0"}),
    "all kinds at once": ({"targets": ["mlp.2", nn.ConvTranspose1d]}, {"mlp.2", "up"}),
    "ignore": ({"targets": ["mlp", "own"], "ignore": r"mlp\.0"}, {"mlp.2", "own"}),
    "ignore a type": ({"targets": ["mlp", "own"], "ignore": [nn.Linear]}, {"own"}),
    "a part of an LSTM": ({"targets": "weight_hh_l1$"}, {"rnn.weight_hh_l1"}),
}


@pytest.mark.parametrize("how", CHOICES)
def test_what_is_chosen(how):
    options, names = CHOICES[how]
    assert {t.name for t in bss.find_targets(Everything(), 8, **options)} == names


def test_a_model_that_is_one_layer():
    (target,) = bss.find_targets(nn.Linear(16, 16), 8)
    assert (target.name, target.path) == ("weight", "")


def test_wrong_choices():
    model = Everything()
    with pytest.raises(ValueError, match=r"targets has 'attention', which fits no weight; the model has mlp.0 64 x 32"):
        bss.find_targets(model, 8, targets="attention")
    with pytest.raises(ValueError, match="needs a regular expression"):
        bss.find_targets(model, 8, targets="(")
    with pytest.raises(ValueError, match=r"small is 3 x 32 .*, smaller than a block of 8: leave it out by ignore"):
        bss.find_targets(model, 8, targets=["small", "mlp"])
    with pytest.raises(ValueError, match=r"weight_hh_l0 has hidden_size 24, needs a multiple of 16"):
        bss.find_targets(nn.LSTM(4, 24), 16, targets=nn.LSTM)
    with pytest.raises(ValueError, match="block_size is 12, needs one of 8, 16, 32, 64, 128"):
        bss.find_targets(model, 12)
    with pytest.raises(TypeError, match="targets has 3, needs a regular expression, a type"):
        bss.find_targets(model, 8, targets=3)
    with pytest.raises(TypeError, match="model is a list"):
        bss.find_targets([model], 8)
    with (
        pytest.warns(UserWarning, match=r"head \(tied\)"),
        pytest.raises(ValueError, match="no weight is left"),
    ):
        bss.find_targets(model, 8, targets="^head")
    with pytest.warns(UserWarning, match="ignore has 'lm_hed', which fits no module"):
        bss.find_targets(model, 8, targets="mlp", ignore="lm_hed")


def test_two_parameters_of_one_memory_are_tied():
    model = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].weight.data = model[0].weight.data
    with pytest.warns(UserWarning, match=r"left alone: 1 \(tied\)"):
        assert [t.name for t in bss.find_targets(model, 8)] == ["2"]


def test_quantised_weights_are_left_alone():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    model[1].weight = nn.Parameter(torch.ones(16, 16, dtype=torch.int8), requires_grad=False)
    model[3].weight = nn.Parameter(torch.ones(16, 16).to(torch.float8_e4m3fn), requires_grad=False)

    class Packed(nn.Parameter):
        """As bitsandbytes has them: another class of parameter."""

    model[2].weight = Packed(torch.ones(16, 16))
    with pytest.warns(UserWarning, match=r"1 \(quantised\), 2 \(quantised or .*: a Packed\), 3 \(quantised\)"):
        assert [t.name for t in bss.find_targets(model, 8)] == ["0"]
    dynamic = getattr(torch.ao.quantization, "quantize_dynamic", None)
    if dynamic is None or sys.platform != "linux":
        pytest.skip("this PyTorch has no dynamic quantisation")
    packed = dynamic(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), {nn.Linear}, torch.qint8)
    packed.append(nn.Linear(16, 16))
    with pytest.warns(UserWarning, match=r"0 \(quantised\)"):
        assert [t.name for t in bss.find_targets(packed, 8)] == ["2"]


# ---- Masks ---------------------------------------------------------------------------------------------------------


def some_masks(targets):
    return {t.name: (torch.rand(t.grid) < 0.5) & t.present() for t in targets}


def test_masks_are_applied_and_found_again():
    model = Everything()
    targets = bss.find_targets(model, 8, targets=["mlp", "conv", "own"])
    masks = some_masks(targets)
    bss.apply_masks(targets, masks)
    again = bss.masks_of_zeros(targets)
    assert all(torch.equal(masks[name], again[name]) for name in masks)
    bss.apply_masks(targets, {name: mask.float() for name, mask in masks.items()})  # numbers will do
    assert all(torch.equal(masks[t.name], t.norms() > 0) for t in targets)


def test_masks_as_bsr():
    model = Everything()
    targets = bss.find_targets(model, 8, targets=["mlp", "own", "gpt"])
    masks = some_masks(targets)
    matrices = bss.masks_to_bsr(targets, masks)
    again = bss.masks_from_bsr(matrices)
    bss.apply_masks(targets, masks)
    assert list(again) == list(masks)
    for target in targets:
        assert torch.equal(again[target.name], masks[target.name])
        dense = target.module.to_dense().weight if target.name == "own" else target.matrix()
        assert torch.equal(matrices[target.name].to_dense(), dense)
    conv = bss.find_targets(model, 8, targets="conv")
    with pytest.raises(ValueError, match="conv is a filter of"):
        bss.masks_to_bsr(conv, some_masks(conv))


def test_masks_of_another_model():
    model = Everything()
    targets = bss.find_targets(model, 8, targets=["mlp", "own"])
    masks = some_masks(targets)
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def refuse(wrong, text, kind=ValueError):
        with pytest.raises(kind, match=text):
            bss.apply_masks(targets, wrong)
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items()), "nothing was changed"

    refuse({"mlp.0": masks["mlp.0"]}, "there is none for mlp.2, own")
    refuse({**masks, "mlp.7": masks["mlp.0"]}, "there is no weight for mlp.7")
    refuse(
        {**masks, "mlp.2": torch.ones(4, 4)},
        r"\[masks\] that of mlp.2 is \[4, 4\] \(hash [0-9a-f]{16}\), needs \[4, 8\] \(hash [0-9a-f]{16} with all",
    )
    refuse({**masks, "mlp.2": torch.full((4, 8), 2)}, "mlp.2 holds other numbers than 0 and 1")
    refuse({**masks, "mlp.2": torch.full((4, 8), math.nan)}, "mlp.2 holds other numbers than 0 and 1")
    refuse({**masks, "own": torch.ones(2, 4)}, r"that of own \[2, 4\] \(hash \w+\) has blocks that its layout \[2, 4\]")
    refuse({**masks, "mlp.2": torch.ones(4, 8).to_sparse()}, "mlp.2 is torch.sparse_coo, needs torch.strided")
    refuse({**masks, "own": [1]}, "own is a list, needs a torch.Tensor", TypeError)
    refuse([masks], "masks is a list, needs a dict", TypeError)
