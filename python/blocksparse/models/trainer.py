"""A model on its way: weights, their average, Adam's moments; what was stopped goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..torch.modules.digits import same_integers
from . import checkpoint
from .checkpoint import Kind
from .distributed import World
from .files import AnyPath

SUMS = 100  # losses of training are averaged over so many updates


class Trainer:
    """What trainers share; each says what an update is, and what else a checkpoint holds.

    Several processes (`joined`) share a batch; gradients are averaged, so all have the same weights.

    Attributes:
        kind: of its checkpoints.
        data_name: what it is trained on, in its checkpoints: a hash of all of it.
    """

    kind: ClassVar[Kind]
    data_name: ClassVar[str]

    def __init__(
        self,
        model_config: Any,
        config: Any,
        model: nn.Module,
        adam: torch.optim.Optimizer,
        data_hash: str,
        device: torch.device,
        world: World,
    ) -> None:
        self.model_config, self.config, self.device, self.world = model_config, config, device, world
        self.model, self.adam, self.data_hash = model, adam, data_hash
        self.ema = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.update = 0
        self.recent: list[float] = []

    # ---- What each says itself --------------------------------------------------------------------------------------

    def step(self) -> float:
        """One update; its loss in bits."""
        raise NotImplementedError

    def seen(self) -> dict[str, int]:
        """By all updates until now: how much of what."""
        raise NotImplementedError

    def more_header(self) -> dict[str, Any]:
        """What a checkpoint's header says beside model, training, update and data."""
        return {}

    def more_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds beside weights, averages, moments and states of generators; of all processes."""
        return {}

    def more_needed(self, update: int) -> dict[str, tuple[Tensor, set[torch.dtype]]]:
        """Tensors like those of `more_tensors` at this update, and which other types they may have."""
        return {}

    def more_restored(self, tensors: dict[str, Tensor]) -> None:
        """Takes over what `more_tensors` gave."""

    # ---- What all do ------------------------------------------------------------------------------------------------

    def is_finite(self) -> bool:
        """Whether no weight has ever become NaN or infinite."""
        return all(bool(t.isfinite().all()) for t in self.ema.values())

    def rate(self) -> float:
        """The learning rate of the next update."""
        return float(self.config.rate(self.update))

    def count(self, bits: float) -> float:
        """Remembers the loss of an update."""
        self.recent = [*self.recent[-(SUMS - 1) :], bits]
        return bits

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """While it lasts, the model has the averaged weights."""
        mine = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        try:
            self._set(self.ema)
            yield
        finally:
            self._set(mine)

    @torch.no_grad()
    def _set(self, weights: dict[str, Tensor]) -> None:
        for name, p in self.model.named_parameters():
            p.copy_(weights[name])

    def save(self, path: AnyPath) -> None:
        """Everything that `resume` needs; the first process writes it."""
        more = self.more_tensors()
        if not self.world.first:
            return
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"ema.{k}": v for k, v in self.ema.items()}
        for (name, p), entry in zip(self.model.named_parameters(), self._moments(), strict=True):
            assert entry is not None or p.grad is None
            tensors |= {f"adam.{name}.{k}": v for k, v in (entry or {}).items()}
        tensors |= more
        tensors["recent"] = torch.tensor(self.recent, dtype=torch.float64)
        tensors["random"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.device)
        header = {
            "model": asdict(self.model_config),
            "training": asdict(self.config),
            "update": self.update,
            self.data_name: self.data_hash,
            **self.more_header(),
        }
        checkpoint.save(path, tensors, header, self.kind)

    def _moments(self) -> list[dict[str, Tensor] | None]:
        return [self.adam.state.get(p) for p in self.model.parameters()]

    def resume(self, path: AnyPath, *, other_updates: bool = False) -> int:
        """Goes on from a checkpoint. All of it is checked before anything is replaced.

        Args:
            path: of the checkpoint.
            other_updates: whether it may be of a training of another number of updates, which changes the learning
                rates from here on.

        Returns:
            The number of updates that its training was to have.

        Raises:
            ValueError: it is damaged, not whole, or of another model, training or data.
        """
        path = Path(path)
        tensors, header = checkpoint.load(path, self.kind)
        mine = {"model": asdict(self.model_config), "training": asdict(self.config), self.data_name: self.data_hash}
        mine |= {what: value for what, value in self.more_header().items() if what in header}  # older ones lack some
        updates = updates_of(header)
        if updates is None:
            raise ValueError(f"[{self.kind.op}] {path} describes no training, but a model alone")
        for what, value in mine.items():
            found = header.get(what)
            if what == "training":  # older ones lack fields, whose defaults are what was done then
                found = {**asdict(type(self.config)()), **header["training"]}
                found |= {"updates": self.config.updates} if other_updates else {}
            if found != value:
                which = f"other {what}" if what.endswith("s") else f"another {what}"
                raise ValueError(f"[{self.kind.op}] {path} is of {which}: {difference(found, value)}")
        if "update" not in header:
            raise ValueError(f"[{self.kind.op}] {path} lacks 'update'")
        update = header["update"]
        if type(update) is not int or not 0 <= update <= updates:
            raise ValueError(f"[{self.kind.op}] {path} is at update {update}, needs 0 to {updates}")
        if update > self.config.updates:
            raise ValueError(f"[{self.kind.op}] {path} has done {update} updates, needs --updates {update} or more")
        self._check(tensors, update, path)
        self._restore(tensors, update, path)
        return updates

    def _needed(self, update: int) -> dict[str, Tensor]:
        """Tensors like those of a checkpoint at this update, by their names; those of the model have their values."""
        needed = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        needed |= {f"ema.{name}": tensor for name, tensor in self.ema.items()}
        needed |= {"recent": torch.empty(min(update, SUMS), dtype=torch.float64), "random": torch.get_rng_state()}
        if update > 0:
            for name, p in self.model.named_parameters():
                like = {"exp_avg": p, "exp_avg_sq": p, "step": torch.empty(())}
                needed |= {f"adam.{name}.{moment}": tensor for moment, tensor in like.items()}
        if self.device.type == "cuda":
            needed["random.cuda"] = torch.cuda.get_rng_state(self.device)
        return needed

    def _check(self, tensors: dict[str, Tensor], update: int, path: Path) -> None:
        """Raises ValueError unless a checkpoint has all that `_restore` takes, and nothing else."""
        more = self.more_needed(update)
        needed = {**self._needed(update), **{name: like for name, (like, _) in more.items()}}
        graphs = {f"model.{name}" for name, _ in self.model.named_buffers()}
        for name, like in needed.items():
            dtypes = {like.dtype} | (more[name][1] if name in more else set())
            found, wrong = tensors.get(name), ""
            if found is None:
                wrong = "" if name == "random.cuda" else f"lacks {name!r}"  # it may come from a CPU
            elif name in graphs:
                wrong = "" if same_integers(found, like) else f"{name} is of another graph"
            elif found.shape != like.shape:
                wrong = f"{name} is {list(found.shape)}, needs {list(like.shape)}"
            elif found.dtype not in dtypes:
                wrong = f"{name} is {found.dtype}, needs {like.dtype}"
            elif name == "random" and not is_random_state(found):
                wrong = f"{name} is no state of a generator"
            if wrong:
                what = "model" if name.startswith("model.") else "training"
                raise ValueError(f"[{self.kind.op}] {path} does not fit the {what}: {wrong}")
        unknown = tensors.keys() - needed.keys() - {"random.cuda"}
        if unknown:
            raise ValueError(f"[{self.kind.op}] {path} holds {min(unknown)!r}, which is of no such training")

    def _restore(self, tensors: dict[str, Tensor], update: int, path: Path) -> None:
        """Takes over what `_check` found right."""
        checkpoint.load_weights(self.model, tensors, "model.", path, self.kind.op)
        fused = bool(self.adam.defaults.get("fused"))  # then Adam's counts of updates are on the card, too
        for name, p in self.model.named_parameters():
            self.ema[name].copy_(tensors[f"ema.{name}"])
            prefix = f"adam.{name}."
            entry = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
            moved = {k: v if k == "step" and not fused else v.to(self.device) for k, v in entry.items()}
            if moved:
                self.adam.state[p] = moved
        self.more_restored(tensors)
        self.recent = tensors["recent"].tolist()
        torch.set_rng_state(tensors["random"])
        if self.device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"], self.device)
        self.update = update


def updates_of(header: dict[str, Any]) -> int | None:
    """The number of updates that a checkpoint's training was to have, if its header says it."""
    training = header.get("training")
    updates = training.get("updates") if isinstance(training, dict) else None
    return updates if type(updates) is int else None


def difference(found: Any, needed: Any) -> str:
    """Between two descriptions, in words."""
    if not isinstance(found, dict) or not isinstance(needed, dict):  # hashes of data
        return f"{str(found)[:12]}..., needs {str(needed)[:12]}..."
    keys = [key for key in {**needed, **found} if found.get(key, ...) != needed.get(key, ...)]
    return "; ".join(f"{key} is {_shown(found, key)}, needs {_shown(needed, key)}" for key in keys)


def _shown(description: dict[str, Any], key: str) -> str:
    return str(description.get(key)) or '""'


def is_random_state(state: Tensor) -> bool:
    """Whether a generator takes it."""
    try:
        torch.Generator().set_state(state)
    except RuntimeError:
        return False
    return True
