"""A byte-level language model around a deep-update LSTM with block-sparse, or dense, matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...layout import Layout
from ...torch.deep_update import DeepUpdateLSTM
from ...torch.modes import evaluating
from ...torch.recurrent import State
from ..distributed import ALONE, World
from ..stopping import Stopped as Stopped
from .config import PRESETS as PRESETS
from .config import ModelConfig as ModelConfig
from .config import check_graph

SYMBOLS = 256  # byte values


class LanguageModel(nn.Module):
    """Predicts the next byte.

    Rows of the embedding and of the output's weight have a norm of their own, a parameter each. The output reads the
    units that the input writes.

    Source: openai/blocksparse, `examples/lstm`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        check_graph(config)
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.embedding = nn.Parameter(nn.init.orthogonal_(torch.empty(SYMBOLS, config.embedding)))
            self.embedding_gain = nn.Parameter(torch.ones(SYMBOLS, 1))
            if config.graph:
                sizes = (config.embedding, config.hidden, config.graph, config.block, config.inner)
                self.lstm = DeepUpdateLSTM.from_graph(*sizes, seed=config.seed, ports=config.stride)
            else:
                self.lstm = DeepUpdateLSTM(config.embedding, config.hidden, None, config.inner, config.stride)
            ports = self.lstm.ports.size(0)
            self.output = nn.Parameter(torch.randn(SYMBOLS, ports) * 0.02)
            self.output_gain = nn.Parameter(torch.ones(SYMBOLS, 1))
            self.output_bias = nn.Parameter(torch.zeros(SYMBOLS))

    def forward(self, text: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Text [steps, n] of byte values, the last call's state -> (logits [steps, n, 256] for what follows, state)."""
        y, state = self.read(text, state)
        if self.config.stride > 1:
            y = y[..., :: self.config.stride]
        return functional.linear(y, self.output_weight(), self.output_bias), state

    def read(self, text: Tensor, state: State | None = None, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        """Text [steps, n], of `lengths` [n] if these differ -> (h [steps, n, hidden], state (h, c) [1, n, hidden])."""
        y, state = self.lstm(functional.embedding(text, self.table()), state, lengths)
        return y, state

    def table(self) -> Tensor:
        """What the network reads of each byte value, [256, embedding]."""
        return functional.normalize(self.embedding) * self.embedding_gain

    def output_weight(self) -> Tensor:
        """[256, ports]."""
        return functional.normalize(self.output) * self.output_gain

    def mix(self) -> list[float]:
        """Share of blocks that one block reaches after each matrix, of all of them; [] for a dense model."""
        from ... import graphs

        if not self.config.graph:
            return []
        config = self.config
        steps = [Layout.from_graph(config.graph, config.block, seed=config.seed + j) for j in range(config.inner + 1)]
        return list(graphs.mix(steps))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats; logits [steps, n, 256], targets [steps, n]."""
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    return functional.cross_entropy(wide.flatten(0, 1), targets.flatten())


def chunks(text: Tensor, streams: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Text [bytes] as `streams` parts side by side, in chunks: (input, what follows), [up to steps, streams] each."""
    length = (text.numel() - 1) // streams
    xs = text[: length * streams].view(streams, length).t()
    ys = text[1 : length * streams + 1].view(streams, length).t()
    for begin in range(0, length, steps):
        yield xs[begin : begin + steps].contiguous().long(), ys[begin : begin + steps].contiguous().long()


def bits_per_byte(
    model: LanguageModel,
    text: Tensor,
    streams: int = 16,
    steps: int = 128,
    *,
    bf16: bool = False,
    world: World = ALONE,
    progress: Callable[[int], None] = lambda done: None,
    stop: Callable[[], bool] = lambda: False,
) -> float:
    """What the model needs for a byte of text [bytes]; every stream begins without context.

    Args:
        model: on the device of the text.
        text: uint8 [bytes].
        streams: parts of the text, side by side.
        steps: bytes of a stream that are read at once; of no matter for the result.
        bf16: products in bfloat16, by autocast.
        world: processes that share the streams.
        progress: is told from time to time how many bytes are done.
        stop: is asked from time to time whether to end.

    Raises:
        ValueError: the text has fewer than 2 bytes.
        Stopped: `stop` said so, in one of the processes.
    """
    if text.numel() < 2:
        raise ValueError(f"[lm] text has {text.numel()} bytes, needs 2 or more")
    streams = max(1, min(streams, (text.numel() - 1) // 2))
    mine = slice(world.rank, None, world.size)
    total = torch.zeros(2, dtype=torch.float64, device=text.device)  # nats, bytes
    state, done = None, 0
    with evaluating(model):
        for x, y in chunks(text, streams, steps):
            x, y = x[:, mine], y[:, mine]
            if y.numel() == 0:
                break
            if stop():
                total[1] = torch.nan  # so that it is in the sum over all processes
                break
            with torch.autocast(text.device.type, torch.bfloat16, bf16):
                logits, state = model(x, state)
            total[0] += loss_of(logits, y).double() * y.numel()
            total[1] += y.numel()
            done += y.numel()
            progress(done)
    nats, count = world.sum(total).tolist()
    if math.isnan(count):
        raise Stopped
    return nats / count / math.log(2)
