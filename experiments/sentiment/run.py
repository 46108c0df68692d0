"""Accuracy of linear classifiers on what language models know of six sets of labelled texts.

    python experiments/sentiment/run.py --data DATA --model ba=out/ba/last.safetensors --model dense=out/dense/... \
        --out out/sentiment --results experiments/sentiment/results/NAME

DATA holds imdb/ and sentiment/ as README.md says. The same command goes on after a stop: features and lines of results
that are there are not made again. Without a model it writes the table of the lines that are there. Processes may share
a file of results, each with models of its own.

OUT keeps which test rows each model gets right, in *-right.safetensors. Models are compared where both have these rows.
They may be brought from another machine, with their lines of results: rows of another model than the line are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from blocksparse.models.bars import bytes_bar
from blocksparse.models.files import named_files, write_whole
from blocksparse.models.language import LanguageModel
from blocksparse.models.language.compression import digest_of
from blocksparse.models.language.training import load_model
from blocksparse.models.lines import add_line, read_lines
from blocksparse.models.sentiment import (
    Split,
    bag_of_ngrams,
    best_unit,
    classify,
    classify_at_once,
    colour_text,
    cross_validation,
    fixed_split,
    mcnemar,
    plot_unit,
    prepare,
    unit_score,
)
from blocksparse.models.sentiment.features import cell_states, load_features, save_features, unit_at_each_byte
from blocksparse.models.sentiment.texts import Examples, read_imdb, read_labelled
from blocksparse.program import finish, positive

LINES = {"cr": "custrev", "mr": "rt-polarity", "subj": "subj", "mpqa": "mpqa"}
SETS = ("imdb", "sst", *LINES)
SENTENCES = Path(__file__).parent / "sentences.txt"  # of our own, one a line
BASELINE, WORDS = "1- and 2-grams", "words"  # in results, and in names of files
RIGHT = "-right.safetensors"
SAME = ("set", "limit", "sha256", "model", "accuracy")  # a file of rows has these of its line
ON_A_PAGE, LONGEST_ON_A_PAGE = 8, 600  # texts in colours, and bytes of one


def read_set(name: str, data: Path, limit: int | None, skip: bool) -> tuple[Examples, list[Split]]:
    """All texts of a set, and its splits: fixed ones of IMDB and SST, ten folds of the others.

    A limit of texts, of each part that there is, takes them at random, the same each time.
    """
    if name == "imdb":
        parts = []
        archive = read_imdb(
            data / "imdb" / "aclImdb_labeled.tar.xz", ["train/neg", "train/pos", "test/neg", "test/pos"]
        )
        for part in ("train", "test"):
            texts = {label: archive[f"{part}/{kind}"] for label, kind in enumerate(("neg", "pos"))}
            labels = [label for label, of_label in texts.items() for _ in of_label]
            parts.append(Examples([*texts[0], *texts[1]], labels))
    elif name == "sst":
        folder = data / "sentiment" / "openai-sst"
        files = [folder / f"{part}_binary_sent.csv" for part in ("train", "dev", "test")]
        parts = [read_labelled(file, skip_bad_rows=skip) for file in files]
    else:
        path = data / "sentiment" / "data" / f"{LINES[name]}.all"
        parts = [read_labelled(path, skip_bad_rows=skip, tokenised=True)]
    for line in [line for part in parts for line in part.left_out]:
        print(f"left out: {line}", file=sys.stderr)
    parts = [some(part, limit) for part in parts]
    whole = Examples([t for p in parts for t in p.texts], [y for p in parts for y in p.labels])
    if len(parts) == 1:
        return whole, cross_validation(whole.y())
    sizes = [len(part) for part in parts]
    return whole, fixed_split(*sizes) if len(sizes) == 3 else fixed_split(sizes[0], 0, sizes[1])


def some(examples: Examples, limit: int | None) -> Examples:
    """As many at random, if there are more."""
    if limit is None or len(examples) <= limit:
        return examples
    rows = np.sort(np.random.default_rng(0).choice(len(examples), limit, replace=False))
    return Examples([examples.texts[i] for i in rows], [examples.labels[i] for i in rows])


def digest_of_texts(examples: Examples) -> str:
    """Of texts and labels, in their order."""
    whole = hashlib.sha256()
    for text, label in zip(examples.texts, examples.labels, strict=True):
        whole.update(hashlib.sha256(text).digest() + str(label).encode())
    return whole.hexdigest()[:12]


def place(out: Path, line: dict[str, Any], ending: str) -> Path:
    """A file of what a line is of."""
    features = WORDS if line["features"] == BASELINE else line["features"]
    limit = "" if line["limit"] is None else f"-{line['limit']}"
    return out / f"{features}-{line['set']}{limit}{ending}"


def features_of(model: LanguageModel, line: dict[str, Any], examples: Examples, options: argparse.Namespace) -> Any:
    """From the file, if it is of this very model and these texts; else by reading them all."""
    path = place(options.out, line, ".safetensors")
    about = {**{key: line[key] for key in ("model", "set", "sha256")}, "bf16": options.bf16}
    if path.exists():
        features, _, found = load_features(path)
        if found == about:
            return features
    start = time.perf_counter()
    total = sum(map(len, examples.texts))
    with bytes_bar(total) as done:
        features = cell_states(model, examples.texts, batch=options.batch, bf16=options.bf16, progress=done)
    seconds = time.perf_counter() - start
    print(f"{path.stem}: {len(examples)} texts, {total} bytes in {seconds:.1f} s", flush=True)
    save_features(path, features, examples.y(), about)
    return features


def judge(x: Any, examples: Examples, splits: list[Split], device: str | None) -> tuple[dict[str, Any], Any]:
    """What a line says, and which rows are right: L1 on a device, or for bags of words L2 by scikit-learn."""
    start = time.perf_counter()
    y = examples.y()
    score = asdict(classify_at_once(x, y, splits, device) if device else classify(x, y, splits, l1=False))
    rows = score.pop("right")
    return {**score, "texts": len(examples), "classifier_seconds": round(time.perf_counter() - start, 1)}, rows


def keep_rows(out: Path, line: dict[str, Any], rows: Any) -> None:
    """A file of the rows that are right, which says of what it is."""
    save_features(place(out, line, RIGHT), rows, None, {key: line.get(key) for key in SAME})


def right_rows(out: Path, line: dict[str, Any]) -> Any:
    """The rows that a line has right, None without a file of them. One of something else is named and left out."""
    path, without = place(out, line, RIGHT), place(out, line, ".npy")
    wrong = f"{without} does not say of which model it is, needs {path.name}" if without.exists() else ""
    if path.exists():
        try:
            rows, _, about = load_features(path)
            differs = [key for key in SAME if about.get(key) != line.get(key)]
            if not differs:
                return rows
            wrong = f"{path} has another {' and '.join(differs)} than its line of results"
        except ValueError as error:
            wrong = str(error)
    if wrong:
        print(f"left out of the pairs: {wrong}", file=sys.stderr)
    return None


def pictures(
    model: LanguageModel,
    x: Any,
    examples: Examples,
    splits: list[Split],
    line: dict[str, Any],
    options: argparse.Namespace,
) -> None:
    """The histogram of the best unit on the test rows; a page of test texts and a picture of sentences in its colours.

    What both pictures show is a file, too, for machines without matplotlib: report.py draws them.
    """
    split, title = splits[0], f"{line['set'].upper()}, best unit of {line['features']}"
    rows = np.concatenate([split.train, split.dev])
    unit = best_unit(x[rows], examples.y()[rows], options.device)
    values, labels = x[split.test, unit.index], examples.y()[split.test]
    kept = {"values": values.astype(np.float32), "labels": labels.astype(np.int8), "title": title, **asdict(unit)}
    sentences = [prepare(text) for text in SENTENCES.read_text().splitlines()]
    of_bytes = unit_at_each_byte(model, sentences, unit.index)
    kept |= {"text": np.frombuffer(b"".join(sentences), np.uint8), "of_bytes": np.concatenate(of_bytes)}
    kept["lengths"] = np.array(list(map(len, sentences)))
    write_whole(place(options.out, line, ".npz"), lambda file: np.savez_compressed(file, **kept))
    histogram = place(options.out, line, ".png")
    try:
        plot_unit(values, labels, unit, title, histogram)
        colour_text(sentences, of_bytes, unit, title, place(options.out, line, "-text.png"))
    except ModuleNotFoundError as error:
        print(f"{histogram} is left out: {error}", file=sys.stderr)
    short = [examples.texts[i] for i in split.test if len(examples.texts[i]) <= LONGEST_ON_A_PAGE]
    chosen = short[:: max(1, len(short) // ON_A_PAGE)][:ON_A_PAGE]
    values = unit_at_each_byte(model, chosen, unit.index)
    colour_text(chosen, values, unit, title, place(options.out, line, ".html"))


def measure(
    line: dict[str, Any],
    model: LanguageModel | None,
    examples: Examples,
    splits: list[Split],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """The line with its figures, of words without a model. Features, rows and pictures are files."""
    x = features_of(model, line, examples, options) if model else bag_of_ngrams(examples.texts)
    score, rows = judge(x, examples, splits, options.device if model else None)
    line = line | score
    keep_rows(options.out, line, rows)
    if model:
        line["unit"] = unit_score(x, examples.y(), splits, options.device)
        if line["set"] in ("sst", "imdb"):
            pictures(model, x, examples, splits, line, options)
    return line


def lines_of(record: Path, limit: int | None) -> list[dict[str, Any]]:
    """The lines of results that are of as many texts."""
    return [line for line in read_lines(record, ("set", "features", "limit")) if line["limit"] == limit]


def table(lines: list[dict[str, Any]]) -> str:
    """Accuracies in percent, and in parentheses those of the best unit, as Markdown."""
    sets = [name for name in SETS if any(line["set"] == name for line in lines)]
    rows = ["| features | " + " | ".join(name.upper() for name in sets) + " |", "| --- |" + " --- |" * len(sets)]
    for name in dict.fromkeys(line["features"] for line in lines):
        cells = []
        for which in sets:
            found = next((line for line in lines if (line["features"], line["set"]) == (name, which)), None)
            unit = f" ({found['unit']:.1f})" if found and "unit" in found else ""
            cells.append(f"{found['accuracy']:.1f}{unit}" if found else "")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def pairs(
    record: Path, out: Path, lines: list[dict[str, Any]], features: list[str], limit: int | None
) -> list[dict[str, Any]]:
    """Which of two models is right where the other is not: lines of a file, with those that `out` knows now.

    `lines` are the results, and `features` their models, in the order of the table. A pair of a model that was trained
    again is left out; old pairs do not say of which models they are.
    """
    model = {(line["set"], line["features"]): line.get("model") for line in lines}
    known = {}
    for old in lines_of(record, limit):
        now = [model.get((old["set"], f)) for f in old["features"]]
        if old.get("models", now) == now:
            known[old["set"], frozenset(old["features"])] = old
    for name in SETS:
        found = {line["features"]: right_rows(out, line) for line in lines if line["set"] == name}
        rows = {f: found[f] for f in features if found.get(f) is not None}
        for pair in map(frozenset, combinations(rows, 2)):
            before = known.get((name, pair))
            one, other = before["features"] if before else sorted(pair, key=features.index)
            only, only_other, p = mcnemar(rows[one], rows[other])
            line: dict[str, Any] = {"set": name, "features": [one, other], "limit": limit}
            line["models"] = [model[name, one], model[name, other]]
            line |= {"first": only, "second": only_other, "p": float(f"{p:.2g}")}
            if before != line:
                known[name, pair] = line
                add_line(record, line)
    shown = [line for (_, pair), line in known.items() if pair <= set(features)]
    return sorted(shown, key=lambda line: (SETS.index(line["set"]), *map(features.index, line["features"])))


def table_of_pairs(lines: list[dict[str, Any]]) -> str:
    """As Markdown; "" without any."""
    if not lines:
        return ""
    head = "| set | models | right by the first alone | by the second alone | p of McNemar's test |"
    rows = []
    for line in lines:
        cells = (line["set"].upper(), ", ".join(line["features"]), line["first"], line["second"], f"{line['p']:.2g}")
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(["", head, "| --- | --- | --- | --- | --- |", *rows]) + "\n"


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME=FILE", help="checkpoints, a name for each"
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--limit", type=positive, help="texts of each part: for a first look")
    parser.add_argument("--out", type=Path, required=True, help="folder of the features and of the coloured texts")
    parser.add_argument("--results", type=Path, required=True, help="NAME.jsonl, NAME-pairs.jsonl, NAME.md are written")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-words", action="store_true", help="leave out the words and pairs of words")
    parser.add_argument("--batch", type=positive, default=128, help="texts side by side")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--bad-rows", choices=("stop", "skip"), default="stop")
    options = parser.parse_args()
    options.model = named_files(options.model, "--model", (BASELINE, WORDS))
    return options


def check_models(record: Path, lines: list[dict[str, Any]], digests: dict[str, str]) -> None:
    """Raises ValueError where a line has one of these names and is of another model. Old lines do not say of which."""
    for line in lines:
        own = digests.get(line["features"])
        if own and line.get("model", own) != own:
            text = f"has {line['features']} of another model: give it another name, or --results another file"
            raise ValueError(f"{record} {text}")


def main() -> int:
    """Returns the exit status."""
    options = parse()
    models = {name: load_model(path, options.device) for name, path in options.model.items()}
    digests = {name: digest_of(model).hex() for name, model in models.items()}
    name = options.results.name.removesuffix(".jsonl")  # which may have a dot of its own
    record = options.results.with_name(f"{name}.jsonl")
    record.parent.mkdir(parents=True, exist_ok=True)
    lines = lines_of(record, options.limit)
    check_models(record, lines, digests)
    for name in options.sets:
        done = {line["features"] for line in lines if line["set"] == name}
        wanted = [f for f in ([] if options.no_words else [BASELINE]) + list(models) if f not in done]
        if not wanted:
            continue
        examples, splits = read_set(name, options.data, options.limit, options.bad_rows == "skip")
        content = digest_of_texts(examples)
        if any(line.get("sha256", content) != content for line in lines if line["set"] == name):
            raise ValueError(f"{record} has {name} of other texts: --results names another file")
        for features in wanted:
            line = {"set": name, "features": features, "limit": options.limit, "sha256": content}
            if features in models:
                line["model"] = digests[features]
            line = measure(line, models.get(features), examples, splits, options)
            lines.append(line)
            add_line(record, line)
            print(f"{name} {features}: {line['accuracy']:.1f} %", flush=True)
    lines = lines_of(record, options.limit)  # those of other processes, too
    known = list(dict.fromkeys([BASELINE, *models, *(line["features"] for line in lines)]))
    of_pairs = record.with_name(f"{record.stem}-pairs.jsonl")
    report = table(lines) + table_of_pairs(pairs(of_pairs, options.out, lines, known, options.limit))
    record.with_suffix(".md").write_text(report)
    print(report)
    return 0


if __name__ == "__main__":
    finish(main, goes_on=True)
