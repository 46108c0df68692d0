"""Runs a command with the libraries that `make bench` brings named in its environment.

python benchmarks/with_opponents.py build/release/tools/blocksparse-bench --list

OpenBLAS and oneDNN come from this Python environment (scripts/requirements/bench.txt), LIBXSMM from build/libxsmm
(scripts/install_libxsmm.sh). A variable that is set already is left alone.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def libraries() -> dict[str, list[Path]]:
    """Where each may lie, best first."""
    packages, data = Path(sysconfig.get_path("platlib")), Path(sysconfig.get_path("data"))
    return {
        "BLOCKSPARSE_OPENBLAS": sorted(packages.glob("scipy_openblas32/lib/libscipy_openblas.*")),
        "BLOCKSPARSE_ONEDNN": sorted(data.glob("lib/libdnnl.so.3")),
        "BLOCKSPARSE_LIBXSMM": sorted(ROOT.glob("build/libxsmm/lib/libxsmm.so")),
    }


def main(command: list[str]) -> int:
    """Replaces itself by the command."""
    if not command:
        raise SystemExit("usage: with_opponents.py COMMAND...")
    environment = dict(os.environ)
    for variable, paths in libraries().items():
        if paths and not environment.get(variable):
            environment[variable] = str(paths[0])
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise SystemExit(f"cannot run {command[0]}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
