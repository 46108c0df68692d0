"""The structs of the C interface, field by field as in c_api.h."""

from __future__ import annotations

import ctypes

MAX_RANK = 5
MAX_MIX = 64
MAX_SIZES = 3

Dims = ctypes.c_int64 * MAX_RANK
Sizes = ctypes.c_int64 * MAX_SIZES


class Blocking(ctypes.Structure):
    """bs_blocking."""

    _fields_ = (("block_size", ctypes.c_int32), ("out_features", ctypes.c_int64), ("in_features", ctypes.c_int64))


class LayoutInfo(ctypes.Structure):
    """bs_layout_info."""

    _fields_ = (
        ("block_size", ctypes.c_int32),
        ("transposed", ctypes.c_int32),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("out_blocks", ctypes.c_int64),
        ("in_blocks", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("pattern_words", ctypes.c_int64),
        ("index_words", ctypes.c_int64),
        ("hash", ctypes.c_uint64),
    )


class LayoutView(ctypes.Structure):
    """bs_layout_view."""

    _fields_ = (
        ("index", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("transposed", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("cut_by_out", ctypes.c_int32),
        ("cut_by_in", ctypes.c_int32),
    )


class Degrees(ctypes.Structure):
    """bs_degrees."""

    _fields_ = (("min", ctypes.c_int64), ("median", ctypes.c_double), ("max", ctypes.c_int64))


class Report(ctypes.Structure):
    """bs_report."""

    _fields_ = (
        ("blocks", ctypes.c_int64),
        ("density", ctypes.c_double),
        ("out", Degrees),
        ("in_", Degrees),
        ("mean_path", ctypes.c_double),
        ("unreachable", ctypes.c_double),
        ("clustering", ctypes.c_double),
        ("diameter", ctypes.c_int64),
        ("symmetric", ctypes.c_int32),
        ("sampled", ctypes.c_int32),
        ("mix_steps", ctypes.c_int32),
        ("mix", ctypes.c_double * MAX_MIX),
    )


class Tensor(ctypes.Structure):
    """bs_tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", Dims),
        ("stride", Dims),
    )


class Epilogue(ctypes.Structure):
    """bs_epilogue."""

    _fields_ = (
        ("bias", ctypes.POINTER(Tensor)),
        ("residual", ctypes.POINTER(Tensor)),
        ("activation", ctypes.c_int32),
    )


class ConvGeometry(ctypes.Structure):
    """bs_conv_geometry."""

    _fields_ = (
        ("rank", ctypes.c_int32),
        ("transposed", ctypes.c_int32),
        ("kernel", Sizes),
        ("stride", Sizes),
        ("dilation", Sizes),
        ("padding_before", Sizes),
        ("padding_after", Sizes),
        ("output_padding", Sizes),
    )


class LstmOutputs(ctypes.Structure):
    """bs_lstm_outputs."""

    _fields_ = tuple((name, ctypes.POINTER(Tensor)) for name in ("y", "h", "c", "gates", "cells"))


class LstmSaved(ctypes.Structure):
    """bs_lstm_saved."""

    _fields_ = (
        *((name, ctypes.POINTER(Tensor)) for name in ("w", "h0", "c0")),
        ("lengths", ctypes.c_void_p),
        *((name, ctypes.POINTER(Tensor)) for name in ("y", "gates", "cells")),
    )


class LstmGrads(ctypes.Structure):
    """bs_lstm_grads."""

    _fields_ = tuple((name, ctypes.POINTER(Tensor)) for name in ("pre", "w", "h0", "c0"))


class LayerNormInputs(ctypes.Structure):
    """bs_layer_norm_inputs."""

    _fields_ = (
        *((name, ctypes.POINTER(Tensor)) for name in ("x", "gain", "shift", "factor", "term")),
        ("relu", ctypes.c_int32),
        ("epsilon", ctypes.c_double),
    )


class LayerNormSaved(ctypes.Structure):
    """bs_layer_norm_saved."""

    _fields_ = (
        *((name, ctypes.POINTER(Tensor)) for name in ("x", "gain", "shift", "factor", "y", "stats")),
        ("relu", ctypes.c_int32),
    )


class LayerNormGrads(ctypes.Structure):
    """bs_layer_norm_grads."""

    _fields_ = tuple((name, ctypes.POINTER(Tensor)) for name in ("x", "gain", "shift", "factor", "term"))


class DeepUpdateMatrix(ctypes.Structure):
    """bs_deep_update_matrix."""

    _fields_ = (
        ("layout", ctypes.POINTER(LayoutView)),
        *((name, ctypes.POINTER(Tensor)) for name in ("w", "gain", "shift")),
    )


class DeepUpdateInputs(ctypes.Structure):
    """bs_deep_update_inputs."""

    _fields_ = (
        ("matrices", ctypes.POINTER(DeepUpdateMatrix)),
        ("count", ctypes.c_int32),
        *((name, ctypes.POINTER(Tensor)) for name in ("factor", "term", "h0", "c0")),
        ("lengths", ctypes.c_void_p),
        ("epsilon", ctypes.c_double),
    )


class DeepUpdateMatrixGrads(ctypes.Structure):
    """bs_deep_update_matrix_grads."""

    _fields_ = tuple((name, ctypes.POINTER(Tensor)) for name in ("w", "gain", "shift"))


class DeepUpdateGrads(ctypes.Structure):
    """bs_deep_update_grads."""

    _fields_ = (
        ("matrices", ctypes.POINTER(DeepUpdateMatrixGrads)),
        *((name, ctypes.POINTER(Tensor)) for name in ("factor", "term", "h0", "c0")),
    )


class MultiplicativeInputs(ctypes.Structure):
    """bs_multiplicative_inputs."""

    _fields_ = (
        *((name, ctypes.POINTER(LayoutView)) for name in ("layout_m", "layout")),
        *((name, ctypes.POINTER(Tensor)) for name in ("w_m", "w", "factor", "pre", "h0", "c0")),
        ("lengths", ctypes.c_void_p),
    )


class MultiplicativeGrads(ctypes.Structure):
    """bs_multiplicative_grads."""

    _fields_ = tuple((name, ctypes.POINTER(Tensor)) for name in ("w_m", "w", "factor", "pre", "h0", "c0"))


class Workspace(ctypes.Structure):
    """bs_workspace."""

    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


class Stream(ctypes.Structure):
    """bs_stream."""

    _fields_ = (("handle", ctypes.c_void_p), ("threads", ctypes.c_int32), ("math", ctypes.c_int32))
