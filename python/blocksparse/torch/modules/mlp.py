"""`BlockSparseMLP`: the feed-forward part of a transformer with block-sparse weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..._core.arguments import need, shown
from ...layout import Layout, need_layout
from .. import convert
from ..arguments import need_tensor
from ..functional.glu import GLU_ACTIVATIONS, need_glu_activation
from ..mlp_parts import MLPParts, mlp_parts
from .glu import BlockSparseGLU
from .leaf import as_leaf
from .linear import BlockSparseLinear


class BlockSparseMLP(nn.Module):
    """y = W_down (f(W_gate x) * (W_up x)), or without a gate y = W_down f(W_up x + b_up) + b_down.

    Two launches without gradients: `up` (a `BlockSparseGLU` with a gate, a `BlockSparseLinear` without one) and `down`
    (a `BlockSparseLinear`). Both are layers like any other: their weights are ordinary parameters [blocks, b, b], and
    their layouts are saved with them.

    Args:
        in_features: of x.
        hidden_features: rows of W_gate and W_up, columns of W_down.
        layout: which blocks there are in W_up [hidden_features, in_features], and in W_gate the same.
        down_layout: which blocks there are in W_down, [out_features, hidden_features].
        out_features: of y; that of x if not given.
        gated: whether there is a gate: SwiGLU.
        activation: "silu", "gelu" (the exact one), "gelu_tanh" or "relu".
        bias: whether to add biases, to all products.
        gates: whether the layers have a factor for each block, as `BlockSparseLinear`'s.
        dropout: of y, in training.
        hidden_dropout: of what W_down is fed, in training.
        device: of the parameters.
        dtype: of the parameters: float32, float64, bfloat16 or float16.

    Raises:
        ValueError: a layout has another size, or there is no such activation.

    Source: Shazeer, GLU Variants Improve Transformer (2020), arXiv:2002.05202.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        layout: Layout,
        down_layout: Layout,
        *,
        out_features: int | None = None,
        gated: bool = True,
        activation: str = "silu",
        bias: bool = False,
        gates: bool = False,
        dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.hidden_features = in_features, hidden_features
        self.out_features = in_features if out_features is None else out_features
        self.activation, self.gated = need_glu_activation("BlockSparseMLP", activation), gated
        options: Any = {"gates": gates, "device": device, "dtype": dtype}
        self.up: BlockSparseGLU | BlockSparseLinear
        if gated:
            self.up = BlockSparseGLU(in_features, hidden_features, layout, bias, activation=activation, **options)
        else:
            self.up = BlockSparseLinear(in_features, hidden_features, layout, bias, activation=activation, **options)
        self.down = BlockSparseLinear(hidden_features, self.out_features, down_layout, bias, **options)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.hidden_dropout = nn.Dropout(hidden_dropout) if hidden_dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        if not isinstance(x, Tensor):
            if (node := as_leaf(self, x)) is not None:
                return cast(Tensor, node)
            need_tensor("BlockSparseMLP", "x", x)
        y: Tensor = self.dropout(self.down(self.hidden_dropout(self.up(x))))
        return y

    # ---- From and to dense ------------------------------------------------------------------------------------------

    @classmethod
    def from_dense(
        cls,
        mlp: nn.Module | MLPParts,
        *,
        density: float | None = None,
        block_size: int = 32,
        layouts: tuple[Layout, Layout] | None = None,
        masks: Mapping[str, Tensor] | None = None,
        pruned: bool = False,
    ) -> BlockSparseMLP:
        """The same MLP with some of its blocks, chosen by exactly one of density, layouts, masks and pruned.

        Args:
            mlp: a dense one that `mlp_parts` knows: Llama's, Mistral's, Qwen's, Phi-3's, GPT-2's, BERT's, ...
            density: share of blocks to keep, of the largest norms; gate and up keep the same ones, by both together.
            block_size: edge of a block, unless layouts tell it.
            layouts: of W_up (and W_gate), [hidden, in], and of W_down, [out, hidden].
            masks: "up", "down" and, of a gated one, "gate": booleans [out_blocks, in_blocks], of blocks to keep. Gate
                and up keep those that either of them keeps.
            pruned: keep the blocks that are not all zeros.

        Raises:
            ValueError: the module is none that is known, not exactly one way to choose is given, or sizes do not fit.
        """
        op = "BlockSparseMLP.from_dense"
        parts = mlp if isinstance(mlp, MLPParts) else _known(op, mlp)
        if sum(way is not None for way in (density, layouts, masks)) + pruned != 1:
            raise ValueError(f"[{op}] needs density, layouts, masks or pruned, one of them")
        weights = parts.weights()
        if layouts is None:
            layouts = _choose(op, weights, density, masks, block_size)
        if not isinstance(layouts, Sequence) or len(layouts) != 2:
            raise TypeError(f"[{op}] layouts is {shown(layouts)}, needs two layouts: of up (and gate), and of down")
        layout, down_layout = (need_layout(op, layout) for layout in layouts)
        up, down = weights["up"], weights["down"]
        made = cls(
            up.size(1), up.size(0), layout, down_layout, out_features=down.size(0), gated=parts.gated,
            activation=parts.activation, bias=any(name.endswith("bias") for name in weights), dropout=parts.dropout,
            hidden_dropout=parts.hidden_dropout, device=up.device, dtype=up.dtype,
        )  # fmt: skip
        made.set_weights(weights)
        made.train(parts.module.training)
        for mine, theirs in ((made.up, parts.up), (made.down, parts.down)):
            mine.weight.requires_grad_(cast(nn.Parameter, theirs.weight).requires_grad)
            if mine.bias is not None:  # a layer without one has zeros beside another's
                like = theirs.weight if theirs.bias is None else theirs.bias
                mine.bias.requires_grad_(cast(nn.Parameter, like).requires_grad)
        return made

    @torch.no_grad()
    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Takes the layouts' blocks of dense weights, named as `weights` names them, and biases, 0 if not given."""
        if missing := [name for name in ("gate", "up", "down")[not self.gated :] if name not in weights]:
            raise ValueError(f"[BlockSparseMLP.set_weights] weights has no {', '.join(missing)}")
        if isinstance(self.up, BlockSparseGLU):
            self.up.set_weights(weights["gate"], weights["up"], weights.get("gate_bias"), weights.get("up_bias"))
        else:
            _set(self.up, weights["up"], weights.get("up_bias"))
        _set(self.down, weights["down"], weights.get("down_bias"))

    def weights(self) -> dict[str, Tensor]:
        """Dense `gate` (if there is one), `up` and `down` [out, in], and `gate_bias`, `up_bias`, `down_bias` if any.

        `blocksparse.torch.dense_mlp` computes with them what this does.
        """
        layers = {"down": self.down.to_dense()}
        found = self.up.weights() if isinstance(self.up, BlockSparseGLU) else {}
        if isinstance(self.up, BlockSparseLinear):
            layers["up"] = self.up.to_dense()
        found |= {name: layer.weight.detach() for name, layer in layers.items()}
        found |= {f"{name}_bias": layer.bias.detach() for name, layer in layers.items() if layer.bias is not None}
        return {name: weight.detach() for name, weight in found.items()}

    def extra_repr(self) -> str:
        """The sizes and what is computed."""
        sizes = f"in_features={self.in_features}, hidden_features={self.hidden_features}"
        if self.out_features != self.in_features:
            sizes += f", out_features={self.out_features}"
        return f"{sizes}, activation={self.activation}, gated={self.gated}"


def _known(op: str, module: object) -> MLPParts:
    need(op, "mlp", module, nn.Module, "a torch.nn.Module")
    assert isinstance(module, nn.Module)
    parts = mlp_parts(module)
    if parts is None:
        raise ValueError(
            f"[{op}] {type(module).__name__} is no feed-forward part that is known: needs children such as gate_proj, "
            f"up_proj and down_proj, or c_fc and c_proj, an activation of {', '.join(GLU_ACTIVATIONS)}, and that it "
            f"computes what these would; it has {', '.join(name for name, _ in module.named_children()) or 'none'}"
        )
    return parts


def _set(layer: BlockSparseLinear, weight: Tensor, bias: Tensor | None) -> None:
    layer.weight.copy_(convert.from_dense(weight, layer.layout))
    if layer.bias is not None:
        layer.bias.copy_(torch.zeros_like(layer.bias) if bias is None else bias)


def _choose(
    op: str,
    weights: Mapping[str, Tensor],
    density: float | None,
    masks: Mapping[str, Tensor] | None,
    block_size: int,
) -> tuple[Layout, Layout]:
    """The layouts of up (and gate) and of down."""
    inputs = [weights[name] for name in ("gate", "up") if name in weights]
    if density is not None:
        both = torch.stack([w.float().square() for w in inputs]).sum(0).sqrt()
        return (
            convert.select_blocks(both, density, block_size),
            convert.select_blocks(weights["down"], density, block_size),
        )
    if masks is None:
        masks = {name: _not_zero(weights[name], block_size) for name in ("gate", "up", "down") if name in weights}
    wanted = {name for name in ("gate", "up", "down") if name in weights}
    need(op, "masks", masks, Mapping, "a dict of tensors")
    if set(masks) != wanted:
        raise ValueError(f"[{op}] masks are of {', '.join(sorted(masks))}, needs {', '.join(sorted(wanted))}")
    for name, mask in masks.items():
        need_tensor(op, f"masks[{name!r}]", mask)
        grid = [-(-size // block_size) for size in weights[name].shape]
        if list(mask.shape) != grid:
            raise ValueError(
                f"[{op}] masks[{name!r}] is {list(mask.shape)}, needs {grid}, the blocks of {block_size} of a weight "
                f"{list(weights[name].shape)}"
            )
    up = masks["up"] != 0
    if "gate" in masks:
        up = up | (masks["gate"] != 0)
    return _layout(up, weights["up"], block_size), _layout(masks["down"] != 0, weights["down"], block_size)


def _not_zero(weight: Tensor, block_size: int) -> Tensor:
    return (convert.grid_of(weight, block_size) != 0).any(3).any(2)


def _layout(mask: Tensor, weight: Tensor, block_size: int) -> Layout:
    sizes = {"out_features": weight.size(0), "in_features": weight.size(1)}
    return Layout.from_mask(mask.cpu().numpy(), block_size, **sizes)
