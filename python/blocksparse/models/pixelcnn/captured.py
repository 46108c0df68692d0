"""Forward and backward of a part of a batch as one CUDA graph, for Python takes longer to start their kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARM_UPS = 2  # what kernels and allocators set up once is not captured


class CapturedLoss:
    """Gradients lie in the same tensors after every call, of that call alone.

    Args:
        loss: of images, what is captured with its backward.
        parameters: whose gradients it makes; none: it is captured without a backward.
        like: images like those of every call.
    """

    def __init__(self, loss: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], like: Tensor) -> None:
        def run() -> Tensor:
            value = loss(self.images)
            if parameters:
                value.backward()
            return value.detach()

        self.images = like.clone()
        random = torch.cuda.get_rng_state(like.device)  # warming up is no part of the training
        side = torch.cuda.Stream(like.device)
        side.wait_stream(torch.cuda.current_stream(like.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream(like.device).wait_stream(side)
        for p in parameters:
            p.grad = None  # so that those of the graph lie in its memory
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.value = run()
        self.gradients = [p.grad for p in parameters if p.grad is not None]
        torch.cuda.set_rng_state(random, like.device)

    def __call__(self, images: Tensor) -> Tensor:
        """The loss, which stays until the next call."""
        self.images.copy_(images)
        self.graph.replay()
        return self.value
