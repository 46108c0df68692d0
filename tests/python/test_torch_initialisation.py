"""Layers begin where they are to be: no array of values on the host for another device, and no second one anywhere."""

import resource

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import blocksparse.torch as bst
from blocksparse import graphs

LAYOUT = graphs.balanced_random(64, degree=8, block_size=32)
LAYERS = {
    "linear": lambda **where: bst.BlockSparseLinear(2048, 2048, LAYOUT, gates=True, **where),
    "identity": lambda **where: bst.BlockSparseLinear(2048, 2048, LAYOUT, **where).identity_init_(),
    "mlp": lambda **where: bst.BlockSparseMLP(2048, 2048, LAYOUT, LAYOUT, **where),
    "conv": lambda **where: bst.BlockSparseConv1d(2048, 2048, 1, LAYOUT, **where),
    "lstm": lambda **where: bst.BlockSparseLSTM(8, 2048, LAYOUT, **where),
    "multiplicative": lambda **where: bst.MultiplicativeLSTM(8, 2048, LAYOUT, **where),
    "deep update": lambda **where: bst.DeepUpdateLSTM(8, 2048, LAYOUT, 2, **where),
}


class LargeOnHost(TorchDispatchMode):
    """How often memory of the size of a weight was taken on the host, by operators of PyTorch."""

    def __init__(self):
        super().__init__()
        self.kept = {}  # so that no memory is taken twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                memory = tensor.untyped_storage()
                if memory.nbytes() >= 4 * LAYOUT.blocks * 32 * 32:
                    self.kept[memory.data_ptr()] = tensor.detach()
        return made


@pytest.mark.parametrize("name", LAYERS)
def test_no_copy_is_made(name):
    make = LAYERS[name]
    with LargeOnHost() as elsewhere:
        make(device="meta")  # whose operators are those of any device but the host
    assert not elsewhere.kept
    with LargeOnHost() as here:
        layer = make()
    weights = [p for p in layer.parameters() if p.numel() >= LAYOUT.blocks * 32 * 32]
    assert sorted(here.kept) == sorted(p.untyped_storage().data_ptr() for p in weights)
    with LargeOnHost() as again:
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    assert set(again.kept) <= set(here.kept)


def test_parameters_are_drawn_after_to_empty():
    """What FSDP does with models that were made on the meta device."""
    torch.manual_seed(3)
    expected = LAYERS["linear"]()
    with torch.device("meta"):
        layer = LAYERS["linear"]()
    layer.to_empty(device="cpu")
    torch.manual_seed(3)
    layer.reset_parameters()
    for name, parameter in expected.named_parameters():
        assert torch.equal(layer.get_parameter(name), parameter), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")
def test_a_card_takes_what_the_layer_takes():
    LAYERS["linear"](device="cuda")  # loads kernels
    host, card = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layout = graphs.random(2048, density=0.016, block_size=64)
    layer = bst.BlockSparseLinear(1 << 17, 1 << 17, layout, device="cuda")
    assert layer.weight.nbytes > 1 << 30
    assert torch.cuda.max_memory_allocated() - card < 1.1 * layer.weight.nbytes
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - host < 0.1 * layer.weight.nbytes
