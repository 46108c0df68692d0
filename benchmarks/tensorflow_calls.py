"""What TensorFlow's op costs: a call of next to nothing beside tf.matmul, and a large product beside NumPy's front end.

    scripts/framework_env.sh tensorflow python benchmarks/tensorflow_calls.py

Microseconds a call, the best of 7 rounds in which all take turns, as a table with ratios.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import blocksparse.numpy as bsn
import blocksparse.tensorflow as bstf
from blocksparse import graphs

Calls = dict[str, Callable[[], object]]


def microseconds(calls: Calls, times: int) -> dict[str, float]:
    """The best mean of 7 of each."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(7):
        for name, call in calls.items():
            call()
            start = time.perf_counter()
            for _ in range(times):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / times * 1e6)
    return best


def small() -> tuple[Calls, int]:
    """16 x 16 over 8 tokens, eagerly, in a function, with gradients."""
    layout = graphs.dense(2, block_size=8)
    x, w, dense = tf.random.normal([8, 16]), tf.random.normal(layout.values_shape), tf.random.normal([16, 16])
    function = tf.function(lambda x, w: bstf.linear(x, w, layout))
    other = tf.function(tf.matmul)

    def gradients(call: Callable[..., object], weight: tf.Tensor) -> Callable[[], object]:
        def run() -> object:
            with tf.GradientTape() as tape:
                tape.watch([x, weight])
                y = call(x, weight)
            return tape.gradient(y, [x, weight])

        return run

    return {
        "tf.matmul": lambda: tf.matmul(x, dense),
        "linear": lambda: bstf.linear(x, w, layout),
        "tf.matmul in a function": lambda: other(x, dense),
        "linear in a function": lambda: function(x, w),
        "tf.matmul and gradients": gradients(tf.matmul, dense),
        "linear and gradients": gradients(lambda x, w: bstf.linear(x, w, layout), w),
    }, 1000


def large() -> tuple[Calls, int]:
    """4096 x 4096, b = 32, 10 % of the blocks, 64 tokens."""
    layout = graphs.random(128, density=0.1, block_size=32, seed=0)
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((64, 4096), layout.values_shape))
    y = np.empty((64, 4096), np.float32)
    tx, tw = tf.constant(x), tf.constant(w)
    return {
        "NumPy, 4096 x 4096": lambda: bsn.linear_fprop(x, w, layout, out=y),
        "TensorFlow, 4096 x 4096": lambda: bstf.linear(tx, tw, layout),
    }, 50


def main() -> None:
    """Prints the table."""
    for calls, times in (small(), large()):
        measured = microseconds(calls, times)
        names = list(measured)
        for base, name in zip(names[::2], names[1::2], strict=True):
            ratio = measured[name] / measured[base]
            print(f"{base:<26}{measured[base]:>10.1f} us   {name:<26}{measured[name]:>10.1f} us   {ratio:.2f}x")


if __name__ == "__main__":
    main()
