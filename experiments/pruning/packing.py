"""Arrays in one small file: 16-bit floats by bytes of equal meaning, all of it through xz."""

from __future__ import annotations

import io
import lzma
from pathlib import Path
from typing import Any

import numpy as np

from blocksparse.models.files import write_whole

Array = np.ndarray[Any, np.dtype[Any]]
PLANES = ".planes"  # behind the names of 16-bit floats


def write_arrays(path: Path, arrays: dict[str, Array]) -> None:
    """Writes them; 32-bit floats are rounded to 16 bits."""
    stored = {}
    for name, array in arrays.items():
        if array.dtype.kind == "f":
            planes = np.ascontiguousarray(array.astype("<f2")).view(np.uint8).reshape(*array.shape, 2)
            stored[name + PLANES] = np.ascontiguousarray(np.moveaxis(planes, -1, 0))  # exponents lie together
        else:
            stored[name] = array
    content = io.BytesIO()
    np.savez(content, **stored)  # type: ignore[arg-type]  # its stub takes a keyword for all others
    write_whole(path, lzma.compress(content.getvalue(), preset=6))


def read_arrays(path: Path) -> dict[str, Array]:
    """What `write_arrays` has written; floats are 32-bit again."""
    found = {}
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as content:
        for name in content.files:
            array = content[name]
            if name.endswith(PLANES):
                whole = np.ascontiguousarray(np.moveaxis(array, 0, -1)).view("<f2")
                found[name.removesuffix(PLANES)] = whole[..., 0].astype(np.float32)
            else:
                found[name] = array
    return found
