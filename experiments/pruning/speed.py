"""How fast the pruned models are beside the dense ones: sentences per second, and tokens per second.

    python speed.py sentences --packed packed/sentences --masks out/sentences --threads 1 2
    python speed.py language --packed packed/language --masks out/language --threads 2
    python speed.py sentences --packed packed/sentences --masks out/sentences --device cuda

Models have the blocks that training chose (masks-*.npz in --masks), or of the largest norms where there is none.
Each is run eagerly, compiled, and on a card as the replay of a CUDA graph of both; the best way of each model counts.
Times are medians of samples that are taken in turn. A line for each batch and dtype, with all models and ways in it, is
written as soon as it is there: those of decoding first, then those of prompts. A sample of decoding is one token.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import embedder
import language
import numpy as np
import sentences
import torch
from sentences import Arm
from torch import Tensor, nn

import blocksparse
import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse.program import finish, positive

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOKENS, PROMPT = 64, 512  # of a sentence; of the text before the token that is decoded
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """What a model is given: `fresh` makes its input, which is not timed; `call` is. A call reads tokens like `ids`."""

    name: str
    count: int  # sentences, or tokens
    ids: Tensor
    fresh: Callable[[nn.Module], Any]
    call: Callable[[Any, Any], Any]


def sentence_cases(packed: embedder.Packed, sizes: list[int]) -> list[Case]:
    """Batches of sentences of 64 tokens."""
    made = []
    for size in sizes:
        ids = packed.sentences(packed.held_out[:size], TOKENS)
        made.append(Case(f"batch {size}", size, ids, lambda model, ids=ids: ids, lambda model, ids: model(ids)))  # type: ignore[misc]
    return made


def language_cases(packed: language.Packed, sizes: list[int]) -> list[Case]:
    """One token behind 512 others, of so many texts; then a prompt of 512 tokens."""
    from transformers import DynamicCache

    decodes, prefills = [], []
    for size in sizes:
        ids = packed.training[: size * (PROMPT + 1)].view(size, -1)
        options = {"use_cache": True, "logits_to_keep": 1}

        def read(model: Any, ids: Tensor = ids) -> Any:
            cache = DynamicCache()
            model(input_ids=ids[:, :PROMPT], past_key_values=cache, use_cache=True, logits_to_keep=1)
            return cache

        def prefill(model: Any, ids: Tensor, options: dict[str, Any] = options) -> Any:
            return model(input_ids=ids, past_key_values=DynamicCache(), **options)

        def decode(model: Any, cache: Any, ids: Tensor = ids, options: dict[str, Any] = options) -> Any:
            return model(input_ids=ids[:, PROMPT:], past_key_values=cache, **options)

        decodes.append(Case(f"decode {size}", size, ids[:, PROMPT:], read, decode))
        name, prompt = f"prefill {size} x {PROMPT}", ids[:, :PROMPT]
        prefills.append(Case(name, prompt.numel(), prompt, lambda model, prompt=prompt: prompt, prefill))  # type: ignore[misc]
    return decodes + prefills


# ---- The ways to run a model -----------------------------------------------------------------------------------------


class Way:
    """A model and one way to run it. `sample` gives the seconds of a call."""

    def __init__(self, model: nn.Module, case: Case, device: str, compiled: bool, graph: bool) -> None:
        self.case, self.device = case, device
        self.model = torch.compile(model, dynamic=False) if compiled else model
        self.eager = model
        base = case.fresh(model)
        self.fresh: Call = lambda: copy.deepcopy(base) if not isinstance(base, Tensor) else base
        for _ in range(3):
            case.call(self.model, self.fresh())
        self.graph = self._captured() if graph else None

    def _captured(self) -> Any:
        cuda: Any = torch.cuda
        given, side = self.fresh(), cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.case.call(self.model, self.fresh())
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.kept = self.case.call(self.model, given), given
        return graph

    def sample(self) -> float:
        """Seconds of a call: of one, or of ten replays of a graph, divided by ten."""
        times = 10 if self.graph is not None else 1
        given = self.fresh()
        if self.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            if self.graph is not None:
                self.graph.replay()
            else:
                self.case.call(self.model, given)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / times


def ways(
    models: dict[str, nn.Module], case: Case, options: argparse.Namespace, failed: dict[str, str]
) -> dict[str, Way]:
    """All ways of all models that work; of others `failed` says why not."""
    made = {}
    for graph in (False, True) if options.device == "cuda" else (False,):
        for compiled in (False, True):
            for title, model in models.items():
                if compiled and title not in (list(models) if options.compile == "all" else [options.compile]):
                    continue
                name = f"{title}: {'compiled' if compiled else 'eager'}{', graph' if graph else ''}"
                try:
                    made[name] = Way(model, case, options.device, compiled, graph)
                except Exception as error:
                    failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                    warnings.warn(f"{case.name}, {name} does not run: {failed[name]}", stacklevel=1)
    return made


@torch.no_grad()
def measure(models: dict[str, nn.Module], case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """{what: seconds of each way, best of each model}."""
    torch._dynamo.reset()  # it compiles no more than 8 models of one class, and runs the next one eagerly
    failed: dict[str, str] = {}
    all_ways = ways(models, case, options, failed)
    taken: dict[str, list[float]] = {name: [] for name in all_ways}
    for _ in range(options.samples):
        for name, way in all_ways.items():
            taken[name].append(way.sample())
    seconds = {name: statistics.median(samples) for name, samples in taken.items()}
    best = {t: min((s, n) for n, s in seconds.items() if n.startswith(f"{t}: ")) for t in models}
    return {
        "seconds": {name: round(s, 7) for name, s in seconds.items()},
        "best_way": {title: name for title, (_, name) in best.items()},
        "per_second": {title: round(case.count / s, 2) for title, (s, _) in best.items()},
        **({"failed": failed} if failed else {}),
    }


# ---- Models ----------------------------------------------------------------------------------------------------------


def masks_of(model: nn.Module, arm: Arm, targets: str, folder: Path | None) -> tuple[dict[str, Tensor], str]:
    """(the masks of an arm, where they are from)."""
    file = folder / f"masks-{arm.name}.npz" if folder else None
    if file is not None and file.exists():
        device = next(model.parameters()).device
        with np.load(file) as found:
            return {name: torch.from_numpy(found[name]).to(device) for name in found.files}, "training"
    return bss.sparsify_(model, "magnitude", sparsity=arm.sparsity, block_size=arm.block, targets=targets), "magnitude"


def sparse_model(
    dense: nn.Module, arm: Arm, targets: str, example: Any, options: argparse.Namespace
) -> tuple[nn.Module, dict[str, Any]]:
    """The dense model with block-sparse layers where they are faster; and what is to be said of it."""
    made = copy.deepcopy(dense)
    masks, source = masks_of(made, arm, targets, options.masks)
    for target in bss.find_targets(made, arm.block, targets):
        target.keep_(target.parameter.data, masks[target.name])
    parts = {name: (part.up, part.down, part.gate) for name, part in bst.find_mlps(made).items()}
    paths = {module: path for path, module in made.named_modules()}
    inside = {name: [paths[layer] for layer in layers if layer is not None] for name, layers in parts.items()}
    timings: dict[str, bss.Timing] = {}
    start = time.perf_counter()
    made = bss.convert(made, masks, block_size=arm.block, example=example, timings=timings)
    seconds = round(time.perf_counter() - start, 1)
    return made.eval(), {"masks": source, **summary(timings, inside), "convert_s": seconds}


def summary(timings: dict[str, bss.Timing], inside: dict[str, list[str]]) -> dict[str, Any]:
    """How many of the pruned layers are block-sparse now, and how much faster all of them became together.

    Args:
        timings: of layers, and of MLPs that became one module.
        inside: names of the layers of each MLP.
    """
    mlps = [name for name in timings if name in inside]
    within = {layer for name in mlps for layer in inside[name]}
    apart = {name: timing for name, timing in timings.items() if name not in within}
    before = sum(t.before_s for t in apart.values())
    after = sum(t.after_s if t.converted else t.before_s for t in apart.values())
    converted = len(within) + sum(t.converted for t in apart.values()) - len(mlps)
    return {
        "layers_speedup": round(before / after, 3) if apart else None,
        "converted": f"{converted} of {len(timings) - len(mlps)}",
        "mlps": len(mlps),
    }


def run(options: argparse.Namespace) -> None:
    """All lines."""
    about_language = options.what == "language"
    packed: Any = (language if about_language else embedder).Packed(options.packed, options.device)
    targets = language.TARGETS if about_language else sentences.TARGETS
    cases = (language_cases if about_language else sentence_cases)(packed, options.batches)
    timed = [case for case in cases if options.only in case.name]
    if not timed:
        raise ValueError(f"--only is {options.only!r}, which is in the name of no case")
    where = torch.cuda.get_device_name() if options.device == "cuda" else blocksparse.cpu_isa()
    for threads in options.threads:
        torch.set_num_threads(threads)
        for dtype in options.dtypes:
            dense = packed.model(DTYPES[dtype]) if about_language else packed.model().to(DTYPES[dtype])
            dense = dense.requires_grad_(False)
            for case in timed:
                models, said = {"dense": dense}, {}
                for sparsity in options.sparsities:
                    for block in options.blocks:
                        arm = Arm(options.method, sparsity, block)
                        models[arm.name], said[arm.name] = sparse_model(dense, arm, targets, case.ids, options)
                        about = said[arm.name]
                        print(
                            f"{case.name}, {dtype}, {arm.name}: {about['converted']} layers are block-sparse",
                            flush=True,
                        )
                line = {"what": options.what, "case": case.name, "dtype": dtype, "device": options.device}
                line |= {"threads": threads if options.device == "cpu" else None, "models": said}
                line |= measure(models, case, options)
                line |= {"torch": torch.__version__, "machine": where, "shared": options.shared}
                line |= {"date": time.strftime("%Y-%m-%d")}
                with open(options.out, "a") as file:
                    file.write(json.dumps(line) + "\n")
                rates = {title: rate / line["per_second"]["dense"] for title, rate in line["per_second"].items()}
                ratios = ", ".join(f"{title} {rate:.2f}x" for title, rate in rates.items() if title != "dense")
                print(
                    f"{case.name}, {dtype}, {threads} threads: dense {line['per_second']['dense']:.1f}/s, {ratios}",
                    flush=True,
                )


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("sentences", "language"))
    parser.add_argument("--packed", type=Path, required=True, help="folder that pack.py has made")
    parser.add_argument("--masks", type=Path, help="folder of masks-*.npz")
    parser.add_argument("--method", default="gradual", help="of the arms whose masks are taken")
    parser.add_argument("--out", type=Path, default=Path("speed.jsonl"), help="lines are added to it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=positive, nargs="+", default=[1], help="of the CPU")
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 32, 256])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.8, 0.9])
    parser.add_argument("--blocks", type=positive, nargs="+", default=[32])
    parser.add_argument("--samples", type=positive, default=9)
    parser.add_argument("--compile", choices=("all", "dense", "none"), default="all", help="which models, too")
    parser.add_argument("--only", default="", help="cases with this in their names, such as decode")
    parser.add_argument("--shared", action="store_true", help="note that the machine did other work, too")
    return parser.parse_args()


if __name__ == "__main__":
    finish(lambda: run(parse()))
