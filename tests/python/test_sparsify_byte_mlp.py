"""The order of sparse structures on a real text, as published for the byte-level MLP: some 40 minutes of one core.

Run it with BLOCKSPARSE_TEXT=imdb.txt, a text that experiments/imdb_text.py makes.
"""

import os
import runpy
from pathlib import Path

import pytest
import torch

import blocksparse.torch.sparsify as bss

PROGRAM = Path(__file__).parents[2] / "experiments" / "learned_structure" / "byte_mlp.py"
pytestmark = pytest.mark.skipif("BLOCKSPARSE_TEXT" not in os.environ, reason="takes 40 minutes: see the module")
STEPS = int(os.environ.get("BLOCKSPARSE_TEXT_STEPS", "1500"))


@pytest.fixture(scope="module")
def program():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROGRAM.parent))
        return runpy.run_path(str(PROGRAM))


@pytest.fixture(scope="module")
def text():
    return torch.frombuffer(bytearray(Path(os.environ["BLOCKSPARSE_TEXT"]).read_bytes()), dtype=torch.uint8)


@pytest.fixture(scope="module")
def bits(program, text):
    """Bits per byte of an arm; each is trained once."""
    done = {}

    def of(arm):
        if arm not in done:
            held_out = program["HELD_OUT"]
            done[arm] = program["run"](arm, text[:-held_out], text[-held_out:], STEPS, 0, "wide")
            print(done[arm])
        return done[arm]["bits_per_byte"]

    return of


def test_gradual_pruning_is_better_than_a_static_layout(bits):
    assert bits("gmp") < bits("static") - 0.25  # 0.284 was measured


def test_gradual_pruning_is_better_than_a_narrow_network(bits):
    assert bits("gmp") < bits("narrow")


def test_rewiring_is_better_than_a_static_layout(bits):
    assert bits("rigl") < bits("set") < bits("static")


def test_one_shot_is_worse_than_a_static_layout(bits, program, text):
    torch.manual_seed(0)
    arm = program["ARMS"]["dense"](STEPS)
    program["wide_init_"](arm.model)
    held_out = program["HELD_OUT"]
    program["train"](arm, text[:-held_out], STEPS, 0)
    bss.sparsify_(arm.model, "magnitude", sparsity=0.9, block_size=16, targets=r"^hidden")
    one_shot = program["bits_per_byte"](arm.model, text[-held_out:])
    assert bits("static") + 0.3 < one_shot
