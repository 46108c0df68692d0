"""The norms of the 2017 release, which are elsewhere now: each name says where."""

from ._core.refused import ways_of

_BATCH = "keras.layers.BatchNormalization, or torch.nn.BatchNorm2d"

WAYS = {
    "layer_norm": "keras.layers.LayerNormalization, or blocksparse.torch.norm, which fuses what follows it",
    "batch_norm": _BATCH,
    "batch_norm_inference": _BATCH,
}
__getattr__ = ways_of(__name__, WAYS)
