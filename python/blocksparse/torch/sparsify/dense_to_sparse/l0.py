"""`L0`: learns which blocks to keep, by a hard-concrete gate for each block."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...._core.arguments import need, shown, to_int, to_number
from ....schedules import Schedule
from ..distributed import World
from ..weights.masked_layer import Layer
from ..weights.masks import Masks
from .checkpoint import check_shape
from .gating import Gated
from .pruner import Pruner

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1  # of the paper


def sample_gates(log_alpha: Tensor, u: Tensor) -> Tensor:
    """Hard-concrete gates from uniform numbers u in (0, 1), differentiable in log_alpha. ::

        s = sigmoid((ln u - ln(1 - u) + log_alpha) / beta) (zeta - gamma) + gamma,   z = clip(s, 0, 1)

    with beta = 2/3, gamma = -0.1, zeta = 1.1. Source: Louizos, Welling and Kingma, arXiv:1712.01312 (2017).
    """
    s = torch.sigmoid((u.log() - (-u).log1p() + log_alpha) / BETA)
    return (s * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def expected_gates(log_alpha: Tensor) -> Tensor:
    """The gates of a model that is not trained: clip(sigmoid(log_alpha) (zeta - gamma) + gamma, 0, 1)."""
    return (log_alpha.sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def open_probability(log_alpha: Tensor) -> Tensor:
    """P(z > 0) = sigmoid(log_alpha - beta ln(-gamma / zeta))."""
    return torch.sigmoid(log_alpha - BETA * math.log(-GAMMA / ZETA))


class L0(Pruner):
    """Multiplies each block by a gate whose distribution is learned, with the expected density held to a target. ::

        pruner = bss.L0(bss.PolynomialDecay(0.9, begin_step=200, end_step=2000, power=1), block_size=32)
        pruner.prepare(model)
        gates = {"params": pruner.parameters(), "lr": 2e-2, "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([{"params": model.parameters()}, gates], lr=1e-3)
        pruner.attach(optimizer)

    In training z is sampled once a step, from the seed, the step and the layer; in eval mode it is the expected gate.
    The gradient of a gate is <dW_B, W_B>, by the kernels of our own block-sparse layers or, for dense ones, by
    PyTorch's. Before each step of the optimizer the gates' gradients get that of a Lagrangian in the density d and its
    target 1 - s(t), whose multipliers rise along their own gradients::

        l1 (d - target) + l2 (d - target)^2,   d = mean over blocks of P(z > 0)

    At the end of the schedule the blocks with the largest log_alpha stay, an exact number of them; expected gates are
    multiplied into their weights, and the gates are gone. Until then they are in hooks: a copy of the model asks them,
    too, and computes without any once they are gone; a copy of model and pruner together has its own. What is saved is
    a state_dict, for hooks cannot be pickled. `convert`, `compact_` and `save_pretrained` refuse a model whose gates
    are being learned; this pruner's own `convert` and `squash_mask` multiply them into the weights first.

    Args:
        schedule: how sparse at which step. With a `PolynomialDecay` of power 1 the target density falls slowly enough
            for gates to be learned; the cubic one was worse (docs/guide/pruning-results.md).
        initial: log_alpha at first, to which N(0, 0.01) is added.
        multipliers: l1 and l2 at first; l2 keeps the density from swinging about its target.
        multiplier_rate: of the ascent on l1 and l2.
        seed: of the samples.
        options: `block_size`, `targets`, `ignore`, `scope`: see `Pruner`. scope="global" has one target for all layers.

    Raises:
        ValueError: the schedule ends at step 0, or a number is not finite.

    Source: Louizos, Welling and Kingma, arXiv:1712.01312 (2017); the Lagrangian: Wang et al., arXiv:1910.04732 (2019).
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        initial: float = 2.0,
        multipliers: tuple[float, float] = (0.0, 30.0),
        multiplier_rate: float = 0.03,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(schedule, **options)
        if schedule.end_step < 1:
            raise ValueError(f"[L0] the schedule ends at step {schedule.end_step}, needs 1 or more: gates are learned")
        need("L0", "multipliers", multipliers, Sequence, "two numbers, l1 and l2")
        if len(multipliers) != 2:
            raise ValueError(f"[L0] multipliers has {len(multipliers)} numbers, needs l1 and l2")
        l1, l2 = multipliers
        for name, value in (("initial", initial), ("l1", l1), ("l2", l2), ("multiplier_rate", multiplier_rate)):
            if not math.isfinite(to_number("L0", name, value)):
                raise ValueError(f"[L0] {name} is {value}, needs a finite number")
        self.initial, self.multiplier_rate, self.seed = initial, multiplier_rate, to_int("seed", seed, op="L0")
        self._first = float(l1), float(l2)
        self.log_alpha: dict[str, nn.Parameter] = {}
        """Of each layer, [out_blocks, in_blocks]."""
        self.multipliers: dict[str, tuple[float, float]] = {}
        """(l1, l2) of each layer, or of all under the name ""."""
        self._gated: list[Gated] = []
        self._sampled: dict[str, tuple[int, Tensor]] = {}

    def parameters(self) -> list[nn.Parameter]:
        """The log_alpha of all layers, for an optimizer: at 10 to 100 times the weights' learning rate, undecayed."""
        return list(self.log_alpha.values())

    @torch.no_grad()
    def density(self) -> dict[str, float]:
        """The expected share of live blocks of each pool: of each layer, or of all under the name ""."""
        return {pool: float(d) for pool, d in self._densities().items()}

    # ---- Before the training -----------------------------------------------------------------------------------------

    def _prepared(self, model: nn.Module) -> None:
        for i, (name, layer) in enumerate(self.layers.items()):
            weight = layer.target.parameter
            noise = torch.randn(layer.target.grid, generator=torch.Generator().manual_seed(self.seed + i), device="cpu")
            dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
            self.log_alpha[name] = nn.Parameter((self.initial + 0.01 * noise).to(weight.device, dtype))
            self._gated.append(Gated(layer.target, model, self._asked_for(layer)))
        self.multipliers = dict.fromkeys(self._pools(), self._first)

    def _trained(self) -> dict[str, nn.Parameter]:
        gates = {f"the gates of {name} (pruner.parameters())": p for name, p in self.log_alpha.items()}
        return {**super()._trained(), **gates}

    # ---- Each run ----------------------------------------------------------------------------------------------------

    def _take_copies(self) -> None:
        super()._take_copies()
        for gated, layer in zip(self._gated, self.layers.values(), strict=False):  # none is gated at the end
            gated.ask(self._asked_for(layer))

    def _asked_for(self, layer: Layer) -> Callable[[bool], Tensor | None]:
        """A function, of which a copy of the model has no copy: a method's copy would have a pruner of its own."""
        return lambda training: self._gates_of(layer, training)

    def _gates_of(self, layer: Layer, training: bool) -> Tensor | None:
        if not self._gated:  # a copy of the model runs: it has hooks still
            return None
        log_alpha = self.log_alpha[layer.target.name]
        if not training:
            return expected_gates(log_alpha)
        if layer.target.parameter.grad is None:  # model.zero_grad() does not reach gates
            log_alpha.grad = None
        return sample_gates(log_alpha, self._uniform(layer, log_alpha))

    def _uniform(self, layer: Layer, like: Tensor) -> Tensor:
        """One sample a step, so that runs that are repeated in backward have the gates of the first."""
        name = layer.target.name
        step, u = self._sampled.get(name, (-1, like))
        if step != self.steps or u.device != like.device:
            place = list(self.layers).index(name)
            seed = ((self.seed << 20) + place) * 1_000_003 + self.steps
            generator = torch.Generator(like.device).manual_seed(seed % (1 << 63))
            u = torch.rand(like.shape, generator=generator, device=like.device, dtype=like.dtype)
            u = u.clamp_(torch.finfo(like.dtype).eps, 1 - torch.finfo(like.dtype).eps)
            self._sampled[name] = self.steps, u
        return u

    # ---- Each step ---------------------------------------------------------------------------------------------------

    def _pools(self) -> dict[str, list[str]]:
        return {name: [name] for name in self.layers} if self.scope == "layer" else {"": list(self.layers)}

    def _densities(self) -> dict[str, Tensor]:
        densities = {}
        for pool, names in self._pools().items():
            open_ = [(open_probability(self.log_alpha[n]) * self.layers[n].allowed).sum().double() for n in names]
            blocks = sum(self.layers[n].allowed.numel() for n in names)
            densities[pool] = torch.stack([o.to(open_[0].device) for o in open_]).sum() / blocks
        return densities

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer) -> None:
        """Adds the gradient of the Lagrangian to those of the gates."""
        if self.finished:
            return
        World().average_gradients(self.parameters())
        if self.steps < self.schedule.begin_step:
            return
        scale = getattr(optimizer, "grad_scale", None)  # of a GradScaler that leaves unscaling to a fused optimizer
        for pool, d in self._densities().items():
            miss = d - self._target_density()
            l1, l2 = self.multipliers[pool]
            slope = l1 + 2 * l2 * miss
            for name in self._pools()[pool]:
                log_alpha, allowed = self.log_alpha[name], self.layers[name].allowed
                p = open_probability(log_alpha) * allowed
                blocks = sum(self.layers[n].allowed.numel() for n in self._pools()[pool])
                gradient = (p * (1 - p) * (slope.to(p.device) / blocks)).to(log_alpha.dtype)
                gradient = gradient if scale is None else gradient * scale.to(gradient)
                log_alpha.grad = gradient if log_alpha.grad is None else log_alpha.grad + gradient

    def _target_density(self) -> float:
        return 1 - self._sparsity()

    def _adjust(self) -> None:
        for log_alpha in self.parameters():
            log_alpha.grad = None
        if self.finished or self.steps <= self.schedule.begin_step:
            return
        for pool, d in self.density().items():
            miss = d - self._target_density()
            l1, l2 = self.multipliers[pool]
            self.multipliers[pool] = l1 + self.multiplier_rate * miss, l2 + self.multiplier_rate * miss * miss

    # ---- The end -----------------------------------------------------------------------------------------------------

    def _choose(self) -> None:
        if self.steps >= self.schedule.end_step:
            super()._choose()

    def _scores(self, layer: Layer) -> Tensor:
        return self.log_alpha[layer.target.name].detach()

    def _masks_from(self, scores: Masks) -> Masks:
        self._fold()
        return super()._masks_from(scores)

    def _chosen(self) -> None:
        self._end()

    @torch.no_grad()
    def _fold(self) -> None:
        for name, layer in self.layers.items():
            if self._gated:
                layer.target.scale_(layer.target.parameter.data, expected_gates(self.log_alpha[name]))

    def _end(self) -> None:
        for gated in self._gated:
            gated.remove()
        self._gated = []
        for log_alpha in self.parameters():
            log_alpha.requires_grad_(False)
            log_alpha.grad = None

    def _undo(self) -> None:
        self._end()
        super()._undo()

    def _check_copy(self, model: nn.Module) -> None:
        mine = {layer.target.module for layer in self.layers.values()}
        if self._gated and mine.isdisjoint(model.modules()):
            raise ValueError(
                f"[L0] a copy of the model has no gates of its own, and they are learned until step "
                f"{self.schedule.end_step}, of which {self.steps} were done: convert the model itself, or copy it later"
            )

    def _settle(self) -> None:
        """Before the end of the schedule, too, expected gates are multiplied into the weights."""
        self._fold()
        self._end()

    # ---- Saving ------------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        log_alpha = {name: p.detach() for name, p in self.log_alpha.items()}
        multipliers = {pool: list(pair) for pool, pair in self.multipliers.items()}
        return {"log_alpha": log_alpha, "multipliers": multipliers, "gated": bool(self._gated), "seed": self.seed}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if state["multipliers"].keys() != self.multipliers.keys():
            raise ValueError("[L0] the state was saved with another scope")
        for pool, pair in state["multipliers"].items():
            if [type(number) for number in pair] != [float, float]:
                raise ValueError(f"[L0] the state's multipliers of {pool} are {shown(pair)}, needs two numbers")
        for name, p in self.log_alpha.items():
            check_shape("L0", f"log_alpha of {name}", state["log_alpha"][name], p.shape)
        to_int("seed", state["seed"], op="L0")
        need("L0", "gated", state["gated"], bool, "True or False")

    @torch.no_grad()
    def _load_state(self, state: dict[str, Any]) -> None:
        for name, p in self.log_alpha.items():
            p.copy_(state["log_alpha"][name])
        self.multipliers = {pool: (pair[0], pair[1]) for pool, pair in state["multipliers"].items()}
        self.seed, self._sampled = state["seed"], {}
        if not state["gated"]:
            self._end()
        elif not self._gated and self._model is not None:  # this pruner has come to the end meanwhile
            for name, layer in self.layers.items():
                self._gated.append(Gated(layer.target, self._model, self._asked_for(layer)))
                self.log_alpha[name].requires_grad_(True)
