"""Adam as PixelCNN++ was trained with: epsilon inside of the root."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn

BETAS = (0.95, 0.9995)


class Adam(torch.optim.Optimizer):
    """m = lerp(m, g, 1 - b1), v = lerp(v, g^2, 1 - b2), w -= lr m' / sqrt(v' + eps), m' and v' without their bias.

    PyTorch's adds eps to the root instead: at 1e-8, what has small gradients moves up to 10,000 times as far.

    Args:
        parameters: which are trained.
        lr: the learning rate.
        betas: of both moments.
        eps: see above.

    Source: openai/pixel-cnn, `nn.adam_updates`.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = BETAS,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of all that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        gradients: list[Tensor] = [p.grad for p in parameters]
        for p in parameters:
            if not self.state[p]:
                moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                self.state[p] = {"step": torch.zeros((), dtype=torch.float32), **moments}
        states = [self.state[p] for p in parameters]
        for state in states:
            state["step"] += 1
        step = float(states[0]["step"])  # of all: they are trained together
        b1, b2 = group["betas"]
        m, v = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(m, gradients, 1 - b1)
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, gradients, gradients, 1 - b2)
        roots = torch._foreach_div(v, 1 - b2**step)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_sqrt_(roots)
        torch._foreach_addcdiv_(parameters, m, roots, -group["lr"] / (1 - b1**step))
