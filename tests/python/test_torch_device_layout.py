"""Layouts that a card makes from a mask on it."""

import subprocess
import sys

import pytest
import torch
from test_torch import error
from test_torch_cuda import leaf, pytestmark  # noqa: F401 - skips all of these where there is no card

import blocksparse.torch as bst
from blocksparse import Layout


def _masks(rows, columns, blocks, count):
    for _ in range(count):
        mask = torch.zeros(rows * columns, dtype=torch.bool, device="cuda")
        mask[torch.randperm(rows * columns, device="cuda")[:blocks]] = True
        yield mask.view(rows, columns)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_a_card_makes_the_layout_of_a_mask(dtype):
    mask = next(_masks(40, 30, 211, 1)).to(dtype)
    host = Layout.from_mask(mask.cpu().numpy(), 16, out_features=637)
    for layout in (
        Layout.from_device_mask(mask, 16, 211, out_features=637),
        Layout.from_device_mask(mask.t().contiguous().t(), 16, out_features=637),
    ):
        assert (layout.blocks, layout.sizes, layout.grid) == (211, (637, 480), (40, 30))
        x, w = leaf(50, 480, dtype=torch.bfloat16), leaf(*layout.values_shape, dtype=torch.bfloat16)
        y = bst.linear(x, w, layout)
        dx, dw = torch.autograd.grad(y, (x, w), torch.ones_like(y))
        expected = bst.linear(x, w, host)
        dx0, dw0 = torch.autograd.grad(expected, (x, w), torch.ones_like(y))
        assert error(y, expected.double()) < 1e-2  # rows may be cut otherwise
        assert error(dx, dx0.double()) < 1e-2
        assert torch.equal(dw, dw0)
        assert torch.equal(bst.linear(y, w, layout.t()), bst.linear(y, w, layout.t().t().t()))
        assert error(bst.linear(y, w, layout.t()), bst.linear(y, w, host.t()).double()) < 1e-2
        assert layout == host
        assert layout.t() == host.t()
        assert hash(layout) == hash(host)
        assert torch.equal(torch.from_numpy(layout.mask()).cuda(), mask != 0)


def test_a_captured_layout_follows_its_mask():
    masks = list(_masks(24, 24, 90, 4))
    x, w = torch.randn(64, 768, device="cuda", dtype=torch.bfloat16), None
    w = torch.randn(90, 32, 32, device="cuda", dtype=torch.bfloat16)
    mask = masks[0].clone()
    bst.linear(x, w, Layout.from_device_mask(mask, 32, 90))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layout = Layout.from_device_mask(mask, 32, 90)
        y = bst.linear(x, w, layout)
        with pytest.raises(ValueError, match="cannot be counted"):
            Layout.from_device_mask(mask, 32)
    for other in masks:
        mask.copy_(other)
        graph.replay()
        assert error(y, bst.linear(x, w, Layout.from_mask(other.cpu().numpy(), 32)).double()) < 1e-2


def test_a_captured_layout_is_read_anew():
    masks = list(_masks(24, 24, 90, 3))
    mask = masks[0].clone()
    Layout.from_device_mask(mask, 32, 90)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layout = Layout.from_device_mask(mask, 32, 90)
        with pytest.raises(RuntimeError, match="cannot be read while a graph is captured"):
            layout.check()
    for other in masks:
        mask.copy_(other)
        graph.replay()
        assert torch.equal(torch.from_numpy(layout.check().mask()), other.cpu())
        assert torch.equal(torch.from_numpy(layout.t().mask()), other.cpu().t())
        assert layout == Layout.from_mask(other.cpu().numpy(), 32)
        assert layout == layout.t().t()
    mask[:] = True
    graph.replay()
    with pytest.raises(ValueError, match="mask holds 576 blocks, 90 were asked for"):
        layout.check()
    with pytest.raises(RuntimeError, match="made anew by each replay"):
        bst.index_of(layout, "cpu")


def test_a_layout_made_on_another_stream_is_read_whole():
    mask = next(_masks(128, 128, 4000, 1))
    host = Layout.from_mask(mask.cpu().numpy(), 32)
    Layout.from_device_mask(mask, 32, 4000)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        layout = Layout.from_device_mask(mask, 32, 4000)
    assert layout == host


def test_a_capture_does_not_load_kernels():
    code = """
import torch
from blocksparse import Layout
mask = torch.ones(4, 4, dtype=torch.bool, device="cuda")
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        Layout.from_device_mask(mask, 32, 16)
except RuntimeError as error:
    print(error)
assert Layout.from_device_mask(mask, 32, 16).check().blocks == 16
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "the kernels are not on cuda:0 yet" in done.stdout


def test_a_mask_of_another_number_of_blocks_leaves_none():
    mask = next(_masks(9, 9, 40, 1))
    for blocks in (39, 41):
        layout = Layout.from_device_mask(mask, 8, blocks)
        x, w = torch.randn(5, 72, device="cuda"), torch.randn(blocks, 8, 8, device="cuda")
        assert not bst.linear(x, w, layout).any()
        with pytest.raises(ValueError, match=f"mask holds 40 blocks, {blocks} were asked for"):
            layout.check()


def test_masks_that_are_no_masks_are_refused():
    mask = next(_masks(9, 9, 40, 1))
    with pytest.raises(ValueError, match="needs a tensor on a CUDA device"):
        Layout.from_device_mask(mask.cpu(), 8)
    with pytest.raises(ValueError, match="needs \\[out_blocks, in_blocks\\]"):
        Layout.from_device_mask(mask[0], 8)
    with pytest.raises(ValueError, match="out_features is 10"):
        Layout.from_device_mask(mask, 8, out_features=10)
    with pytest.raises(ValueError, match="holds 81 at most"):
        Layout.from_device_mask(mask, 8, 82)
    with pytest.raises(ValueError, match="block_size is 12"):
        Layout.from_device_mask(mask, 12)
