"""`Pruner`: what all sparsifiers of dense training share. A subclass says how blocks are chosen."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...._core.arguments import shown, to_count, to_list, to_number
from ....schedules import Schedule, live_blocks
from ..conversion.compact import need_places
from ..conversion.convert import convert
from ..conversion.layer_times import layer_times
from ..conversion.timing import Seen
from ..optimizer.moments import inner_optimizer
from ..report import Report, Row
from ..weights.masked_layer import Layer, blocks_left, claim, disown, own, owner_of
from ..weights.masks import Masks, check_masks, check_scope
from ..weights.targets import Choices, Target, find_targets
from .regrowth import Regrown
from .steps import Steps


class Pruner(Steps):
    """Makes a model sparse while it is trained. ::

        pruner.prepare(model)       # in place: parameters stay what they are; one buffer of gates beside each weight
        pruner.attach(optimizer)    # steps behind optimizer.step()
        ...                         # the training
        print(pruner.report())
        pruner.squash_mask()        # an ordinary model again, with zeros

    Blocks that are not live are zeros in the parameter itself, their gradients are zero, and they are made zero again
    after each step of the optimizer, whatever momentum and weight decay do. `<weight>_gates`, float32 [out_blocks,
    in_blocks] of zeros and ones, is saved with the model.

    The number of live blocks is exact: blocks - floor(blocks sparsity + 1/2), in each layer or, with scope="global", in
    all together; of equal blocks the first stay. Processes that train in parallel choose the same ones.

    `copy.deepcopy((model, pruner))` copies both. The copied pruner masks the gradients of the copied model, and is
    attached to no optimizer.

    Moments of a block that comes back begin at zero, and in Adam have a bias correction of their own for 32 steps.

    Where a gradient is not finite, an attached pruner takes all of them away: that step changes nothing and does not
    count, and a warning says which it was. A step that a `torch.amp.GradScaler` skips does not count either. Where a
    weight is not finite, or a gradient when `step` is called by hand, blocks stay as they are until the next step that
    is, and a warning says so once.

    Args:
        schedule: how sparse at which step.
        block_size: edge of a block: 8, 16, 32, 64 or 128.
        targets: which weights; see `find_targets`.
        ignore: which not.
        scope: "layer" or "global". A warning names a layer that loses all of its blocks.
        compact_at: densities, such as [0.5, 0.2]: once so few of a layer's blocks are live, it moves to block-sparse
            storage in mid-training, with its state in the attached optimizer: see `compact_`. Steps get faster as the
            layer gets sparser. Blocks that are dropped by then do not come back. `moves` counts how often layers have
            moved: where several processes train, wrap the model in DistributedDataParallel anew when it has grown.

    Raises:
        ValueError: there is no such scope, or a density is not between 0 and 1.
        TypeError: the schedule is none.
    """

    _schedule_method = "sparsity"  # what a schedule is asked at a step

    def __init__(
        self,
        schedule: Schedule,
        *,
        block_size: int = 32,
        targets: Choices = None,
        ignore: Choices = (),
        scope: str = "layer",
        compact_at: Sequence[float] = (),
    ) -> None:
        op = type(self).__name__
        wanted = ("acts_at", "end_step", self._schedule_method)
        if isinstance(schedule, type) or not all(hasattr(schedule, name) for name in wanted):
            raise TypeError(f"[{op}] schedule is {shown(schedule)}, needs a schedule such as PolynomialDecay")
        check_scope(op, scope)
        self.schedule, self.block_size, self.scope = schedule, block_size, scope
        densities = to_list(op, "compact_at", compact_at, "densities, such as [0.5, 0.2]")
        self.compact_at = tuple(to_number(op, "a density of compact_at", density) for density in densities)
        if wrong := [density for density in self.compact_at if not 0 < density < 1]:
            raise ValueError(f"[{op}] compact_at has {wrong[0]}, needs densities between 0 and 1")
        self._model: nn.Module | None = None
        self._targets, self._ignore = targets, ignore
        self.steps = 0
        """Steps of the optimizer since `prepare`."""
        self.layers: dict[str, Layer] = {}
        """What is made sparse, by name; empty before `prepare`."""
        self.moves = 0
        """How often layers have moved to block-sparse storage: their parameters are then others."""
        self._optimizers: tuple[Optimizer, ...] = ()
        self._handles: list[RemovableHandle] = []
        self._regrown = Regrown()
        self._due = False  # a choice that a step that was not finite has put off
        self._skips = False  # the step that is being made: its gradients were not finite
        self._unseen: list[Layer] = []  # moved, and no gradient of theirs was seen since
        self._said: set[str] = set()  # what was warned of: "not finite", layers that become empty

    # ---- Before the training -----------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, masks: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Puts gates beside the weights of a model, in place. All is checked before anything is changed.

        Args:
            model: is changed and returned.
            masks: blocks that may be live, {name: [out_blocks, in_blocks]}; others stay zero for good. None: all, but
                for those that are zero in weights that have others, as pruned ones have, or that an earlier pruner left
                out. So a model that is sparse already can be made sparser.

        Raises:
            ValueError: a target is wrong (see `find_targets`), another pruner has it, or a mask is of another model.
            RuntimeError: it was called before.
        """
        if self.layers:
            raise RuntimeError(f"[{type(self).__name__}] prepare was called before: make another pruner")
        targets = find_targets(model, self.block_size, self._targets, self._ignore)
        for target in targets:
            if getattr(target.module, "takes_layout", None) is not None:  # as SET and RigL have it
                raise ValueError(f"[{type(self).__name__}] {target.name} has a SET or RigL already, which moves blocks")
            if (owner := owner_of(target)) is not None:
                raise ValueError(
                    f"[{type(self).__name__}] {target.name} has a {type(owner).__name__} already: leave it out by "
                    "ignore, or call its squash_mask() first"
                )
        self._check_targets(targets)
        if self.compact_at:
            need_places(type(self).__name__, targets)
        allowed = blocks_left(targets) if masks is None else check_masks(targets, masks)
        self._warn_of_losses(targets)
        try:
            for target in targets:
                own(target, self)
                self.layers[target.name] = Layer(target, allowed[target.name])
            self._prepared(model)
            self._model = model
            for name, layer in self.layers.items():
                layer.hook(self._on_gradient)
                layer.choose(allowed[name])
            if self.schedule.acts_at(0):
                self._choose()
        except BaseException:  # no memory, say, or a wrong schedule: the model is left as it was
            self._undo()
            raise
        return model

    def _undo(self) -> None:
        """Takes away what `prepare` and `_prepared` have put into the model."""
        for layer in self.layers.values():
            layer.unhook()
            disown(layer.target)
        self.layers, self._model = {}, None

    def __deepcopy__(self, memo: dict[int, Any]) -> Pruner:
        """One that has copies of the layers, and is attached to no optimizer: those that it has know nothing of it."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy({**vars(self), "_handles": [], "_optimizers": ()}, memo))
        made._take_copies()
        return made

    def _take_copies(self) -> None:
        """Has the layers of a copy mask their gradients in its name."""
        for layer in self.layers.values():
            claim(layer.target.module, layer.target.parameter_name, self)
            layer.unhook()  # a copied parameter has no hooks
            layer.hook(self._on_gradient)

    def _warn_of_losses(self, targets: list[Target]) -> None:
        final = getattr(self.schedule, "final_sparsity", None)
        if final is None or self.scope == "global":
            return
        if lost := [target.name for target in targets if live_blocks(math.prod(target.grid), final) == 0]:
            warnings.warn(
                f"[{type(self).__name__}] at sparsity {final} no block is left of {', '.join(lost)}: take smaller "
                "blocks, or leave out by ignore what has so few",
                stacklevel=3,
            )
            self._said |= set(lost)

    def attach(self, *optimizers: Optimizer) -> None:
        """Has `step` called after each step of the optimizer. Several: in the order in which they step.

        Raises:
            ValueError: no optimizer holds the parameter of a layer (the message names it).
            RuntimeError: `prepare` was not called before, or it is attached already.
        """
        op = type(self).__name__
        if not self.layers:
            raise RuntimeError(f"[{op}] call prepare(model) before attach(optimizer)")
        if self._optimizers:
            raise RuntimeError(f"[{op}] is attached already: call detach() first")
        if not optimizers:
            raise TypeError(f"[{op}] attach needs an optimizer")
        inner = tuple(inner_optimizer(op, optimizer) for optimizer in optimizers)
        held = {id(p) for optimizer in inner for group in optimizer.param_groups for p in group["params"]}
        if missing := [name for name, parameter in self._trained().items() if id(parameter) not in held]:
            raise ValueError(
                f"[{op}] the optimizer does not hold the parameter of {', '.join(missing)}: give it, or leave out by "
                "ignore what is not trained"
            )
        for layer in self.layers.values():  # a state that was assigned brings parameters of its own
            layer.hook(self._on_gradient)
        self._optimizers = inner
        self._handles = [
            inner[0].register_step_pre_hook(self._before),
            inner[-1].register_step_post_hook(lambda optimizer, args, kwargs: self._after_step(optimizer)),
        ]

    def detach(self) -> None:
        """Ends that. Gates stay, and their gradients stay zero."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._optimizers = [], ()

    def step(self) -> None:
        """What an attached pruner does by itself: call it after each step of the optimizer.

        Raises:
            RuntimeError: it is attached, or `prepare` was not called before.
        """
        if self._optimizers or not self.layers:
            why = "is attached to an optimizer, which calls step itself" if self.layers else "call prepare(model) first"
            raise RuntimeError(f"[{type(self).__name__}] {why}")
        if self.compact_at:
            raise RuntimeError(f"[{type(self).__name__}] compact_at needs attach(optimizer), whose state moves, too")
        self._step()

    # ---- What subclasses say -----------------------------------------------------------------------------------------

    def _check_targets(self, targets: list[Target]) -> None:
        """Raises ValueError if one cannot be had."""

    def _prepared(self, model: nn.Module) -> None:
        """Called once, with all layers."""

    def _check_copy(self, model: nn.Module) -> None:
        """Raises ValueError if it is a copy of the model whose parameters are not what the model computes with."""

    def _settle(self) -> None:
        """Makes the parameters what the model computes with, if they are not."""

    # ---- What came of it ---------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether the last step of the schedule has been."""
        return self.steps >= self.schedule.end_step and not self._due

    @property
    def attached(self) -> bool:
        """Whether an optimizer calls `step`."""
        return bool(self._optimizers)

    def masks(self) -> Masks:
        """{name: bool [out_blocks, in_blocks]}: which blocks are live. Empty before `prepare`."""
        return {name: layer.mask.clone() for name, layer in self.layers.items()}

    @torch.no_grad()
    def report(self, *, seen: Mapping[str, Seen] | None = None, tokens: int = 512) -> Report:
        """Per layer: sparsity, density, the share of the norm kept, its time now and as a block-sparse layer.

        Args:
            seen: what layers are fed, for the times: see `watch`.
            tokens: rows of x for layers that it does not tell of. 0: nothing is timed, which takes 0.1 s a kind.

        Raises:
            RuntimeError: there is no model: `prepare` was not called, or `convert` or `squash_mask` has ended it.
        """
        self._need_model("report")
        tokens = to_count("tokens", tokens, type(self).__name__)
        rows, times = [], layer_times(self.targets, self.masks(), seen, tokens) if tokens or seen else {}
        for name, layer in self.layers.items():
            mask = layer.mask
            numbers = (layer.target.block_size, mask.numel(), int(mask.sum()), layer.norm_kept())
            rows.append(Row(name, layer.target.sizes, *numbers, *times.get(name, (None, None))))
        return Report(self.steps, rows)

    def convert(self, model: nn.Module, min_speedup: float = 1.0, **options: Any) -> nn.Module:
        """`convert` with this pruner's masks, then `squash_mask`: block-sparse layers where they are measured faster.

        Where it raises, no layer was replaced, and the pruner goes on (an `L0` without its gates).

        Args:
            model: the one that was prepared, or a copy (of an `L0` one that was made behind the end of its schedule).
            min_speedup: times before / after from which on a layer is replaced.
            options: of `convert`: `example`, `seen`, `tokens`, `forward`, `timings`, `progress`.

        Raises:
            RuntimeError: there is no model, as in `report`.
            ValueError: as `convert`.
        """
        self._need_model("convert")
        self._check_copy(model)
        self._settle()
        options["_owner"] = self
        made = convert(model, self.masks(), block_size=self.block_size, min_speedup=min_speedup, **options)
        self.squash_mask()
        return made

    def squash_mask(self) -> None:
        """Takes gates and hooks off: an ordinary model is left, with zeros in it. The pruner has ended then."""
        self._settle()
        self.detach()
        self._undo()

    def _need_model(self, verb: str) -> None:
        if not self.layers:
            raise RuntimeError(f"[{type(self).__name__}] {verb} needs a model: call prepare(model) first")
