"""What processes have to agree on before they train one model."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from ..modules.layer import BlockSparseLayer


def need_same_layouts(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Makes sure that all processes have the same layouts: before DistributedDataParallel or `fully_shard`.

    Those exchange weights block by block and look at shapes alone. The styles of this package ask by themselves.

    Args:
        model: whose layers are looked at. All processes of the group have to call.
        group: of processes; None: all.

    Raises:
        ValueError: layouts differ. It is raised in all processes, and names the layer and both hashes.
    """
    layers = ((name, m) for name, m in model.named_modules() if isinstance(m, BlockSparseLayer))
    need_same("need_same_layouts", {name or "layout": hash(layer.layout) for name, layer in layers}, group)


def need_same(op: str, found: Mapping[str, int | str], group: dist.ProcessGroup | None) -> None:
    """Raises ValueError, in all processes of a group, unless they have the same hashes and texts by the same names."""
    of_all: list[dict[str, int | str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(of_all, found, group=group)
    for process, others in enumerate(of_all):
        for name in {**of_all[0], **others}:
            if (first := of_all[0].get(name)) != (other := others.get(name)):
                raise ValueError(
                    f"[{op}] processes have different {name}: {_text(first)} in process 0, {_text(other)} in process "
                    f"{process}"
                )


def _text(found: int | str | None) -> str:
    return "none" if found is None else found if isinstance(found, str) else f"hash {found:016x}"
