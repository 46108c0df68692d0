"""The model of a checkpoint, and a file of the model alone."""

from __future__ import annotations

from dataclasses import asdict
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


def save_model(path: AnyPath, model: LanguageModel, *, bf16: bool = False) -> None:
    """A checkpoint of the model alone, to hand it on: `load_model` reads it, training does not go on from it.

    It has 4 bytes a parameter, where one of `lm train` has 16: weights, their average and both moments of Adam.

    Args:
        path: of the file. One that is there is replaced once the new one is whole.
        model: what is written.
        bf16: round matrices to bfloat16, 2 bytes a parameter. Gains and shifts stay in float32. Predictions change a
            little, so files that `compress` makes with either need that one to come back.

    Raises:
        OSError: the file cannot be written.
    """
    buffers = {name for name, _ in model.named_buffers()}
    tensors = {}
    for name, tensor in model.state_dict().items():
        rounded = bf16 and name not in buffers and tensor.ndim > 1
        kept = tensor.to(torch.bfloat16) if rounded else tensor
        tensors[f"{'model' if name in buffers else 'ema'}.{name}"] = kept.cpu().contiguous()
    checkpoint.save(path, tensors, {"model": asdict(model.config)})
