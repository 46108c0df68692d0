"""Layers divided among processes compute and save what one process does: 2 and 3 processes on the CPU."""

import contextlib
import socket

import numpy as np
import parallel_bodies as bodies
import parallel_halves
import processes
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

import blocksparse.torch as bst
from blocksparse import graphs
from blocksparse._core import library
from blocksparse.torch.multiprocessors import leave_multiprocessors
from blocksparse.torch.parallel import ColwiseParallel, deal

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
TENSOR = [
    bodies.styles,
    parallel_halves.halves,
    bodies.training,
    bodies.from_meta,
    bodies.with_fsdp,
    bodies.refusals,
    bodies.damaged,
]
TWO = [*TENSOR, bodies.fsdp, bodies.fsdp_options, bodies.ddp, bodies.death]
THREE = [bodies.styles, parallel_halves.halves, bodies.resumed, bodies.refusals, bodies.fsdp_resumed, bodies.ddp]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the bodies raised in 2 processes, and then in 3, by (body, processes)."""
    folder = tmp_path_factory.mktemp("processes")
    results = {(name, 2): texts for name, texts in processes.run(TWO, 2, folder).items()}
    results |= {(name, 3): texts for name, texts in processes.run(THREE, 3, folder).items()}
    return folder, results


@pytest.mark.parametrize(("body", "n"), [(b.__name__, 2) for b in TWO] + [(b.__name__, 3) for b in THREE])
def test_in_processes(body, n, found):
    texts = found[1][body, n]
    if body == "death":
        assert texts == [""] * (n - 1) + ["not run"]
    elif any(texts):
        pytest.fail("\n".join(texts))


@pytest.mark.parametrize("body", [bodies.resumed, bodies.fsdp_resumed])
def test_in_one_process(body, found):
    """What two have saved."""
    body(0, 1, found[0])


def test_the_example(tmp_path):
    """Of the guide, in two processes as torchrun starts them."""
    with contextlib.ExitStack() as free:
        ports = [free.enter_context(socket.socket()) for _ in range(2)]
        for port in ports:
            port.bind(("127.0.0.1", 0))
        (tmp_path / "ports").write_text(" ".join(str(port.getsockname()[1]) for port in ports))
    (texts,) = processes.run([bodies.example], 2, tmp_path, joined=False).values()
    if any(texts):
        pytest.fail("\n".join(texts))


# ---- Deals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_blocks_are_shared_evenly(n):
    """Within 2 % on scale-free layouts, of the layers on both sides at once."""
    with torch.device("meta"):
        up = bst.BlockSparseLinear(8 * 384, 8 * 384, graphs.barabasi_albert(384, 8, block_size=8))
        down = bst.BlockSparseLinear(8 * 384, 8 * 384, graphs.barabasi_albert(384, 8, block_size=8, seed=1))
        glu = bst.BlockSparseGLU(8 * 384, 8 * 384, up.layout)
    dealt = deal(n, outputs_of=[up, glu], inputs_of=down)
    assert np.array_equal(np.sort(np.concatenate(dealt.hands)), np.arange(384))
    for counts in (np.bincount(up.layout.coordinates()[0]), np.bincount(down.layout.coordinates()[1])):
        shares = [counts[hand].sum() for hand in dealt.hands]
        assert max(shares) <= 1.02 * min(shares)
        contiguous = [part.sum() for part in np.array_split(counts, n)]
        assert max(contiguous) > 1.5 * min(contiguous)  # what a cut into equal rows gives
    widths = [dealt.features_of(process).size for process in range(n)]
    assert max(widths) - min(widths) <= 8
    assert dealt == deal(n, outputs_of=[up, glu], inputs_of=down)
    assert dealt != deal(n, outputs_of=up)


def test_groups_stay_together():
    with torch.device("meta"):
        layer = bst.BlockSparseLinear(96, 96, graphs.barabasi_albert(12, 2, block_size=8))
    dealt = deal(2, outputs_of=layer, group=24)
    assert dealt.unit == 24
    assert sorted(dealt.features_of(0).reshape(-1, 24)[:, 0] % 24) == [0, 0]
    with pytest.raises(ValueError, match="96 features are 4 units of 24, fewer than the 5 processes"):
        deal(5, outputs_of=layer, group=24)
    assert Replicate() == ColwiseParallel().output_layouts


# ---- Multiprocessors ------------------------------------------------------------------------------------------------


def test_multiprocessors_are_given_back(monkeypatch):
    """To the outer context, also by an exception; a count that is refused changes nothing."""
    told = []

    def call(name, count):
        if count < 0:
            raise ValueError(count)
        told.append(count)

    monkeypatch.setattr(library, "call", call)
    with contextlib.suppress(ZeroDivisionError), leave_multiprocessors(5):
        with leave_multiprocessors(24):
            pass
        with pytest.raises(ValueError, match="-1"):
            leave_multiprocessors(-1).__enter__()
        1 / 0  # noqa: B018
    with leave_multiprocessors(8):
        pass
    assert told == [5, 24, 5, 0, 8, 0]
