"""Neural-network layers whose weights are zero outside a chosen set of blocks.

`Layout` says which blocks there are, `graphs` makes layouts. The ops are in `blocksparse.numpy` and `blocksparse.cupy`
(functions on arrays), `blocksparse.torch` and `blocksparse.jax` (functional ops and modules); `blocksparse.matmul` and
`blocksparse.conv` run the programs of the 2017 release, `blocksparse.models` has language models and what is made of
them.
"""

from . import program as _program

if _program.is_ours():
    _program.end_on_interrupt()  # before the imports that take time

import ctypes as _ctypes
import typing as _typing

from . import graphs
from ._core import library as _library
from ._core.arguments import need as _need
from ._core.library import UnavailableError, UnsupportedError
from .layout import Layout

__version__: str = _library.ask("bs_version").decode()
__all__ = [
    "Layout",
    "UnavailableError",
    "UnsupportedError",
    "cpu_isa",
    "cpu_isas",
    "cuda_status",
    "graphs",
    "set_cpu_isa",
]


def cpu_isas() -> list[str]:
    """Instruction sets that this CPU runs, best first, and last "reference", the plain loops in double precision."""
    names: bytes = _library.ask("bs_cpu_isas")
    return names.decode().split()


def cpu_isa() -> str:
    """The instruction set in use: the best, unless BLOCKSPARSE_ISA in the environment or `set_cpu_isa` names another.

    Raises:
        ValueError: BLOCKSPARSE_ISA holds an unknown name.
        UnavailableError: this CPU does not run it.
    """
    name = _ctypes.c_char_p()
    _library.call("bs_cpu_isa", _ctypes.byref(name))
    return (name.value or b"").decode()


def set_cpu_isa(name: str) -> None:
    """Makes all ops use this instruction set; "" for the best again.

    Raises:
        ValueError: there is no such instruction set.
        UnavailableError: this CPU does not run it.
    """
    _need("isa", "name", name, str, f"one of {', '.join(cpu_isas())}, or an empty str")
    _library.call("bs_set_cpu_isa", name.encode())


def cuda_status() -> str:
    """Why CUDA tensors cannot be used; "" if they can."""
    try:
        _library.call("bs_cuda_status")
    except UnavailableError as error:
        return str(error)
    return ""


if not _typing.TYPE_CHECKING:  # to which all names would be right

    def __getattr__(name: str) -> object:
        """Names that `import blocksparse as bs` had in the original: from where they are, or what to take now."""
        from ._core.refused import ways_of
        from .ew import WAYS as ELEMENTWISE
        from .norms import WAYS as NORMS

        if name in ("BlocksparseMatMul", "SparseProj", "group_param_grads"):
            import blocksparse.matmul as place
        elif name in ("BlocksparseConv", "BlocksparseDeconv", "cwise_linear"):
            import blocksparse.conv as place
        else:
            ways_of(__name__, {**ELEMENTWISE, **NORMS, "gradients": "tf.gradients"})(name)
        return getattr(place, name)
