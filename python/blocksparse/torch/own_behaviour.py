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
    if "forward" in own and not hasattr(module, "_orig_mod"):  # the wrapper that torch.compile makes has one, too
        return "a forward of its own"
    hooks = [hook for name in _HOOKS for hook in own[name].values()]
    package = f"{__name__.partition('.')[0]}."
    return "hooks" if any(not (getattr(hook, "__module__", "") or "").startswith(package) for hook in hooks) else ""
