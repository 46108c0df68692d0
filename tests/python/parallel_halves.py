"""What every process of a group does in test_torch_parallel.py to y that is sent in halves of its tokens."""

import copy

import pytest
import torch
import torch.distributed as dist
from parallel_bodies import batch, divided, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module

import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.torch.parallel import ColwiseParallel, RowwiseParallel, deal, layers, overlap


def halves(rank, n, folder):
    """What is summed in halves is what is summed at once: y, dx and the gradients of parameters."""
    mesh = init_device_mesh("cpu", (n,))
    model, sizes, all_reduce = divided("gathered", mesh), [], dist.all_reduce

    def counted(tensor, *arguments, **options):
        sizes.append(len(tensor.flatten(0, -2)))
        return all_reduce(tensor, *arguments, **options)

    def run(layer, x, least, autocast=False):
        with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16, autocast):
            patch.setattr(overlap, "IN_HALVES", least)
            patch.setattr(overlap, "TILE", 2)
            patch.setattr(dist, "all_reduce", counted)
            x = x.detach().requires_grad_()
            layer.zero_grad()
            sizes.clear()
            y = layer(x)
            y.sin().sum().backward()
            with torch.no_grad():
                torch.testing.assert_close(layer(x), y)
        gradients = {name: whole(p.grad).clone() for name, p in layer.named_parameters()}
        return {"y": y.detach(), "dx": x.grad, **gradients}, tuple(sizes)

    flat = batch(0).flatten(0, 1)[:23]
    for layer, wide in ((model[0], flat), (model[1], flat[:, :92]), (model[2], flat)):
        colwise, mlp = layer is model[0], layer is model[2]
        dx = (23,) if colwise or mlp else ()
        y, in_halves = ((), ()) if colwise else ((23,), (12, 11))
        at_once, sent = run(layer, wide, 24)
        assert sent == y + dx + y
        for x, least in ((wide, 4), (wide[None], 23)):
            found, sent = run(layer, x, least)
            assert sent == in_halves + dx + in_halves
            for name, tensor in at_once.items():
                torch.testing.assert_close(found[name].view_as(tensor), tensor)
                if n == 2:  # Gloo adds up three in an order that depends on the place
                    assert torch.equal(found[name].view_as(tensor), tensor), name
        if colwise:
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layers.Part, "sums_alone", lambda part, x: False)
            for name, tensor in run(layer, wide, 24)[0].items():  # of DTensors
                assert torch.equal(at_once[name], tensor), name
    rowwise = divided("grouped", mesh)[1]
    own = flat[:, torch.from_numpy(rowwise.part.features)]
    found, sent = zip(*(run(rowwise, x, 4) for x in (own, own.t().contiguous().t())), strict=True)
    assert sent == ((12, 11) * 2,) * 2  # as y of a features-first matrix is, too
    torch.testing.assert_close(*found)
    with_one_feature(mesh)
    layer, narrow = model.float()[1], flat[:, :92].float()
    layer.activation = "gelu"  # rounding may put a sum on either side of the corner of a ReLU
    assert run(layer, narrow, 4, autocast=True)[0]["y"].dtype == torch.bfloat16
    in_halves, at_once = (run(layer, narrow, least, autocast=True)[0] for least in (4, 99))
    assert all((in_halves[name] - tensor).norm() < 0.01 * tensor.norm() for name, tensor in at_once.items())
    spread = DTensor.from_local(narrow, mesh, [Replicate()])
    torch.testing.assert_close(layer(spread), layer(narrow))


def with_one_feature(mesh):
    """The last process has one feature: its features-first matrix is contiguous, too, but not those of others."""
    width, rows = 8 * mesh.size() - 7, mesh.size()
    up = Layout.from_graph(f"dense({rows},2)", 8, out_features=width, in_features=16)
    one = nn.Sequential(
        bst.BlockSparseLinear(16, width, up, activation="gelu"), bst.BlockSparseLinear(width, 16, up.t())
    )
    model = copy.deepcopy(one)
    dealt = deal(mesh.size(), outputs_of=model[0], inputs_of=model[1])
    parallelize_module(model, mesh, {"0": ColwiseParallel(dealt), "1": RowwiseParallel(dealt)})
    x = torch.randn(16, overlap.IN_HALVES).t()
    torch.testing.assert_close(model(x), one(x))
