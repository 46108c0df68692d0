"""What a language model knows of a text when it has read it: its cell state behind the last byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...torch.modes import evaluating
from ..files import AnyPath, write_whole
from ..language.network import LanguageModel
from ..language.stepping import Stepper

FORMAT = "blocksparse-features-1"
Array = np.ndarray[Any, np.dtype[Any]]


@torch.inference_mode()
def cell_states(
    model: LanguageModel,
    texts: Sequence[bytes],
    *,
    batch: int = 128,
    steps: int = 64,
    bf16: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> Array:
    """The cell state behind the last byte of each text, float32 [texts, hidden].

    Texts of similar length are read together, the longest first; those that have ended leave after `steps` bytes.

    Args:
        model: reads them, each from a state of zeros.
        texts: of a byte or more; see `blocksparse.models.sentiment.texts.prepare`.
        batch: texts side by side.
        steps: bytes that are read by one call.
        bf16: products in bfloat16, by autocast.
        progress: is told from time to time how many bytes are done.

    Raises:
        ValueError: a text is empty, or batch or steps is not positive.
    """
    if batch < 1 or steps < 1:
        raise ValueError(f"[lm] batch is {batch} and steps {steps}, needs 1 or more")
    lengths = np.array([len(text) for text in texts], np.int64)
    if lengths.size and lengths.min() == 0:
        raise ValueError(f"[lm] text {int(lengths.argmin())} is empty, needs a byte or more")
    made = np.zeros((len(texts), model.config.hidden), np.float32)
    order = np.argsort(-lengths, kind="stable")
    device = model.output.device
    done = 0
    for begin in range(0, len(texts), batch):
        chosen = order[begin : begin + batch]
        padded = np.zeros((lengths[chosen[0]], chosen.size), np.uint8)  # [longest, texts]
        for column, i in enumerate(chosen):
            padded[: lengths[i], column] = np.frombuffer(texts[i], np.uint8)
        state = None
        for t in range(0, padded.shape[0], steps):
            still = int((lengths[chosen] > t).sum())  # the first ones, for the longest are in front
            left = np.minimum(lengths[chosen[:still]] - t, steps)
            ends_here = None if left.min() == padded[t : t + steps].shape[0] else torch.from_numpy(left).to(device)
            part = torch.from_numpy(padded[t : t + steps, :still].astype(np.int64)).to(device)
            if state is not None:
                state = (state[0][:, :still], state[1][:, :still])
            with evaluating(model), torch.autocast(device.type, torch.bfloat16, bf16):
                state = model.read(part, state, ends_here)[1]
            ends = np.flatnonzero(lengths[chosen[:still]] <= t + steps)
            if ends.size:  # the last ones, for the shortest are behind
                made[chosen[ends]] = state[1][0, ends[0] :].float().cpu().numpy()
            done += int(left.sum())
            progress(done)
    return made


@torch.inference_mode()
def unit_at_each_byte(model: LanguageModel, texts: Sequence[bytes], unit: int) -> list[Array]:
    """The cell of one unit behind each byte of some texts, float32 [bytes] of each. They are read side by side."""
    longest = max(map(len, texts), default=0)
    padded = torch.tensor([[*text, *bytes(longest - len(text))] for text in texts], device=model.output.device)
    values = np.zeros((longest, len(texts)), np.float32)
    step, state = Stepper(model), None
    for t in range(longest):
        state = step.read(padded[:, t].unsqueeze(0), state)[1]
        values[t] = state[1][:, unit].float().cpu().numpy()
    return [values[: len(text), i] for i, text in enumerate(texts)]


def save_features(path: AnyPath, features: Array, labels: Array | None, about: dict[str, Any]) -> None:
    """A safetensors file with `features` and `labels`, whole or not at all; `about` says what they are of.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors.numpy import save

    arrays = {"features": features, **({} if labels is None else {"labels": labels.astype(np.int64)})}
    write_whole(path, save(arrays, {FORMAT: json.dumps(about)}))


def load_features(path: AnyPath) -> tuple[Array, Array | None, dict[str, Any]]:
    """(features, labels, about) of a file.

    Raises:
        OSError: there is none.
        ValueError: it is damaged, or holds no features.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"[lm] there are no features {path}")
    try:
        with safe_open(str(path), "np") as file:
            about = (file.metadata() or {}).get(FORMAT)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"[lm] {path} is damaged: {error}") from error
    if about is None or "features" not in arrays:
        raise ValueError(f"[lm] {path} holds no features")
    return arrays["features"], arrays.get("labels"), json.loads(about)
