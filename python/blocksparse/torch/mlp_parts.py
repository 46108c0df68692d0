"""The feed-forward parts of transformers, recognised by what they consist of and by what they compute.

Names of classes count for nothing: libraries rename and subclass them. A module is taken for a feed-forward part if it
has linear layers with the names that such parts have, whose sizes fit, and an activation, and if it then computes what
these would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .functional.glu import GLU_ACTIVATIONS

_GATED: tuple[tuple[str, str, str], ...] = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("wi_0", "wi_1", "wo"),
)
_JOINED = (("gate_up_proj", "down_proj"),)  # gate above up in one weight
_PLAIN = (("c_fc", "c_proj"), ("fc1", "fc2"), ("lin1", "lin2"), ("wi", "wo"), ("fc_in", "fc_out"),
          ("dense_h_to_4h", "dense_4h_to_h"), ("up_proj", "down_proj"))  # fmt: skip
_HALVES = ("intermediate", "output")  # each with a child `dense`: BERT
_ACTIVATIONS = ("act_fn", "act", "activation_fn", "activation", "intermediate_act_fn")
_TOKENS = 3  # that the module and its parts are compared on


@dataclass(frozen=True)
class MLPParts:
    """The dense layers of y = W_down (f(W_gate x + b) * (W_up x + b)) + b, or of y = W_down f(W_up x + b) + b."""

    module: nn.Module
    up: nn.Module
    down: nn.Module
    gate: nn.Module | None = None  # None: no gated one, or `joined`
    joined: bool = False  # `up` holds the rows of the gate, and those of up below them
    halves: bool = False  # `module` has more in it: its children `intermediate` and `output` are the two halves
    activation: str = "silu"
    dropout: float = 0.0  # behind W_down
    hidden_dropout: float = 0.0  # in front of W_down
    names: dict[str, str] = field(default_factory=dict)  # of gate, up and down, below the module

    @property
    def gated(self) -> bool:
        """Whether there is a gate."""
        return self.gate is not None or self.joined

    def weights(self) -> dict[str, Tensor]:
        """`gate` (if there is one), `up`, `down` [out, in], and `gate_bias`, `up_bias`, `down_bias` if there are such.

        They share the memory of the parameters.
        """
        layers = {"up": self.up, "down": self.down, **({} if self.gate is None else {"gate": self.gate})}
        found = {name: matrix_of(layer).detach() for name, layer in layers.items()}
        biases = {f"{name}_bias": layer.bias for name, layer in layers.items()}
        found |= {name: b.detach() for name, b in biases.items() if isinstance(b, Tensor)}
        if self.joined:
            for name in [name for name in ("up", "up_bias") if name in found]:
                found[name.replace("up", "gate")], found[name] = found[name].chunk(2)
        return found


def is_conv1d(layer: nn.Module) -> bool:
    """Whether it is a linear layer whose weight lies transposed, [in, out], as `transformers.Conv1D`."""
    own = dict(layer.named_parameters(recurse=False))
    outputs = getattr(layer, "nf", None)
    return set(own) == {"weight", "bias"} and own["weight"].dim() == 2 and own["weight"].size(1) == outputs


def matrix_of(layer: nn.Module) -> Tensor:
    """The weight [out, in] of a linear layer, which shares the memory of its parameter."""
    weight: Any = layer.weight
    assert isinstance(weight, Tensor)
    return weight.t() if is_conv1d(layer) else weight


def _is_linear(layer: object) -> bool:
    """Of a subclass (quantised, or with adapters) nobody knows what its weight means."""
    if not isinstance(layer, nn.Module) or parametrize.is_parametrized(layer):
        return False
    if type(layer) is nn.Linear:
        return set(dict(layer.named_parameters(recurse=False))) <= {"weight", "bias"}
    return is_conv1d(layer)


def _children(module: nn.Module, names: tuple[str, ...]) -> list[nn.Module] | None:
    layers = [getattr(module, name, None) for name in names]
    return [layer for layer in layers if isinstance(layer, nn.Module)] if all(map(_is_linear, layers)) else None


def name_of_activation(function: Callable[[Tensor], Tensor]) -> str | None:
    """Which of the known activations a function is, by its values; None: none of them."""
    if isinstance(function, nn.Module) and [*function.parameters(), *function.buffers()]:
        return None  # a call in training may change it, as a norm's averages
    at = torch.linspace(-6, 6, 97, dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad(), torch.random.fork_rng([]):  # a dropout draws random numbers
            values = function(at.clone())
    except Exception:  # whatever a module says that takes something else, an assertion, say
        return None
    if not isinstance(values, Tensor) or values.shape != at.shape:
        return None
    distances = {name: (values - known(at)).abs().max().item() for name, known in GLU_ACTIVATIONS.items()}
    best = min(distances, key=lambda name: distances[name])
    return best if distances[best] < 2e-6 else None  # some write 0.7978845608 for sqrt(2 / pi)


def _activation_of(module: nn.Module) -> str | None:
    for name in _ACTIVATIONS:
        function = getattr(module, name, None)
        if callable(function):
            return name_of_activation(function)
    return None


def _candidates(module: nn.Module) -> list[MLPParts]:
    """What the module may be, by the names of its children."""
    if isinstance(module, nn.Sequential):
        return _sequential(module)
    found = _halves(module)
    activation = _activation_of(module)
    if activation is None:
        return found
    for three in _GATED:
        if layers := _children(module, three):
            told = dict(zip(("gate", "up", "down"), three, strict=True))
            gate, up, down = layers
            found.append(MLPParts(module, up=up, down=down, gate=gate, activation=activation, names=told))
    for pair in _JOINED + _PLAIN:
        if layers := _children(module, pair):
            told = dict(zip(("up", "down"), pair, strict=True))
            up, down = layers
            found.append(MLPParts(module, up, down, joined=pair in _JOINED, activation=activation, names=told))
    return found


def _sequential(module: nn.Sequential) -> list[MLPParts]:
    """Linear, activation, linear, and maybe dropouts between them or behind."""
    neutral = (nn.Identity, nn.Dropout)
    steps = {name: step for name, step in module.named_children() if not isinstance(step, neutral)}
    if len(steps) != 3:
        return []
    (first, up), (_, function), (second, down) = steps.items()
    activation = name_of_activation(function) if _is_linear(up) and _is_linear(down) else None
    if activation is None:
        return []
    told = {"up": first, "down": second}
    return [MLPParts(module, up=up, down=down, activation=activation, names=told)]


def _halves(module: nn.Module) -> list[MLPParts]:
    first, second = (getattr(module, name, None) for name in _HALVES)
    if not (isinstance(first, nn.Module) and isinstance(second, nn.Module)):
        return []
    up, down = (_children(half, ("dense",)) for half in (first, second))
    activation = _activation_of(first)
    if activation is None or up is None or down is None:
        return []
    told = {"up": f"{_HALVES[0]}.dense", "down": f"{_HALVES[1]}.dense"}
    return [MLPParts(module, up=up[0], down=down[0], halves=True, activation=activation, names=told)]


def _fits(parts: MLPParts) -> bool:
    """Whether the sizes of the layers fit each other."""
    up, down = matrix_of(parts.up), matrix_of(parts.down)
    hidden = up.size(0) // 2 if parts.joined else up.size(0)
    if parts.joined and up.size(0) % 2:
        return False
    same = parts.gate is None or matrix_of(parts.gate).shape == up.shape
    return same and down.size(1) == hidden and up.dtype == down.dtype and up.device == down.device


def dense_mlp(x: Tensor, weights: dict[str, Tensor], activation: str) -> Tensor:
    """What dense weights compute, those that `MLPParts.weights` and `BlockSparseMLP.weights` return."""
    return dense_mlp_steps(x, weights, activation)[1]


def dense_mlp_steps(x: Tensor, weights: dict[str, Tensor], activation: str) -> tuple[Tensor, Tensor]:
    """What W_down is fed, and what it gives."""
    activate, linear = GLU_ACTIVATIONS[activation], nn.functional.linear
    up = linear(x, weights["up"], weights.get("up_bias"))
    gated = "gate" in weights
    hidden = activate(linear(x, weights["gate"], weights.get("gate_bias"))) * up if gated else activate(up)
    return hidden, linear(hidden, weights["down"], weights.get("down_bias"))


def _computing(parts: MLPParts) -> MLPParts | None:
    """The parts with the dropouts that the module has, if it gives what they would, of some random tokens."""
    weights = parts.weights()
    if weights["up"].is_meta:  # nothing can be computed
        drops = [child.p for child in parts.module.children() if isinstance(child, nn.Dropout)]
        return replace(parts, dropout=max(drops, default=0.0))
    module: Any = parts.module.intermediate if parts.halves else parts.module
    modes = [(m, m.training) for m in module.modules()]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _TOKENS, weights["up"].size(1), generator=generator).to(weights["up"])
    hidden, want = dense_mlp_steps(x, weights, parts.activation)
    try:
        module.eval()
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            given = hidden if parts.halves else want
            dropouts = _dropouts(parts, module, x, hidden, given) if _is_close(module(x), given) else None
    except Exception:  # it takes something else than x
        return None
    finally:
        for m, training in modes:
            m.training = training
    return None if dropouts is None else replace(parts, hidden_dropout=dropouts[0], dropout=dropouts[1])


def _is_close(got: object, want: Tensor) -> bool:
    if not isinstance(got, Tensor) or got.shape != want.shape:
        return False
    bound = 64 * torch.finfo(want.dtype).eps
    return bool((got - want).float().norm() <= bound * want.float().norm().clamp_min(1e-6))


def _dropouts(
    parts: MLPParts, module: nn.Module, x: Tensor, hidden: Tensor, want: Tensor
) -> tuple[float, float] | None:
    """What the module drops in training: of what W_down is fed, and of what it gives. None: it does something else.

    hidden is what W_down is fed in eval mode, and want what the module gives then.
    """
    fed: list[Tensor] = []
    given: list[Tensor] = []
    handles = [
        parts.down.register_forward_pre_hook(lambda _, inputs: fed.append(inputs[0])),
        parts.down.register_forward_hook(lambda _, __, output: given.append(output)),
    ]
    devices = [x.device] if x.device.type == "cuda" else []
    try:
        module.train()
        with torch.random.fork_rng(devices):
            result = module(x)
    finally:
        for handle in handles:
            handle.remove()
    if _is_close(result, want):
        return 0.0, 0.0
    if parts.halves:  # W_down and what is behind it are the other half's
        first = _dropped(hidden, result)
        return None if first is None else (first, 0.0)
    if len(fed) != 1:
        return None
    first, second = _dropped(hidden, fed[0]), _dropped(given[0], result)
    return None if first is None or second is None else (first, second)


def _dropped(before: Tensor, after: Tensor) -> float | None:
    """The p with which zeros were drawn and others made 1 / (1 - p) times as large; None: it is no dropout."""
    if _is_close(after, before):
        return 0.0
    kept = after != 0
    if after.shape != before.shape or not bool(kept.any()):
        return None
    scale = float((after[kept].double() / before[kept].double()).median())
    scaled = torch.where(kept, before.double() * scale, 0.0).to(before.dtype)
    if not scale > 1 or not _is_close(after, scaled):
        return None
    return round(1 - 1 / scale, 2 if before.dtype in (torch.float16, torch.bfloat16) else 4)


def mlp_parts(module: nn.Module) -> MLPParts | None:
    """The parts of a feed-forward module; None: it is none that is known.

    Known are Llama's, Mistral's and Qwen's (gate_proj, up_proj, down_proj), Phi-3's (gate_up_proj), GPT-2's (c_fc and
    c_proj, whose weights lie transposed), BERT's (a layer with intermediate.dense and output.dense), others with two
    linear layers of customary names, and `torch.nn.Sequential` of linear, activation, linear. Nothing is changed; the
    module is called twice, on three random tokens: in training mode, too, which shows where it drops features.
    """
    fitting = (_computing(parts) for parts in _candidates(module) if _fits(parts))
    return next((parts for parts in fitting if parts is not None), None)
