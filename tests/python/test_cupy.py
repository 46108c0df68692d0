"""The CuPy front end: on a card, and without one on arrays that only look like CuPy's."""

import ctypes
import subprocess
import sys
import types

import numpy as np
import pytest

import blocksparse
from blocksparse import Layout, _lib, _structs
from blocksparse import cupy as ops


def _why_not():
    if status := blocksparse.cuda_status():
        return status
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"CuPy: {error}"
    return ""


WHY_NOT = _why_not()
needs_card = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)


# ---- without a card: arrays in the memory of the host that look like CuPy's


CURRENT = [0]  # cards


class Device:
    def __init__(self, id):
        self.id = id

    def __enter__(self):
        CURRENT.append(self.id)

    def __exit__(self, *error):
        CURRENT.pop()


class Stream:
    def __init__(self, ptr):
        self.ptr, self.capturing, self.synchronised = ptr, False, 0

    def is_capturing(self):
        return self.capturing

    def synchronize(self):
        self.synchronised += 1


class Fake:
    def __init__(self, host, device=0):
        self.host, self.device = host, Device(device)
        self.data = types.SimpleNamespace(ptr=host.ctypes.data)

    dtype, shape, strides = (
        property(lambda self, name=name: getattr(self.host, name)) for name in ("dtype", "shape", "strides")
    )
    ndim, size, itemsize, flags = (
        property(lambda self, name=name: getattr(self.host, name)) for name in ("ndim", "size", "itemsize", "flags")
    )
    T = property(lambda self: Fake(self.host.T, self.device.id))

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.data.ptr, False), "version": 3}

    def reshape(self, *shape):
        return Fake(self.host.reshape(*shape), self.device.id)


class Foreign:
    """An array of another library on the card."""

    def __init__(self, host):
        self.host = host

    __cuda_array_interface__ = property(lambda self: Fake(self.host).__cuda_array_interface__)


@pytest.fixture
def fake(monkeypatch):
    """A CuPy of the host, and a C library that is told that its card is the CPU. Calls are written down."""
    module, streams = types.ModuleType("cupy"), {0: Stream(0), 1: Stream(0)}
    module.ndarray, module.copies, module.streams, module.calls = Fake, [], streams, []
    module.empty = lambda shape, dtype: Fake(np.full(shape, 7, dtype), CURRENT[-1])

    def asarray(a):
        module.copies.append(a)
        return Fake(getattr(a, "host", a), CURRENT[-1])

    module.asarray = asarray
    module.cuda = types.SimpleNamespace(get_current_stream=lambda: streams[CURRENT[-1]])
    monkeypatch.setattr(ops._ARRAYS, "_module", module)
    call = _lib.call

    def on_cpu(name, *arguments):
        module.calls.append((name, arguments, CURRENT[-1]))
        if name != "bs_cuda_prepare":
            call(name, *arguments)

    monkeypatch.setattr(_lib, "call", on_cpu)
    monkeypatch.setattr(_lib, "CUDA", _lib.CPU)
    return module


def operands(layout, rng, n=7):
    x, dy = rng.standard_normal((n, layout.in_features)), rng.standard_normal((n, layout.out_features))
    return x, dy, rng.standard_normal(layout.values_shape)


def test_all_passes(fake, layout, rng):
    x, dy, w = operands(layout, rng)
    bias, gates, dense = rng.standard_normal(60), np.ones(layout.blocks), layout.to_dense(w)
    y = ops.linear_fprop(Fake(x), Fake(w), layout, bias=Fake(bias), gates=Fake(gates), activation="relu")
    assert isinstance(y, Fake)
    assert np.allclose(y.host, np.maximum(x @ dense.T + bias, 0))
    assert np.allclose(ops.linear_dgrad(Fake(dy), Fake(w), layout).host, dy @ dense)
    assert np.allclose(ops.linear_fprop(Fake(dy), Fake(w), layout.t()).host, dy @ dense)
    inside = layout.to_dense(np.ones(w.shape))
    dw, gates_out = Fake(np.ones(w.shape)), Fake(np.zeros(layout.blocks))
    given = {"values": Fake(w), "gates": Fake(gates), "out": dw, "gates_out": gates_out, "accumulate": True}
    assert ops.linear_wgrad([Fake(x)] * 2, [Fake(dy)] * 2, layout, **given) is dw
    assert np.allclose(layout.to_dense(dw.host), (1 + 2 * (dy.T @ x)) * inside)
    assert np.allclose(layout.to_dense(ops.linear_wgrad(Fake(x), Fake(dy), layout).host), (dy.T @ x) * inside)
    assert len(fake.copies) == 1  # the tables, once


def test_orders_and_leading_dimensions(fake, layout, rng):
    x, _, w = operands(layout, rng, 6)
    expected = x @ layout.to_dense(w).T
    first = ops.linear_fprop(Fake(np.ascontiguousarray(x.T).T), Fake(w), layout)
    assert first.host.T.flags.c_contiguous
    assert np.allclose(first.host, expected)
    y = ops.linear_fprop(Fake(x.reshape(1, 2, 1, 1, 1, 3, 90)), Fake(w), layout)
    assert np.allclose(y.host.reshape(6, 60), expected)


def test_card_and_stream_are_those_of_the_arrays(fake, layout, rng, monkeypatch):
    x, _, w = operands(layout, rng)
    y = ops.linear_fprop(Fake(x, device=1), Fake(w, device=1), layout)
    ops.linear_fprop(Fake(x), Fake(w), layout)
    ops.linear_fprop(Fake(x, device=1), Fake(w, device=1), layout.t().t())
    assert y.device.id == 1
    assert CURRENT == [0]
    assert [call[::2] for call in fake.calls if call[0] in ("bs_cuda_prepare", "bs_linear_fprop")] == [
        ("bs_cuda_prepare", 1),
        ("bs_linear_fprop", 1),
        ("bs_cuda_prepare", 0),  # tables of its own
        ("bs_linear_fprop", 0),
        ("bs_linear_fprop", 1),
    ]
    assert fake.streams[1].synchronised == fake.streams[0].synchronised == 1
    # What the C library is told where there are cards.
    told = []
    monkeypatch.setattr(_lib, "CUDA", 1)
    monkeypatch.setattr(_lib, "call", lambda name, *arguments: told.append(arguments))
    monkeypatch.setattr(_lib, "ask", lambda *arguments: 64)
    fake.streams[1].ptr = 1234
    ops.linear_dgrad(y, Fake(w, device=1), layout)
    view, dy, *_, stream = told[-1]
    assert (dy.contents.device_type, dy.contents.device_index, dy.contents.data) == (1, 1, y.data.ptr)
    view = ctypes.cast(view, ctypes.POINTER(_structs.LayoutView)).contents
    assert (view.device_type, view.device_index, view.blocks) == (1, 1, layout.blocks)
    assert stream.handle == 1234


def test_other_arrays_of_a_card_are_taken(fake, layout, rng):
    x, _, w = operands(layout, rng)
    y = ops.linear_fprop(Foreign(x), Foreign(w), layout)
    assert np.allclose(y.host, x @ layout.to_dense(w).T)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"x": np.zeros((5, 90))}, TypeError, "needs a CuPy array or one with __cuda_array_interface__, got ndarray"),
        ({"values": [1.0]}, TypeError, "got list"),
        ({"out": np.zeros((5, 60))}, TypeError, "got ndarray"),
        ({"x": Fake(np.zeros((5, 80)))}, ValueError, r"x is \[5, 80\], layout needs \[N, 90\]"),
        ({"x": Fake(np.zeros((5, 90), np.int32))}, ValueError, "an array of int32"),
        ({"x": Fake(np.zeros((5, 90), np.float32))}, ValueError, "w is f64, needs f32"),
        ({"activation": "tanh"}, ValueError, "activation is 'tanh'"),
        ({"layout": "dense"}, TypeError, "layout is a str"),
    ],
)
def test_says_what_is_wrong(fake, layout, change, error, text):
    good = {"x": Fake(np.zeros((5, 90))), "values": Fake(np.zeros(layout.values_shape)), "layout": layout}
    with pytest.raises(error, match=text):
        ops.linear_fprop(**{**good, **change})
    assert CURRENT == [0]


def test_capture_needs_the_tables(fake, rng):
    layout = Layout.from_graph("random(4,0.5)", 8)
    x, _, w = operands(layout, rng)
    fake.streams[0].capturing = True
    with pytest.raises(RuntimeError, match="tables are not on card 0 yet"):
        ops.linear_fprop(Fake(x), Fake(w), layout)
    assert CURRENT == [0]
    fake.streams[0].capturing = False
    ops.linear_fprop(Fake(x), Fake(w), layout)
    fake.streams[0].capturing = True
    ops.linear_fprop(Fake(x), Fake(w), layout)


def test_is_imported_late():
    code = "import sys, blocksparse.cupy; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- on a card


@needs_card
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("first", [False, True])
def test_on_a_card(layout, rng, dtype, first):
    import cupy

    x, dy, w = (a.astype(dtype) for a in operands(layout, rng, 70))
    dense = layout.to_dense(w).astype(np.float64)
    inside = layout.to_dense(np.ones(w.shape))
    on_card = [cupy.asarray(np.ascontiguousarray(a.T)).T if first else cupy.asarray(a) for a in (x, dy)]
    x64, dy64, values = x.astype(np.float64), dy.astype(np.float64), cupy.asarray(w)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        results = (
            ops.linear_fprop(on_card[0], values, layout),
            ops.linear_dgrad(on_card[1], values, layout),
            ops.linear_fprop(on_card[1], values, layout.t()),
            ops.linear_wgrad(*on_card, layout),
        )
    stream.synchronize()
    y, dx, dx_t, dw = (r.get().astype(np.float64) for r in results)
    assert results[0].strides[0] == results[0].itemsize * (1 if first else 60)
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 3e-3}[dtype]
    wanted = (x64 @ dense.T, dy64 @ dense, dy64 @ dense, (dy64.T @ x64) * inside)
    for got, expected in zip((y, dx, dx_t, layout.to_dense(dw)), wanted, strict=True):
        assert np.linalg.norm(got - expected) <= tolerance * np.linalg.norm(expected)


@needs_card
def test_capture_on_a_card(layout, rng):
    import cupy

    x, _, w = (cupy.asarray(a) for a in operands(layout, rng))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        y = ops.linear_fprop(x, w, layout)  # the stream has its own pool of memory, which is to hold the workspace
        expected = y.get()
        stream.begin_capture()
        ops.linear_fprop(x, w, layout, out=y)
        graph = stream.end_capture()
        y.fill(0)
        graph.launch(stream)
    stream.synchronize()
    assert np.array_equal(y.get(), expected)


@needs_card
def test_tensors_of_pytorch_on_a_card(layout, rng):
    torch = pytest.importorskip("torch")
    x, _, w = operands(layout, rng)
    y = ops.linear_fprop(torch.from_numpy(x).cuda(), torch.from_numpy(w).cuda(), layout)
    assert np.allclose(y.get(), x @ layout.to_dense(w).T)
