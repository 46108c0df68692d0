"""The model of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from .. import checkpoint
from ..distributed import device_of
from ..files import AnyPath
from .config import ModelConfig
from .network import LanguageModel


def load_model(path: AnyPath, device: torch.device | str = "cpu") -> LanguageModel:
    """The model of a checkpoint, with its averaged weights.

    Raises:
        OSError: there is none.
        ValueError: it is damaged, or there is no such device.
    """
    place = device_of(device)
    path = Path(path)
    tensors, header = checkpoint.load(path)
    try:
        model = LanguageModel(ModelConfig(**header["model"]))
    except (KeyError, TypeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"[lm] {path} describes no model: {error}") from error
    buffers = {f"ema.{name}": tensors.get(f"model.{name}") for name, _ in model.named_buffers()}
    averaged = {**{k: v for k, v in buffers.items() if v is not None}, **tensors}
    checkpoint.load_weights(model, averaged, "ema.", path)
    return model.to(place).eval()
