"""Layers of which no block is left: whoever empties one says so."""

import warnings

import pytest
import torch
from torch import nn

import blocksparse.torch.sparsify as bss
from pruners import counts, network, pruner_of

pytestmark = pytest.mark.usefixtures("one_thread")


def with_a_faint_layer():
    """Of four layers the third has norms that are below all others."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    with torch.no_grad():
        model[2].weight.mul_(1e-3)
    return model


def faint_pruner(scope):
    return bss.MagnitudePruner(bss.PolynomialDecay(0.5, 0, 4, frequency=1), block_size=16, scope=scope)


def test_a_warning_names_layers_that_the_global_scope_empties():
    model, pruner = with_a_faint_layer(), faint_pruner("global")
    pruner.prepare(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            pruner.step()
    (text,) = (str(warning.message) for warning in caught)
    assert text.startswith("[MagnitudePruner] step 1: no block is left of 2: take a lower sparsity")
    assert not pruner.masks()["2"].any()
    model, pruner = with_a_faint_layer(), faint_pruner("layer")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruner.prepare(model)
        for _ in range(6):
            pruner.step()
    assert pruner.masks()["2"].any()


def test_what_prepare_has_warned_of_is_not_said_again():
    model, pruner = network(), pruner_of(bss.MagnitudePruner, bss.PolynomialDecay(0.99, 0, 2, frequency=1))
    with pytest.warns(UserWarning, match=r"at sparsity 0\.99 no block is left of 0, 2"):
        pruner.prepare(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruner.step()
        pruner.step()
    assert set(counts(pruner).values()) == {0}


def test_a_threshold_warns_of_layers_that_it_empties():
    model, pruner = network(), pruner_of(bss.GroupLasso, bss.ThresholdRamp(9.0, 0, 0, 1, frequency=1), rate=0.0)
    pruner.prepare(model)
    with pytest.warns(UserWarning, match=r"\[GroupLasso\] step 1: no block is left of 0, 2"):
        pruner.step()


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_one_shot_pruning_warns_of_layers_that_it_empties(method):
    options = {"block_size": 16, "calibration": [torch.randn(8, 32)]}
    with pytest.warns(UserWarning, match=r"\[sparsify_\] no block is left of") as caught:
        masks = bss.sparsify_(with_a_faint_layer(), method, sparsity=0.9, scope="global", **options)  # 2 of 16 blocks
    empty = [name for name, mask in masks.items() if not mask.any()]
    assert len(empty) >= 2
    (text,) = (str(warning.message) for warning in caught)
    assert f"no block is left of {', '.join(empty)}: take" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bss.sparsify_(with_a_faint_layer(), method, sparsity=0.5, **options)
