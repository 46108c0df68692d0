"""What a model is made of, and how it is trained. Nothing here needs PyTorch, so that help comes at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...layout import Layout


@dataclass(frozen=True)
class ModelConfig:
    """What a model is made of.

    Args:
        hidden: units of the state.
        graph: which blocks every matrix has, such as "ba(175,3)"; "" for dense ones.
        block: edge of a block.
        inner: matrices that the state goes through before the gates.
        stride: input and output touch every stride-th unit.
        embedding: features of a byte.
        seed: another one, other graphs and other first weights.
    """

    hidden: int = 512
    graph: str = "balanced(64,16,diagonal=1)"
    block: int = 8
    inner: int = 2
    stride: int = 1
    embedding: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses what makes no model; the rest is refused by the layers."""
        if self.embedding < 1 or self.hidden < 1:
            raise ValueError(f"[lm] embedding is {self.embedding} and hidden {self.hidden}, needs 1 or more")
        if not 1 <= self.stride <= self.hidden:
            raise ValueError(f"[lm] stride is {self.stride}, needs 1 to {self.hidden}, the units")
        if self.inner < 2:
            raise ValueError(f"[lm] inner is {self.inner}, needs 2 or more")
        if self.graph and self.block > 0 and self.hidden % self.block != 0:
            raise ValueError(f"[lm] hidden is {self.hidden}, needs a multiple of the block size {self.block}")


PRESETS = {
    "small": ModelConfig(),
    "dense-small": ModelConfig(284, ""),
    "dense-1120": ModelConfig(1120, "", inner=6),
    "ba-5600": ModelConfig(5600, "ba(175,3,blocks=1225)", 32, 6, 2),
    "ws-5600": ModelConfig(5600, "ws(175,6,0.2)", 32, 6, 2),
    "dense-3168": ModelConfig(3168, "", inner=6),
    "ba-18432": ModelConfig(18432, "ba(576,8,blocks=9792)", 32, 6, 2),
    # As many weights in larger blocks, which a card multiplies faster; ws and random have 6 % more. random is ws with
    # all links moved: `random(...)` has no diagonal, and matrices begin as identities.
    "ba-18432-b64": ModelConfig(18432, "ba(288,3,blocks=2448)", 64, 6, 2),
    "ws-18432-b64": ModelConfig(18432, "ws(288,8,0.2)", 64, 6, 2),
    "random-18432-b64": ModelConfig(18432, "ws(288,8,1)", 64, 6, 2),
    # Every unit reads and writes, two matrices before the gates: against six this saves 0.036 bits a byte (dense), with
    # stride 1 in place of 2 it saves 0.055 (sparse). balanced-2816-b64 has as many parameters as dense-1440; the others
    # as many as dense-4080, 9 % and 4 % fewer.
    "dense-1440": ModelConfig(1440, ""),
    "balanced-2816-b64": ModelConfig(2816, "balanced(44,11,diagonal=1)", 64),
    "dense-4080": ModelConfig(4080, ""),
    "ba-18432-inner2": ModelConfig(18432, "ba(288,6,blocks=3836)", 64),
    "balanced-18432-b128": ModelConfig(18432, "balanced(144,6,diagonal=1)", 128),
    "balanced-8192-b128": ModelConfig(8192, "balanced(64,15,diagonal=1)", 128),
}


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained.

    Args:
        updates: how often the weights are changed.
        batch: streams of text side by side.
        steps: bytes of a stream in an update; gradients end there, the state goes on.
        lr: the highest learning rate: after `warmup` updates, from where it falls by a cosine.
        warmup: updates in which the learning rate rises.
        min_lr_ratio: share of `lr` that is left at the end.
        clip: the largest norm of a gradient; what is longer is shortened.
        ema: decay of the average of the weights that evaluation uses; shorter at first.
        bf16: products in bfloat16, by autocast.
        seed: of all that is random.
    """

    updates: int = 1000
    batch: int = 64
    steps: int = 64
    lr: float = 4e-3
    warmup: int = 100
    min_lr_ratio: float = 0.05
    clip: float = 1.0
    ema: float = 0.999
    bf16: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses what is no training."""
        for name in ("updates", "batch", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"[lm] {name} is {getattr(self, name)}, needs 1 or more")
        if not (0 < self.lr < math.inf and self.clip > 0 and 0 <= self.ema < 1 and self.warmup >= 0):
            given = f"lr is {self.lr}, clip {self.clip}, ema {self.ema}, warmup {self.warmup}"
            needs = "lr and clip above 0, ema at least 0 and below 1, warmup 0 or more"
            raise ValueError(f"[lm] {given}; needs {needs}")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"[lm] min_lr_ratio is {self.min_lr_ratio}, needs 0 to 1")
        check_seed(self.seed)

    def rate(self, update: int) -> float:
        """The learning rate with which so many updates are followed by the next one."""
        if update < self.warmup:
            return self.lr * (update + 1) / self.warmup
        progress = (update - self.warmup) / max(1, self.updates - self.warmup)
        above = 0.5 * (1 + math.cos(math.pi * min(progress, 1)))
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * above)


def check_graph(config: ModelConfig) -> None:
    """Raises ValueError where the graph of a model is not one of as many units as it has."""
    if not config.graph:
        return
    made = Layout.from_graph(config.graph, config.block, seed=config.seed)
    sizes = {made.out_features, made.in_features}
    if sizes != {config.hidden}:
        nodes = config.hidden // config.block
        other = f"ba({nodes},{min(3, nodes - 1)})" if nodes > 1 else "dense(1)"
        raise ValueError(
            f"[lm] hidden is {config.hidden}, but graph {config.graph} in blocks of {config.block} makes "
            f'{" x ".join(map(str, sorted(sizes)))}: give both, such as --hidden {config.hidden} --graph "{other}"'
        )


def check_seed(seed: int) -> None:
    """Raises ValueError where PyTorch cannot take it."""
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"[lm] seed is {seed}, needs 64 bits or less")
