"""Configurations: what arms there are, and the trainings of each."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sweeps import SETTINGS, Setting

from blocksparse.models.language import ModelConfig, TrainConfig

NEEDED = {"model", "training", "arms", "seeds", "valid_bytes", "valid_streams", "save_every"}
OTHERS = {"epochs", "sweep_epochs", "sweep_updates", "trials", "warmups", "min_lr_ratios", "choose_bytes"}
OTHERS |= {"choose_streams", "evaluations", "evaluate_every"}


@dataclass(frozen=True)
class Run:
    """One training: an arm with a seed, a rate and, as `variant` says, other settings. Sweeps are short ones."""

    arm: str
    model: ModelConfig
    training: TrainConfig
    sweep: bool = False
    variant: str = ""

    @property
    def name(self) -> str:
        """Of its folder and its line."""
        kind = "sweep" if self.sweep else "run"
        training = self.training
        return f"{self.arm}-{kind}-{training.updates}-seed{training.seed}-lr{training.lr:g}{self.variant}"


def read_config(path: Path) -> dict[str, Any]:
    """All that it says.

    Raises:
        ValueError: something is missing, unknown or no positive number.
    """
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict) or not set(config) >= NEEDED:
        given = ", ".join(config) if isinstance(config, dict) else config
        raise ValueError(f"{path} has {given}; needs {', '.join(sorted(NEEDED))}")
    if unknown := set(config) - NEEDED - OTHERS:
        raise ValueError(f"{path} has {', '.join(sorted(unknown))}; knows {', '.join(sorted(NEEDED | OTHERS))}")
    for what, parts in (("the usual arm", config), *config["arms"].items()):
        for part, known in (("model", ModelConfig), ("training", TrainConfig)):
            names = {field.name for field in fields(known)} - {"seed"}
            if unknown := set(parts.get(part, {})) - names:
                raise ValueError(f"{path}: {part} of {what} has {', '.join(unknown)}; knows {', '.join(sorted(names))}")
    for arm, parts in config["arms"].items():
        if not (parts.get("rates") and "model" in parts):
            raise ValueError(f"{path}: {arm} has {', '.join(parts)}; needs a model and rates")
    for name in ("valid_bytes", "valid_streams", "save_every", "epochs", "sweep_epochs", "evaluations"):
        number = config.get(name, 1)
        if not (isinstance(number, int | float) and 0 < number < math.inf):
            raise ValueError(f"{path}: {name} is {number}, needs to be above 0")
    return config


def settings_of(run: Run, config: dict[str, Any]) -> dict[str, Any]:
    """All that its result depends on besides the text, for its line."""
    held_out = {name: config.get(name) for name in ("choose_bytes", "choose_streams", "valid_bytes", "valid_streams")}
    return {**asdict(run.model), **asdict(run.training), **held_out}  # the seed is the training's: a model's follows


def usual(config: dict[str, Any], arm: str) -> dict[str, float]:
    """What an arm trains with where nothing is swept."""
    training = TrainConfig(**{**config["training"], **config["arms"][arm].get("training", {})})
    return {setting.field: getattr(training, setting.field) for setting in SETTINGS}


def values_of(setting: Setting, config: dict[str, Any], arm: str) -> list[float]:
    """Those that are tried at first. An arm has rates of its own; the others begin with the usual value."""
    if setting.field == "lr":
        return list(config["arms"][arm]["rates"])
    return [usual(config, arm)[setting.field], *config.get(f"{setting.field}s", [])]


def run_of(config: dict[str, Any], arm: str, seed: int, settings: dict[str, float], sweep: bool = False) -> Run:
    """The run of an arm; the seed is of the graphs, of the weights and of the training."""
    what = config["arms"][arm]
    training = {**config["training"], **what.get("training", {}), "seed": seed, **settings}
    if sweep:
        training["updates"] = config["sweep_updates"]
    model = ModelConfig(**{**config["model"], **what["model"], "seed": 100 * seed})
    before = usual(config, arm)
    others = [setting for setting in SETTINGS[1:] if settings[setting.field] != before[setting.field]]
    variant = "".join(f"-{setting.short}{settings[setting.field]:g}" for setting in others)
    return Run(arm, model, TrainConfig(**training), sweep, variant)


def updates_of(epochs: float, bytes_of_text: int, training: dict[str, Any]) -> int:
    """That read the text so often."""
    each = (bytes_of_text - 1) // training["batch"] // training["steps"]  # as Trainer cuts it
    return max(1, round(epochs * int(each)))


def sweep_updates_of(config: dict[str, Any], bytes_of_text: int) -> int:
    """Those of a trial: what the configuration says, or a tenth of a run's."""
    if "sweep_epochs" in config:
        updates = updates_of(config["sweep_epochs"], bytes_of_text, config["training"])
        return min(int(config["training"]["updates"]), updates)
    return int(config.get("sweep_updates", max(1, config["training"]["updates"] // 10)))
