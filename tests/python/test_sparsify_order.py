"""The order of sparse structures in a small byte-level MLP: experiments/learned_structure in seconds.

The text is drawn from a source in which three of the eight bytes that the model reads decide on the next one, so that
what is learned can choose its inputs. `test_sparsify_byte_mlp.py` has the sizes and the text that are published.
"""

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import blocksparse.torch.sparsify as bss

PROGRAM = Path(__file__).parents[2] / "experiments" / "learned_structure" / "byte_mlp.py"
STEPS, SYMBOLS, LENGTH, HELD_OUT = 300, 8, 40_000, 4_000
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("byte_mlp", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules["byte_mlp"] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROGRAM.parent))
        spec.loader.exec_module(module)
    module.CONTEXT, module.WIDTH, module.BATCH, module.RATE = 8, 128, 128, 4e-3
    yield module
    del sys.modules["byte_mlp"]


@pytest.fixture(scope="module")
def text():
    """Each byte is one of two that the last two bytes and the fifth before it choose, 9 times of 10; else any."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(SYMBOLS, (2, SYMBOLS, SYMBOLS, 2), generator=generator).tolist()
    coins = torch.rand(LENGTH, generator=generator).tolist()
    others = torch.randint(SYMBOLS, (LENGTH,), generator=generator).tolist()
    symbols = others[:5]
    for i in range(5, LENGTH):
        known = table[int(coins[i] < 0.3)][symbols[-1]][symbols[-2]][symbols[-5] // 4]
        symbols.append(known if coins[i] < 0.9 else others[i])
    return torch.tensor(symbols, dtype=torch.uint8)


@pytest.fixture(scope="module")
def bits(program, text):
    """Bits per byte of an arm; each is trained once."""
    done = {}

    def of(arm, one_shot=None):
        if arm not in done:
            torch.manual_seed(0)
            made = program.ARMS[arm](STEPS)
            program.wide_init_(made.model)
            program.train(made, text[:-HELD_OUT], STEPS, 0)
            done[arm] = made.model, program.bits_per_byte(made.model, text[-HELD_OUT:])
        model, found = done[arm]
        if one_shot is None:
            return found
        pruned = copy.deepcopy(model)
        x = program.contexts(text, torch.arange(100, 8100, 8))[0]
        bss.sparsify_(pruned, one_shot, sparsity=0.9, block_size=16, targets=r"^hidden", calibration=[x])
        return program.bits_per_byte(pruned, text[-HELD_OUT:])

    return of


def test_gradual_pruning_is_better_than_a_static_layout(bits):
    assert bits("gmp") < bits("static") - 0.3  # 0.55 was measured
    assert bits("gmp") < bits("dense") + 0.1  # 0.005


def test_what_is_pruned_at_once_is_worse(bits):
    assert bits("static") < bits("dense", "magnitude") - 0.3  # 1.72
    assert bits("dense", "obs") < bits("dense", "magnitude") - 0.3  # 1.35
