"""`sparsify_`: a trained model made sparse at once, without training."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ...._core.arguments import shown, to_list, to_number
from ....schedules import check_sparsity
from ...modes import evaluating
from ..batches import Forward, feed
from ..progress import bar
from ..weights.masks import Masks, check_scope, choose_blocks, warn_of_empty
from ..weights.targets import Choices, Target, find_targets
from .layer_inputs import edges_of, matrix_of, rows_of, set_matrix_
from .scores import DAMP, damped, obs_scores, refit, wanda_scores

_version_of: Any = Tensor._version.__get__  # type: ignore[attr-defined]  # counts what is written into a tensor
METHODS = ("magnitude", "wanda", "obs")


def sparsify_(
    model: nn.Module,
    method: str,
    *,
    sparsity: float,
    block_size: int = 32,
    calibration: Iterable[Any] | None = None,
    targets: Choices = None,
    ignore: Choices = (),
    scope: str = "layer",
    forward: Forward = None,
    damp: float = DAMP,
    progress: bool | None = None,
) -> Masks:
    """Zeroes blocks of the weights of a model, in place, by one look at each. ::

        masks = bss.sparsify_(model, "obs", sparsity=0.5, block_size=32, calibration=loader)
        model = bss.convert(model, masks, example=batch)

    "magnitude" drops the blocks of the smallest Frobenius norms. "wanda" and "obs" run the model over the calibration
    data: see `wanda_scores`, `obs_scores` and `refit`, by which "obs" adapts the blocks that stay.

    With scope "layer" they go through the model as SparseGPT does: part by part, in the order in which the model calls
    them, each part looking at inputs that sparse parts before it have made, which are the inputs that it will get. A
    part is what has its names up to the first number in common, as the layers of a transformer have
    ("encoder.layer.3"). Its layers are sparsified together: a pass over the data for each part, not for each layer.

    With scope "global" blocks of all layers are ranked together by what they are of the dense model: by norm, or by
    scores as shares of |X W^T|^2. "obs" then refits part by part.

    Nothing but the weights is changed, and if something fails, nothing at all.

    Args:
        model: is run in eval mode.
        method: "magnitude", "wanda" or "obs".
        sparsity: share of blocks to drop, at least 0 and below 1: floor(blocks * sparsity + 0.5) of them, of a layer or
            of all. Of equal scores the last ones go.
        block_size: edge of a block; our own modules keep theirs.
        calibration: batches, kept in memory while this runs; needed by "wanda" and "obs". A few ten thousand tokens do.
        targets: see `find_targets`.
        ignore: see `find_targets`.
        scope: "layer": every layer loses the same share; "global": all are ranked together. A warning names layers that
            lose all of their blocks.
        forward: how the model is called, forward(model, batch). None: model(**batch) for a mapping, model(*batch) for a
            tuple or list, else model(batch).
        damp: of H in "obs": share of its mean diagonal.
        progress: whether to show a bar. None: on a terminal.

    Returns:
        The masks, {name: bool [out_blocks, in_blocks]}, on the weights' devices.

    Raises:
        TypeError: calibration is one batch, or none that can be gone through.
        ValueError: there is no such method or scope, the sparsity is outside of [0, 1), calibration is missing or
            empty, damp is not above 0, a weight is NaN or Inf, a layer is not called, or is fed nothing, NaN or Inf, or
            as `find_targets`.
    """
    if method not in METHODS:
        raise ValueError(f"[sparsify_] method is {shown(method)}, needs one of {', '.join(METHODS)}")
    check_scope("sparsify_", scope)
    sparsity = check_sparsity("sparsify_", "sparsity", sparsity)
    if not to_number("sparsify_", "damp", damp) > 0:
        raise ValueError(f"[sparsify_] damp is {shown(damp)}, needs a number above 0")
    if method != "magnitude" and calibration is None:
        raise ValueError(f"[sparsify_] {method} needs calibration: batches to run the model over")
    if isinstance(calibration, Tensor | Mapping):
        raise TypeError(f"[sparsify_] calibration is one {type(calibration).__name__}, needs a list of batches")
    found = find_targets(model, block_size, targets, ignore)
    if bad := [target.name for target in found if not bool(target.norms().isfinite().all())]:
        raise ValueError(
            f"[sparsify_] {', '.join(bad)} {'has' if len(bad) == 1 else 'have'} weights that are NaN or Inf"
        )
    if method == "magnitude":
        masks = _best({t.name: t.norms() for t in found}, found, sparsity, scope)
        for target in found:
            target.keep_(target.parameter.data, masks[target.name])
        warn_of_empty("sparsify_", masks)
        return masks
    batches = to_list("sparsify_", "calibration", calibration, "batches, such as a loader's")
    if not batches:
        raise ValueError(f"[sparsify_] calibration holds no batch, which {method} needs")
    run = _Run(model, method, batches, forward, damp, found)
    with _restored_on_error(found), evaluating(model), bar(progress, len(run.parts), method, "part") as done:
        masks = run.sparsify(sparsity, scope, done)
    warn_of_empty("sparsify_", masks)
    return masks


def _best(scores: Mapping[str, Tensor], targets: Iterable[Target], sparsity: float, scope: str) -> Masks:
    """The best blocks of those that the weights have memory for."""
    present = {target.name: target.present() for target in targets}
    ranked = {name: score.masked_fill(~present[name], -math.inf) for name, score in scores.items()}
    return {name: mask & present[name] for name, mask in choose_blocks(ranked, sparsity, scope).items()}


# ---- Part by part --------------------------------------------------------------------------------------------------


class _Enough(Exception):  # noqa: N818  no error: the rest of the model has nothing to tell
    pass


class _Run:
    """One `sparsify_` with calibration."""

    def __init__(
        self, model: nn.Module, method: str, batches: list[Any], forward: Forward, damp: float, targets: list[Target]
    ) -> None:
        self.model, self.method, self.batches, self.forward, self.damp = model, method, batches, forward, damp
        self.targets = targets
        with evaluating(model):
            self.parts = _parts(targets, self._called())

    def sparsify(self, sparsity: float, scope: str, done: Callable[[], None]) -> Masks:
        """The masks; the model is then sparse."""
        masks: Masks = {}
        if scope == "global":
            grams = self._grams(self.targets)
            shares = {t.name: self._share(t, grams[t.name]) for t in self.targets}
            masks = _best(shares, self.targets, sparsity, scope)
        for part in self.parts:
            grams = {} if scope == "global" and self.method == "wanda" else self._grams(part)
            for target in part:
                if scope == "layer":
                    scores = {target.name: self._scores(target, grams[target.name])}
                    masks |= _best(scores, [target], sparsity, scope)
                self._apply(target, masks[target.name], grams.pop(target.name, None))
            done()
        return {target.name: masks[target.name] for target in self.targets}

    def _scores(self, target: Target, gram: Tensor) -> Tensor:
        matrix, edges = matrix_of(target), edges_of(target)
        if self.method == "wanda":
            return wanda_scores(matrix, gram.sqrt(), edges)
        return obs_scores(matrix, gram, edges)

    def _share(self, target: Target, gram: Tensor) -> Tensor:
        """The scores as shares of |X W^T|^2, which layers with large inputs have not more of than others."""
        scores, w = self._scores(target, gram), matrix_of(target).double()
        whole = scores.sum() if self.method == "wanda" else (w @ gram * w).sum()
        return scores / whole if whole > 0 else scores

    def _apply(self, target: Target, mask: Tensor, gram: Tensor | None) -> None:
        if self.method == "wanda" or gram is None:
            target.keep_(target.parameter.data, mask)
        else:
            set_matrix_(target, refit(matrix_of(target), gram, mask, edges_of(target)))

    def _grams(self, part: list[Target]) -> dict[str, Tensor]:
        """Of each target's inputs: H, damped, for "obs", its diagonal for "wanda"."""
        sums: dict[str, Tensor] = {}
        fed: set[nn.Module] = set()
        by_module: dict[nn.Module, list[Target]] = {}
        for target in part:
            by_module.setdefault(target.module, []).append(target)

        last: list[Any] = [None, -1, None]  # an input, its version, its sum: query, key and value share theirs

        def add(module: nn.Module, inputs: Any, output: Any) -> None:
            if not isinstance(inputs[0], Tensor) or inputs[0].numel():
                fed.add(module)
            for target in by_module[module]:
                plain = target.parameter.dim() == 2 and not isinstance(module, nn.LSTM)
                plain = plain and not inputs[0].is_inference()
                if not (plain and last[0] is inputs[0] and last[1] == _version_of(last[0])):
                    last[2] = sum(map(self._sum, rows_of(target, inputs, output)))
                    last[:2] = (inputs[0], _version_of(inputs[0])) if plain else (None, -1)
                sums[target.name] = sums[target.name] + last[2] if target.name in sums else last[2]

        def stop(module: nn.Module, inputs: Any) -> None:
            raise _Enough

        behind = [p for p in self.parts[self.parts.index(part) + 1 :]] if part in self.parts else []
        later = {target.module for other in behind[:1] for target in other} - by_module.keys()
        handles = [module.register_forward_hook(add) for module in by_module]
        handles += [module.register_forward_pre_hook(stop) for module in later]
        try:
            for batch in self.batches:
                with suppress(_Enough):
                    feed(self.model, batch, self.forward)
        finally:
            for handle in handles:
                handle.remove()
        for target in part:
            if target.name not in sums:
                raise ValueError(f"[sparsify_] the model calls {target.name} on its first batch, then never again")
            if target.module not in fed:
                raise ValueError(f"[sparsify_] {target.name} is fed no rows by the calibration data")
            if not bool(torch.isfinite(sums[target.name]).all()):
                raise ValueError(f"[sparsify_] {target.name} is fed NaN or Inf by the calibration data")
        return sums if self.method == "wanda" else {name: damped(gram, self.damp) for name, gram in sums.items()}

    def _sum(self, rows: Tensor) -> Tensor:
        x = rows if rows.dtype == torch.float64 else rows.float()
        return (x.t() @ x if self.method == "obs" else x.square().sum(0)).double()

    def _called(self) -> list[nn.Module]:
        """The targets' modules in the order of their calls on the first batch."""
        calls: list[nn.Module] = []
        modules = {target.module for target in self.targets}
        handles = [m.register_forward_pre_hook(lambda module, _: calls.append(module)) for m in modules]
        try:
            feed(self.model, self.batches[0], self.forward)
        finally:
            for handle in handles:
                handle.remove()
        if missing := [target.name for target in self.targets if target.module not in calls]:
            raise ValueError(
                f"[sparsify_] the model does not call {', '.join(missing)} on the calibration data: leave them out by "
                "ignore"
            )
        return calls


def _parts(targets: list[Target], calls: list[nn.Module]) -> list[list[Target]]:
    """The targets by parts of the model, in the order of the calls. Parts that call each other in turn become one."""
    names = {target.module: _part_of(target.path) for target in targets}
    spans: dict[str, tuple[int, int]] = {}
    for i, module in enumerate(calls):
        first, _ = spans.get(names[module], (i, i))
        spans[names[module]] = (first, i)
    parts: list[list[Target]] = []
    end = -1
    for name, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        own = [target for target in targets if names[target.module] == name]
        if first < end:
            parts[-1] += own
        else:
            parts.append(own)
        end = max(end, last)
    return parts


def _part_of(path: str) -> str:
    """The name up to the first number in it: "encoder.layer.3" of "encoder.layer.3.output.dense"."""
    found = re.match(r"(?:.*?\.)?\d+(?=\.|$)", path)
    return found.group() if found else path


@contextmanager
def _restored_on_error(targets: list[Target]) -> Iterator[None]:
    """Puts all weights back if something fails."""
    saved = [target.parameter.detach().to("cpu", copy=True) for target in targets]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for target, values in zip(targets, saved, strict=True):
                target.parameter.copy_(values)
        raise
