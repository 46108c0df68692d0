"""A layer of 1,048,576 x 1,048,576 takes memory in proportion to its live blocks, whatever is done with it."""

import json
import subprocess
import sys

import pytest

from blocksparse import Layout, graphs

COMMON = """
import copy, json, resource, sys
import torch
from torch import nn
import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse import Layout, graphs, viz

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

side, folder, peaks = 1 << 17, sys.argv[1], {}

def done(what):
    peaks[what] = peak() - begin

def step(layer, optimizer, x):
    optimizer.zero_grad()
    layer(x).square().mean().backward()
    optimizer.step()

def rewire(layer, optimizer, x, method):
    "One exchange: 30 % of the blocks move."
    before = layer.layout
    method.prepare(layer)
    method.attach(optimizer)
    step(layer, optimizer, x)
    assert 0.2 < method.report().rows[0].grown < 0.32 and layer.layout != before
    method.detach()

every, begin = bss.CosineDrop(100, frequency=1), peak()
"""
LAYER = """
layout = graphs.balanced_random(side, degree=1, block_size=8)
layout.save(folder + "/layout.npz")
assert Layout.load(folder + "/layout.npz") == layout
done("layout")
layer = bst.BlockSparseLinear(8 * side, 8 * side, layout)
done("layer")
optimizer = torch.optim.Adam(layer.parameters())
x = torch.randn(2, 8 * side)
for _ in range(2):
    step(layer, optimizer, x)
done("steps")
torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, folder + "/state.pt")
saved = torch.load(folder + "/state.pt")
layer.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
done("state dicts")
rewire(layer, optimizer, x, bss.SET(every))
layer.load_state_dict({**saved["model"], "pattern": layer.state_dict()["pattern"]})
layout = layer.layout
saved["model"] = layer.state_dict()
done("SET")
del optimizer, saved["optimizer"]
layer.zero_grad()
y = layer(x)
with torch.device("meta"):
    empty = bst.BlockSparseLinear(8 * side, 8 * side, layout)
empty.to_empty(device="cpu").load_state_dict(saved["model"])
assert torch.equal(empty(x), y)

def on_meta(module, name, parameter, register=nn.Module.register_parameter):
    register(module, name, parameter if parameter is None else nn.Parameter(parameter.detach().to("meta")))

nn.Module.register_parameter, register = on_meta, nn.Module.register_parameter  # as accelerate's init_empty_weights
empty = bst.BlockSparseLinear(8 * side, 8 * side, layout)
nn.Module.register_parameter = register
assert empty.weight.is_meta
empty.load_state_dict(saved["model"], assign=True)
assert torch.equal(empty(x), y)
done("meta")
again = bst.BlockSparseLinear.from_bsr(layer.to_bsr(), layer.bias.detach())
assert torch.equal(again(x), y)
copy.deepcopy(layer).half()
bst.save_pretrained(nn.Sequential(layer), folder + "/layer.safetensors")
done("conversion")
report = graphs.report(layout)
viz.plot_layout(layout, folder + "/layout.png", report=report)
assert "131072 (0.00076%)" in str(report) and "131072 (0.00076%)" in repr(layer)
done("report and plot")
print(json.dumps({"weights": layer.weight.nbytes, "x": x.nbytes, **peaks}))
"""

REWIRING = """
from blocksparse.torch.sparsify.sparse_to_sparse.exchange import best_of_strips
from blocksparse.torch.sparsify.sparse_to_sparse.grow_scores import score_strips

tiny = bst.BlockSparseLinear(64, 64, graphs.balanced_random(8, degree=4, block_size=8))
rewire(tiny, torch.optim.Adam(tiny.parameters()), torch.randn(2, 64), bss.RigL(every))  # imports what it needs
begin = peak()
layer = bst.BlockSparseLinear(1 << 16, 1 << 15, graphs.balanced_random(1 << 12, 1 << 13, degree=2, block_size=8))
rewire(layer, torch.optim.Adam(layer.parameters()), torch.randn(2, 1 << 16), bss.RigL(every, grow="bound"))
done("RigL")
torch.ones(7 << 20)  # which glibc sees freed, and has smaller ones lie in its heap from now on
begin, places = peak(), torch.arange(1 << 10)
for strips in 2, 128:  # of a million scores, and with a few small tensors for each
    scores = score_strips(torch.randn(1, 1 << 16), torch.randn(1, strips << 10), 8, "bound")
    assert best_of_strips(scores, places, 1 << 10).finite
    done(f"{strips} strips")
print(json.dumps(peaks))
"""


def peaks_of(script, tmp_path):
    """The most memory that was in use up to each point, beyond what was at the beginning."""
    command = [sys.executable, "-W", "ignore", "-c", COMMON + script, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_memory(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    pytest.importorskip("safetensors")
    peaks = peaks_of(LAYER, tmp_path)
    weights, x = peaks.pop("weights"), peaks.pop("x")
    assert weights == 131072 * 8 * 8 * 4
    most = 12 * weights + 16 * x  # a mask of the grid alone would be 500 times the weights
    assert max(peaks.values()) < most, (peaks, most)
    assert peaks["layer"] < 3 * weights, peaks  # with its tables, and a generator's memory


def test_memory_of_scores(tmp_path):
    """Of RigL, with 8192 blocks in 33 million places."""
    pytest.importorskip("torch")
    peaks = peaks_of(REWIRING, tmp_path)
    assert peaks["RigL"] < 300e6, peaks  # 67 MB; 990 MB where all places had a score at a time
    assert peaks["128 strips"] < peaks["2 strips"] + 60e6, peaks  # 4 MB; 164 MB where each left a hole in the heap


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (lambda: graphs.random(65536, density=1, block_size=8), 65536**2),
        (lambda: graphs.dense(50000, block_size=8), 50000**2),
        (lambda: graphs.balanced_random(1 << 20, degree=2048, block_size=8), 1 << 31),
        (lambda: graphs.watts_strogatz(1 << 20, 2048, 0.1, block_size=8), (1 << 20) * 2049),
        (lambda: graphs.banded(1 << 20, 1024, block_size=8), (1 << 20) * 2049),
    ],
)
def test_more_blocks_than_there_can_be(make, blocks):
    with pytest.raises(ValueError, match=f"asks for {blocks} blocks, at most 2147483647 fit"):
        make()


def test_stacks_of_more_blocks_than_there_can_be():
    layout = Layout.from_graph("dense(1024)", 8)
    with pytest.raises(ValueError, match="times is 2048, needs 1 to 2047"):
        layout.stack(2048)
