"""LoRA adapters of peft on block-sparse layers: dense, of low rank, beside frozen blocks. Needs `pip install peft`."""

from __future__ import annotations

from typing import Any

import peft
from peft.tuners.lora import Linear as _Linear

from .modules.linear import BlockSparseLinear


class LoraBlockSparseLinear(_Linear):  # type: ignore[misc]
    """y = layer(x) + scaling B A x, where `layer` is a `BlockSparseLinear` without an activation."""

    def __init__(self, base_layer: Any, *arguments: Any, **options: Any) -> None:
        blocks = base_layer.get_base_layer() if hasattr(base_layer, "get_base_layer") else base_layer
        if blocks.activation != "none":
            raise ValueError(
                f"[lora] the layer has activation {blocks.activation!r}, needs 'none': the adapter's part belongs "
                "before it, so apply it in a module of its own"
            )
        super().__init__(base_layer, *arguments, **options)

    def merge(self, *_: Any, **__: Any) -> None:
        """Raises NotImplementedError: what A and B add is dense."""
        raise NotImplementedError("[lora] adapters cannot be merged into blocks: their product is dense")

    def get_delta_weight(self, adapter: str) -> Any:
        """Raises NotImplementedError, as `merge`."""
        raise NotImplementedError("[lora] adapters cannot be merged into blocks: their product is dense")


def register(config: Any) -> Any:
    """Lets `target_modules` of a `peft.LoraConfig` name block-sparse linear layers, and returns it. ::

        from blocksparse.torch import lora

        config = lora.register(peft.LoraConfig(target_modules=["up", "down"]))
        model = peft.get_peft_model(model, config)

    Call it again before `PeftModel.from_pretrained(model, path, config=config)`: files do not save it.

    Raises:
        TypeError: it is no such config.
        ValueError: it asks for initial values or variants that read a dense weight.
    """
    if not isinstance(config, peft.LoraConfig):
        raise TypeError(f"[lora] config is a {type(config).__name__}, needs a peft.LoraConfig")
    if config.use_dora:
        raise ValueError("[lora] use_dora reads a dense weight, which block-sparse layers do not have")
    if config.init_lora_weights not in (True, False, "gaussian"):
        raise ValueError(f"[lora] init_lora_weights is {config.init_lora_weights!r}, needs True, False or 'gaussian'")
    config._register_custom_module({BlockSparseLinear: LoraBlockSparseLinear})
    return config
