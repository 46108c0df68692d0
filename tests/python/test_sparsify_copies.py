"""Copies of a model that has a pruner, with and without the pruner."""

import copy

import pytest
import torch

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from pruners import KINDS, assert_equal, network, prepared, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("copied", [False, True])
def test_what_a_file_or_another_network_would_not_compute_is_refused(copied, tmp_path):
    model, pruner, optimizer = prepared("l0")
    train(model, optimizer, 5)
    pruner.detach()
    given = copy.deepcopy(model) if copied else model
    x, before, file = torch.randn(3, 32), copy.deepcopy(given.state_dict()), tmp_path / "l0.safetensors"
    y = given.eval()(x)
    for op, take in (
        ("save_pretrained", lambda: bst.save_pretrained(given, file)),
        ("convert", lambda: bss.convert(given, pruner.masks(), block_size=8, min_speedup=0)),
        ("compact", lambda: bss.compact_(given, pruner.masks(), block_size=8)),
    ):
        with pytest.raises(
            ValueError, match=rf"\[{op}\] the model multiplies 0, 2 by gates .* finish the L0's schedule"
        ):
            take()
    assert not file.exists()
    assert_equal(given.state_dict(), before)
    assert torch.equal(given(x), y)

    pruner.squash_mask()
    bst.save_pretrained(model, file)
    torch.testing.assert_close(bst.load_pretrained(network, file)(x), model.eval()(x), rtol=0, atol=0)
    torch.testing.assert_close(model(x), y)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "l0" not in kind])
def test_pruners_whose_weights_are_the_parameters_can_be_saved_at_any_step(kind, tmp_path):
    model, pruner, optimizer = prepared(kind)
    train(model, optimizer, 5)
    x, file = torch.randn(3, 32), tmp_path / "half.safetensors"
    bst.save_pretrained(model, file)
    assert torch.equal(bst.load_pretrained(network, file)(x), model.eval()(x))
    converted = bss.convert(copy.deepcopy(model), pruner.masks(), block_size=8, min_speedup=0)
    torch.testing.assert_close(converted(x), model(x), rtol=1e-4, atol=1e-5)
