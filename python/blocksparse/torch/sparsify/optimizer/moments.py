"""Optimizer state that follows blocks when they change their places, and bias correction of each grown block's own.

PyTorch's optimizers keep one `step` for a parameter, so Adam divides the moments of all of its blocks by 1 - beta^t.
The moments of a block that was grown after step s are sums over a = t - s steps: m = (1 - beta1) sum beta1^i g. What it
should move by is u(a), and what Adam has moved it by is u(t):

    u(a) = lr m / (1 - beta1^a) / (sqrt(v / (1 - beta2^a)) + eps)

With (.9, .999) and t large its first step would be 3.2 times too long, its tenth 6.5 times. While a block is young,
u(t) - u(a) is added to it after each step, so that it moves as one of a new optimizer. No scaling of the moments does
that, for a new gradient enters m and v with the fixed weights 1 - beta; nor does one of the gradient beside it, for it
would have to be 1 / (1 - beta1^a) in m and 1 / sqrt(1 - beta2^a) in v. Later they are scaled, once:

    m *= (1 - beta1^t) / (1 - beta1^a)        v *= (1 - beta2^t) / (1 - beta2^a)

Adam's own division then gives the same estimates, and from there on unbiased ones: E m = (1 - beta1^t) E g holds after
the scaling, and a step of Adam keeps it. State and parameters keep their memory, as CUDA graphs need.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...._core.arguments import need
from .adam import Blocks, add_lack, add_lack_compiled, add_lack_of_one_age, bias, compiles, logs_of

YOUNG = 32  # steps that grown blocks have a bias correction of their own, which costs up to 5 % of small steps

Take = Callable[[Tensor], Tensor]

_CORRECTED = (torch.optim.Adam, torch.optim.AdamW)
_WITHOUT_BIAS = (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta)
_SMALLEST = 1e-30  # in place of an eps of 0, where nothing divided by nothing is to be nothing


def move_blocks(tensor: Tensor, source: Tensor, kept: Tensor, fill: float = 0) -> None:
    """tensor[i] = tensor[source[i]] where kept[i], else `fill`: in place, without waiting for a card.

    Args:
        tensor: [blocks, ...].
        source: int64 [blocks], where the block in each place was before.
        kept: bool [blocks]; the others are new.
        fill: of new blocks.
    """
    by_block = kept.view(-1, *(1,) * (tensor.dim() - 1))
    tensor.copy_(torch.where(by_block, tensor.index_select(0, source), fill))


def inner_optimizer(op: str, optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of those that libraries put around it, which have it as `optimizer`.

    Raises:
        TypeError: it is no `torch.optim.Optimizer`; the message begins with `op`.
    """
    if isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):
        raise TypeError(f"[{op}] optimizer is a {type(optimizer).__name__}, needs a torch.optim.Optimizer")
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    need(op, "optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    made: torch.optim.Optimizer = optimizer
    return made


def replace_parameter(optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter, take: Take) -> None:
    """Puts a parameter in the place of another, with its state: for weights that move to block-sparse storage.

    Args:
        optimizer: holds `old`.
        old: what goes; its state goes, too.
        new: what comes.
        take: makes a tensor of new's shape of one of old's, as `blocksparse.torch.from_dense(tensor, layout)` does. All
            state of old's shape goes through it; counts of steps stay, so that the bias correction goes on.

    Raises:
        ValueError: the optimizer does not hold `old`, or `take` gives another shape. Nothing is changed then.
    """
    optimizer = inner_optimizer("sparsify", optimizer)
    places = [(g["params"], i) for g in optimizer.param_groups for i, p in enumerate(g["params"]) if p is old]
    if not places:
        raise ValueError(
            f"[sparsify] the optimizer does not hold the parameter {list(old.shape)} that is to be replaced"
        )
    taken: dict[str, Any] = {}
    for name, value in optimizer.state.get(old, {}).items():
        is_whole = isinstance(value, Tensor) and value.shape == old.shape
        # Contiguous, as new is: fused optimizers go through all tensors by the same strides.
        taken[name] = take(value).to(value.dtype).contiguous() if is_whole else value
        if is_whole and taken[name].shape != new.shape:
            raise ValueError(f"[sparsify] take gives {list(taken[name].shape)} of {name}, needs {list(new.shape)}")
    for parameters, i in places:
        parameters[i] = new
    if optimizer.state.pop(old, None) is not None:
        optimizer.state[new] = taken


class Moments:
    """What an optimizer knows of some block-sparse parameters [blocks, ...].

    Args:
        optimizer: Adam and AdamW, also fused, foreach, capturable and with amsgrad: grown blocks get their own bias
            correction. SGD, RMSprop, Adagrad, Adadelta: state that begins anew is all that they need. Others: state
            begins with zeros, and a warning says that their bias correction, if any, is the parameter's.
        parameters: by name.
        op: whose messages these are.

    Raises:
        TypeError: it is no `torch.optim.Optimizer`.
        ValueError: it does not hold a parameter; the message names it.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], op: str = "Moments"
    ) -> None:
        optimizer = inner_optimizer(op, optimizer)
        self.optimizer = optimizer
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in parameters.items() if id(p) not in held]
        if missing:
            raise ValueError(f"[{op}] the optimizer does not hold {', '.join(missing)}")
        self._parameters = list(parameters.values())
        self._young: dict[int, tuple[Tensor, Tensor]] = {}  # rows of a parameter, and their births as floats: see watch
        self._cohort: dict[int, int | None] = {}  # the birth of all of them, where the host knows of one
        self._compiled: set[int] = set()  # parameters whose correction is compiled, and so may be captured
        self._groups: tuple[Any, list[tuple[dict[str, Any], list[int]]]] = (None, [])
        self._is_adam = isinstance(optimizer, _CORRECTED)
        if not isinstance(optimizer, (*_CORRECTED, *_WITHOUT_BIAS)):
            warnings.warn(
                f"[{op}] {type(optimizer).__name__} is not known here: the state of grown blocks begins with "
                "zeros, and if it corrects a bias, it does so by the age of the whole parameter",
                stacklevel=3,
            )

    @torch.no_grad()
    def follow(self, parameter: nn.Parameter, source: Tensor, kept: Tensor) -> None:
        """`move_blocks` of all state of the parameter's shape, in place."""
        start = self.optimizer.defaults.get("initial_accumulator_value", 0)  # Adagrad's
        for name, value in self.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                move_blocks(value, source, kept, start if name == "sum" else 0)

    def watch(self, young: Mapping[nn.Parameter, tuple[Tensor, Tensor]]) -> None:
        """Says which blocks `correct` is to look at from now on.

        Args:
            young: of each parameter int64 [n], some of its blocks, none twice; and int64 [n], the step after which each
                was grown, less than 0 for those that need no correction.
        """
        numbers, before = {id(p): i for i, p in enumerate(self._parameters)}, self._young
        self._young, self._cohort = {}, {}
        for parameter, (rows, births) in young.items():
            if not rows.numel():
                continue
            # float32 counts to 2^24 steps, as Adam's own count does. Before all steps: as old as the parameter itself.
            born, i = births.float().masked_fill_(births < 0, -math.inf), numbers[id(parameter)]
            if born.is_cuda and i in before and before[i][1].shape == born.shape:
                born = before[i][1].copy_(born)  # where graphs look for it
            self._young[i] = rows, born
            first = -1 if births.is_cuda else int(births[0])
            self._cohort[i] = first if first >= 0 and bool((births == first).all()) else None

    @torch.no_grad()
    def correct(self, step: Tensor) -> None:
        """To be called after each step of the optimizer: adds u(t) - u(a) to the blocks that are watched.

        Does not wait for a card.

        Args:
            step: int64 [], the count of steps with this one.
        """
        found = getattr(self.optimizer, "found_inf", None)  # a fused optimizer under a GradScaler leaves a step out so
        for group, members in self._by_group():
            watched = [i for i in members if i in self._young and self.optimizer.state.get(self._parameters[i])]
            if self._is_adam and watched:
                self._correct_adam(group, watched, step, found)
            elif isinstance(self.optimizer, torch.optim.SGD) and 0 < group["dampening"] < 1:
                for i in watched:
                    self._correct_dampening(group, i, step)

    @torch.no_grad()
    def settle(self, parameter: nn.Parameter, ages: Tensor) -> None:
        """Scales moments of Adam, so that its own bias correction is right for blocks that are watched no more.

        Args:
            parameter: [blocks, ...].
            ages: int64 [blocks]: steps since each was grown; 0 or less: it stays as it is.
        """
        state = self.optimizer.state.get(parameter)
        if not self._is_adam or not state:
            return
        group = next(g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"]))
        first, second = logs_of(group)
        age = ages.clamp_min(1).to(torch.float64)
        for name, log in (("exp_avg", first), ("exp_avg_sq", second), ("max_exp_avg_sq", second)):
            if name in state:
                factor = torch.where(ages > 0, bias(age, log) / bias(_count(state["step"], parameter), log), 1)
                state[name].mul_(factor.to(state[name].dtype).view(-1, *(1,) * (parameter.dim() - 1)))

    def _by_group(self) -> list[tuple[dict[str, Any], list[int]]]:
        """(group, numbers of its parameters); loading a state makes other groups."""
        groups = self.optimizer.param_groups
        if self._groups[0] is not groups:
            numbers = {id(p): i for i, p in enumerate(self._parameters)}
            members = [[numbers[id(p)] for p in group["params"] if id(p) in numbers] for group in groups]
            self._groups = (groups, list(zip(groups, members, strict=True)))
        return self._groups[1]

    def _correct_adam(self, group: dict[str, Any], watched: list[int], step: Tensor, found: Tensor | None) -> None:
        """All parameters whose blocks have one shape at once, or where it is compiled one by one."""
        lr, logs = group["lr"] if found is None else group["lr"] * (1 - found), logs_of(group)
        eps, second = max(group["eps"], _SMALLEST), "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
        of_one_age: dict[Any, list[Blocks]] = {}
        others: dict[Any, list[tuple[Blocks, Tensor, Tensor]]] = {}
        filled: dict[Any, Tensor] = {}
        for i in watched:
            p, (rows, births), cohort = self._parameters[i], self._young[i], self._cohort[i]
            state = self.optimizer.state[p]
            blocks, kind = Blocks(p.detach(), state["exp_avg"], state[second], rows), (p.shape[1:], p.dtype, p.device)
            if cohort is not None:
                t = max(float(state["step"]), 1.0)
                age = max(min(float(step) - cohort, t), 1.0)
                of_one_age.setdefault((t, age, kind), []).append(blocks)
                continue
            count, clock, rate = (_on_device(number, births, filled) for number in (state["step"], step, lr))
            captured = p.is_cuda and torch.cuda.is_current_stream_capturing()
            if compiles(p) and (i in self._compiled or not captured):
                add_lack_compiled(blocks, births, count, clock, rate, logs, eps)
                self._compiled.add(i)
            else:
                others.setdefault((kind, clock, rate), []).append((blocks, births, count))
        for (t, age, _), members in of_one_age.items():
            add_lack_of_one_age(members, t, age, lr, logs, eps)
        for (_, clock, rate), given in others.items():
            blocks_of, births_of, counts = zip(*given, strict=True)
            add_lack(blocks_of, births_of, counts, clock, rate, logs, eps)

    def _correct_dampening(self, group: dict[str, Any], i: int, step: Tensor) -> None:
        """The first step of a new buffer is not dampened."""
        parameter, left, (rows, births) = self._parameters[i], 1 - group["dampening"], self._young[i]
        buffer = self.optimizer.state[parameter].get("momentum_buffer")
        if buffer is not None:
            is_first = (step - births == 1).view(-1, *(1,) * (parameter.dim() - 1))
            lack = torch.where(is_first, buffer.index_select(0, rows) * (1 / left - 1), 0)
            parameter.index_add_(0, rows, lack * -group["lr"])
            buffer.index_add_(0, rows, lack)


def corrected_lack(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], state: Mapping[str, Any], age: int
) -> Tensor | None:
    """u(t) - u(a) of a whole parameter whose moments have the age of all its blocks; None: nothing is to be corrected.

    Args:
        optimizer: which has just stepped.
        group: its group of the parameter.
        state: its state of the parameter.
        age: steps since the moments began anew.
    """
    if not isinstance(optimizer, _CORRECTED) or "exp_avg" not in state:
        return None
    found, logs = getattr(optimizer, "found_inf", None), logs_of(group)
    lr, eps = group["lr"] if found is None else group["lr"] * (1 - found), max(group["eps"], _SMALLEST)
    v = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    t = float(state["step"])
    (f, root), (own_f, own_root) = ((bias(n, logs[0]) * lr, bias(n, logs[1]) ** 0.5) for n in (t, age))
    scale = v.sqrt() if v.dtype.itemsize >= 4 else v.float().sqrt()
    shared, own = scale * root + eps, scale * own_root + eps
    lack: Tensor = state["exp_avg"] * (f / shared - own_f / own)
    return lack


def settling_factors(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], state: Mapping[str, Any], age: int
) -> dict[str, float]:
    """What moments of that age are multiplied by, so that the optimizer's own bias correction is right for them."""
    if not isinstance(optimizer, _CORRECTED):
        return {}
    (first, second), t = logs_of(group), float(state["step"])
    logs = {"exp_avg": first, "exp_avg_sq": second, "max_exp_avg_sq": second}
    return {key: bias(age, log) / bias(t, log) for key, log in logs.items() if key in state}


def _count(step: Any, parameter: Tensor) -> Any:
    """A count of steps: float64 [] where it lies on the parameter's card, else a number."""
    on_card = isinstance(step, Tensor) and step.is_cuda and parameter.is_cuda
    return step.to(torch.float64) if on_card else float(step)


def _on_device(number: Any, like: Tensor, filled: dict[Any, Tensor]) -> Tensor:
    """A number as a tensor [] on that of `like`. A kernel fills it in: a copy from the host would wait for the card."""
    if isinstance(number, Tensor) and number.device == like.device:
        return number
    key = float(number), like.device
    if key not in filled:
        filled[key] = torch.full((), key[0], dtype=torch.float64, device=like.device)
    return filled[key]
