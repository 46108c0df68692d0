"""`Rewiring`: training with a fixed number of blocks that change their places. A subclass says which blocks come."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...._core.arguments import need, to_int
from ...modules.layer import BlockSparseLayer
from ..distributed import World
from ..optimizer.moments import YOUNG, Moments, inner_optimizer
from ..report import RewiringReport, RewiringRow
from ..weights.masked_layer import claim, release
from ..weights.targets import Choices, find_targets
from .exchange import Candidates, CosineDrop, exchange
from .rewired_layer import START, RewiredLayer, most_exchanged


class Rewiring:
    """What SET and RigL share: every so many steps blocks go and as many come, in each layer. ::

        rewiring = bss.RigL(bss.CosineDrop(end_step=7500), grow="bound")
        rewiring.prepare(model)          # its BlockSparse layers; the model lies where it is to be trained
        rewiring.attach(optimizer)       # acts behind optimizer.step() from now on

    Parameters stay the objects that they are, [blocks, ..., b, b], and so do optimizers and DistributedDataParallel.
    Blocks of the lowest Frobenius norms go. Those that come are 0, with moments of 0 and a bias correction of their own
    (`Moments`); moments and gradients of the others follow them. Weight averages (`AveragedModel`) cannot follow.

    On a card nothing waits for the host, and tables are made anew in place. To capture a training step, attach with
    `hook=False` and capture two graphs: one that ends with `step(acts=False)`, and one that ends with `step(acts=True)`
    (RigL: with its forward and backward pass in `observing()`), to be replayed at steps where `schedule.acts_at(step)`.
    The optimizer has to be capturable. What counts the steps is then on the card. The first step that is not captured
    compiles the bias correction, which takes seconds; a graph that is captured before it runs more kernels.

    `copy.deepcopy((model, rewiring))` copies both. The copy is attached to no optimizer.

    Processes of torch.distributed take the same pattern: grow scores are averaged, norms are those of rank 0.

    A step whose weights, gradients or scores are not all finite moves no block; a warning says so once.

    Args:
        schedule: which share of the blocks is exchanged when.
        targets: which layers: see `find_targets`. None: all block-sparse ones.
        ignore: which ones not.
        seed: of the random choices; of several processes that of rank 0 counts.
        process_group: of the processes that train the same model; None: all.
    """

    def __init__(
        self,
        schedule: CosineDrop,
        *,
        targets: Choices = None,
        ignore: Choices = (),
        seed: int = 0,
        process_group: Any = None,
    ) -> None:
        self._op = type(self).__name__
        need(self._op, "schedule", schedule, CosineDrop, "a CosineDrop")
        self.schedule, self.seed = schedule, to_int("seed", seed, op=self._op)
        self._choices, self._world = (targets, ignore), World(process_group)
        self._layers: list[RewiredLayer] = []
        self._moments: Moments | None = None
        self._hook: RemovableHandle | None = None
        self._steps = 0  # as the host counts them
        self._due: set[int] = set()  # steps after which some blocks are young no more, as far as the host knows
        self._warned = False
        self._is_ahead = False  # whether the card may have counted other steps
        self._is_new = True  # whether no step came by since an optimizer was attached
        self._notice: tuple[Tensor, Any] | None = None  # how many updates were left out, on its way from the card

    # ---- Verbs ------------------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module) -> None:
        """Takes over the layouts of the model's block-sparse layers.

        Raises:
            ValueError: there is no such layer, a target is dense or has no empty place, a layer has a sparsifier
                already, or layers lie on several devices. Nothing is changed then.
            RuntimeError: it was called before.
        """
        if self._layers:
            raise RuntimeError(f"[{self._op}] prepare was called before: make another {self._op}")
        layers = self._find(model)
        devices = {module.weight.device for _, module in layers}
        if len(devices) > 1:
            raise ValueError(f"[{self._op}] layers are on {', '.join(sorted(map(str, devices)))}, needs one device")
        self._device = devices.pop()
        self._clock = torch.zeros((), dtype=torch.int64, device=self._device)
        self._skipped = torch.zeros_like(self._clock)
        self._layers = [RewiredLayer(name, module, self.schedule.alpha) for name, module in layers]
        self._hold(True)

    def _hold(self, on: bool) -> None:
        """Has layers take other layouts when weights are loaded, or lets them go."""
        for layer in self._layers:
            layer.module.takes_layout = layer.adopt if on else None
            (claim if on else release)(layer.module, "weight", self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rewiring:
        """One that has copies of the layers, and is attached to no optimizer: those that it has know nothing of it."""
        made = type(self).__new__(type(self))
        memo[id(self)], memo[id(self._world)] = made, self._world
        vars(made).update(copy.deepcopy({**vars(self), **self._unattached()}, memo))
        made._hold(any(layer.module.takes_layout is not None for layer in made._layers))
        return made

    def _unattached(self) -> dict[str, Any]:
        """Attributes of one that has no optimizer."""
        return {"_parameters": {}, "_moments": None, "_hook": None, "_notice": None}

    @property
    def attached(self) -> bool:
        """Whether it acts behind the steps of an optimizer."""
        return self._moments is not None

    def _find(self, model: nn.Module) -> list[tuple[str, BlockSparseLayer]]:
        targets, ignore = self._choices
        need(self._op, "model", model, nn.Module, "a torch.nn.Module")
        if targets is None and not any(block_sparse_layers("", module) for module in model.modules()):
            raise ValueError(
                f"[{self._op}] the model has no block-sparse layer whose blocks could move: see "
                "BlockSparseLinear.from_dense and replace_linears"
            )
        chosen = block_sparse_layers if targets is None else targets
        found: list[tuple[str, BlockSparseLayer]] = []
        full: list[str] = []
        for target in find_targets(model, 8, chosen, ignore):
            if not isinstance(target.module, BlockSparseLayer):
                raise ValueError(
                    f"[{self._op}] {target.name} is dense, needs block-sparse layers: see from_dense, or leave it out"
                )
            if target.module.takes_layout is not None or hasattr(target.module, "weight_gates"):
                raise ValueError(f"[{self._op}] {target.name} has a sparsifier already")
            self._check_layer(model, target.path, target.module)
            has_room = most_exchanged(target.module.layout, self.schedule.alpha) > 0
            if has_room:
                found.append((target.path, target.module))
            else:
                full.append(target.name)
        if full:
            text = (
                f"[{self._op}] nothing can be exchanged in {', '.join(full)}: no place is empty, or blocks are too few"
            )
            if not found:
                raise ValueError(text)
            warnings.warn(text, stacklevel=4)
        return found

    def _check_layer(self, model: nn.Module, path: str, module: BlockSparseLayer) -> None:
        """Raises ValueError if the method cannot work on a layer."""

    def attach(self, optimizer: torch.optim.Optimizer, *, hook: bool = True) -> None:
        """Acts behind each step of the optimizer from now on; what a GradScaler skips does not count.

        Args:
            optimizer: holds the weights of all layers.
            hook: False: the caller calls `step` behind optimizer.step().

        Raises:
            ValueError: the optimizer does not hold a layer's weight (the message names it).
            RuntimeError: `prepare` was not called before, or it is attached already.
        """
        self._need_model()
        if self._moments is not None:
            raise RuntimeError(f"[{self._op}] is attached already: call detach() first")
        optimizer = inner_optimizer(self._op, optimizer)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._parameters = {  # gates may be left alone
            name: (i, parameter)
            for i, layer in enumerate(self._layers)
            for name, parameter in layer.parameters
            if id(parameter) in held or parameter is layer.module.weight
        }
        if self._world:
            (seed,) = self._world.from_first([torch.tensor(self.seed, device=self._device)])
            self.seed = int(seed)
        held_here = {name: parameter for name, (_, parameter) in self._parameters.items()}
        self._moments = Moments(optimizer, held_here, self._op)
        self._hold(True)
        self._is_new = True
        if hook:
            self._hook = optimizer.register_step_post_hook(lambda *_: self.step())
        self._watch()
        self._look_ahead()

    def detach(self) -> None:
        """Lets the optimizer and the layers go.

        The optimizer's moments of young blocks are scaled, so that its own bias correction is right.
        """
        if self._hook is not None:
            self._hook.remove()
        if self._moments is not None:
            self._settle(1)
            self._due.clear()
        self._moments = self._hook = None
        self._hold(False)
        self._observe(False)

    @torch.no_grad()
    def step(self, acts: bool | None = None) -> None:
        """What belongs behind a step of the optimizer: own bias corrections, and an exchange where one is due.

        Args:
            acts: whether blocks are exchanged. None: as the schedule says of this step.

        Raises:
            RuntimeError: nothing is attached; a layer was moved; or a graph is captured, and `acts` is not given.
        """
        self._need_model()
        if self._moments is None:
            raise RuntimeError(f"[{self._op}] has no optimizer: attach(optimizer) first")
        self._layers[0].check_device(self._op)
        captured = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if captured and acts is None:
            raise RuntimeError(
                f"[{self._op}] a CUDA graph is being captured: attach(optimizer, hook=False), and step(acts=...)"
            )
        found = getattr(self._moments.optimizer, "found_inf", None)
        if found is not None and found.device.type == "cpu" and bool(found):
            return
        self._clock.add_(1 if found is None else (1 - found).to(self._device, torch.int64).view(()))
        if not captured:
            self._steps += 1
        self._is_ahead |= captured or found is not None
        if self._is_ahead or self._due or self._is_new:  # at the first step a card compiles it, and moves nothing
            self._moments.correct(self._clock)
        self._is_new = False
        if self._steps in self._due and not captured:
            self._due.remove(self._steps)
            self._settle(YOUNG)
            self._watch()
        if acts if acts is not None else self.schedule.acts_at(self._steps):
            self._act(found, captured)
        if not captured:
            self._tell()
            self._look_ahead()

    @property
    def layers(self) -> dict[str, BlockSparseLayer]:
        """The layers that were prepared, by name."""
        return {layer.name: layer.module for layer in self._layers}

    @property
    def steps(self) -> int:
        """Steps of the optimizer so far. Waits for the card."""
        self._need_model()
        return int(self._clock)

    def report(self) -> RewiringReport:
        """A table: the layers, and the shares of their blocks that were grown. Waits for the card."""
        self._need_model()
        rows = []
        for layer in self._layers:
            layout = layer.module.layout
            share = float((layer.births != START).double().mean())
            rows.append(RewiringRow(layer.name, layout.sizes, layout.block_size, layer.blocks, layout.density, share))
        return RewiringReport(tuple(rows), self.steps, int(self._skipped))

    # ---- State ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on to the bit, beside the model's and the optimizer's state. Waits for the card."""
        layers = {
            layer.name: {"places": layer.places.cpu().clone(), "births": layer.births.cpu().clone()}
            for layer in self._layers
        }
        return {"steps": self.steps, "skipped": int(self._skipped), "seed": self.seed, "layers": layers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a state was taken; before or after the model's own `load_state_dict`.

        Raises:
            ValueError: the state is of other layers, or is damaged. Nothing is changed then.
            RuntimeError: no model is prepared.
        """
        self._need_model()
        need(self._op, "state", state, Mapping, "what state_dict() returned")
        try:
            saved = state["layers"]
            self._check_saved(saved)
            seed, steps, skipped = (int(state[name]) for name in ("seed", "steps", "skipped"))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"[{self._op}] the state is damaged: {type(error).__name__}: {error}") from error
        self.seed, self._steps = seed, steps
        self._clock.fill_(self._steps)
        self._skipped.fill_(skipped)
        self._due.clear()
        for layer in self._layers:
            births = saved[layer.name]["births"]
            layer.restore(saved[layer.name]["places"], births)
            self._due |= {birth + YOUNG for birth in births[births >= 0].unique().tolist()}
        self._warned = skipped > 0
        if self._moments is not None:
            self._watch()
            self._look_ahead()

    def _check_saved(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        own = [layer.name for layer in self._layers]
        if sorted(saved) != sorted(own):
            raise ValueError(f"[{self._op}] the state is of {', '.join(saved)}, this is prepared for {', '.join(own)}")
        for layer in self._layers:
            (places, births), grid = (saved[layer.name][key] for key in ("places", "births")), layer.grid
            rising = places.numel() == layer.blocks and bool((places.diff() > 0).all())
            if not rising or int(places[0]) < 0 or int(places[-1]) >= grid[0] * grid[1]:
                raise ValueError(
                    f"[{self._op}] the state of {layer.name} has {places.numel()} blocks, needs {layer.blocks} at "
                    f"rising places below {grid[0] * grid[1]}"
                )
            for name, numbers in (("places", places), ("births", births)):
                if numbers.dtype != torch.int64 or numbers.shape != (layer.blocks,):
                    raise ValueError(
                        f"[{self._op}] the state's {name} of {layer.name} are {numbers.dtype} {list(numbers.shape)}, "
                        f"needs torch.int64 [{layer.blocks}]"
                    )

    # ---- What methods add -------------------------------------------------------------------------------------------

    def _candidates(self) -> tuple[list[Candidates], Tensor]:
        """Where blocks of each layer may come; and bool [layers]: which ones take part."""
        raise NotImplementedError

    def _observe(self, on: bool) -> None:
        """Begins or ends to look at backward passes."""

    # ---- One exchange -----------------------------------------------------------------------------------------------

    def _act(self, found: Tensor | None, captured: bool) -> None:
        for layer in self._layers:
            layer.check_device(self._op)
        norms, (candidates, there) = [layer.norms() for layer in self._layers], self._candidates()
        grads = [p.grad for _, p in self._parameters.values() if p.grad is not None]
        # The largest magnitude takes a fifth of the kernels that isfinite().all() does, and is NaN if any number is.
        largest = torch.stack([torch.linalg.vector_norm(t, math.inf) for t in (*norms, *grads)])
        finite = torch.stack([largest.isfinite().all(), *(found.finite for found in candidates)]).all()
        norms, finite = self._agree(norms, finite)
        if found is not None:
            finite = finite & (found.to(self._device).view(()) == 0)
        self._skipped.add_(finite.logical_not())
        if self._device.type == "cpu" and not bool(finite):
            return
        for i, (layer, of_blocks, coming) in enumerate(zip(self._layers, norms, candidates, strict=True)):
            count = self.schedule.count(self._clock, layer.blocks).clamp_max_(layer.most)
            count = count.minimum(coming.there) * (finite & there[i])
            change = exchange(layer.places, of_blocks.nan_to_num(), coming.places, count, layer.most)
            assert self._moments is not None
            layer.apply(change, self._clock, self._moments)
        self._watch()
        if not captured:
            self._due.add(self._steps + YOUNG)
        if self._device.type == "cuda" and not captured and not self._warned:
            arrived = torch.cuda.Event()
            self._notice = (self._skipped.to("cpu", non_blocking=True), arrived)
            arrived.record()

    def _agree(self, norms: list[Tensor], finite: Tensor) -> tuple[list[Tensor], Tensor]:
        """What all processes take: norms of rank 0, and finite if it is so everywhere."""
        if not self._world:
            return norms, finite
        bad = self._world.sum([finite.logical_not().float()])[0]
        return self._world.from_first(norms), bad == 0

    def _settle(self, youth: int) -> None:
        assert self._moments is not None
        for layer in self._layers:
            layer.settle(self._clock, youth, self._moments)

    def _watch(self) -> None:
        """Has young blocks corrected. On a card it is the same memory at each time."""
        assert self._moments is not None
        for layer in self._layers:
            layer.find_young(self.schedule.frequency)
        layers = [self._layers[i] for i, _ in self._parameters.values()]
        held = [parameter for _, parameter in self._parameters.values()]
        self._moments.watch({p: layer.young for p, layer in zip(held, layers, strict=True)})

    def _tell(self) -> None:
        """Says once that an update was left out, when the host has heard of it."""
        if self._warned:
            return
        if self._device.type == "cpu":
            skipped = int(self._skipped)
        elif self._notice is not None and self._notice[1].query():
            skipped, self._notice = int(self._notice[0]), None
        else:
            return
        if skipped:
            self._warned = True
            warnings.warn(
                f"[{self._op}] a weight, a gradient or a grow score was not finite at step {self._steps} or before: no "
                "block was moved then. This is said once; report() counts such steps",
                RuntimeWarning,
                stacklevel=3,
            )

    def _look_ahead(self) -> None:
        self._observe(self.schedule.acts_at(self._steps + 1))

    def _need_model(self) -> None:
        if not self._layers:
            raise RuntimeError(f"[{self._op}] has no model: prepare(model) first")


def block_sparse_layers(name: str, module: nn.Module) -> bool:
    """What is rewired where no targets are given."""
    return isinstance(module, BlockSparseLayer) and min(module.layout.sizes) >= module.layout.block_size
