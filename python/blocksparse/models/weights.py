"""Weights of a checkpoint as a model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from . import checkpoint
from .config import ModelConfig
from .distributed import device_of
from .language import LanguageModel


def load_weights(model: nn.Module, tensors: dict[str, Tensor], prefix: str, path: Path, op: str = "lm") -> None:
    """Weights of a checkpoint into a model, all of them.

    Raises:
        ValueError: some are missing, of another shape, or of another layout.
    """
    found = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
    try:
        model.load_state_dict(found)
    except RuntimeError as error:
        lines = " ".join(str(error).split())
        raise ValueError(f"[{op}] {path} does not fit the model: {lines}") from error


def load_model(path: Path, device: torch.device | str = "cpu") -> LanguageModel:
    """The model of a checkpoint, with its averaged weights.

    Raises:
        OSError: there is none.
        ValueError: it is damaged, or there is no such device.
    """
    place = device_of(device)
    tensors, header = checkpoint.load(path)
    try:
        model = LanguageModel(ModelConfig(**header["model"]))
    except (KeyError, TypeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"[lm] {path} describes no model: {error}") from error
    buffers = {f"ema.{name}": tensors.get(f"model.{name}") for name, _ in model.named_buffers()}
    averaged = {**{k: v for k, v in buffers.items() if v is not None}, **tensors}
    load_weights(model, averaged, "ema.", path)
    return model.to(place).eval()
