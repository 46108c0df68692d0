"""What the tests of TensorFlow's ops share."""

import numpy as np
import pytest
import tensorflow as tf


def wide_of(dtype):
    return np.float64 if dtype == np.float64 else np.float32


def problem(rng, layout, dtype=np.float32, n=7):
    """X, values, bias, gates and dy."""
    sides = ((n, layout.in_features), layout.values_shape, (layout.out_features,), (n, layout.out_features))
    x, values, bias, dy = (rng.standard_normal(side).astype(dtype) for side in sides)
    return x, values, bias, rng.random(layout.blocks).astype(wide_of(dtype)), dy


def same(mine, theirs):
    """To the bit, zeros and their signs, too."""
    mine, theirs = np.ascontiguousarray(mine), np.ascontiguousarray(theirs)
    assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    np.testing.assert_array_equal(mine.reshape(-1).view(np.uint8), theirs.reshape(-1).view(np.uint8))


def numeric_gradients(function, arguments, rng, delta=1e-5):
    """Fails unless the gradients are those of central differences along a random direction of each argument."""
    variables = [tf.Variable(argument) for argument in arguments]
    with tf.GradientTape() as tape:
        total = function(*variables)
    gradients = tape.gradient(total, variables, unconnected_gradients="zero")
    for gradient, variable in zip(gradients, variables, strict=True):
        direction = rng.standard_normal(variable.shape)
        before = variable.numpy()
        sides = []
        for sign in (1, -1):
            variable.assign(before + sign * delta * direction)
            sides.append(float(function(*variables)))
        variable.assign(before)
        slope = float((gradient.numpy() * direction).sum())
        assert slope == pytest.approx((sides[0] - sides[1]) / (2 * delta), rel=1e-5, abs=1e-7)
