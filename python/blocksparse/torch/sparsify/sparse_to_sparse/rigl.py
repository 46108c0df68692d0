"""`RigL`: blocks grow where the gradient of a dense weight is largest."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...autograd.taps import Listener, listen
from ...modules.deep_update import DeepUpdateLSTM
from ...modules.layer import BlockSparseLayer
from ...modules.lstm import MultiplicativeLSTM
from .exchange import Candidates, CosineDrop, best_candidates, best_of_strips
from .rewiring import Rewiring

_FUSED = (DeepUpdateLSTM, MultiplicativeLSTM)  # whose ops tell nothing of what is inside


class RigL(Rewiring):
    """Blocks of the lowest norms go, and come where the gradient of a dense weight has the largest. See `Rewiring`.

    At steps that act, and at no other, x and dy of each layer are looked at in the backward pass: in the last one, if
    gradients of several are added up. Until its end they stay in memory; for a layer of more than 2^24 places, which is
    scored strip by strip, until the step. Layers in compiled graphs cannot be looked at: run such steps under
    `torch.compiler.set_stance("force_eager")`. A layer that has taken no part stays as it is.

    Args:
        schedule: see `Rewiring`, as for all below.
        grow: "exact": block norms of the full dW (`grow_scores`); "bound": from above, at 1 / b^2 of the cost
            (`grow_bound`).
        targets: which layers.
        ignore: which ones not.
        seed: not used, as nothing is random.
        process_group: whose scores are averaged; each process scores its own part of the batch.

    Source: Evci et al., "Rigging the lottery: making all tickets winners", arXiv:1911.11134 (2019), by blocks. Blocks
    that go do not come back at once.
    """

    def __init__(self, schedule: CosineDrop, grow: str = "exact", **options: Any) -> None:
        super().__init__(schedule, **options)
        if grow not in ("exact", "bound"):
            raise ValueError(f"[RigL] grow is {grow!r}, needs 'exact' or 'bound'")
        self.grow = grow
        self._observed = self._told = False
        # x and dy by backward pass, of which one may run inside of another, and by layer
        self._pairs: dict[int, dict[int, list[tuple[Tensor, Tensor]]]] = {}
        # Of the last backward pass that came by, by layer: scores of all places; x and dy of a layer of many places.
        self._seen: dict[int, Tensor | tuple[list[Tensor], list[Tensor]]] = {}

    def _check_layer(self, model: nn.Module, path: str, module: BlockSparseLayer) -> None:
        for name, parent in model.named_modules():
            if isinstance(parent, _FUSED) and path.startswith(f"{name}." if name else ""):
                raise ValueError(
                    f"[RigL] {path} is multiplied inside of the one op of a {type(parent).__name__}, which shows no x "
                    "and dy: leave it out by ignore, or take SET"
                )

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Looks at x and dy of backward passes inside, whatever the schedule says: for steps that are captured."""
        self._need_model()
        self._observe(True)
        try:
            yield
        finally:
            self._look_ahead()

    def _unattached(self) -> dict[str, Any]:
        return {**super()._unattached(), "_observed": False, "_pairs": {}, "_seen": {}}

    def _observe(self, on: bool) -> None:
        if on and not self._observed:
            self._seen.clear()
            self._pairs.clear()
        if on or self._observed:
            for i, layer in enumerate(self._layers):
                listen(layer.module.weight, self._listener(i) if on else None)
        self._observed = on

    def _listener(self, i: int) -> Listener:
        itself = weakref.ref(self)  # for listeners are in a list of all

        def hear(x: Tensor, dy: Tensor) -> None:
            if (rigl := itself()) is not None:
                rigl.note(i, x, dy)

        return hear

    def note(self, i: int, x: Tensor, dy: Tensor) -> None:
        """Keeps x and dy of layer i until this backward pass ends."""
        task = torch._C._current_graph_task_id()
        if task not in self._pairs:
            self._pairs[task] = {}
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._score, task))
        self._pairs[task].setdefault(i, []).append((x.detach(), dy.detach()))

    @torch.no_grad()
    def _score(self, task: int) -> None:
        with torch.autocast(self._device.type, enabled=False):
            for i, pairs in self._pairs.pop(task, {}).items():
                xs, dys = (list(part) for part in zip(*reversed(pairs), strict=True))
                layer = self._layers[i]
                self._seen[i] = (xs, dys) if layer.has_many_places else layer.scores(xs, dys, self.grow).float()

    @torch.no_grad()
    def _candidates(self) -> tuple[list[Candidates], Tensor]:
        has = [i in self._seen for i in range(len(self._layers))]
        if not any(has) and not self._world:
            raise RuntimeError(
                "[RigL] no backward pass came by at a step that acts. Layers in compiled graphs cannot be looked at: "
                'run such steps under torch.compiler.set_stance("force_eager"), captured ones in observing()'
            )
        if not all(has) and not self._told:
            self._told = True
            names = ", ".join(layer.name for layer, h in zip(self._layers, has, strict=True) if not h)
            warnings.warn(f"[RigL] no gradient came to {names} at a step that acts: left as it is", stacklevel=4)
        whole = {i: self._scores(i) for i, layer in enumerate(self._layers) if not layer.has_many_places}
        there = torch.stack([torch.full((), float(h), device=self._device) for h in has])
        if self._world:
            *sums, there = self._world.sum([*whole.values(), there])
            whole = {i: part / there[i].clamp_min(1) for i, part in zip(whole, sums, strict=True)}
        made = [
            best_candidates(whole[i], layer.places, layer.most)
            if i in whole
            else best_of_strips(self._strips(i, there[i]), layer.places, layer.most)
            for i, layer in enumerate(self._layers)
        ]
        self._seen.clear()
        self._pairs.clear()  # of passes that broke
        return made, there > 0

    def _scores(self, i: int) -> Tensor:
        """Of all places of a layer; 0 where no gradient came to it."""
        size = self._layers[i].grid[0] * self._layers[i].grid[1]
        seen = self._seen.get(i, torch.zeros(size, device=self._device))
        assert isinstance(seen, Tensor)
        return seen

    def _strips(self, i: int, count: Tensor) -> Iterator[Tensor]:
        """Likewise, strip by strip, a mean over `count` processes."""
        layer, seen = self._layers[i], self._seen.get(i)
        if seen is None:  # other processes may have seen some
            nothing = [torch.zeros(0, size, device=self._device) for size in layer.module.layout.sizes]
            seen = (nothing[1:], nothing[:1])
        assert isinstance(seen, tuple)
        with torch.autocast(self._device.type, enabled=False):
            for strip in layer.strips(*seen, self.grow):
                yield self._world.sum([strip.float()])[0] / count.clamp_min(1) if self._world else strip.float()
