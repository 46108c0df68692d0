"""The command line: python -m blocksparse [selftest | report | plot | animate GRAPH | lm | pixelcnn COMMAND]."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from . import Layout, __version__, cpu_isa, cpu_isas, cuda_status, graphs, program
from . import numpy as ops
from ._core import library
from .front_ends import front_ends
from .models.bars import duration
from .models.language import options
from .models.pixelcnn import options as pixelcnn_options
from .patience import patiently

MODELS = ("lm", "pixelcnn")  # commands that need PyTorch
LARGE = 3e8  # starts x blocks of a report that takes more than some seconds
SECONDS_A_BLOCK = (5e-9, 50e-9)  # that a path's start takes, where blocks lie in caches or in memory


def _info() -> None:
    rows = [
        ("blocksparse", __version__),
        ("library", str(library.library_path())),
        ("CPU", platform.processor() or platform.machine()),
        ("instruction sets", ", ".join(cpu_isas())),
        ("in use", cpu_isa()),
        ("threads", str(library.ask("bs_default_threads"))),
        ("CUDA", cuda_status() or "available"),
        ("CUDA kernels", library.ask("bs_cuda_kernels").decode() or "none in this build"),
        ("NumPy", np.__version__),
    ]
    rows += front_ends()
    for name, value in rows:
        print(f"{name:<18}{value}")


def _selftest() -> int:
    """Every pass, block size and instruction set on small problems with gates, against dense products in float64."""
    from . import set_cpu_isa

    failures = cases = 0
    rng = np.random.default_rng(0)
    for isa in cpu_isas():
        set_cpu_isa(isa)
        for b in (8, 16, 32, 64, 128):
            layout = Layout.from_graph("random(5,4,0.5)", b, seed=b, in_features=4 * b - 3)
            for dtype, bound in (("float64", 1e-12), ("float32", 1e-5), ("float16", 1e-2)):
                x, dy = rng.standard_normal((33, layout.in_features)), rng.standard_normal((33, layout.out_features))
                w = rng.standard_normal(layout.values_shape)
                x, dy, w = (a.astype(dtype) for a in (x, dy, w))
                gates = rng.integers(0, 3, layout.blocks).astype(np.float64 if dtype == "float64" else np.float32)
                dense = layout.to_dense(w * gates[:, None, None]).astype(np.float64)
                live = layout.to_dense(np.ones_like(w) * gates[:, None, None])
                x64, dy64 = x.astype(np.float64), dy.astype(np.float64)
                results = {
                    "fprop": (ops.linear_fprop(x, w, layout, gates=gates), x64 @ dense.T),
                    "dgrad": (ops.linear_dgrad(dy, w, layout, gates=gates), dy64 @ dense),
                    "wgrad": (layout.to_dense(ops.linear_wgrad(x, dy, layout, gates=gates)), (dy64.T @ x64) * live),
                }
                for name, (got, expected) in results.items():
                    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
                    cases += 1
                    if not error <= bound:
                        failures += 1
                        print(f"wrong: {name} {dtype} b={b} {isa}: relative error {error:.2e}, bound {bound:.0e}")
    set_cpu_isa("")
    print(f"{cases - failures} of {cases} right ({', '.join(cpu_isas())})")
    return 1 if failures else 0


def _layout(arguments: argparse.Namespace) -> Layout:
    if Path(arguments.graph).suffix == ".npz":
        return Layout.load(arguments.graph)
    how = {"block_size": arguments.block_size, "seed": arguments.seed}
    return patiently(f"making {arguments.graph}", lambda: Layout.from_graph(arguments.graph, **how))


def _report(layout: Layout) -> graphs.Report:
    """`graphs.report`, with a word beforehand where it takes long."""
    nodes, blocks = layout.grid[0], layout.blocks
    starts = min(nodes, 1024) if layout.grid[0] == layout.grid[1] else 0
    if starts * blocks > LARGE:
        few, many = (duration(starts * blocks * seconds) for seconds in SECONDS_A_BLOCK)
        text = f"paths from {starts} of {nodes} blocks through {blocks} blocks may take {few} to {many}; Ctrl-C stops"
        print(f"blocksparse: {text}", file=sys.stderr, flush=True)
    return patiently(f"measuring paths through {blocks} blocks", lambda: graphs.report(layout))


def _plot(arguments: argparse.Namespace) -> None:
    from .viz import check_picture, plot_layout

    path = check_picture(f"{_stem(arguments.graph)}.png" if arguments.out is None else arguments.out)
    layout = _layout(arguments)
    print(plot_layout(layout, path, arguments.graph, _report(layout)))


def _animate(arguments: argparse.Namespace) -> None:
    from .spread import Torus, animate_spread, check_animation

    graph = arguments.graph
    path = check_animation(f"{_stem(graph)}.gif" if arguments.out is None else arguments.out)
    Torus.of(graph)
    layout = patiently(f"making {graph}", lambda: Layout.from_graph(graph, 8, seed=arguments.seed))
    print(animate_spread(graph, path, layout=layout, report=_report(layout)))


def _stem(graph: str) -> str:
    """Of a file: the beginning, for graphs may have longer names than files."""
    return re.sub(r"[^\w.-]+", "-", graph).strip("-")[:100]


def _parser() -> argparse.ArgumentParser:
    name = "blocksparse" if Path(sys.argv[0]).name == "blocksparse" else "python -m blocksparse"
    parser = argparse.ArgumentParser(prog=name, description="Says what was found on this machine.")
    parser.add_argument("--version", action="version", version=f"blocksparse {__version__}")
    parser.add_argument("--cmake-dir", action="store_true", help="print the folder for CMake's blocksparse_DIR")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("selftest", help="run every kernel of this CPU on small problems, for some seconds")
    for name, text in (("report", "print what a layout connects"), ("plot", "draw a layout")):
        command = commands.add_parser(name, help=text)
        command.add_argument("graph", help='a graph such as "ba(384,8)", or a saved layout (.npz)')
        command.add_argument("--block-size", type=int, default=32, help="edge of a block (default: %(default)s)")
        command.add_argument("--seed", type=int, default=0, help="of graphs that are random (default: %(default)s)")
        if name == "plot":
            command.add_argument("-o", "--out", help="PNG or SVG file (default: from the graph's name)")
    command = commands.add_parser("animate", help="draw step by step how activation spreads through a graph")
    command.add_argument("graph", help='a graph on a torus such as "ws2d(16,24,8,0.2)"')
    command.add_argument("--seed", type=int, default=0, help="of the graph (default: %(default)s)")
    command.add_argument("-o", "--out", help="GIF, or PNG or SVG of six steps at most (default: from the graph's name)")
    options.add_parser(commands)
    pixelcnn_options.add_parser(commands)
    return parser


def _need_models(words: list[str]) -> None:
    """Raises ModuleNotFoundError if a model is asked for, be it for help, without what it needs."""
    asked = next((word for word in words if not word.startswith("-")), "")
    if asked in MODELS and not all(map(importlib.util.find_spec, ("torch", "safetensors"))):
        raise ModuleNotFoundError(f"{asked} needs PyTorch and safetensors: pip install 'blocksparse[{asked}]'")


def _model(arguments: argparse.Namespace) -> int:
    if arguments.command == "lm":
        from .models.language.command import run  # importing PyTorch takes seconds
    else:
        from .models.pixelcnn.command import run
    from .models.memory import memory_errors

    program.raise_on_interrupt()
    with memory_errors(arguments.command):
        return run(arguments)


@contextmanager
def _short_warnings() -> Iterator[None]:
    """A line each, without the place in our code."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"blocksparse: warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    with _short_warnings():
        return _run(sys.argv[1:] if argv is None else argv)


def _run(words: list[str]) -> int:
    status = 0
    try:
        _need_models(words)
        arguments = _parser().parse_args(words)
        if arguments.command not in MODELS:
            program.raise_on_interrupt()
        if arguments.cmake_dir:
            print(Path(__file__).parent / "lib" / "cmake" / "blocksparse")
        elif arguments.command == "selftest":
            status = _selftest()
        elif arguments.command == "report":
            layout = _layout(arguments)
            print(layout, _report(layout), sep="\n")
        elif arguments.command == "plot":
            _plot(arguments)
        elif arguments.command == "animate":
            _animate(arguments)
        elif arguments.command in MODELS:
            status = _model(arguments)
        else:
            _info()
        sys.stdout.flush()
    except BrokenPipeError:
        program.write_to_nobody()
    except (ValueError, OSError, MemoryError, ModuleNotFoundError, library.UnavailableError) as error:
        print(f"blocksparse: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nblocksparse: stopped", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
