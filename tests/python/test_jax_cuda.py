"""The ops for JAX on a CUDA card, beside those of PyTorch there, which run in a process of their own."""

import os
import pickle
import subprocess
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory, too

import numpy as np
import pytest

import blocksparse

jax = pytest.importorskip("jax")

import jax.numpy as jnp

import blocksparse.jax as bsj
from blocksparse import Layout


def _why_not():
    if jax.default_backend() == "cpu":
        return "JAX sees no CUDA device"
    return blocksparse.cuda_status()


pytestmark = pytest.mark.skipif(_why_not() != "", reason=_why_not())
DTYPES = ["float32", "bfloat16", "float16"]
LAYOUTS = {
    "b32": Layout.from_graph("random(32,32,0.2)", 32, seed=1),  # 1024 x 1024
    "b8": Layout.from_graph("ba(64,4)", 8, seed=2),
    "b128": Layout.from_graph("random(8,8,0.4)", 128, seed=3),
    "ragged": Layout.from_graph("random(9,7,0.5)", 16, seed=4, out_features=140, in_features=105),
}
CHANNELS = Layout.from_graph("random(4,4,0.5)", 32, seed=5)

TORCH = """
import pickle, sys, torch
import blocksparse.torch as bst
with open(sys.argv[1], "rb") as file:
    calls = pickle.load(file)
results = []
for name, dtype, layout, arrays, options in calls:
    given = [torch.from_numpy(a).to("cuda", getattr(torch, dtype)).requires_grad_() for a in arrays]
    if name == "conv2d":
        y = bst.conv2d(given[0].permute(0, 3, 1, 2), given[1], layout, given[2], **options)
        y = y.permute(0, 2, 3, 1)
    elif name == "lstm":
        y, _ = bst.lstm(given[0], given[1], layout)
    else:
        y = bst.linear(given[0], given[1], layout, given[2])
    wanted = given[:2]
    made = [y.detach(), *torch.autograd.grad(y, wanted, torch.ones_like(y))]
    results.append([a.double().cpu().numpy() for a in made])
with open(sys.argv[2], "wb") as file:
    pickle.dump(results, file)
"""


def calls():
    """(function, dtype, layout, float32 arrays, options): float64 would be rounded twice by PyTorch, once by NumPy"""
    rng = np.random.default_rng(0)

    def normal(shape):
        return rng.standard_normal(shape, np.float32)

    for dtype in DTYPES:
        for layout in LAYOUTS.values():
            for n in (1, 64, 300, 2048):
                shapes = ((n, layout.in_features), layout.values_shape, (layout.out_features,))
                yield "linear", dtype, layout, [normal(s) for s in shapes], {}
        options = {"kernel_size": 3, "stride": 1, "padding": 1}
        shapes = ((4, 14, 14, 128), (CHANNELS.blocks, 9, 32, 32), (128,))
        yield "conv2d", dtype, CHANNELS, [normal(s) for s in shapes], options
        layout = CHANNELS.stack(4)
        shapes = ((7, 5, 512), layout.values_shape)
        yield "lstm", dtype, layout, [normal(s) / 8 for s in shapes], {}


def run(name, dtype, layout, arrays, options):
    given = [jnp.asarray(a, dtype) for a in arrays]
    more = {"precision": "highest"} if name != "lstm" else {}

    def f(x, w):
        y = getattr(bsj, name)(x, w, layout, *given[2:], **options, **more)
        return y[0] if name == "lstm" else y

    y, pull = jax.vjp(jax.jit(f), *given[:2])
    return [np.asarray(a.astype(jnp.float32)).astype("float64") for a in (y, *jax.jit(pull)(jnp.ones_like(y)))]


def test_is_pytorchs_to_the_bit(tmp_path):
    pytest.importorskip("torch")
    every = list(calls())
    given, made = tmp_path / "given.pkl", tmp_path / "made.pkl"
    given.write_bytes(pickle.dumps(every))
    subprocess.run([sys.executable, "-c", TORCH, given, made], check=True)
    wrong = []
    for call, theirs in zip(every, pickle.loads(made.read_bytes()), strict=True):
        for which, mine, other in zip(("y", "dx", "dw"), run(*call), theirs, strict=True):
            if not np.array_equal(mine, other):
                name, dtype, layout, arrays, _ = call
                worst = abs(mine - other).max() / abs(other).max()
                wrong.append(f"{name} {which} {dtype} {layout} x {arrays[0].shape}: {worst:.1e} of the largest")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_agrees_with_the_cpu(dtype):
    rng, layout = np.random.default_rng(1), LAYOUTS["ragged"]
    enable = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with enable(dtype == "float64"):
        x, w, bias = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((33, 105), layout.values_shape, (140,)))
        gates = jnp.asarray(rng.integers(0, 3, layout.blocks), "float64" if dtype == "float64" else "float32")

        def loss(x, w, bias, gates):
            y = bsj.linear(x, w, layout, bias, gates=gates, activation="gelu", precision="highest")
            return (y.astype(gates.dtype) ** 2).mean()

        on_card = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(x, w, bias, gates)
        moved = jax.device_put((x, w, bias, gates), jax.devices("cpu")[0])
        on_cpu = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*moved)
    tolerance = {"float64": 1e-12, "float32": 1e-5}.get(dtype, 3e-2)
    for a, b in zip(*map(jax.tree.leaves, (on_card, on_cpu)), strict=True):
        a, b = (np.asarray(v.astype(gates.dtype)) for v in (a, b))
        assert abs(a - b).max() <= tolerance * abs(b).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_gated_units_agree_with_the_cpu(dtype, name):
    """One call for y, and with derivatives the product and what XLA makes of the rest.

    The sum, not the mean: gradients of a mean are so small that float16 has four bits for them.
    """
    rng, layout = np.random.default_rng(3), bsj.interleaved_layout(LAYOUTS[name])
    hidden = LAYOUTS[name].out_features
    shapes = ((70, layout.in_features), layout.values_shape, (layout.out_features,))
    x, w, bias = (jnp.asarray(rng.standard_normal(shape), dtype) / 8 for shape in shapes)

    def unit(x, w, bias):
        return bsj.linear_glu(x, w, layout, hidden, bias, precision="highest").astype(jnp.float32)

    def results(*given):
        return jax.jit(unit)(*given), *jax.jit(jax.grad(lambda *g: (unit(*g) ** 2).sum(), (0, 1, 2)))(*given)

    on_card, on_cpu = results(x, w, bias), results(*jax.device_put((x, w, bias), jax.devices("cpu")[0]))
    for a, b in zip(on_card, on_cpu, strict=True):
        a, b = (np.asarray(v.astype(jnp.float32)) for v in (a, b))
        assert abs(a - b).max() <= (1e-5 if dtype == "float32" else 3e-2) * abs(b).max()


def test_tf32_is_asked_for_as_jax_asks_for_it():
    layout, rng = LAYOUTS["b32"], np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((256, 1024)), jnp.float32)
    w = jnp.asarray(rng.standard_normal(layout.values_shape), jnp.float32)
    exact = np.asarray(x, "float64") @ layout.to_dense(np.asarray(w, "float64")).T

    def error(**options):
        return float(abs(np.asarray(bsj.linear(x, w, layout, **options)) - exact).max() / abs(exact).max())

    assert error(precision="highest") < 1e-6
    assert error(precision="highest") < error(precision="tensorfloat32") < 2e-3
    with jax.default_matmul_precision("highest"):
        assert error() < 1e-6


COMMAND_BUFFERS = """
import jax, jax.numpy as jnp, numpy as np
import blocksparse.jax as bsj
from blocksparse import Layout
layout = Layout.from_graph("random(32,32,0.2)", 32, seed=1)
rng = np.random.default_rng(0)
w = jnp.asarray(rng.standard_normal((8, *layout.values_shape)) / 8, jnp.bfloat16)
def f(x):
    for i in range(8):
        x = bsj.linear(x, w[i], layout, activation="gelu")
    return (x.astype(jnp.float32) ** 2).sum()
step = jax.jit(jax.value_and_grad(f))
for seed in range(5):
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((512, 1024)), jnp.bfloat16)
    value, gradient = step(x)
    print(float(value), float(gradient.astype(jnp.float32).sum()))
"""


def test_command_buffers_change_nothing():
    outputs = []
    for flags in ("--xla_gpu_enable_command_buffer=", "--xla_gpu_graph_min_graph_size=1"):
        environment = {**os.environ, "XLA_FLAGS": flags}
        command = [sys.executable, "-c", COMMAND_BUFFERS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]


def test_errors_name_the_op():
    layout = LAYOUTS["ragged"]
    tables = bsj.tables_of(layout)
    wrong = bsj.Tables(tables.words[:-64], tables.sizes)
    x, w = jnp.ones((3, 105)), jnp.ones(layout.values_shape)
    with pytest.raises(Exception, match=r"\[layout\] index has"):
        jax.block_until_ready(bsj.linear(x, w, wrong))


def test_several_cards():
    if jax.device_count() < 2:
        pytest.skip("there is one card")
    spec = jax.sharding.PartitionSpec
    auto = {"axis_types": (jax.sharding.AxisType.Auto,)} if hasattr(jax.sharding, "AxisType") else {}
    mesh = jax.make_mesh((jax.device_count(),), ("i",), **auto)
    layout, rng = LAYOUTS["b32"], np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((64 * jax.device_count(), 1024)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal(layout.values_shape), jnp.bfloat16)
    f = jax.shard_map(
        lambda x, w: bsj.linear(x, w, layout), mesh=mesh, in_specs=(spec("i"), spec()), out_specs=spec("i")
    )
    whole = np.concatenate(
        [np.asarray(bsj.linear(part, w, layout), "float32") for part in jnp.split(x, jax.device_count())]
    )
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(x, w), "float32"), whole)
