"""What benchmarks make of a recording of kernels; the recordings themselves need a card."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from device_kernels import Calls, Kernel, kernels_of_planes


def test_of_each_call_the_time_in_which_a_kernel_runs():
    calls = Calls()
    first = [Kernel("product", 0, 4), Kernel("sum", 3, 5)]  # the second starts before the first has ended
    second = [Kernel("product", 10, 16), Kernel("sum", 20, 21)]
    calls.add([*second, *first], 2)  # recordings are in no order
    calls.add([Kernel("product", 30, 38), Kernel("sum", 31, 32)], 1)
    assert calls.busy == [5, 7, 8]
    assert calls.names == ["product", "sum"]
    assert calls.median() == 7


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ([], "2 equal calls ran 0 kernels: none was seen"),
        ([Kernel("product", 0, 1)], "2 equal calls ran 1 kernels: product"),
        ([Kernel("product", 0, 1), Kernel("copy", 2, 3)], "2 equal calls ran 2 kernels: copy, product"),
    ],
)
def test_calls_that_are_not_equal_are_refused(kernels, message):
    with pytest.raises(RuntimeError, match=message):
        Calls().add(kernels, 2)


def test_a_trace_of_jax_counts_each_kernel_once():
    event = SimpleNamespace(name="product", start_ns=2000.0, duration_ns=500.0)

    def line(name):
        return SimpleNamespace(name=name, events=[event])

    planes = [
        SimpleNamespace(name="/host:CPU", lines=[line("Stream of words")]),
        SimpleNamespace(name="/device:GPU:0", lines=[line("Stream #13(Compute)"), line("XLA Ops")]),
    ]
    assert kernels_of_planes(planes) == [Kernel("product", 2.0, 2.5)]
