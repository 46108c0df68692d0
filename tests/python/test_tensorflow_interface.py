"""TensorFlow's ops where there is no TensorFlow, or none that has what they need: the library says so, and no more."""

import subprocess
import sys

import pytest

from blocksparse._core import library

PLUGIN = library.library_path().with_name("libblocksparse_tensorflow.so")
ASK = """
import ctypes, sys
if len(sys.argv) > 2:
    ctypes.CDLL(sys.argv[2])
plugin = ctypes.CDLL(sys.argv[1])
plugin.bs_tensorflow_failure.restype = ctypes.c_char_p
print(plugin.bs_tensorflow_failure().decode())
"""


def failure(*framework):
    command = [sys.executable, "-c", ASK, str(PLUGIN), *map(str, framework)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(not PLUGIN.exists(), reason="the library of TensorFlow's ops was not built")
def test_without_tensorflow():
    assert failure() == "libtensorflow_framework.so.2 is not loaded"


@pytest.mark.skipif(not PLUGIN.exists(), reason="the library of TensorFlow's ops was not built")
def test_a_tensorflow_without_the_interface_for_kernels(tmp_path):
    """A library of that name which has but one of the functions."""
    source, framework = tmp_path / "old.c", tmp_path / "libtensorflow_framework.so.2"
    source.write_text("void* TF_NewStatus(void) { return 0; }\n")
    name = "-Wl,-soname,libtensorflow_framework.so.2"
    subprocess.run(["cc", "-shared", "-fPIC", name, str(source), "-o", str(framework)], check=True)
    assert failure(framework) == "TF_DeleteStatus"


def test_the_front_end_asks_for_tensorflow():
    """Unless it is there."""
    code = "import sys; sys.modules['tensorflow'] = None; import blocksparse.tensorflow"
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert run.returncode != 0
    assert "pip install 'blocksparse[tensorflow]'" in run.stderr or "None in sys.modules" in run.stderr


@pytest.mark.parametrize("framework", ["tensorflow", "keras", "torch", "jax"])
def test_the_package_imports_no_framework(framework):
    code = f"import sys, blocksparse, blocksparse.matmul, blocksparse.conv; sys.exit({framework!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
