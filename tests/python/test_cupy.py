"""The CuPy front end: on a card, and without one on arrays that only look like CuPy's."""

import ctypes
import subprocess
import sys
import types

import numpy as np
import pytest

import blocksparse
from blocksparse import Layout
from blocksparse import cupy as ops
from blocksparse import numpy as of_numpy
from blocksparse._arrays import cupy_conv
from blocksparse._core import library, structs


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

    def transpose(self, *axes):
        return Fake(self.host.transpose(*axes), self.device.id)

    def copy(self):
        return Fake(self.host.copy(), self.device.id)

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
    for arrays in (ops._ARRAYS, cupy_conv._ARRAYS):
        monkeypatch.setattr(arrays, "_module", module)
    call = library.call

    def on_cpu(name, *arguments):
        module.calls.append((name, arguments, CURRENT[-1]))
        if name != "bs_cuda_prepare":
            call(name, *arguments)

    monkeypatch.setattr(library, "call", on_cpu)
    monkeypatch.setattr(library, "CUDA", library.CPU)
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


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions(fake, rng, channels_last):
    layout = Layout.from_graph("random(3,2,0.7)", 8, seed=1)
    geometry = ops.conv_geometry((3, 2), stride=(2, 1), padding=1)

    def images(channels, *size):
        x = rng.standard_normal((2, *size, channels)).transpose(0, 3, 1, 2)
        return x if channels_last else np.ascontiguousarray(x)

    x, dy = images(16, 7, 5), images(24, *ops.conv_output_size(geometry, (7, 5)))
    w, gates = rng.standard_normal((layout.blocks, 6, 8, 8)), rng.random(layout.blocks)
    order = rng.permutation(16).astype(np.int32)
    strided = np.repeat(order, 2)[::2]
    same = {"channel_order": order, "gates": gates}
    on_card = {"channel_order": Fake(strided), "gates": Fake(gates), "allow_tf32": True}
    y = ops.conv_fprop(Fake(x), Fake(w), layout, geometry, bias=Fake(dy[0, :, 0, 0].copy()), **on_card)
    expected = of_numpy.conv_fprop(x, w, layout, geometry, bias=dy[0, :, 0, 0].copy(), **same)
    assert np.array_equal(y.host, expected)
    assert y.strides == expected.strides
    dx = ops.conv_dgrad(Fake(dy), Fake(w), layout, geometry, (7, 5), **on_card)
    assert np.array_equal(dx.host, of_numpy.conv_dgrad(dy, w, layout, geometry, (7, 5), **same))
    dw, gates_out = Fake(np.ones(w.shape)), Fake(np.zeros(layout.blocks))
    given = {"values": Fake(w), "out": dw, "gates_out": gates_out, "accumulate": True}
    assert ops.conv_wgrad(Fake(x), Fake(dy), layout, geometry, **given, **on_card) is dw
    wanted, wanted_gates = np.ones(w.shape), np.zeros(layout.blocks)
    given = {"values": w, "out": wanted, "gates_out": wanted_gates, "accumulate": True}
    of_numpy.conv_wgrad(x, dy, layout, geometry, **given, **same)
    assert np.array_equal(dw.host, wanted)
    assert np.array_equal(gates_out.host, wanted_gates)
    new = ops.conv_wgrad(Fake(x), Foreign(dy), layout, geometry)
    assert np.array_equal(new.host, of_numpy.conv_wgrad(x, dy, layout, geometry))
    assert len(fake.copies) == 2  # the tables and what is foreign
    assert all(call[2] == 0 for call in fake.calls)


def test_convolutions_are_done_on_the_card_of_the_images(fake, rng):
    layout = Layout.from_graph("random(3,2,0.7)", 8, seed=1)
    x, dy, w = (Fake(rng.standard_normal(s), 1) for s in ((2, 16, 5), (2, 24, 5), (layout.blocks, 3, 8, 8)))
    geometry = ops.conv_geometry((3,), padding=1)
    results = (
        ops.conv_fprop(x, w, layout, geometry),
        ops.conv_dgrad(dy, w, layout, geometry, (5,)),
        ops.conv_wgrad(x, dy, layout, geometry),
    )
    assert [result.device.id for result in results] == [1, 1, 1]
    assert CURRENT == [0]
    assert [call[2] for call in fake.calls if call[0] in ("bs_conv_fprop", "bs_conv_dgrad", "bs_conv_wgrad")] == [1] * 3


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"x": np.zeros((2, 16, 5))}, TypeError, r"\[conv\] x is a ndarray, needs a CuPy array or one with"),
        ({"x": Fake(np.zeros((2, 16, 5, 5)))}, ValueError, r"needs \[n, channels\] and 1 sizes"),
        ({"x": Fake(np.zeros((2, 15, 5)))}, ValueError, r"x is \[2, 15, 5\], needs \[n, 16\] and 1 size"),
        ({"x": Fake(np.zeros((2, 16, 5), np.int32))}, ValueError, r"\[conv\] an array of int32"),
        ({"channel_order": list(range(16))}, TypeError, "channel_order is a list, needs a CuPy array"),
        ({"channel_order": Fake(np.arange(16))}, ValueError, "channel_order is int64"),
        ({"out": np.zeros((2, 24, 5))}, TypeError, r"\[conv\] needs a CuPy array .* got ndarray"),
        ({"geometry": (3,)}, TypeError, "needs what conv_geometry makes"),
    ],
)
def test_says_what_is_wrong_with_a_convolution(fake, change, error, text):
    layout, geometry = Layout.from_graph("dense(3,2)", 8), ops.conv_geometry((3,), padding=1)
    good = {"x": Fake(np.zeros((2, 16, 5))), "values": Fake(np.zeros((6, 3, 8, 8))), "layout": layout}
    with pytest.raises(error, match=text):
        ops.conv_fprop(**{**good, "geometry": geometry, **change})
    assert CURRENT == [0]


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
    monkeypatch.setattr(library, "CUDA", 1)
    monkeypatch.setattr(library, "call", lambda name, *arguments: told.append(arguments))
    monkeypatch.setattr(library, "ask", lambda *arguments: 64)
    fake.streams[1].ptr = 1234
    ops.linear_dgrad(y, Fake(w, device=1), layout)
    view, dy, *_, stream = told[-1]
    assert (dy.contents.device_type, dy.contents.device_index, dy.contents.data) == (1, 1, y.data.ptr)
    view = ctypes.cast(view, ctypes.POINTER(structs.LayoutView)).contents
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


@needs_card
@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_on_a_card(rng, channels_last):
    import cupy

    layout, geometry = Layout.from_graph("random(3,2,0.7)", 16, seed=1), ops.conv_geometry((3, 3), padding=1)
    shapes = ((2, 32, 7, 5), (2, 48, 7, 5), (layout.blocks, 9, 16, 16))
    x, dy, w = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    if channels_last:
        x, dy = (np.ascontiguousarray(a.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2) for a in (x, dy))
    images = [cupy.asarray(a, order="K") for a in (x, dy)]
    values = cupy.asarray(w)
    results = (
        (ops.conv_fprop(images[0], values, layout, geometry), of_numpy.conv_fprop(x, w, layout, geometry)),
        (
            ops.conv_dgrad(images[1], values, layout, geometry, (7, 5)),
            of_numpy.conv_dgrad(dy, w, layout, geometry, (7, 5)),
        ),
        (ops.conv_wgrad(*images, layout, geometry), of_numpy.conv_wgrad(x, dy, layout, geometry)),
    )
    for got, wanted in results:
        assert np.linalg.norm(got.get() - wanted) <= 1e-5 * np.linalg.norm(wanted)
