"""`Distiller`: a sparse student learns what its dense teacher answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.arguments import need, shown, to_number
from ..modes import evaluating
from .batches import Forward, feed, hooked


@dataclass(frozen=True)
class Distilled:
    """What one batch gave.

    Attributes:
        loss: a number with a gradient for the student alone.
        output: of the student.
        kl: T^2 KL(teacher || student), a mean over predictions; None where there are no logits.
        layers: relative MSE of each layer, by its name.
    """

    loss: Tensor
    output: Any
    kl: Tensor | None
    layers: dict[str, Tensor]


class Distiller:
    r"""The loss of a student beside its teacher, over the same batch. ::

        distiller = bss.Distiller(dense, model, layers=r"encoder\.layer\.\d+", temperature=2.0)
        for batch in loader:
            distiller(batch).loss.backward()

    With f_t, f_s the outputs of a layer, z_t, z_s the logits, and T the temperature:

        distillation = T^2 KL(softmax(z_t / T) || softmax(z_s / T)) + mean over layers of MSE(f_t, f_s) / MSE(f_t, 0)
        loss = alpha * distillation + (1 - alpha) * task

    Layers are looked up by name at each call, so those that are replaced meanwhile count. Sums are in float32.

    Args:
        teacher: runs in eval mode and without gradients; it is not changed.
        student: runs in whatever mode it is in.
        layers: names of modules whose outputs (the first, of a tuple) are compared: a regular expression that their
            whole names match, a list, or {name in the teacher: name in the student}. None: none.
        alpha: share of the distillation in the loss, 0 to 1; of use where there is a task.
        temperature: T. None: logits are not compared, of models that have none.
        logits: takes logits [..., classes] out of a model's output. None: the output if it is a tensor, or its
            `.logits`, or entry "logits".
        forward: how a model is called, forward(model, batch). None: model(**batch), model(*batch) or model(batch).

    Raises:
        ValueError: nothing is compared, a name is that of nothing, or alpha or temperature is impossible.
        TypeError: teacher and student are one module, or none.

    Source: Hinton, Vinyals and Dean, arXiv 1503.02531 (KL); Romero et al., arXiv 1412.6550 (layers).
    """

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        *,
        layers: str | Collection[str] | Mapping[str, str] | None = None,
        alpha: float = 1.0,
        temperature: float | None = 2.0,
        logits: Callable[[Any], Tensor] | None = None,
        forward: Forward = None,
    ) -> None:
        need("Distiller", "teacher", teacher, nn.Module, "a torch.nn.Module")
        need("Distiller", "student", student, nn.Module, "a torch.nn.Module")
        if teacher is student:
            raise TypeError("[Distiller] teacher and student are one module: copy.deepcopy(model) makes a teacher")
        if not 0 <= to_number("Distiller", "alpha", alpha) <= 1:
            raise ValueError(f"[Distiller] alpha is {shown(alpha)}, needs 0 to 1")
        if temperature is not None and not to_number("Distiller", "temperature", temperature) > 0:
            raise ValueError(f"[Distiller] temperature is {shown(temperature)}, needs a number above 0, or None")
        self.teacher, self.student = teacher, student
        self.alpha, self.temperature, self.logits, self.forward = alpha, temperature, logits, forward
        self.layers = _pairs(teacher, inner(student), layers)
        if temperature is None and not self.layers:
            raise ValueError("[Distiller] needs layers or a temperature: it would compare nothing")

    def __call__(
        self, batch: Any, *, mask: Tensor | None = None, task: Callable[[Any], Tensor] | None = None
    ) -> Distilled:
        """The loss of a batch.

        Args:
            batch: for both models.
            mask: which places count of outputs and logits whose first dimensions are the mask's: an attention mask
                [n, tokens]. Others, such as embeddings of whole sentences, count whole.
            task: the task's loss of the student's output.

        Raises:
            ValueError: outputs of a layer have different shapes, a layer is no longer there, there are no logits, or
                the mask fits or leaves nothing.
        """
        theirs, mine = _watched(self.teacher, self.layers), _watched(inner(self.student), self.layers.values())
        answers: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}
        with evaluating(self.teacher), hooked(theirs, _into(answers)):
            answer = feed(self.teacher, batch, self.forward)
        with hooked(mine, _into(outputs)):
            output = feed(self.student, batch, self.forward)
        layers = {}
        logits = None if self.temperature is None else (self._logits_of(answer), self._logits_of(output))
        compared = [*outputs.values(), *([] if logits is None else logits)]
        if mask is not None and not any(_fits(mask, values) for values in compared):
            shapes = ", ".join(str(list(values.shape)) for values in compared)
            raise ValueError(f"[Distiller] mask is {list(mask.shape)}, needs the first dimensions of one of {shapes}")
        for there, here in self.layers.items():
            if there not in answers or here not in outputs:
                raise ValueError(f"[Distiller] {there if there not in answers else here} was not called by its model")
            layers[here] = _relative_mse(here, answers[there], outputs[here], mask)
        kl = None
        if self.temperature is not None and logits is not None:
            kl = _kl(*logits, self.temperature, mask)
        terms = [] if kl is None else [kl]
        if layers:
            terms.append(torch.stack(list(layers.values())).mean())
        loss = torch.stack(terms).sum()
        if task is not None:
            loss = self.alpha * loss + (1 - self.alpha) * task(output)
        return Distilled(loss, output, kl, layers)

    def _logits_of(self, output: Any) -> Tensor:
        if self.logits is not None:
            return self.logits(output)
        found = output
        if not isinstance(output, Tensor):
            found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        if not isinstance(found, Tensor):
            raise ValueError(
                f"[Distiller] the output, a {type(output).__name__}, has no logits: give logits=, or temperature=None"
            )
        return found


def inner(model: nn.Module) -> nn.Module:
    """The network inside of DistributedDataParallel, whose layers have the names of the teacher's."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _pairs(
    teacher: nn.Module, student: nn.Module, layers: str | Collection[str] | Mapping[str, str] | None
) -> dict[str, str]:
    names, own = dict(teacher.named_modules()), dict(student.named_modules())
    if layers is None:
        return {}
    if isinstance(layers, str):
        try:
            pairs = {name: name for name in names if re.fullmatch(layers, name)}
        except re.error as error:
            raise ValueError(f"[Distiller] layers is {layers!r}, needs a regular expression: {error}") from None
        if not pairs:
            raise ValueError(f"[Distiller] layers is {layers!r}, which matches none of {_listed(names)}")
    elif isinstance(layers, Mapping):
        pairs = dict(layers)
    elif isinstance(layers, Collection):
        pairs = {name: name for name in layers}
    else:
        raise TypeError(f"[Distiller] layers is {shown(layers)}, needs a regular expression or names")
    for whose, given, there in (("teacher", pairs, names), ("student", pairs.values(), own)):
        for name in given:
            if name not in there:
                raise ValueError(f"[Distiller] the {whose} has no {name!r}, but {_listed(there)}")
    return pairs


def _listed(names: Collection[str]) -> str:
    shown_names = [name for name in names if name]
    more = f" and {len(shown_names) - 20} more" if len(shown_names) > 20 else ""
    return ", ".join(shown_names[:20]) + more


def _watched(model: nn.Module, names: Collection[str]) -> dict[str, nn.Module]:
    there = dict(model.named_modules(remove_duplicate=False))
    if gone := [name for name in names if name not in there]:
        raise ValueError(
            f"[Distiller] the model has no {', '.join(gone)} now: a layer that became part of a BlockSparseMLP has no "
            f"output of its own, so compare the whole. There is {_listed(there)}"
        )
    return {name: there[name] for name in names}


def _into(outputs: dict[str, Tensor]) -> Callable[[str, Any, Any], None]:
    def keep(name: str, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) else output
        if not isinstance(first, Tensor):
            raise ValueError(f"[Distiller] {name} gives a {type(output).__name__}, needs a tensor")
        outputs[name] = first

    return keep


def _chosen(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None or not _fits(mask, values):
        return values
    chosen = values[mask.to(values.device, torch.bool)]
    if chosen.numel() == 0:  # a mean over nothing is NaN
        raise ValueError(f"[Distiller] mask {list(mask.shape)} leaves nothing to compare")
    return chosen


def _fits(mask: Tensor, values: Tensor) -> bool:
    return tuple(values.shape[: mask.dim()]) == tuple(mask.shape)


def _relative_mse(name: str, teacher: Tensor, student: Tensor, mask: Tensor | None) -> Tensor:
    if teacher.shape != student.shape:
        raise ValueError(f"[Distiller] {name} gives {list(student.shape)}, its teacher {list(teacher.shape)}")
    wanted = _chosen(teacher, mask).detach().float()
    scale = wanted.square().mean().clamp(min=torch.finfo(torch.float32).tiny)
    return (_chosen(student, mask).float() - wanted.to(student.device)).square().mean() / scale.to(student.device)


def _kl(teacher: Tensor, student: Tensor, temperature: float, mask: Tensor | None) -> Tensor:
    if teacher.shape != student.shape:
        raise ValueError(f"[Distiller] logits are {list(student.shape)}, the teacher's {list(teacher.shape)}")
    wanted = (_chosen(teacher, mask).detach().float() / temperature).log_softmax(-1).to(student.device)
    made = (_chosen(student, mask).float() / temperature).log_softmax(-1)
    kl = (wanted.exp() * (wanted - made)).sum(-1)
    return kl.mean() * temperature**2
