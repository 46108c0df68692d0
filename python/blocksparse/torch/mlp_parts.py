"""The feed-forward parts of transformers, recognised by what they consist of and by what they compute.

Names of classes count for nothing: libraries rename and subclass them. A module is taken for a feed-forward part if it
has linear layers with the names that such parts have, whose sizes fit, and an activation, and if it then computes what
these would.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .functional.glu import GLU_ACTIVATIONS
from .own_behaviour import lost_with

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
_LARGE = 1e3  # times as large is the last of them: gpt-oss clamps gate and up at 7. Not in f16, where it overflows.


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

    @property
    def whole(self) -> nn.Module:
        """What a `BlockSparseMLP` takes the place of: the module, or its first half."""
        return self.module.get_submodule(_HALVES[0]) if self.halves else self.module

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


def _loses(parts: MLPParts) -> bool:
    """Whether hooks, or a forward of its own, are on what would be replaced."""
    return any(lost_with(module) for module in (*parts.whole.modules(), parts.down))


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


class _Dropouts(TorchFunctionMode):
    """Has dropouts keep all of x, and notes what they are called with: p and x."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[float, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.dropout:
            return func(*args, **(kwargs or {}))
        return self._keep(*args, **(kwargs or {}))

    def _keep(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if training:
            self.calls.append((float(p), input.clone()))
        return input


class _NoRandomNumbers(TorchDispatchMode):
    """Raises where one would be drawn, on any device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(f"{func} draws random numbers")
        return func(*args, **(kwargs or {}))


def _computing(parts: MLPParts) -> MLPParts | None:
    """The parts with the dropouts that the module has, if it gives what they would, of some random tokens.

    It is called in eval mode and, with dropouts that keep all, in training mode. In neither may it draw random numbers.
    """
    weights, module = parts.weights(), parts.whole
    up = weights["up"]
    x = torch.randn(1, _TOKENS, up.size(1), generator=torch.Generator().manual_seed(0)).to(up)
    if up.dtype != torch.float16:
        x[:, -1] *= _LARGE
    dropouts = _Dropouts()
    try:
        with torch.no_grad(), _without_autocast(x.device), torch.compiler.set_stance("force_eager"), _NoRandomNumbers():
            hidden, want = dense_mlp_steps(x, weights, parts.activation)
            given = hidden if parts.halves else want
            evaluated = _called(module, x, False)
            with dropouts:
                trained = _called(module, x, True)
    except Exception:  # it takes something else than x, or it draws random numbers
        return None
    if not _is_close(evaluated, given) or not _is_close(trained, given) or (up.is_meta and not _has_only(parts)):
        return None
    if not dropouts.calls and _asks_for_mode(module):
        return None
    return _with_dropouts(parts, dropouts.calls, hidden, given)


def _called(module: nn.Module, x: Tensor, training: bool) -> Any:
    """What a module makes of x in a mode. Its modes and buffers, counts of calls, say, stay as they are."""
    modes = [(m, m.training) for m in module.modules()]
    try:
        for m, _ in modes:
            m.training = training
        return functional_call(module, {name: buffer.clone() for name, buffer in module.named_buffers()}, (x.clone(),))
    finally:
        for m, was in modes:
            m.training = was


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _is_close(got: object, want: Tensor) -> bool:
    if not isinstance(got, Tensor) or got.shape != want.shape:
        return False
    bound = 64 * torch.finfo(want.dtype).eps
    differ, size = (got - want).float().norm(dim=-1), want.float().norm(dim=-1)  # of each token
    return want.is_meta or bool((differ <= bound * size.clamp_min(1e-6)).all())


def _has_only(parts: MLPParts) -> bool:
    """Whether no other layer of the module has parameters: what it computes is not seen on "meta"."""
    known = {id(p) for layer in (parts.gate, parts.up, parts.down) if layer is not None for p in layer.parameters()}
    return parts.halves or all(id(p) in known for p in parts.module.parameters())


def _with_dropouts(
    parts: MLPParts, calls: list[tuple[float, Tensor]], hidden: Tensor, given: Tensor
) -> MLPParts | None:
    """The parts with what is dropped of hidden features and of the result; None: something else is dropped."""
    found = {"hidden_dropout": 0.0, "dropout": 0.0}
    for p, x in calls:
        if p == 0:
            continue
        place = "hidden_dropout" if _is_close(x, hidden) else "dropout" if _is_close(x, given) else ""
        if not place or found[place]:
            return None
        found[place] = p
    return replace(parts, hidden_dropout=found["hidden_dropout"], dropout=found["dropout"])


def _asks_for_mode(module: nn.Module) -> bool:
    """Whether a forward that is not PyTorch's own reads `training`, for what no call shows."""
    forwards = [type(m).forward for m in module.modules() if not type(m).__module__.startswith("torch.")]
    codes = [getattr(inspect.unwrap(forward), "__code__", None) for forward in forwards]
    return any("training" in code.co_names for code in codes if code is not None)


def mlp_parts(module: nn.Module) -> MLPParts | None:
    """The parts of a feed-forward module; None: it is none that is known.

    Known are Llama's, Mistral's and Qwen's (gate_proj, up_proj, down_proj), Phi-3's (gate_up_proj), GPT-2's (c_fc and
    c_proj, whose weights lie transposed), BERT's (a layer with intermediate.dense and output.dense), others with two
    linear layers of customary names, and `torch.nn.Sequential` of linear, activation, linear. Nothing is changed; the
    module is called on three random tokens, one of them large, once in eval mode and once in training mode. Dropout of
    hidden features and of the result is kept. Unknown is a module that drops anything else, that draws random numbers
    otherwise (stochastic depth, say), whose forward asks for `training` without dropping anything, or that has hooks or
    a forward of its own, which would be lost.
    """
    fitting = (_computing(parts) for parts in _candidates(module) if _fits(parts) and not _loses(parts))
    return next((parts for parts in fitting if parts is not None), None)
