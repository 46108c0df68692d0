"""The handlers of XLA's custom calls in a runtime of our own: no JAX is needed, and any version can be had."""

import ctypes

import numpy as np
import pytest
from xla_runtime import CallFrame, Runtime

import blocksparse.numpy as bsn
from blocksparse import Layout
from blocksparse._core import library

HANDLERS = [
    *("bs_xla_linear_fprop", "bs_xla_linear_dgrad", "bs_xla_linear_wgrad", "bs_xla_linear_glu_fprop"),
    *("bs_xla_conv_fprop", "bs_xla_conv_dgrad", "bs_xla_conv_wgrad"),
    *("bs_xla_lstm_forward", "bs_xla_lstm_backward"),
]
INVALID, UNIMPLEMENTED = 3, 12


@pytest.fixture(autouse=True)
def restored():
    """The library remembers the runtime that has asked last: JAX's own, for tests that follow."""
    before = library.xla_versions()[1]
    yield
    if before >= (0, 1):
        Runtime(before).metadata(HANDLERS[0])


@pytest.mark.parametrize("name", HANDLERS)
@pytest.mark.parametrize(
    ("runtime", "reported"),
    [(None, (0, 1)), ((0, 1), (0, 1)), ((0, 3), (0, 3)), ((0, 4), (0, 4)), ((0, 9), (0, 4)), ((1, 0), (0, 4))],
    ids=str,
)
def test_no_version_newer_than_the_runtimes_is_reported(name, runtime, reported):
    version, traits = Runtime(runtime).metadata(name)
    assert version == reported
    assert traits == 1  # may be captured in a command buffer


def test_the_runtimes_version_is_remembered():
    for runtime, version in ((0, 2), (0, 2)), ((1, 3), (1, 3)), (None, (0, 1)):
        Runtime(runtime).metadata(HANDLERS[0])
        assert library.xla_versions() == ((0, 4), version)


def test_a_runtime_that_asks_for_less_metadata_is_too_old():
    version, traits = Runtime((0, 1)).metadata(HANDLERS[0], size=16)
    assert (version, traits) == ((-7, -7), 0)  # nothing is written
    assert library.xla_versions() == ((0, 4), (0, 0))


class Product:
    """y = x W^T as a call."""

    def __init__(self, rng, dtype=np.float32):
        self.layout = Layout.from_graph("random(4,6,0.4)", 16, seed=3, out_features=60, in_features=90)
        self.x = rng.standard_normal((7, 90)).astype(dtype)
        self.w = rng.standard_normal(self.layout.values_shape).astype(dtype)
        self.y = np.full((7, 60), np.nan, dtype)
        #               CPU, tf32, optional operands, transposed, b, out, in, blocks, features first, activation
        self.numbers = [0, 0, 0, 0, 16, 60, 90, self.layout.blocks, 0, 0]

    def operands(self):
        return [self.x, self.w, self.layout.index()]


@pytest.mark.parametrize("version", [(0, 1), (0, 3), (0, 9)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_a_call_is_the_cores(rng, version, dtype):
    product = Product(rng, dtype)
    assert Runtime(version).call("bs_xla_linear_fprop", product.operands(), [product.y], product.numbers) is None
    np.testing.assert_array_equal(product.y, bsn.linear_fprop(product.x, product.w, product.layout))


def refusals(product):
    """(what is changed, part of the message)."""
    operands, short = product.operands(), np.zeros((7, 59), np.float32)
    other = Layout.from_graph("random(4,6,0.4)", 16, seed=4, out_features=60, in_features=90)
    assert other.blocks == product.layout.blocks
    one_less = Layout.from_mask(np.eye(4, 6), 16, out_features=60, in_features=90)
    wide = [*product.numbers]
    wide[5] = 61
    yield {"operands": operands[:2]}, "2 operands and 1 results, needs 3 and 1"
    yield {"operands": [operands[0].astype(np.int64), *operands[1:]]}, "XLA's type 5, needs one of float32"
    yield {"operands": [operands[0].astype(np.float64), *operands[1:]]}, r"\[linear_fprop\] w is f32, needs f64"
    yield {"operands": [operands[0][:, :-1].copy(), *operands[1:]]}, r"x is \[7, 89\], layout needs \[N, 90\]"
    yield {"operands": [*operands[:2], operands[2][:-1]]}, "index has [0-9]+ words, its header asks for"
    yield {"operands": [*operands[:2], operands[0]]}, "needs a row of int32"
    yield {"operands": [*operands[:2], one_less.index()]}, "the tables are of 4 blocks of 16 in 60 x 90, needs"
    crooked = np.ndarray(operands[0].shape, np.float32, bytes(operands[0].nbytes + 8), offset=1)
    yield {"operands": [crooked, *operands[1:]]}, "x is not aligned to its elements of 4 bytes"
    yield {"numbers": wide}, "needs 10 of 16 in 61 x 90"
    yield {"numbers": product.numbers[:5]}, "`numbers` has 5 integers of 64 bits, needs 10"
    yield {"results": [short]}, r"y is \[7, 59\]"
    yield {"stage": 2}, "a call in stage 2, needs 3"
    yield {"size": ctypes.sizeof(CallFrame) - 64}, "the runtime is too old"


def test_what_is_wrong_is_an_error_of_the_runtime(rng):
    product, runtime = Product(rng), Runtime((0, 3))
    for change, text in refusals(product):
        given = {"operands": product.operands(), "results": [product.y], "numbers": product.numbers} | change
        code, message = runtime.call("bs_xla_linear_fprop", **given)
        assert code == (UNIMPLEMENTED if "too old" in text else INVALID)
        with pytest.raises(ValueError, match=text):
            raise ValueError(message)
    assert np.isnan(product.y).all()  # nothing was written


def test_a_card_is_refused_where_there_is_none(rng):
    if library.ask("bs_cuda_status") == 0:
        pytest.skip("there is a card")
    product = Product(rng)
    code, message = Runtime((0, 3)).call(
        "bs_xla_linear_fprop", product.operands(), [product.y], [1, *product.numbers[1:]]
    )
    assert code == 14
    assert "[cuda]" in message
