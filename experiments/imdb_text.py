"""Writes the corpus of the experiments: IMDB's unlabelled reviews, one behind the other, as models read them.

    python experiments/imdb_text.py aclImdb_unsup.tar.xz imdb.txt

The archive is aclImdb, or the part of it with train/unsup. 65.6 MB come out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from blocksparse.models.files import check_writable, write_whole
from blocksparse.models.sentiment.texts import read_imdb
from blocksparse.program import finish


def main() -> None:
    """Writes it."""
    parser = argparse.ArgumentParser(description="Writes IMDB's unlabelled reviews as one text.")
    parser.add_argument("archive", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    check_writable(arguments.out)
    text = b"".join(read_imdb(arguments.archive, ["train/unsup"])["train/unsup"])
    write_whole(arguments.out, text)
    print(f"{arguments.out}: {len(text)} bytes")


if __name__ == "__main__":
    finish(main)
