"""A small-world LSTM language model in JAX: flax's nnx for the modules, optax for the steps.

    python examples/lm_jax.py [--text FILE] [--steps 300]

Predicts the bytes of a text, by default of Python's own library. The recurrent weights of its LSTMs are small worlds of
Watts and Strogatz: each unit hears a few neighbours and, by short cuts, everybody within some steps. Truncated
backpropagation through time: each chunk of text begins with the state that the last one has ended with.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from blocksparse import graphs
from blocksparse.jax.nnx import BlockSparseLSTM

HIDDEN, BLOCK, EMBEDDING = 256, 16, 64
STREAMS, CHUNK = 16, 48  # texts side by side, bytes a step


class LanguageModel(nnx.Module):
    """Logits of the next byte."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        layouts = [graphs.watts_strogatz(HIDDEN // BLOCK, 4, 0.3, block_size=BLOCK, seed=seed) for seed in (0, 1)]
        self.embedding = nnx.Embed(256, EMBEDDING, rngs=rngs)
        options = {"forget_bias": 1.0, "time_major": True, "rngs": rngs}
        self.lower = BlockSparseLSTM(EMBEDDING, HIDDEN, layouts[0], **options)
        self.upper = BlockSparseLSTM(HIDDEN, HIDDEN, layouts[1], **options)
        self.output = nnx.Linear(HIDDEN, 256, rngs=rngs)

    def __call__(self, text, states):
        """text [steps, n] -> logits [steps, n, 256], states."""
        y, lower = self.lower(self.embedding(text), states[0])
        y, upper = self.upper(y, states[1])
        return self.output(y), (lower, upper)


def no_states(n: int):
    """Of a text that begins."""
    zeros = jnp.zeros((n, HIDDEN))
    return ((zeros, zeros), (zeros, zeros))


@nnx.jit
def train_step(model, optimizer, text, states):
    """text [steps + 1, n] -> bits a byte, and the states at its end."""

    def loss_of(model):
        logits, after = model(text[:-1], states)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, text[1:]).mean()
        return loss, after

    (loss, after), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model)
    optimizer.update(model, gradients)
    return loss / jnp.log(2), after


@nnx.jit
def next_byte(model, byte, states, key):
    """One byte drawn, and the states behind it."""
    logits, states = model(byte[None, None], states)
    return jax.random.categorical(key, logits[0, 0] / 0.7), states


def sample(model: LanguageModel, count: int, prompt: bytes = b"def ") -> bytes:
    """The prompt and what the model goes on with."""
    states, text = no_states(1), list(prompt)
    for i in range(len(prompt) - 1 + count):
        drawn, states = next_byte(model, jnp.asarray(text[i]), states, jax.random.key(i))
        if i >= len(prompt) - 1:
            text.append(int(drawn))
    return bytes(text)


def chunks(text: bytes):
    """[CHUNK + 1, STREAMS] of consecutive bytes, without an end."""
    streams = np.frombuffer(text, np.uint8)[: len(text) // STREAMS * STREAMS].reshape(STREAMS, -1).T.astype(np.int32)
    while True:
        for start in range(0, len(streams) - CHUNK - 1, CHUNK):
            yield jnp.asarray(streams[start : start + CHUNK + 1])


def main() -> float:
    """Trains, and prints what it has learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a file to learn (default: the modules of Python's library)")
    parser.add_argument("--steps", type=int, default=300, help="of the optimizer (default: %(default)s)")
    arguments = parser.parse_args()
    library = sorted(Path(os.__file__).parent.glob("*.py"))
    text = arguments.text.read_bytes() if arguments.text else b"\n".join(path.read_bytes() for path in library)
    if len(text) < 2 * STREAMS * CHUNK:
        parser.error(f"{arguments.text} has {len(text)} bytes, needs {2 * STREAMS * CHUNK} or more")
    model = LanguageModel(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3)), wrt=nnx.Param)
    states, begin, bits = no_states(STREAMS), time.perf_counter(), 8.0
    for step, chunk in zip(range(1, arguments.steps + 1), chunks(text), strict=False):
        loss, states = train_step(model, optimizer, chunk, states)
        bits = float(loss)
        if step in (1, arguments.steps) or step % 25 == 0:
            print(f"step {step:4d}  {bits:.3f} bits a byte  {time.perf_counter() - begin:.1f} s", flush=True)
    print(sample(model, 200).decode(errors="replace"))
    return bits


if __name__ == "__main__":
    main()
