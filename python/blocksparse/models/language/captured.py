"""Forward and backward of an update as one CUDA graph, for Python takes longer to start its thousands of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...torch.recurrent import State

WARM_UPS = 2  # what kernels and allocators set up once is not captured

# (input, what follows, state) -> (loss, state)
Forward = Callable[[Tensor, Tensor, State], tuple[Tensor, State]]


class CapturedStep:
    """Gradients lie in the same tensors after every call, those that the optimizer reads.

    Args:
        forward: what is captured, with its backward.
        parameters: whose gradients it makes.
        x: bytes [steps, n], like those of every call.
        state: as a call of `forward` returns it.
    """

    def __init__(self, forward: Forward, parameters: Sequence[Tensor], x: Tensor, state: State) -> None:
        self.x, self.y = torch.zeros_like(x), torch.zeros_like(x)
        self.state: State = (torch.zeros_like(state[0]), torch.zeros_like(state[1]))
        side = torch.cuda.Stream(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                forward(self.x, self.y, self.state)[0].backward()
        torch.cuda.current_stream(x.device).wait_stream(side)
        for p in parameters:
            p.grad = None  # so that those of the graph lie in its memory
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss, after = forward(self.x, self.y, self.state)
            self.loss.backward()
            for mine, made in zip(self.state, after, strict=True):
                mine.copy_(made.detach())
        self.gradients = [p.grad for p in parameters]

    def __call__(self, x: Tensor, y: Tensor, state: State | None) -> tuple[Tensor, State]:
        """The loss and the state after it, which stay until the next call."""
        self.x.copy_(x)
        self.y.copy_(y)
        for mine, given in zip(self.state, state or (None, None), strict=True):
            if given is None:
                mine.zero_()
            elif given is not mine:
                mine.copy_(given)
        self.graph.replay()
        return self.loss, self.state
