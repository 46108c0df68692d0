"""The byte-level language model of byte_lm.py: Llama's layers over bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

HEADS_OF = 64  # features of a head
Make = Callable[[int, int], nn.Module]  # of a layer of the feed-forward part: features in and out


class RMSNorm(nn.RMSNorm):
    """In float32, whatever autocast says."""

    def forward(self, x: Tensor) -> Tensor:
        """x / its root mean square, times a weight."""
        return super().forward(x.float())


class Layer(nn.Module):
    """Causal attention with rotary places, then W_down (silu(W_gate x) * (W_up x)), each added to what came in."""

    def __init__(self, width: int, hidden: int, make: Make) -> None:
        super().__init__()
        self.before, self.between = RMSNorm(width), RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = make(width, hidden), make(width, hidden), make(hidden, width)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """x [n, tokens, width] -> the same."""
        n, tokens, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(n, tokens, 3, -1, HEADS_OF).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(turned(q, turn), turned(k, turn), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, tokens, width))
        y = self.between(x)
        new: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return new


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary places. Source: Su et al., arXiv:2104.09864."""
    a, b = x.chunk(2, -1)
    cos, sin = (t.to(x.dtype) for t in turn)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class ByteLM(nn.Module):
    """Bytes [n, tokens] -> logits [n, tokens, 256] of what follows each."""

    def __init__(self, width: int, hidden: int, layers: int, make: Make) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Layer(width, hidden, make) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(
                    parameter, std=0.02 if name.startswith(("embedding", "head")) else parameter.size(1) ** -0.5
                )
            if name.endswith(("out.weight", "down.weight")):
                parameter.data.mul_((2 * layers) ** -0.5)

    def forward(self, text: Tensor) -> Tensor:
        """See above."""
        places = torch.arange(text.size(1), device=text.device, dtype=torch.float32)
        rates = 1e4 ** (-torch.arange(0, HEADS_OF, 2, device=text.device, dtype=torch.float32) / HEADS_OF)
        angles = torch.outer(places, rates)
        turn = angles.cos(), angles.sin()
        x = self.embedding(text)
        for layer in self.layers:
            x = layer(x, turn)
        logits: Tensor = self.head(self.norm(x))
        return logits
