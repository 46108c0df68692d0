"""Optimizer state that follows blocks when they change their places, and bias correction of each grown block's own.

PyTorch's optimizers keep one `step` for a parameter, so Adam divides the moments of all of its blocks by 1 - beta^t.
The moments of a block that was grown after step s are sums over a = t - s steps: m = (1 - beta1) sum beta1^i g. What it
should move by is u(a), and what Adam has moved it by is u(t):

    u(a) = lr m / (1 - beta1^a) / (sqrt(v / (1 - beta2^a)) + eps)

With (.9, .999) and t large its first step would be 3.2 times too long, its tenth 6.5 times. No scaling of the moments
repairs that, for a new gradient enters m and v with the fixed weights 1 - beta. So u(t) - u(a) is added to such blocks
after each step, and they move as those of a new optimizer. State and parameter keep their memory, as CUDA graphs need.
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
_ROUNDING = 2.0**-24  # beta2^a below which the corrections are the same in float32


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
        need("sparsify", "optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
        self.optimizer = optimizer
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in parameters.items() if id(p) not in held]
        if missing:
            raise ValueError(f"[sparsify] the optimizer does not hold {', '.join(missing)}")
        self._parameters = list(parameters.values())
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

    @torch.no_grad()
    def correct(self, ages: Sequence[Tensor]) -> None:
        """To be called after each step of the optimizer: gives grown blocks their own bias correction.

        Does not wait for a card.

        Args:
            ages: of each parameter int64 [blocks]: steps since the block was grown, the last one counted; 0 or less
                where it was there from the start.
        """
        found = getattr(self.optimizer, "found_inf", None)  # a fused optimizer under a GradScaler leaves a step out so
        for group, members in self._by_group():
            with_state = [i for i in members if self.optimizer.state.get(self._parameters[i])]
            if self._is_adam and with_state:
                self._correct_adam(group, with_state, ages, found)
            elif isinstance(self.optimizer, torch.optim.SGD) and 0 < group["dampening"] < 1:
                for i in with_state:
                    self._correct_dampening(group, i, ages[i])

    def _by_group(self) -> list[tuple[dict[str, Any], list[int]]]:
        """(group, numbers of its parameters); loading a state makes other groups."""
        groups = self.optimizer.param_groups
        if self._groups[0] is not groups:
            numbers = {id(p): i for i, p in enumerate(self._parameters)}
            members = [[numbers[id(p)] for p in group["params"] if id(p) in numbers] for group in groups]
            self._groups = (groups, list(zip(groups, members, strict=True)))
        return self._groups[1]

    def _correct_adam(
        self, group: dict[str, Any], members: list[int], all_ages: Sequence[Tensor], found: Tensor | None
    ) -> None:
        eps, lr, second = group["eps"], group["lr"], "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
        lr = lr if found is None else lr * (1 - found)
        logs = [math.log(beta) if (beta := float(b)) > 0 else -math.inf for b in group["betas"]]
        ages = torch.cat([all_ages[i] for i in members])
        grown = (ages > 0).to(torch.float64)
        age = ages.clamp_min(1).to(torch.float64)
        own = lr * grown / torch.expm1(age * logs[0])  # -lr / (1 - beta1^a), and 0 for those that need nothing
        own_root = torch.expm1(age * logs[1]).neg_().rsqrt_()
        sizes = [all_ages[i].numel() for i in members]
        parts = zip(
            own.split(sizes), own_root.split(sizes), grown.split(sizes), (age * logs[1]).split(sizes), strict=True
        )
        for i, (first, root, is_grown, decay) in zip(members, parts, strict=True):
            parameter = self._parameters[i]
            state = self.optimizer.state[parameter]
            shared, shared_root = _bias_of(state["step"], logs, parameter.device)
            given = (state["exp_avg"], state[second], first, root, is_grown * (lr * shared / shared_root))
            if parameter.is_cuda:
                parameter.add_(_lack(given, eps, eps / shared_root))
                continue
            young = torch.nonzero((is_grown > 0) & (decay > math.log(_ROUNDING))).flatten()
            if young.numel():
                lack = _lack([tensor[young] for tensor in given], eps, eps / shared_root)
                parameter.index_add_(0, young, lack.to(parameter.dtype))

    def _correct_dampening(self, group: dict[str, Any], i: int, ages: Tensor) -> None:
        """The first step of a new buffer is not dampened."""
        parameter, left = self._parameters[i], 1 - group["dampening"]
        buffer = self.optimizer.state[parameter].get("momentum_buffer")
        if buffer is not None:
            first = (ages == 1).view(-1, *(1,) * (parameter.dim() - 1))
            parameter.sub_(torch.where(first, buffer * (group["lr"] * (1 / left - 1)), 0))
            buffer.copy_(torch.where(first, buffer / left, buffer))


def _bias_of(step: Any, logs: list[float], device: torch.device) -> tuple[Any, Any]:
    """1 / (1 - beta1^t) and 1 / sqrt(1 - beta2^t): numbers, or tensors where the step is on a card."""
    if isinstance(step, Tensor) and step.device == device and device.type != "cpu":
        t = step.to(torch.float64)
        return torch.expm1(t * logs[0]).neg_().reciprocal_(), torch.expm1(t * logs[1]).neg_().rsqrt_()
    count = float(step)
    return -1 / math.expm1(count * logs[0]), (-math.expm1(count * logs[1])) ** -0.5


def _lack(given: Sequence[Tensor], eps: float, shared_eps: Any) -> Tensor:
    """u(t) - u(a) = m (shared / (sqrt(v) + shared_eps) + own / (sqrt(v) own_root + eps)).

    Args:
        given: m and v [blocks, ...], own, own_root and shared [blocks].
        eps: of the optimizer.
        shared_eps: sqrt(1 - beta2^t) eps.
    """
    m, v = given[:2]
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    own, own_root, shared = (t.to(wide).view(-1, *(1,) * (v.dim() - 1)) for t in given[2:])
    root = v.to(wide).sqrt()
    lack = (root * own_root).add_(eps)
    torch.div(own, lack, out=lack)
    lack.addcdiv_(shared, root.add_(shared_eps))
    return lack.mul_(m)
