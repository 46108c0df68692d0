"""Which weights of a model can be made sparse, and what they look like as matrices."""

from __future__ import annotations

import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...._core.arguments import need, to_int
from ....layout import Layout
from ...modules.conv import DENSE, DENSE_TRANSPOSED
from ...modules.layer import BlockSparseLayer
from .norms import block_norms, block_views

Choice = str | re.Pattern[str] | type[nn.Module] | Callable[[str, nn.Module], bool]
Choices = Choice | Collection[Choice] | None

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
BLOCK_SIZES = (8, 16, 32, 64, 128)


@dataclass(eq=False)
class Target:
    """A weight of a model, seen as a matrix [out, in] in blocks.

    Masks and norms are over its grid, [out_blocks, in_blocks]. Dense weights have every block of the grid; those of our
    own block-sparse modules have the blocks of their layout, at the layout's block size.
    """

    name: str
    """The module's, and the parameter's behind it unless that is `weight`: "encoder.0.fc1", "rnn.weight_hh_l0"."""
    path: str
    """The module's name in the model."""
    module: nn.Module
    parameter_name: str
    block_size: int
    exchanged: bool = False
    """Whether the parameter lies as [in, out, ...]: transformers' Conv1D, transposed convolutions."""
    _places: tuple[Layout, Tensor, Tensor] | None = field(default=None, repr=False)

    @property
    def module_name(self) -> str:
        """The path as messages show it: a model that is one layer has none."""
        return self.path or f"the {type(self.module).__name__}"

    @property
    def parameter(self) -> nn.Parameter:
        """The weight, whatever tensor the module has for it now."""
        return cast(nn.Parameter, getattr(self.module, self.parameter_name))

    @property
    def layout(self) -> Layout | None:
        """That of one of our own modules; None: the weight is dense."""
        return self.module.layout if isinstance(self.module, BlockSparseLayer) else None

    @property
    def sizes(self) -> tuple[int, int]:
        """(out, in), in features or channels."""
        if self.layout is not None:
            return self.layout.sizes
        out, in_ = self.parameter.shape[:2]
        return (in_, out) if self.exchanged else (out, in_)

    @property
    def grid(self) -> tuple[int, int]:
        """(out_blocks, in_blocks)."""
        out, in_ = self.sizes
        return -(-out // self.block_size), -(-in_ // self.block_size)

    def matrix(self, tensor: Tensor | None = None) -> Tensor:
        """A view of a tensor of the parameter's shape as [out, in], or a filter's as [out, in, size...].

        Without a tensor, of the parameter's own data.

        Raises:
            ValueError: the weight is one of our own modules', which has blocks: see `blocks`.
        """
        if self.layout is not None:
            raise ValueError(f"[sparsify] {self.name} is block-sparse already, and has blocks in place of a matrix")
        tensor = self.parameter.detach() if tensor is None else tensor
        return tensor.transpose(0, 1) if self.exchanged else tensor

    def blocks(self, tensor: Tensor | None = None) -> Tensor:
        """The values [blocks, b, b] (filters: [blocks, taps, b, b]) of one of our own modules."""
        if self.layout is None:
            raise ValueError(f"[sparsify] {self.name} is dense, and has a matrix in place of blocks")
        return self.parameter.detach() if tensor is None else tensor

    def places(self) -> tuple[Tensor, Tensor]:
        """(out, in) int64 [blocks] on the weight's device: where the blocks of one of our own modules are."""
        layout, device = self.layout, self.parameter.device
        assert layout is not None
        if self._places is None or self._places[0] is not layout or self._places[1].device != device:
            out, in_ = (torch.from_numpy(a).to(device, torch.int64) for a in layout.coordinates())
            self._places = layout, out, in_
        return self._places[1:]

    def present(self) -> Tensor:
        """Bool [out_blocks, in_blocks]: which blocks the weight has memory for."""
        if self.layout is None:
            return torch.ones(self.grid, dtype=torch.bool, device=self.parameter.device)
        mask = torch.zeros(self.grid, dtype=torch.bool, device=self.parameter.device)
        mask[self.places()] = True
        return mask

    def norms(self, p: float = 2, tensor: Tensor | None = None) -> Tensor:
        """`block_norms` of a tensor of the parameter's shape, the parameter's own data by default; 0 where none is."""
        if self.layout is None:
            return block_norms(self.matrix(tensor), self.block_size, p)
        values = self.blocks(tensor).flatten(1)
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        norms = torch.zeros(self.grid, dtype=dtype, device=values.device)
        norms[self.places()] = torch.linalg.vector_norm(values, ord=p, dim=1, dtype=dtype)
        return norms

    def views(self, tensor: Tensor) -> Iterator[tuple[Tensor, Any]]:
        """(view, place) pairs: views of a tensor of the parameter's shape in blocks, for all of them in turn.

        `spread(grid_tensor[place], view)` has an entry of the grid at each number of its block.
        """
        if self.layout is not None:
            yield self.blocks(tensor), self.places()
        else:
            yield from block_views(self.matrix(tensor), self.block_size)

    @torch.no_grad()
    def keep_(self, tensor: Tensor, mask: Tensor) -> Tensor:
        """Zeroes the blocks of a tensor of the parameter's shape where the mask [out_blocks, in_blocks] is False."""
        bits = _BITS[tensor.dtype]
        keep = mask.to(bits).neg_()  # all bits or none: 0 x NaN would be NaN, and masked_fill_ takes 4 times as long
        for view, place in self.views(tensor):
            view.view(bits).bitwise_and_(spread(keep[place], view))
        return tensor

    def times(self, tensor: Tensor, factors: Tensor) -> Tensor:
        """A tensor of the parameter's shape, each block times its factor [out_blocks, in_blocks]. Differentiable."""
        return tensor * self._over(tensor, factors.to(tensor.dtype))

    def kept(self, tensor: Tensor, mask: Tensor) -> Tensor:
        """A tensor of the parameter's shape with zeros in the blocks where the mask is False. Differentiable."""
        if torch.is_grad_enabled() and tensor.requires_grad:
            return tensor.masked_fill(self._over(tensor, mask.logical_not()), 0)
        return self.keep_(tensor.clone(), mask)

    def _over(self, tensor: Tensor, grid: Tensor) -> Tensor:
        """An entry for each number of a tensor of the parameter's shape, or one that broadcasts over it."""
        if self.layout is not None:
            return spread(grid[self.places()], tensor)
        (out, in_), b = self.sizes, self.block_size
        full = grid.repeat_interleave(b, 0, output_size=len(grid) * b)[:out]
        full = full.repeat_interleave(b, 1, output_size=grid.size(1) * b)[:, :in_]
        full = full.T if self.exchanged else full
        return full.view(*full.shape, *(1,) * (tensor.dim() - 2)) if tensor.dim() > 2 else full

    @torch.no_grad()
    def scale_(self, tensor: Tensor, factors: Tensor) -> Tensor:
        """Multiplies each block of a tensor of the parameter's shape by its factor [out_blocks, in_blocks]."""
        for view, place in self.views(tensor):
            view.mul_(spread(factors[place], view))  # in float32: bfloat16 has nothing between 0.996 and 1
        return tensor

    @torch.no_grad()
    def copy_(self, tensor: Tensor, source: Tensor, mask: Tensor) -> Tensor:
        """Takes the blocks where the mask is True from a source of the same shape."""
        for (view, place), (other, _) in zip(self.views(tensor), self.views(source), strict=True):
            view.copy_(torch.where(spread(mask[place], view), other, view))
        return tensor


def spread(grid: Tensor, view: Tensor) -> Tensor:
    """An entry for each block, shaped so that it broadcasts over a view of `Target.views` or `block_views`."""
    if grid.dim() == 1:
        return grid.view(-1, *(1,) * (view.dim() - 1))
    return grid.view(grid.size(0), 1, grid.size(1), *(1,) * (view.dim() - 3))


# ---- Choosing ------------------------------------------------------------------------------------------------------


def find_targets(model: nn.Module, block_size: int = 32, targets: Choices = None, ignore: Choices = ()) -> list[Target]:
    """The weights of a model that can be made sparse, in the model's order.

    These are the weights of `torch.nn` Linear, convolutions and transposed ones without groups, transformers' Conv1D,
    the recurrent weights of `torch.nn.LSTM`, and those of our own block-sparse modules, which keep their block size.
    Weights that are tied, quantised, or computed by something else (parametrized, say) are left out, with one warning
    that names them.

    Args:
        model: is not changed.
        block_size: edge of a block: 8, 16, 32, 64 or 128.
        targets: regular expressions, found anywhere in a module's name; types of modules; functions of name and module;
            one of them, or several, of which one has to fit. None: all whose features are a block at least on either
            side.
        ignore: the same; what fits is left out.

    Raises:
        ValueError: there is no such block size, an expression of `targets` fits no weight (the message lists what there
            is), nothing is left, a weight that was asked for is smaller than a block, or a hidden size is no multiple
            of the block size.
        TypeError: a choice is none of those.
    """
    need("sparsify", "model", model, nn.Module, "a torch.nn.Module")
    if to_int("block_size", block_size, op="sparsify") not in BLOCK_SIZES:
        raise ValueError(f"[sparsify] block_size is {block_size}, needs one of {', '.join(map(str, BLOCK_SIZES))}")
    wanted = None if targets is None else _choices("targets", targets)
    spared = _choices("ignore", ignore)
    all_there = list(candidates(model, block_size))
    for choice in wanted or ():
        if not any(_fits(choice, t) for t, _ in all_there):
            raise ValueError(f"[sparsify] targets has {_text(choice)}, which fits no weight; {_list(all_there)}")
    for choice in spared:
        if not any(_fits(choice, name, module) for name, module in _names(model)):
            warnings.warn(f"[sparsify] ignore has {_text(choice)}, which fits no module", stacklevel=2)
    found, left = [], []
    for target, wrong in all_there:
        if any(_fits(choice, target) for choice in spared):
            continue
        if wanted is None and not wrong and min(target.sizes) < target.block_size:
            continue
        if wanted is not None and not any(_fits(choice, target) for choice in wanted):
            continue
        if not wrong and (unfit := _unfit(target)):
            if wanted is not None:
                raise ValueError(f"[sparsify] {target.name} {unfit}: leave it out by ignore, or take other blocks")
            wrong = unfit
        if wrong:
            left.append(f"{target.name} ({wrong})")
        else:
            found.append(target)
    if left:
        warnings.warn(f"[sparsify] left alone: {', '.join(left)}", stacklevel=2)
    if not found:
        raise ValueError(f"[sparsify] no weight is left to make sparse in blocks of {block_size}; {_list(all_there)}")
    return found


def target_of(module: nn.Module, block_size: int, name: str = "") -> Target:
    """The one weight of a layer as a target.

    Raises:
        ValueError: the layer has none that can be made sparse, or several.
    """
    found = list(_weights_of(name, module, block_size))
    if len(found) != 1:
        raise ValueError(f"[sparsify] a {type(module).__name__} has {len(found)} weights to make sparse, needs one")
    return found[0]


def _unfit(target: Target) -> str:
    """Why a weight cannot have such blocks; "" if it can."""
    (out, in_), b = target.sizes, target.block_size
    if min(out, in_) < b:
        return f"is {out} x {in_} (out x in), smaller than a block of {b}"
    if isinstance(target.module, nn.LSTM) and target.module.hidden_size % b:
        return f"has hidden_size {target.module.hidden_size}, needs a multiple of {b}"
    return ""


def _choices(name: str, given: Choices) -> list[Choice]:
    one = isinstance(given, str | re.Pattern | type) or callable(given)
    choices = [cast(Choice, given)] if one else given
    if not isinstance(choices, Collection):
        choices = [cast(Choice, given)]
    compiled: list[Choice] = []
    for choice in choices:
        if isinstance(choice, str):
            try:
                compiled.append(re.compile(choice))
            except re.error as error:
                raise ValueError(f"[sparsify] {name} has {choice!r}, needs a regular expression: {error}") from None
        elif isinstance(choice, re.Pattern | type) or (callable(choice) and _takes_two(choice)):
            compiled.append(choice)
        else:
            raise TypeError(
                f"[sparsify] {name} has {choice!r}, needs a regular expression, a type of module or a function of name "
                "and module"
            )
    return compiled


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind("name", "module")
    except TypeError:
        return False
    except ValueError:  # nobody can tell, as of some builtins
        pass
    return True


def _fits(choice: Choice, what: Target | str, module: nn.Module | None = None) -> bool:
    name, module = (what.name, what.module) if isinstance(what, Target) else (what, module)
    if isinstance(choice, re.Pattern):
        return choice.search(name) is not None
    if isinstance(choice, type):
        return isinstance(module, choice)
    return bool(cast(Callable[..., bool], choice)(name, module))


def _text(choice: Choice) -> str:
    return repr(choice.pattern) if isinstance(choice, re.Pattern) else getattr(choice, "__name__", repr(choice))


def _names(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules(remove_duplicate=False):
        yield path, module
        for name, _ in module.named_parameters(recurse=False):
            yield _joined(path, name), module


def _list(there: Collection[tuple[Target, str]]) -> str:
    names = [f"{target.name} {target.sizes[0]} x {target.sizes[1]}" for target, wrong in there if not wrong]
    return f"the model has {', '.join(names)}" if names else "the model has none that can be made sparse"


# ---- What there is -------------------------------------------------------------------------------------------------


def candidates(model: nn.Module, block_size: int) -> Iterator[tuple[Target, str]]:
    """All weights that could be targets, and what keeps each from being one; "" if nothing does."""
    uses = Counter(_place(p) for m in model.modules() for p in m.parameters(recurse=False))
    for path, module in model.named_modules():
        for target in _weights_of(path, module, block_size):
            yield target, _wrong(target, uses)


def _place(parameter: nn.Parameter) -> Any:
    """Two parameters of one place are tied: `head.weight.data = embedding.weight.data` makes such ones."""
    plain = type(parameter) is nn.Parameter and type(parameter.data) is Tensor and not parameter.is_meta
    return (parameter.device, parameter.data_ptr()) if plain and parameter.numel() else id(parameter)


def _weights_of(path: str, module: nn.Module, block_size: int) -> Iterator[Target]:
    if isinstance(module, nn.LSTM):
        for name, _ in module.named_parameters(recurse=False):
            if name.startswith("weight_hh"):
                yield Target(_joined(path, name), path, module, name, block_size)
        return
    exchanged = isinstance(module, DENSE_TRANSPOSED) or _is_transformers_conv1d(module)
    if isinstance(module, BlockSparseLayer):
        block_size = module.layout.block_size
    elif not exchanged and not isinstance(module, (nn.Linear, *DENSE)) and not _is_quantised(module):
        return
    yield Target(path or "weight", path, module, "weight", block_size, exchanged)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_transformers_conv1d(module: nn.Module) -> bool:
    """Which keeps its weight as [in, out]; asked without importing transformers."""
    return any(c.__name__ == "Conv1D" and c.__module__.startswith("transformers.") for c in type(module).__mro__)


def _is_quantised(module: nn.Module) -> bool:
    """One of PyTorch's own quantised layers, whose `weight` is a method."""
    kind = type(module).__module__
    return kind.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")) and hasattr(module, "weight")


def _wrong(target: Target, uses: Counter[int]) -> str:
    """What keeps a weight from being made sparse; "" if nothing does."""
    module = target.module
    if _is_quantised(module):
        return "quantised"
    if parametrize.is_parametrized(module, target.parameter_name):
        return "parametrized"
    own = dict(module.named_parameters(recurse=False))
    weight: Any = own.get(target.parameter_name)
    if weight is None:
        other = getattr(module, target.parameter_name, None)
        quantised = isinstance(other, Tensor) and not other.dtype.is_floating_point
        return "quantised" if quantised else "computed by a hook, or not made yet"
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "not made yet: run the model once"
    # Classes of their own stand for weights that are quantised (torchao, bitsandbytes) or lie elsewhere (DTensor).
    kind = type(weight.data)
    if kind is not Tensor or type(weight) is not nn.Parameter:
        return f"quantised or distributed: a {(kind if kind is not Tensor else type(weight)).__name__}"
    if weight.dtype not in _BITS:  # float8, too, which PyTorch cannot add up
        return "quantised" if not weight.dtype.is_complex else "complex"
    if uses[_place(weight)] > 1:
        return "tied"
    if weight.is_meta:
        return "on meta, has no values"
    if getattr(module, "groups", 1) != 1:
        return "has groups"
    return ""
