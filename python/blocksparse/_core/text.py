"""Numbers as readers want them."""

from __future__ import annotations


def percentage(share: float) -> str:
    """With two decimals, and of what is smaller with two digits: 12.50%, 0.0023%."""
    percent = 100 * share
    return f"{percent:.2f}%" if percent == 0 or percent >= 0.01 else f"{percent:.2g}%"
