"""Accuracy of linear classifiers on what language models know of six sets of labelled texts.

    python experiments/sentiment/run.py --data DATA --model ba=out/ba/last.safetensors --model dense=out/dense/... \
        --out out/sentiment --results experiments/sentiment/results/NAME

DATA holds imdb/ and sentiment/ as README.md says. The same command goes on after a stop: features and lines of results
that are there are not made again. Without a model it writes the table of the lines that are there. Processes may share
a file of results, each with models of its own.
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
from blocksparse.models.files import write_whole
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
    unit_score,
)
from blocksparse.models.sentiment.features import cell_states, load_features, save_features, unit_at_each_byte
from blocksparse.models.sentiment.texts import Examples, read_imdb, read_labelled

LINES = {"cr": "custrev", "mr": "rt-polarity", "subj": "subj", "mpqa": "mpqa"}
SETS = ("imdb", "sst", *LINES)
BASELINE = "1- and 2-grams"
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


def features_of(model: LanguageModel, name: str, examples: Examples, path: Path, options: argparse.Namespace) -> Any:
    """From the file, if it is of this very model and these texts; else by reading them all."""
    about = {"model": digest_of(model).hex(), "set": name, "sha256": digest_of_texts(examples), "bf16": options.bf16}
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


def judge(x: Any, examples: Examples, splits: list[Split], device: str | None, right: Path) -> dict[str, Any]:
    """A line of results: L1 on a device, or for bags of words L2 by scikit-learn. Which rows are right is a file."""
    start = time.perf_counter()
    y = examples.y()
    score = asdict(classify_at_once(x, y, splits, device) if device else classify(x, y, splits, l1=False))
    rows = score.pop("right")
    write_whole(right, lambda file: np.save(file, rows))
    return {**score, "texts": len(examples), "classifier_seconds": round(time.perf_counter() - start, 1)}


def pictures(
    model: LanguageModel, x: Any, examples: Examples, splits: list[Split], title: str, stem: Path, device: str
) -> None:
    """The histogram of the best unit on the test rows, and a page of test texts in its colours.

    The histogram's values are a file, too, for machines without matplotlib: report.py draws it.
    """
    split = splits[0]
    rows = np.concatenate([split.train, split.dev])
    unit = best_unit(x[rows], examples.y()[rows], device)
    values, labels = x[split.test, unit.index], examples.y()[split.test]
    kept = {"values": values.astype(np.float32), "labels": labels.astype(np.int8), "title": title, **asdict(unit)}
    write_whole(stem.with_suffix(".npz"), lambda file: np.savez_compressed(file, **kept))
    try:
        plot_unit(values, labels, unit, title, stem.with_suffix(".png"))
    except ModuleNotFoundError as error:
        print(f"{stem.with_suffix('.png')} is left out: {error}", file=sys.stderr)
    short = [examples.texts[i] for i in split.test if len(examples.texts[i]) <= LONGEST_ON_A_PAGE]
    chosen = short[:: max(1, len(short) // ON_A_PAGE)][:ON_A_PAGE]
    values = unit_at_each_byte(model, chosen, unit.index)
    colour_text(chosen, values, unit, title, stem.with_suffix(".html"))


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


def right_rows(out: Path, features: str, name: str, limit: int | None) -> Path:
    """The file that says which test rows of a set some features get right."""
    return out / f"{'words' if features == BASELINE else features}-{name}{'' if limit is None else f'-{limit}'}.npy"


def pairs(record: Path, out: Path, features: list[str], limit: int | None) -> list[dict[str, Any]]:
    """Which of two models is right where the other is not: lines of a file, with those that `out` knows now."""
    known = {(line["set"], frozenset(line["features"])): line for line in lines_of(record, limit)}
    for name in SETS:
        rows = {f: np.load(path) for f in features if (path := right_rows(out, f, name, limit)).exists()}
        for pair in map(frozenset, combinations(rows, 2)):
            before = known.get((name, pair))
            one, other = before["features"] if before else sorted(pair, key=features.index)
            only, only_other, p = mcnemar(rows[one], rows[other])
            line = {"set": name, "features": [one, other], "limit": limit, "first": only, "second": only_other}
            line["p"] = float(f"{p:.2g}")
            if before != line:
                known[name, pair] = line
                add_line(record, line)
    return sorted(known.values(), key=lambda line: (SETS.index(line["set"]), *map(features.index, line["features"])))


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
    parser.add_argument("--model", action="append", default=[], metavar="NAME=CHECKPOINT")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--limit", type=int, help="texts of each part: for a first look")
    parser.add_argument("--out", type=Path, required=True, help="folder of the features and of the coloured texts")
    parser.add_argument("--results", type=Path, required=True, help="NAME.jsonl, NAME-pairs.jsonl, NAME.md are written")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-words", action="store_true", help="leave out the words and pairs of words")
    parser.add_argument("--batch", type=int, default=128, help="texts side by side")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--bad-rows", choices=("stop", "skip"), default="stop")
    return parser.parse_args()


def main() -> int:
    """Returns the exit status."""
    options = parse()
    models = {
        name: load_model(Path(path), options.device) for name, _, path in (m.partition("=") for m in options.model)
    }
    digests = {name: digest_of(model).hex() for name, model in models.items()}
    record = options.results.with_suffix(".jsonl")
    record.parent.mkdir(parents=True, exist_ok=True)
    lines = lines_of(record, options.limit)
    for name in options.sets:
        done = {line["features"] for line in lines if line["set"] == name}
        for line in lines:
            if (own := digests.get(line["features"])) and line.get("model", own) != own:
                text = f"has {line['features']} of another model: give it another name, or --results another file"
                raise ValueError(f"{record} {text}")
        wanted = [*([] if options.no_words else [BASELINE]), *models]
        if done >= set(wanted):
            continue
        examples, splits = read_set(name, options.data, options.limit, options.bad_rows == "skip")
        content = digest_of_texts(examples)
        if any(line.get("sha256", content) != content for line in lines if line["set"] == name):
            raise ValueError(f"{record} has {name} of other texts: --results names another file")
        for features in [f for f in wanted if f not in done]:
            line: dict[str, Any] = {"set": name, "features": features, "limit": options.limit}
            line["sha256"] = content
            right = right_rows(options.out, features, name, options.limit)
            if features == BASELINE:
                line |= judge(bag_of_ngrams(examples.texts), examples, splits, None, right)
            else:
                line["model"] = digests[features]
                stem = options.out / f"{features}-{name}"
                x = features_of(models[features], name, examples, stem.with_suffix(".safetensors"), options)
                line |= judge(x, examples, splits, options.device, right)
                line["unit"] = unit_score(x, examples.y(), splits, options.device)
                if name in ("sst", "imdb"):
                    title = f"{name.upper()}, best unit of {features}"
                    pictures(models[features], x, examples, splits, title, stem, options.device)
            lines.append(line)
            add_line(record, line)
            print(f"{name} {features}: {line['accuracy']:.1f} %", flush=True)
    lines = lines_of(record, options.limit)  # those of other processes, too
    known = dict.fromkeys([BASELINE, *models, *(line["features"] for line in lines)])
    its_pairs = pairs(record.with_name(f"{record.stem}-pairs.jsonl"), options.out, list(known), options.limit)
    report = table(lines) + table_of_pairs(its_pairs)
    options.results.with_suffix(".md").write_text(report)
    print(report)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError, ModuleNotFoundError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\nStopped. The same command goes on from here.")
