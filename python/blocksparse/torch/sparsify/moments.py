"""Optimizer state that follows blocks when they change their places, and bias correction of each grown block's own.

PyTorch's optimizers keep one `step` for a parameter, so Adam divides the moments of all of its blocks by 1 - beta^t.
The moments of a block that was grown after step s are sums over a = t - s steps: m = (1 - beta1) sum beta1^i g. What it
should move by is u(a), and what Adam has moved it by is u(t):

    u(a) = lr m / (1 - beta1^a) / (sqrt(v / (1 - beta2^a)) + eps)

With (.9, .999) and t large its first step would be 3.2 times too long, its tenth 6.5 times. While a block is young,
u(t) - u(a) is added to it after each step, so that it moves as one of a new optimizer. No scaling of the moments does
that, for a new gradient enters m and v with the fixed weights 1 - beta. Later they are scaled, once:

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

from ..._core.arguments import need

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
        taken[name] = take(value).to(value.dtype) if is_whole else value
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

    Raises:
        TypeError: it is no `torch.optim.Optimizer`.
        ValueError: it does not hold a parameter; the message names it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        optimizer = inner_optimizer("sparsify", optimizer)
        self.optimizer = optimizer
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in parameters.items() if id(p) not in held]
        if missing:
            raise ValueError(f"[sparsify] the optimizer does not hold {', '.join(missing)}")
        self._parameters = list(parameters.values())
        self._young: dict[int, tuple[Tensor, Tensor]] = {}  # rows of a parameter, and after which step each was grown
        self._cohort: dict[int, int | None] = {}  # the step after which all of them were, where the host knows of one
        self._groups: tuple[Any, list[tuple[dict[str, Any], list[int]]]] = (None, [])
        self._is_adam = isinstance(optimizer, _CORRECTED)
        if not isinstance(optimizer, (*_CORRECTED, *_WITHOUT_BIAS)):
            warnings.warn(
                f"[sparsify] {type(optimizer).__name__} is not known here: the state of grown blocks begins with "
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
        numbers = {id(p): i for i, p in enumerate(self._parameters)}
        self._young = {numbers[id(p)]: rows for p, rows in young.items() if rows[0].numel()}
        self._cohort = {}
        for i, (_, births) in self._young.items():
            first = None if births.is_cuda else int(births[0])
            self._cohort[i] = first if first is not None and first >= 0 and bool((births == first).all()) else None

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
            if self._is_adam:
                kinds: dict[Any, list[int]] = {}
                for i in watched:
                    kinds.setdefault((self._parameters[i].shape[1:], self._parameters[i].dtype), []).append(i)
                for alike in kinds.values():
                    self._correct_adam(group, alike, step, found)
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
        first, second = _logs_of(group)
        age = ages.clamp_min(1).to(torch.float64)
        for name, log in (("exp_avg", first), ("exp_avg_sq", second), ("max_exp_avg_sq", second)):
            if name in state:
                factor = torch.where(ages > 0, _bias(age, log) / _bias(_count(state["step"], parameter), log), 1)
                state[name].mul_(factor.to(state[name].dtype).view(-1, *(1,) * (parameter.dim() - 1)))

    def _by_group(self) -> list[tuple[dict[str, Any], list[int]]]:
        """(group, numbers of its parameters); loading a state makes other groups."""
        groups = self.optimizer.param_groups
        if self._groups[0] is not groups:
            numbers = {id(p): i for i, p in enumerate(self._parameters)}
            members = [[numbers[id(p)] for p in group["params"] if id(p) in numbers] for group in groups]
            self._groups = (groups, list(zip(groups, members, strict=True)))
        return self._groups[1]

    def _correct_adam(self, group: dict[str, Any], alike: list[int], step: Tensor, found: Tensor | None) -> None:
        """That of parameters whose blocks have one shape: all young blocks at once, for each op costs a launch."""
        eps, second = max(group["eps"], _SMALLEST), "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
        lr, logs = group["lr"] if found is None else group["lr"] * (1 - found), _logs_of(group)
        parameters = [self._parameters[i] for i in alike]
        states = [self.optimizer.state[p] for p in parameters]
        rows, births = zip(*(self._young[i] for i in alike), strict=True)
        sizes = [r.numel() for r in rows]
        m, v = (_rows_of([state[name] for state in states], rows, sizes) for name in ("exp_avg", second))
        counts = [_count(state["step"], p) for state, p in zip(states, parameters, strict=True)]
        t: Any = counts[0]
        if isinstance(t, Tensor) or counts.count(t) < len(counts):
            t = torch.cat([_filled(c, n, m.device) for c, n in zip(counts, sizes, strict=True)])
        age: Any
        born: Any = {self._cohort[i] for i in alike}
        if len(born) == 1 and None not in born:  # numbers in place of small tensors: half of the time on the CPU
            age = int(step) - born.pop()
        else:
            born = torch.cat(births)
            age = (step - born).clamp_min_(1).to(torch.float64)
            lr = (born >= 0).to(torch.float64) * lr
        (f, root), (own_f, own_root) = ((_bias(n, logs[0]) * lr, _bias(n, logs[1]) ** 0.5) for n in (t, age))
        lack = _lack(m, v, (f / root, eps / root), (own_f / own_root, eps / own_root))
        for parameter, row, part in zip(parameters, rows, lack.to(m.dtype).split(sizes), strict=True):
            parameter.index_add_(0, row, part.to(parameter.dtype))

    def _correct_dampening(self, group: dict[str, Any], i: int, step: Tensor) -> None:
        """The first step of a new buffer is not dampened."""
        parameter, left, (rows, births) = self._parameters[i], 1 - group["dampening"], self._young[i]
        buffer = self.optimizer.state[parameter].get("momentum_buffer")
        if buffer is not None:
            is_first = ((births >= 0) & (step - births == 1)).view(-1, *(1,) * (parameter.dim() - 1))
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
    found, logs = getattr(optimizer, "found_inf", None), _logs_of(group)
    lr, eps = group["lr"] if found is None else group["lr"] * (1 - found), max(group["eps"], _SMALLEST)
    v = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    t = float(state["step"])
    (f, root), (own_f, own_root) = ((_bias(n, logs[0]) * lr, _bias(n, logs[1]) ** 0.5) for n in (t, age))
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
    (first, second), t = _logs_of(group), float(state["step"])
    logs = {"exp_avg": first, "exp_avg_sq": second, "max_exp_avg_sq": second}
    return {key: _bias(age, log) / _bias(t, log) for key, log in logs.items() if key in state}


def _rows_of(tensors: list[Tensor], rows: tuple[Tensor, ...], sizes: list[int]) -> Tensor:
    """The rows of each tensor, one below the other."""
    made = tensors[0].new_empty(sum(sizes), *tensors[0].shape[1:])
    for tensor, row, part in zip(tensors, rows, made.split(sizes), strict=True):
        torch.index_select(tensor, 0, row, out=part)
    return made


def _logs_of(group: Mapping[str, Any]) -> tuple[float, float]:
    """Logarithms of the betas."""
    first, second = (math.log(beta) if (beta := float(b)) > 0 else -math.inf for b in group["betas"])
    return first, second


def _count(step: Any, parameter: Tensor) -> Any:
    """A count of steps: float64 [] where it lies on the parameter's card, else a number."""
    on_card = isinstance(step, Tensor) and step.is_cuda and parameter.is_cuda
    return step.to(torch.float64) if on_card else float(step)


def _filled(count: Any, n: int, device: torch.device) -> Tensor:
    """float64 [n], without a copy from the host."""
    if isinstance(count, Tensor):
        return count.expand(n)
    return torch.full((n,), count, dtype=torch.float64, device=device)


def _bias(count: Any, log: float) -> Any:
    """1 / (1 - beta^count), from the logarithm of beta."""
    return -1 / (torch.expm1(count * log) if isinstance(count, Tensor) else math.expm1(count * log))


def _lack(m: Tensor, v: Tensor, shared: tuple[Any, Any], own: tuple[Any, Any]) -> Tensor:
    """u(t) - u(a) = m (f / (sqrt(v) + e) - f' / (sqrt(v) + e')), with (f, e) of t and (f', e') of a, by block."""
    root = v.sqrt() if v.dtype.itemsize >= 4 else v.float().sqrt()
    (f, e), (own_f, own_e) = ((_by_block(factor, root), _by_block(eps, root)) for factor, eps in (shared, own))
    if isinstance(own_f, Tensor) or isinstance(f, Tensor):
        return torch.addcdiv(f / (root + e), own_f * root.new_ones(()), root + own_e, value=-1).mul_(m)
    return torch.addcdiv(m / (root + e), m, root.add_(own_e), value=-own_f / f).mul_(f)


def _by_block(factor: Any, like: Tensor) -> Any:
    """So that a factor of each block broadcasts over blocks."""
    return factor.to(like.dtype).view(-1, *(1,) * (like.dim() - 1)) if isinstance(factor, Tensor) else factor
