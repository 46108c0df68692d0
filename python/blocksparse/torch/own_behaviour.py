"""What a module does beside its class's forward, which another module in its place would not do."""

from __future__ import annotations

from torch import nn

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # where PyTorch keeps them, for which it has no public name


def lost_with(module: nn.Module) -> str:
    """What would be lost if another module took the place of this one: "a forward of its own", "hooks"; or "".

    Hooks of a pruner of ours do not count: it takes them off itself.
    """
    own = vars(module)
    if _has_own_forward(module):
        return "a forward of its own"
    hooks = [hook for name in _HOOKS for hook in own[name].values()]
    package = f"{__name__.partition('.')[0]}."
    return "hooks" if any(not (getattr(hook, "__module__", "") or "").startswith(package) for hook in hooks) else ""


def _has_own_forward(module: nn.Module) -> bool:
    """Whether its forward is not its class's, which libraries write back where they have taken theirs away."""
    if "forward" not in vars(module) or hasattr(module, "_orig_mod"):  # the wrapper of torch.compile has one, too
        return False
    forward = vars(module)["forward"]
    is_bound = getattr(forward, "__self__", None) is module
    return not is_bound or getattr(forward, "__func__", None) is not type(module).forward
