"""One row for each problem of a file of results: ours beside the fastest of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from records import Problem, Record, Results

DENSE = ("openblas", "onednn", "cublas", "cudnn")
SPARSE = ("libxsmm", "cusparse_bsr", "cusparse_ell")
TF32 = "cublas_tf32"
PLAIN = "triton_plain"
TORCH = "torch_dense"
DIRECTIONS = ("fprop", "dgrad", "wgrad")
FEW = 64  # tokens, at most
Group = tuple[str, int, int, int, str, str, int]


@dataclass
class Row:
    """One problem of the file."""

    problem: Problem
    record: Record

    @property
    def us(self) -> float:
        """Ours, weights from memory where that was timed."""
        return float(self.record.get("us") or self.record["us_hot"])

    def of(self, library: str) -> float | None:
        """Another library's time, in us."""
        times = self.record.get("vs") or self.record.get("vs_hot") or {}
        return times.get(library)

    @property
    def dtype(self) -> str:
        """Of x and y, or tf32: f32 whose products are rounded to it."""
        return "tf32" if "tf32" in self.problem.others else self.problem.dtype

    @property
    def dense(self) -> tuple[float, str] | None:
        """Time and name of the fastest dense library, of products in tf32 where ours is."""
        names = (TF32,) if self.dtype == "tf32" else DENSE
        return min(((us, name) for name in names if (us := self.of(name)) is not None), default=None)

    @property
    def speed_up(self) -> float | None:
        """Over the fastest dense library."""
        return self.dense[0] / self.us if self.dense else None

    @property
    def sparse(self) -> tuple[float, str] | None:
        """Time and name of the fastest sparse library."""
        return min(((us, name) for name in SPARSE if (us := self.of(name)) is not None), default=None)

    @property
    def over_sparse(self) -> float | None:
        """How many times the fastest sparse library takes our time."""
        return self.sparse[0] / self.us if self.sparse else None

    def over_plain(self, *, hot: bool) -> float | None:
        """How many times as long plain Triton kernels take, weights from memory or in cache."""
        us = self.record.get("vs_hot" if hot else "vs", {}).get(PLAIN)
        return None if us is None else float(us / self.record["us_hot" if hot else "us"])

    @property
    def on_card(self) -> bool:
        """Whether it is of a CUDA card."""
        return self.problem.device == "cuda"

    @property
    def density(self) -> float:
        """Share of blocks that are there; a random layout's own number where the line does not tell."""
        if "density" in self.record:
            return float(self.record["density"])
        name, numbers = kind(self.problem), numbers_of(self.problem)
        return numbers[-1] if name == "random" else (*numbers, 1.0)[1] / numbers[0]

    @property
    def grouped(self) -> bool:
        """Whether the others' convolution has groups, as many as the layout: then it does no more than ours."""
        return self.problem.is_conv and kind(self.problem) == "diagonal"

    @property
    def ideal(self) -> float | None:
        """Our time over density times the dense time."""
        return 1 / (self.speed_up * self.density) if self.speed_up and not self.grouped else None

    @property
    def size(self) -> tuple[int, int]:
        """Outputs and inputs."""
        if "out" in self.record:
            return self.record["out"], self.record["in"]
        numbers = numbers_of(self.problem)
        in_ = numbers[1] if kind(self.problem) == "random" and len(numbers) == 3 else numbers[0]
        return int(numbers[0]) * self.problem.block, int(in_) * self.problem.block

    def share(self, of: str) -> float | None:
        """Of the peak or of the roofline, where the line tells it."""
        return self.record.get(f"{of}_fraction")

    @property
    def group(self) -> Group:
        """What rows of one table have in common."""
        p = self.problem
        return (self.dtype, *self.size, p.n, p.order, p.setting, 0 if self.on_card else p.threads)


def rows_of(results: Results) -> list[Row]:
    """All rows of blocksparse-bench, by group, direction, graph, block size and density."""
    rows = [Row(Problem.parse(line), record) for line, record in results.bench.items()]

    def key(row: Row) -> tuple[Any, ...]:
        p = row.problem
        dtype, *rest = row.group
        return (dtype != "f32", dtype, *rest, DIRECTIONS.index(p.direction), kind(p), p.block, row.density)

    return sorted(rows, key=key)


def rows_beside_plain(results: Results) -> list[Row]:
    """Those of Python libraries that were timed beside plain Triton kernels, in the order of tables and tokens."""
    rows = [Row(Problem.parse(line), record) for line, record in results.python.items() if PLAIN in record["vs"]]

    def key(row: Row) -> tuple[Any, ...]:
        p = row.problem
        return (p.dtype, *row.size, DIRECTIONS.index(p.direction), p.block, kind(p), -row.density, p.n)

    return sorted(rows, key=key)


def grouped_by_matrix(rows: list[Row]) -> dict[str, list[Row]]:
    """Those of one size and type of W, whatever the tokens."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault("{} x {}, {}".format(*row.size, row.dtype), []).append(row)
    return groups


def kind(problem: Problem) -> str:
    """The generator's name."""
    return problem.graph.split("(")[0]


def numbers_of(problem: Problem) -> list[float]:
    """Of the generator."""
    return [float(number) for number in problem.graph.split("(")[1].rstrip(")").split(",")]


def title(group: Group) -> str:
    """The group in words."""
    dtype, out, in_, n, order, setting, threads = group
    name = f"{out} x {in_} channels, {setting}, {n} images" if setting else f"{out} x {in_}, N = {n}"
    name += f", {dtype}, {order}"
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}" if threads else name
