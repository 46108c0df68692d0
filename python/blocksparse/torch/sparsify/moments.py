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
from collections.abc import Callable, Mapping, Sequence
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
        self._young: dict[int, tuple[Tensor, Tensor]] = {}  # rows of a parameter, and their births as floats: see watch
        self._cohort: dict[int, int | None] = {}  # the birth of all of them, where the host knows of one
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

    def _correct_adam(self, group: dict[str, Any], watched: list[int], step: Tensor, found: Tensor | None) -> None:
        """Each op costs a launch: all factors are made at once, and all blocks of one shape are corrected at once."""
        kinds: dict[Any, list[int]] = {}
        for i in watched:
            kinds.setdefault((self._parameters[i].shape[1:], self._parameters[i].dtype), []).append(i)
        lr, logs = group["lr"] if found is None else group["lr"] * (1 - found), _logs_of(group)
        eps, second = max(group["eps"], _SMALLEST), "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
        ordered = [i for alike in kinds.values() for i in alike] if len(kinds) > 1 else watched
        numbers, begin = self._numbers(ordered, step), 0
        factors = _factors(self._counts(ordered, step), logs, lr) if numbers is None else torch.empty(0)
        for alike in kinds.values():
            parameters, rows = [self._parameters[i] for i in alike], [self._young[i][0] for i in alike]
            states, sizes = [self.optimizer.state[p] for p in parameters], [r.numel() for r in rows]
            m, v = (_rows_of([state[name] for state in states], rows, sizes) for name in ("exp_avg", second))
            if numbers is not None:
                lack = _lack_of_numbers(m, v, numbers, logs, lr, eps)
            else:
                lack = _lack(m, v, factors.narrow(2, begin, len(v)), eps)
            begin += len(v)
            for parameter, row, part in zip(parameters, rows, lack.split(sizes), strict=True):
                parameter.index_add_(0, row, part.to(parameter.dtype))

    def _numbers(self, watched: list[int], step: Tensor) -> tuple[float, float] | None:
        """t and a, on the CPU, where all blocks share them."""
        birth = self._cohort[watched[0]]
        if birth is None or any(self._cohort[i] != birth for i in watched):
            return None
        ts = {float(self.optimizer.state[self._parameters[i]]["step"]) for i in watched}
        t = max(ts.pop(), 1.0)
        return None if ts else (t, max(min(float(step) - birth, t), 1.0))

    def _counts(self, watched: list[int], step: Tensor) -> Tensor:
        """t and a, float64 [2, n]."""
        births = [self._young[i][1] for i in watched]
        steps = _expanded([self.optimizer.state[self._parameters[i]]["step"] for i in watched], births)
        t, age = counts = torch.cat([*steps, *births]).double().view(2, -1)
        torch.minimum(torch.sub(step, age, out=age), t, out=age)
        return counts.clamp_min_(1)  # 0 where a scaler has left the first step out

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


def _rows_of(tensors: list[Tensor], rows: list[Tensor], sizes: list[int]) -> Tensor:
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


def _expanded(steps: list[Any], like: Sequence[Tensor]) -> list[Tensor]:
    """Each count of steps as often as its parameter has births, without a copy from the host."""
    made: dict[float, Tensor] = {}  # of counts that lie on the host while the parameters are on a card
    counts = []
    for step, births in zip(steps, like, strict=True):
        if not isinstance(step, Tensor) or step.device != births.device:
            number = float(step)
            if number not in made:
                made[number] = births.new_full((), number)
            step = made[number]
        counts.append(step.expand(births.numel()))
    return counts


def _bias(count: Any, log: float) -> Any:
    """1 / (1 - beta^count), from the logarithm of beta."""
    return -1 / (torch.expm1(count * log) if isinstance(count, Tensor) else math.expm1(count * log))


def _factors(counts: Tensor, logs: tuple[float, float], lr: Any) -> Tensor:
    """[2, 2, n]: lr sqrt(1 - beta2^c) / (1 - beta1^c), and sqrt(1 - beta2^c), of the counts c [2, n]."""
    bias = counts.new_empty(2, *counts.shape)
    for part, log in zip(bias, logs, strict=True):
        torch.mul(counts, log, out=part)
    bias.expm1_().neg_()
    spreads = bias[1].sqrt_()
    torch.div(spreads, bias[0], out=bias[0]).mul_(lr)
    return bias


def _lack(m: Tensor, v: Tensor, factors: Tensor, eps: float) -> Tensor:
    """u(t) - u(a), with u(c) = rate(c) m / (sqrt(v) + spread(c) eps): 0 to the bit where a = t."""
    root = _root(v)
    rates, spreads = factors.to(root.dtype).view(2, 2, -1, *(1,) * (root.dim() - 1))
    both = torch.add(root, spreads, alpha=eps)
    torch.div(rates, both, out=both)
    return both[0].sub_(both[1]).mul_(m)


def _lack_of_numbers(
    m: Tensor, v: Tensor, counts: tuple[float, float], logs: tuple[float, float], lr: Any, eps: float
) -> Tensor:
    """`_lack` of one t and one a: on the CPU two thirds of the time."""
    spread, own_spread = (_bias(count, logs[1]) ** -0.5 for count in counts)
    rate, own_rate = (s * _bias(count, logs[0]) for s, count in zip((spread, own_spread), counts, strict=True))
    root = _root(v)
    lack = torch.div(m, root + eps * spread)
    return lack.addcdiv_(m, root.add_(eps * own_spread), value=-own_rate / rate).mul_(rate * lr)


def _root(v: Tensor) -> Tensor:
    """sqrt(v), in place, in float32 at least."""
    return (v if v.dtype.itemsize >= 4 else v.float()).sqrt_()
