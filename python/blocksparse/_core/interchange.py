"""What layouts come from and go to: matrices of other libraries, and files."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Csr = tuple[Any, Any, int, int]  # crow, col, in_blocks, block_size


def csr_of_scipy(matrix: Any) -> Csr:
    """See `Layout.from_scipy`."""
    if not hasattr(matrix, "blocksize"):
        raise TypeError(f"[layout] a {type(matrix).__name__}, needs a SciPy BSR array or matrix")
    rows, columns = matrix.blocksize
    if rows != columns:
        raise ValueError(f"[layout] blocks are {rows} x {columns}, needs square ones")
    return matrix.indptr, matrix.indices, matrix.shape[1] // columns, rows


def csr_of_torch(tensor: Any) -> Csr:
    """See `Layout.from_torch`."""
    if (of := str(getattr(tensor, "layout", type(tensor).__name__))) != "torch.sparse_bsr":
        raise TypeError(f"[layout] a tensor is {of}, needs torch.sparse_bsr")
    rows, columns = tensor.values().shape[-2:]
    if tensor.dim() != 2 or rows != columns:
        raise ValueError(
            f"[layout] a BSR tensor of shape {tuple(tensor.shape)} in blocks of {rows} x {columns}, "
            "needs two dimensions and square blocks"
        )
    crow, col = tensor.crow_indices().cpu().numpy(), tensor.col_indices().cpu().numpy()
    return crow, col, tensor.shape[1] // columns, rows


def read_pattern(path: Path) -> Any:
    """The array that `write_pattern` has written.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file, truncated or damaged.
    """
    with open(path, "rb") as stream:
        if not zipfile.is_zipfile(stream):
            raise ValueError("it is no .npz archive, or cut")
        stream.seek(0)
        try:
            with np.load(stream, allow_pickle=False) as file:
                return file["pattern"]
        except KeyError:
            raise ValueError("it has no array named pattern") from None
        except OSError:
            raise
        except Exception as error:  # of zipfile, zlib and NumPy, which suggests to allow_pickle
            raise ValueError("its array named pattern cannot be read") from error


def dense_weight(layout: Any, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """See `Layout.to_dense`."""
    if values.shape != layout.values_shape:
        raise ValueError(f"[layout] values are {list(values.shape)}, needs {list(layout.values_shape)}")
    b, (row, column), (rows, columns) = layout.block_size, layout.coordinates(), layout.grid
    grid = np.zeros((rows, columns, b, b), values.dtype)
    grid[row, column] = values.swapaxes(1, 2) if layout.transposed else values
    dense: npt.NDArray[Any] = grid.swapaxes(1, 2).reshape(rows * b, columns * b)
    return dense[: layout.out_features, : layout.in_features]


def write_pattern(path: Path, pattern: Any) -> None:
    """A .npz file: all of it is there, or, if writing fails, what was there before."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez_compressed(file, pattern=pattern)
        temporary.replace(path)
    except OSError as error:
        if error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error  # not the temporary name
    finally:
        temporary.unlink(missing_ok=True)
