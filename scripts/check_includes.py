"""Fails where a file includes what its folder may not: who may include whom, as data.

Includes point one way, `ops -> gemm -> cpu | cuda -> core`. The tables below say it folder by folder; what is in no
table is refused, and so is an entry of a table that nothing needs.
"""

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUFFIXES = {".h", ".cc", ".c", ".cu", ".cuh", ".inc"}

# Folder: what its files may include beside the public headers. `x/` is a folder with all below it. The longest folder
# that a file lies in counts.
MAY_INCLUDE = {
    "include/blocksparse": "",
    "src/core": "core/",
    "src/graphs": "graphs/ core/",
    "src/cpu": "cpu/ core/",
    "src/cuda": "cuda/ core/",
    "src/gemm": "gemm/ cpu/ cuda/ core/",
    "src/gemm/cpu": "gemm/cpu/ gemm/product.h gemm/reference.h cpu/ core/",
    "src/gemm/cuda": "gemm/cuda/ gemm/product.h gemm/images.h cuda/ core/",
    "src/ops/bias": "ops/bias/ cpu/ cuda/ core/",
    "src/ops/glu": "ops/glu/ ops/linear/ gemm/ cpu/ cuda/ core/",
    "src/ops/glu/cpu": "ops/glu/ cpu/ core/",
    "src/ops/glu/cuda": "ops/glu/ gemm/cuda/finish.cuh cuda/ core/",
    "src/ops/linear": "ops/linear/ ops/glu/glu.h gemm/ cpu/ cuda/ core/",
    "src/ops/conv": "ops/conv/ gemm/ cpu/ cuda/ core/",
    "src/ops/conv/cpu": "ops/conv/ gemm/cpu/ cpu/ core/",
    "src/ops/conv/cuda": "ops/conv/ gemm/cuda/ gemm/images.h cuda/ core/",
    "src/ops/lstm": "ops/lstm/ gemm/ cpu/ cuda/ core/",
    "src/ops/lstm/cpu": "ops/lstm/ gemm/cpu/ gemm/product.h cpu/ core/",
    "src/ops/lstm/cuda": "ops/lstm/ gemm/cuda/ gemm/product.h cuda/ core/",
    "src/ops/norm": "ops/norm/ gemm/ cpu/ cuda/ core/",
    "src/ops/norm/cpu": "ops/norm/ cpu/ core/",
    "src/ops/norm/cuda": "ops/norm/ cuda/ core/",
    "src/ops/sequence": "ops/sequence/ ops/lstm/cell.h ops/lstm/lstm.h ops/norm/norm.h gemm/ cpu/ core/",
    "src/ops": "ops/ gemm/ core/",  # cuda_kernels.cc, which names and loads the kernels of all ops
    "src/no_cuda": "ops/ gemm/ cuda/",
    "src/capi": "capi/ ops/conv/conv.h ops/sequence/deep_update.h cpu/threads.h core/",
    "src/adapters": "adapters/ ops/conv/conv.h core/",
    "tools": "ops/linear/problem.h ops/conv/problem.h cpu/ cuda/ core/",
    "tests": "",
    "examples": "",
}

# Tests (*_test.cc, test.cc and what is in test/) may also include, in folders below the op whose problems they run:
TESTS_MAY_INCLUDE = {
    "src/cpu": "ops/linear/problem.h",
    "src/gemm": "ops/linear/problem.h",
}

# The C interface is for C programs, for what translates it, and for what is loaded through it.
C_HEADER = "blocksparse/c_api.h"
USES_C_HEADER = ("src/capi/", "src/adapters/", "tests/", "examples/")

# A family of kernels and what it takes from another one's folder. A plan.cc may ask any other plan.h, since choices and
# workspaces of families depend on each other.
FAMILIES = "gemm/cuda/"
FROM_FAMILIES = {
    ("stream_w_f32", "stream_w/pack.h"): "packs x by the same kernel",
    ("stream_w_f32", "stream_w/plan.h"): "divides tokens and workspace as stream_w does",
    ("wgrad_stream", "stream_w/pack.h"): "asks whether kernels may begin before the one in front has ended",
    ("w_in_smem", "wgmma/finish.cuh"): "sums lie in registers as wgmma leaves them",
    ("four_rows_wgmma", "wgmma/maps.cuh"): "asks whether boxes of TMA can write y",
    ("wgrad_block", "wgrad_wgmma/terms.cuh"): "walks a list of (x, dy) as wgrad_wgmma does",
    ("wgrad_wgmma", "wgmma/maps.cuh"): "x and dy come by the same maps of TMA",
    ("wgrad_wgmma", "wgmma/plan.h"): "reads chunks and gathers images as wgmma does",
}

# Beside .cu and .cuh files.
CUDA_HEADER = re.compile(r"(cuda|cublas|cusparse|cub/|cuda/|cooperative_groups|mma\.h|nvtx|nv/|thrust/)")
INCLUDES_CUDA = {
    "src/cuda/error.h": "errors of the runtime become a Status",
    "src/cuda/launch.h": "launches",
    "src/cuda/tensor_map.h": "maps of TMA",
    "src/cuda/tensor_map.cc": "maps of TMA",
    "src/cuda/ptx/bulk_copy.h": "copies by maps of TMA",
    "src/gemm/cuda/stream_w/pack.h": "a launch, for host and device code",
    "src/gemm/cuda/tiled_f32/tables.h": "a launch, for host and device code",
    "src/gemm/cuda/wgmma/tables.h": "a launch, for host and device code",
    "src/gemm/cuda/wgrad_in_registers/jobs.h": "a launch, for host and device code",
    "src/gemm/cuda/wgrad_stream/pack.h": "a launch, for host and device code",
    "src/gemm/cuda/wgrad_wgmma/jobs.h": "a launch, for host and device code",
    "src/ops/conv/cuda/gather/taps.h": "a launch, for host and device code",
    "src/gemm/test/cuda_test.cc": "streams and graphs",
    "src/gemm/test/large_cuda_test.cc": "memory filled without a copy on the host",
    "src/ops/conv/test/cuda_test.cc": "streams and graphs",
    "src/ops/lstm/test/cuda_test.cc": "streams and graphs",
}

FRAMEWORK_HEADER = re.compile(r"(torch|ATen|c10|Python\.h|pybind|xla|tensorflow)")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
used: set[object] = set()  # entries of the tables


@cache
def includes_of(file: str) -> list[tuple[int, str]]:
    """Lines and what they include, as the preprocessor finds it: `core/text.h`, `cuda.h`, `opponents.h`."""
    lines = (ROOT / file).read_text().splitlines()
    matches = ((number, INCLUDE.match(line)) for number, line in enumerate(lines, 1))
    return [(number, match[2]) for number, match in matches if match]


def ours(target: str) -> str | None:
    """The file of an include that is found below src or include."""
    return next((f"{folder}/{target}" for folder in ("src", "include") if (ROOT / folder / target).is_file()), None)


def is_test(file: str) -> bool:
    """Whether a file is one of the tests."""
    return file.startswith("tests/") or "/test/" in file or file.endswith(("_test.cc", "/test.cc"))


def folder_in(table: dict[str, str], file: str) -> str | None:
    """The longest folder of the table that the file lies in."""
    return max((folder for folder in table if file.startswith(folder + "/")), key=len, default=None)


def allows(table: dict[str, str], file: str, target: str) -> bool:
    """Whether the table lets the file include the target."""
    folder = folder_in(table, file)
    for entry in table[folder].split() if folder else ():
        if target == entry or (entry.endswith("/") and target.startswith(entry)):
            used.add((id(table), folder, entry))
            return True
    return False


def family_of(target: str) -> tuple[str, str]:
    """The family's folder, if it lies in one, and the rest: `src/gemm/cuda/wgmma/plan.h` -> `wgmma`, `plan.h`."""
    _, found, rest = target.partition(FAMILIES)
    family, below, name = rest.partition("/")
    return (family, name) if found and below else ("", rest)


def check_family(file: str, target: str) -> str | None:
    """What is wrong with an include of another family's file, if it is one."""
    here, of_here = family_of(file) if file.startswith("src/" + FAMILIES) else ("", "")
    there, of_there = family_of(target) if target.startswith(FAMILIES) else ("", "")
    if not here or not there or here == there or (of_here, of_there) == ("plan.cc", "plan.h"):
        return None
    entry = (here, f"{there}/{of_there}")
    used.add(entry)
    return None if entry in FROM_FAMILIES else f"the family {here} takes nothing from there"


def check_target(file: str, target: str) -> str | None:
    """What is wrong with an include of ours."""
    if target == C_HEADER:
        return None if file.startswith(USES_C_HEADER) else f"the C interface is for {', '.join(USES_C_HEADER)}"
    if target.startswith("blocksparse/") or allows(MAY_INCLUDE, file, target):
        return check_family(file, target)
    if is_test(file) and allows(TESTS_MAY_INCLUDE, file, target):
        return None
    folder = folder_in(MAY_INCLUDE, file) or ""
    return f"{folder} may include {MAY_INCLUDE.get(folder) or 'public headers alone'}"


def check_system(file: str, target: str) -> str | None:
    """What is wrong with an include of others' headers."""
    if FRAMEWORK_HEADER.match(target) and file.startswith(("src/", "include/")):
        return "a framework's header"
    if not CUDA_HEADER.match(target) or file.endswith((".cu", ".cuh")):
        return None
    used.add(file)
    return None if file in INCLUDES_CUDA else "a CUDA header outside of .cu and .cuh files"


def check_plan(file: str) -> Iterator[str]:
    """Plans of families are for the host alone: no CUDA header, by whatever way."""
    seen, ways = {file}, [[file]]
    while ways:
        way = ways.pop()
        for _, target in includes_of(way[-1]):
            found = ours(target)
            if found is None and CUDA_HEADER.match(target):
                yield f"{' -> '.join(way)} -> {target}: a plan includes no CUDA header"
            if found is not None and found not in seen:
                seen.add(found)
                ways.append([*way, found])


def check(file: str) -> Iterator[str]:
    """What is wrong with a file's includes."""
    if folder_in(MAY_INCLUDE, file) is None:
        yield f"{file}: its folder is not in the table of scripts/check_includes.py"
        return
    for line, target in includes_of(file):
        beside = (ROOT / file).parent / target
        if beside.is_file() and ours(target) is None:
            continue
        wrong = check_target(file, target) if ours(target) else check_system(file, target)
        if wrong:
            yield f"{file}:{line} includes {target}: {wrong}"
    if file.startswith("src/") and "/cuda/" in file and file.endswith(("/plan.h", "/plan.cc")):
        yield from check_plan(file)


def unused() -> Iterator[str]:
    """Entries that nothing needs any more."""
    for name, table in (("MAY_INCLUDE", MAY_INCLUDE), ("TESTS_MAY_INCLUDE", TESTS_MAY_INCLUDE)):
        for folder, entries in table.items():
            for entry in entries.split():
                if not entry.endswith("/") and (id(table), folder, entry) not in used:
                    yield f"scripts/check_includes.py: nothing in {folder} includes {entry} ({name})"
    for pair in FROM_FAMILIES.keys() - used:
        yield f"scripts/check_includes.py: {pair[0]} does not include {pair[1]} (FROM_FAMILIES)"
    for file in INCLUDES_CUDA.keys() - used:
        yield f"scripts/check_includes.py: {file} includes no CUDA header (INCLUDES_CUDA)"


def main() -> int:
    """Checks all C and C++ files."""
    folders = ("include", "src", "tools", "tests", "examples")
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
    wrong = [text for path in paths for text in check(path.relative_to(ROOT).as_posix())]
    wrong += unused()
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
