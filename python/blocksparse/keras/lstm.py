"""`BlockSparseLSTM`: `keras.layers.LSTM` with a block-sparse recurrent kernel."""

from __future__ import annotations

from typing import Any

import keras

from .._core.arguments import to_int
from ..layout import Layout
from . import backend, layouts
from .layer import BlockSparseLayer

_GATES = 4


@keras.saving.register_keras_serializable(package="blocksparse")
class BlockSparseLSTM(BlockSparseLayer):
    """`keras.layers.LSTM`, with tanh and sigmoid, whose recurrent weights are zero outside of the blocks of a layout.

    Gates are in the order i, f, c, o, as in Keras. `input_kernel` [features, 4 units] is dense, `kernel` [blocks, b, b]
    are the blocks of W [4 units, units]. All steps are one op.

    Args:
        units: of the state, a multiple of the block size.
        layout: of one gate's weight [units, units], for all four, or of W; None: drawn, as in `BlockSparseDense`.
        return_sequences: whether to return all steps, [n, steps, units].
        return_state: whether to return h and c after the last step, too.
        unit_forget_bias: whether the bias of the forget gate begins with 1.
        input_initializer: of the dense weight.
        **more: as in `BlockSparseDense`, but for activation and gates, which there are none of.

    Raises:
        ValueError: an argument is wrong, or the layout has another size.
    """

    def __init__(
        self,
        units: int,
        layout: Layout | str | None = None,
        *,
        return_sequences: bool = False,
        return_state: bool = False,
        unit_forget_bias: bool = True,
        input_initializer: Any = "glorot_uniform",
        **more: Any,
    ) -> None:
        if more.pop("activation", None) not in (None, "linear") or more.pop("gates", False):
            raise ValueError("[BlockSparseLSTM] activation or gates are given, which it does not have")
        super().__init__(layout, **more)
        self.units = units = to_int("units", units, op="BlockSparseLSTM")
        self.return_sequences, self.return_state = return_sequences, return_state
        self.unit_forget_bias = unit_forget_bias
        self.input_initializer = keras.initializers.get(input_initializer)
        self.input_kernel: Any = None
        if units % self.block_size:
            raise ValueError(
                f"[BlockSparseLSTM] units is {units}, needs a multiple of the block size, {self.block_size}"
            )
        if self.layout is not None and self.layout.sizes == (units, units):
            self.layout = self.layout.stack(_GATES)

    def build(self, inputs_shape: Any, initial_state_shape: Any = None, lengths_shape: Any = None) -> None:
        """Makes the variables."""
        units, rows, features = self.units, _GATES * self.units, self.features_of(inputs_shape, ndim=3)
        if self.layout is None:
            self.layout = layouts.drawn(units, units, self.density, self.block_size, self.seed).stack(_GATES)
        self.input_kernel = self.add_weight(
            name="input_kernel", shape=(features, rows), initializer=self.input_initializer
        )
        self.make_variables(rows, units)
        if self.use_bias and self.unit_forget_bias:
            ones = keras.ops.ones((units,), self.bias.dtype)
            start = keras.ops.convert_to_tensor(self.bias)
            self.bias.assign(keras.ops.concatenate([start[:units], ones, start[2 * units :]]))
        self.built = True

    def call(self, inputs: Any, initial_state: Any = None, lengths: Any = None, mask: Any = None) -> Any:
        """[n, steps, features] -> [n, units], or what return_sequences and return_state ask for.

        Args:
            inputs: the sequences.
            initial_state: (h, c), [n, units] each; zeros by default.
            lengths: [n], steps of each sequence; afterwards its state stays and its results are 0. All by default.
            mask: of the inputs, as `keras.layers.Masking` makes it. There must be none: say `lengths`.

        Raises:
            ValueError: there is a mask.
        """
        if mask is not None:
            raise ValueError(
                "[BlockSparseLSTM] the inputs have a mask, which it does not take: pass lengths, such as "
                "keras.ops.sum(mask, 1) where what is masked comes last"
            )
        layout, kernel, bias, _ = self.tensors()
        steps_first = keras.ops.transpose(inputs, (1, 0, 2))
        pre = keras.ops.matmul(steps_first, keras.ops.convert_to_tensor(self.input_kernel))
        if bias is not None:
            pre = pre + bias
        state = None if initial_state is None else tuple(initial_state)
        y, (h, c) = backend.lstm(pre, kernel, layout, state, lengths)
        first = keras.ops.transpose(y, (1, 0, 2)) if self.return_sequences else h
        return [first, h, keras.ops.cast(c, h.dtype)] if self.return_state else first

    def compute_output_shape(
        self, inputs_shape: Any, initial_state_shape: Any = None, lengths_shape: Any = None
    ) -> Any:
        """As `call` returns it."""
        n, steps = inputs_shape[:2]
        state = (n, self.units)
        first = (n, steps, self.units) if self.return_sequences else state
        return [first, state, state] if self.return_state else first

    def get_config(self) -> dict[str, Any]:
        """All arguments."""
        base = super().get_config()
        for name in ("activation", "gates"):
            base.pop(name)
        own = {
            "units": self.units,
            "return_sequences": self.return_sequences,
            "return_state": self.return_state,
            "unit_forget_bias": self.unit_forget_bias,
            "input_initializer": keras.initializers.serialize(self.input_initializer),
        }
        return {**own, **base}
