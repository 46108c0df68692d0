"""A byte-level language model around a deep-update LSTM, trained and used by `python -m blocksparse lm`.

config                  what a model is made of, and how it is trained
network                 the model, its loss and bits per byte
training, captured      an update; forward and backward as one CUDA graph
weights                 the model of a checkpoint, and a file of the model alone
stepping                the model read byte by byte, and text drawn from it
compression             files made small, and made again
options, command, train_command   the command line

Public names are here, too. They are imported when the first is asked for, so that help comes without PyTorch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .compression import CompressionError, compress, decompress
    from .config import PRESETS, ModelConfig, TrainConfig, check_seed
    from .network import SYMBOLS, LanguageModel, bits_per_byte, chunks, loss_of
    from .stepping import sample
    from .training import Trainer, read_text, train
    from .weights import load_model, save_model
else:

    def __getattr__(name: str) -> object:
        if name in __all__:
            from . import config

            if hasattr(config, name):  # without PyTorch
                return getattr(config, name)
            from . import compression, network, stepping, training, weights

            for module in (network, stepping, training, weights, compression):
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "PRESETS",
    "SYMBOLS",
    "CompressionError",
    "LanguageModel",
    "ModelConfig",
    "TrainConfig",
    "Trainer",
    "bits_per_byte",
    "check_seed",
    "chunks",
    "compress",
    "decompress",
    "load_model",
    "loss_of",
    "read_text",
    "sample",
    "save_model",
    "train",
]
