"""Tiny language models, and text that is made here, for all tests of `lm`."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from blocksparse import __main__
from blocksparse.models.language import ModelConfig
from blocksparse.models.language.training import TrainConfig, Trainer, read_text, train

TINY = ModelConfig(hidden=64, graph="ba(8,2)", block=8, inner=2, stride=2, embedding=16)
SIZE = ["--hidden", 64, "--graph", "ba(8,2)", "--inner", 2, "--stride", 2, "--embedding", 16]  # of TINY
SHORT = TrainConfig(updates=12, batch=8, steps=16, lr=4e-3, warmup=4)


def sentences(count: int, seed: int = 0) -> bytes:
    """A language of few words."""
    rng = random.Random(seed)
    words = [["the", "a", "every"], ["red", "small", "sparse"], ["block", "graph", "wolf"], ["sees", "is", "eats"]]
    return " ".join(" ".join(rng.choice(kind) for kind in words) + "." for _ in range(count)).encode()


def trained_in(folder: Path, until: int | None = None) -> Path:
    """The checkpoint of a short training of TINY on a text, which lies beside it."""
    (folder / "text").write_bytes(sentences(600))
    train(Trainer(TINY, SHORT, read_text([folder / "text"]), "cpu"), folder, None, until=until)
    return folder / "last.safetensors"


def lm(*words: object) -> int:
    """The exit status of a command."""
    return __main__.main(["lm", *map(str, words)])


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All that it has learnt, averages too."""
    return {**trainer.model.state_dict(), **{f"ema {k}": v for k, v in trainer.ema.items()}}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """To the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
