"""LoRA adapters of peft on block-sparse layers: dense, of low rank, beside frozen blocks. Needs `pip install peft`."""

import peft
import torch
from peft.tuners.lora import Linear

import blocksparse.torch as bst
from blocksparse import graphs


class LoraBlockSparseLinear(Linear):
    """y = layer(x) + scaling B A x, where `layer` is a `BlockSparseLinear` without an activation."""

    def __init__(self, base_layer, *arguments, **options):
        blocks = base_layer.get_base_layer() if hasattr(base_layer, "get_base_layer") else base_layer
        if blocks.activation != "none":
            raise ValueError(f"the layer has activation {blocks.activation!r}, before which the adapter's part belongs")
        super().__init__(base_layer, *arguments, **options)

    def get_delta_weight(self, adapter):
        raise NotImplementedError("adapters cannot be merged into blocks: their product is dense")

    def merge(self, *_, **__):
        self.get_delta_weight(None)


def register(config):
    """Lets `target_modules` name block-sparse linear layers. Files do not save it, so call it before loading, too."""
    if config.use_dora or config.init_lora_weights not in (True, False, "gaussian"):
        raise ValueError("DoRA and initial values other than True, False and 'gaussian' read a dense weight")
    config._register_custom_module({bst.BlockSparseLinear: LoraBlockSparseLinear})  # peft's way, though named so
    return config


def main():
    layout = graphs.barabasi_albert(nodes=32, links=4, block_size=8)
    net = torch.nn.Sequential(bst.BlockSparseLinear(256, 256, layout), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    model = peft.get_peft_model(net, register(peft.LoraConfig(target_modules=["0"], r=4)))
    model.print_trainable_parameters()
    model(torch.randn(8, 256)).square().mean().backward()


if __name__ == "__main__":
    main()
