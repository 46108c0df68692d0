"""A small Llama whose feed-forward parts are pruned gradually, distilled on IMDB's text; bits per byte of WikiText-2.

    python pack.py language --data DATA --out packed/language
    python language.py --packed packed/language --out out/language --device cuda --minutes 8

A line of results for each arm, written once it is complete; the same command goes on with the arms that are left.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packing import read_arrays
from sentences import Arm, machine, save_masks
from torch import Tensor, nn
from tqdm import tqdm

import blocksparse.torch.sparsify as bss
from blocksparse.models.lines import add_line, missing, need_known
from blocksparse.program import finish, positive

TARGETS = r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj"
WINDOW, CONTEXT = 1024, 512  # of the evaluation: the tokens behind the first 512 of each window count
LENGTH = 512  # of a row in training
WARM_UP, CLIP = 20, 1.0
CALIBRATION = 32  # rows
ARMS = [Arm("dense", 0.0, 0), Arm("gradual", 0.8, 32), Arm("gradual", 0.9, 32), Arm("gradual", 0.8, 64)]
ARMS += [Arm("gradual", 0.9, 64), Arm("gradual", 0.5, 32), Arm("obs", 0.8, 32), Arm("gradual", 0.7, 32)]
ARMS += [Arm("obs", 0.5, 32)]


class Packed:
    """What pack.py has written."""

    def __init__(self, folder: Path, device: str, limit: int | None = None) -> None:
        self.folder, self.device = folder, device
        self.about = json.loads((folder / "about.json").read_text())
        arrays = {
            n: torch.from_numpy(a.astype(np.int64)).to(device) for n, a in read_arrays(folder / "arrays.npz.xz").items()
        }
        held_out = self.about["held_out"]
        self.training = arrays["imdb"][:-held_out]
        self.tests = {
            "wikitext": (arrays["wikitext"], self.about["wikitext_bytes"]),
            "imdb": (arrays["imdb"][-held_out:], self.about["held_out_bytes"]),
        }
        if limit is not None:  # a first look; bytes by the mean of the whole
            self.tests = {n: (t[:limit], round(b * limit / len(t))) for n, (t, b) in self.tests.items()}

    def model(self, dtype: torch.dtype) -> Any:
        """The pretrained one."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.folder, gguf_file=self.about["file"], dtype=torch.float32)
        return model.eval().to(self.device, dtype)

    def batch(self, step: int, rows: int, seed: int) -> dict[str, Any]:
        """The batch of a step; which one depends on step and seed alone."""
        starts = np.random.default_rng((seed, step + 1_000_000)).integers(len(self.training) - LENGTH, size=rows)
        places = torch.from_numpy(starts).to(self.device).unsqueeze(1) + torch.arange(LENGTH, device=self.device)
        return {"input_ids": self.training[places], "use_cache": False}


@torch.no_grad()
def bits_per_byte(model: Any, tokens: Tensor, size: int, cuda: bool, rows: int = 16) -> float:
    """Of all tokens but the first, each of them with 512 to 1023 tokens before it, where the text has them."""
    total = 0.0
    starts = list(range(0, max(1, len(tokens) - CONTEXT), WINDOW - CONTEXT))
    for begin in range(0, len(starts), rows):
        group = [tokens[s : s + WINDOW] for s in starts[begin : begin + rows]]
        ids = nn.utils.rnn.pad_sequence(group, batch_first=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            logits = model(input_ids=ids, use_cache=False).logits
        for row, start in enumerate(starts[begin : begin + rows]):
            length, first = len(group[row]), 1 if start == 0 else CONTEXT
            wanted = group[row][first:]
            total += float(
                nn.functional.cross_entropy(logits[row, first - 1 : length - 1].float(), wanted, reduction="sum")
            )
    return total / size / math.log(2)


def judge(model: Any, packed: Packed) -> dict[str, float]:
    """Bits per byte of the texts."""
    cuda = packed.device.startswith("cuda")
    return {f"{name}_bits": round(bits_per_byte(model, *test, cuda), 4) for name, test in packed.tests.items()}


def train(arm: Arm, packed: Packed, options: argparse.Namespace) -> dict[str, Any]:
    """One arm: its line of results."""
    cuda = options.device.startswith("cuda")
    student = packed.model(torch.float32)
    if arm.method == "dense":
        return judge(student, packed)
    teacher = copy.deepcopy(student).to(torch.bfloat16 if cuda else torch.float32).requires_grad_(False)
    result: dict[str, Any] = {}
    masks: Any = None
    schedule: Any = bss.PolynomialDecay(arm.sparsity, 0, options.steps * 6 // 10, frequency=max(1, options.steps // 80))
    if arm.method == "obs":
        batches = [packed.batch(-1 - i, 8, options.seed) for i in range(CALIBRATION // 8)]
        masks = bss.sparsify_(
            student, "obs", sparsity=arm.sparsity, block_size=arm.block, calibration=batches, targets=TARGETS
        )
        result["before"], schedule = judge(student, packed), bss.Constant(arm.sparsity)
    pruner = bss.MagnitudePruner(schedule, regrow=masks is None, block_size=arm.block, targets=TARGETS)
    pruner.prepare(student, masks)
    student.requires_grad_(True)
    student.get_input_embeddings().requires_grad_(False)  # is the output layer, too
    parameters = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda)
    pruner.attach(optimizer)
    distiller = bss.Distiller(teacher, student, layers=r"model\.layers\.\d+", temperature=1.0)
    began, losses = time.perf_counter(), []
    for step in tqdm(range(options.steps), unit="step", disable=None, leave=False):
        share = 0.05 + 0.95 * (1 + math.cos(math.pi * step / options.steps)) / 2
        optimizer.param_groups[0]["lr"] = options.rate * min(1.0, (step + 1) / WARM_UP) * share
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            distilled = distiller(packed.batch(step, options.rows, options.seed))
        optimizer.zero_grad()
        torch.autograd.backward(distilled.loss)
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        losses.append(distilled.loss.detach())
        if len(losses) % 100 == 0:
            print(f"{arm.name}: step {len(losses)}, loss {float(losses[-1]):.4f}", flush=True)
    result |= {
        "seconds": round(time.perf_counter() - began, 1),
        "loss": round(float(torch.stack(losses[-50:]).mean()), 4),
    }
    made = pruner.masks()
    pruner.squash_mask()
    save_masks(options.out, arm, made)
    density = float(sum(m.sum() for m in made.values()) / sum(m.numel() for m in made.values()))
    return result | judge(student, packed) | {"density": round(density, 5)}


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--packed", type=Path, required=True, help="folder that pack.py has made")
    parser.add_argument("--out", type=Path, default=Path("out/language"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no arm is begun that would end later")
    parser.add_argument("--arms", nargs="+", help="only these, such as gradual-0.8-b32")
    parser.add_argument("--steps", type=positive, default=800)
    parser.add_argument("--rows", type=positive, default=16, help="of 512 tokens, of a step")
    parser.add_argument("--rate", type=float, default=6e-4, help="of learning")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=positive, help="tokens of the texts of the evaluation: for a first look")
    return parser.parse_args()


def main() -> int:
    """Returns the exit status."""
    options, began = parse(), time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    packed = Packed(options.packed, options.device, options.limit)
    settings = {name: getattr(options, name) for name in ("steps", "rows", "rate", "seed", "limit")}
    file, arms = options.out / "language.jsonl", {arm.name: arm for arm in ARMS}
    wanted = ({"arm": name, **settings} for name in need_known(options.arms, arms))
    for each in missing(file, wanted, options.minutes):
        arm = arms[each["arm"]]
        line = {**each, "method": arm.method, "sparsity": arm.sparsity, "block": arm.block}
        line |= train(arm, packed, options)
        line |= {"torch": torch.__version__, "machine": machine(options.device), "date": time.strftime("%Y-%m-%d")}
        add_line(file, line)
        print(f"{arm.name}: WikiText-2 {line['wikitext_bits']:.4f} bits per byte, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    finish(main, goes_on=True)
