"""Texts with labels, features of them, and classifiers on these."""

import json
import warnings

import numpy as np
import pytest
import torch
from tiny_language_models import TINY, lm, sentences

from blocksparse.models.language import LanguageModel
from blocksparse.models.sentiment import (
    Split,
    Unit,
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
from blocksparse.models.sentiment.texts import detokenise, prepare, read_imdb, read_labelled

# ---- Texts ----------------------------------------------------------------------------------------------------------


def test_prepare():
    assert prepare("  a &amp; b<br />c\nd ") == b"\n a & b c d "
    assert prepare("caf\u00e9") == "\n caf\u00e9 ".encode()
    raw = b"caf\xe9"  # no UTF-8
    assert prepare(raw.decode("utf-8", "surrogateescape")) == b"\n caf\xe9 "


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("it does n't work .", "it doesn't work."),
        ("it does n 't work", "it doesn't work"),
        ("so-so ; dvd 's such as this", "so-so; dvd's such as this"),
        ("we 're here , are n't we ?", "we're here, aren't we?"),
        ("a -lrb- b -rrb- c", "a (b) c"),
        ("nothing to do", "nothing to do"),
    ],
)
def test_detokenise(tokens, text):
    assert detokenise(tokens) == text


def test_read_labelled(tmp_path):
    lines = tmp_path / "lines"
    lines.write_bytes(b"1 good , very good\r\n0 bad\n\n1 caf\xe9\n")
    examples = read_labelled(lines, tokenised=True)
    assert examples.texts == [b"\n good, very good ", b"\n bad ", b"\n caf\xe9 "]
    assert examples.y().tolist() == [1, 0, 1]
    lines.write_bytes(b"\xef\xbb\xbf1 good\n")  # with a byte order mark
    assert read_labelled(str(lines)).texts == [b"\n good "]
    table = tmp_path / "table.csv"
    table.write_text('\ufefflabel,sentence\n1,"good, and\nof two lines"\n0,bad\n')
    assert read_labelled(table).texts == [b"\n good, and of two lines ", b"\n bad "]


def test_bad_rows_are_named(tmp_path):
    path = tmp_path / "rows"
    path.write_text("1 good\n2 odd\nworse\n0\n0 bad\n")
    with pytest.raises(ValueError, match="rows, line 2: the label is '2', needs 0 or 1"):
        read_labelled(path)
    examples = read_labelled(path, skip_bad_rows=True)
    assert examples.labels == [1, 0]
    assert [line.split("line ")[1] for line in examples.left_out] == [
        "2: the label is '2', needs 0 or 1",
        "3: the label is 'worse', needs 0 or 1",
        "4: there is no text",
    ]
    path.write_text("\n\n")
    with pytest.raises(ValueError, match="no labelled texts"):
        read_labelled(path)
    table = tmp_path / "table.csv"
    table.write_text("label,sentence\n1,good\n0\n")
    with pytest.raises(ValueError, match=r"table.csv, line 3: there is no text"):
        read_labelled(table)
    table.write_text("a,b\n1,good\n")
    with pytest.raises(ValueError, match="line 1: the columns are a, b, needs label and sentence"):
        read_labelled(table)
    table.write_text("label,sentence\n1," + "x" * 200_000 + "\n")
    with pytest.raises(ValueError, match="line 2: field larger than"):
        read_labelled(table)


def test_read_imdb(tmp_path):
    import io
    import tarfile

    archive = tmp_path / "imdb.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        for name, text in (("pos/10_7", "ten"), ("pos/2_8", "two<br />lines"), ("pos/0_9", "an app"), ("neg/1_1", "x")):
            info = tarfile.TarInfo(f"aclImdb/train/{name}.txt")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    assert read_imdb(archive, ["train/pos"]) == {"train/pos": [b"\n two lines ", b"\n ten "]}
    with pytest.raises(ValueError, match="no reviews in aclImdb/test/pos"):
        read_imdb(archive, ["test/pos"])
    archive.write_bytes(b"x" * 999)
    with pytest.raises(ValueError, match="is damaged"):
        read_imdb(archive, ["train/pos"])


# ---- Features --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return LanguageModel(TINY).eval()


def test_features_do_not_depend_on_neighbours(model):
    """Batches, lengths and chunks are of no matter; each is the state behind the last byte of the text alone."""
    made = sentences(4).split(b". ")
    texts = [text[:n] for text, n in zip(made * 3, (1, 2, 5, 9, 16, 17, 3, 4, 8), strict=False)]
    done = []
    features = cell_states(model, texts, batch=4, steps=4, progress=done.append)
    assert features.shape == (len(texts), 64)
    assert done[-1] == sum(map(len, texts))
    for text, feature in zip(texts, features, strict=True):
        with torch.no_grad():
            alone = model.read(torch.tensor(list(text)).unsqueeze(1))[1][1][0, 0].numpy()
        np.testing.assert_allclose(feature, alone, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(features, cell_states(model, texts), rtol=1e-4, atol=1e-5)
    values = unit_at_each_byte(model, texts[4:7], 7)
    assert list(map(len, values)) == list(map(len, texts[4:7]))
    assert [v[-1] for v in values] == pytest.approx(features[4:7, 7].tolist(), rel=1e-4)
    assert unit_at_each_byte(model, [], 7) == []
    assert cell_states(model, []).shape == (0, 64)
    with pytest.raises(ValueError, match="text 1 is empty"):
        cell_states(model, [b"a", b""])


def test_features_command(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("blocksparse.models.language.command.load_model", lambda path, device: model)
    rows, out = tmp_path / "rows", tmp_path / "out" / "features.safetensors"
    rows.write_text("1 good , good\n0 bad\nx odd\n")
    assert lm("features", "checkpoint", "--labels", rows, "-o", out) == 2
    assert "line 3: the label is 'x'" in capsys.readouterr().err
    assert not out.exists()
    assert lm("features", "checkpoint", "--labels", rows, "-o", out, "--bad-rows", "skip", "--tokenised") == 0
    said = capsys.readouterr()
    assert "left out: [lm]" in said.err
    assert json.loads(said.out) == {"file": str(out), "texts": 2, "features": 64, "left_out": 1}
    features, labels, about = load_features(out)
    np.testing.assert_array_equal(features, cell_states(model, [prepare("good, good"), prepare("bad")]))
    assert labels.tolist() == [1, 0]
    assert about["texts"] == "rows"
    out.write_bytes(out.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is damaged"):
        load_features(out)
    with pytest.raises(FileNotFoundError, match="there are no features"):
        load_features(tmp_path / "none")


def test_a_full_disk_leaves_no_features(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="could not be written"):
        save_features(tmp_path / "features", np.zeros((2, 2), np.float32), None, {})
    assert list(tmp_path.iterdir()) == []


# ---- Classifiers -----------------------------------------------------------------------------------------------------


def separable(count=300, units=12, seed=0):
    """Unit 5 tells the labels apart, but for noise; lower values are label 1."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, count)
    x = rng.standard_normal((count, units)).astype(np.float32)
    x[:, 5] += np.where(y == 1, -3, 3)
    return x, y


def test_splits():
    (split,) = fixed_split(20, 5, 7)
    assert [part.tolist() for part in (split.train, split.dev, split.test)] == [
        list(range(20)),
        list(range(20, 25)),
        list(range(25, 32)),
    ]
    (split,) = fixed_split(20, 0, 7)
    assert sorted([*split.train, *split.dev]) == list(range(20))
    assert split.dev.size == 2
    labels = np.array([0] * 31 + [1] * 72)
    folds = cross_validation(labels)
    assert sorted(np.concatenate([fold.test for fold in folds])) == list(range(103))
    for fold in folds:
        rows = np.concatenate([fold.train, fold.dev, fold.test])
        assert sorted(rows) == list(range(103))
        assert 3 <= (labels[fold.test] == 0).sum() <= 4


def test_best_unit(monkeypatch):
    x, y = separable()
    for at_once in (256, 5):
        monkeypatch.setattr("blocksparse.models.sentiment.classifiers.UNITS_AT_ONCE", at_once)
        unit = best_unit(x, y)
        assert (unit.index, unit.sign) == (5, -1)
        every = [(x[:, 5] > t) != (y == 1) for t in np.sort(x[:, 5])]
        assert unit.accuracy(x, y) == pytest.approx(100 * max(float(right.mean()) for right in every))
    assert unit_score(x, y, cross_validation(y, 5)) > 98
    constant = np.zeros((4, 3), np.float32)
    assert best_unit(constant, np.array([1, 1, 1, 0])).accuracy(constant, np.array([1, 1, 1, 0])) == 75


def test_classify():
    pytest.importorskip("sklearn")
    x, y = separable()
    score = classify(x, y, cross_validation(y, 5))
    assert score.accuracy > 97
    assert score.folds == 5
    assert score.weights < 4  # of 12: the penalty finds the one
    noise = classify(x[:, :5], y, fixed_split(200, 40, 60))
    assert 25 < noise.accuracy < 75
    with pytest.raises(ValueError, match="have one label"):
        classify(x, np.ones_like(y), fixed_split(200, 40, 60))


@pytest.mark.parametrize(("only", "other", "p"), [(0, 0, 1.0), (3, 3, 1.0), (9, 1, 22 / 1024), (0, 6, 2 / 64)])
def test_mcnemar(only, other, p):
    """By hand: twice the share of the divisions that are at least as uneven."""
    one = np.array([True] * only + [False] * other + [True, False])
    two = np.array([False] * only + [True] * other + [True, False])
    assert mcnemar(one, two) == (only, other, pytest.approx(p))
    with pytest.raises(ValueError, match="needs the same rows"):
        mcnemar(one, two[1:])


def test_bag_of_ngrams():
    pytest.importorskip("sklearn")
    texts = [b"\n not good, bad! ", b"\n good, not bad ", b"\n good good "]
    bag = bag_of_ngrams(texts)
    assert bag.shape[0] == 3
    assert bag.max() == 1
    assert (bag[0] != bag[1]).nnz > 0  # the order is of matter
    x = bag_of_ngrams([b"\n fine film ", b"\n dull film "] * 40)
    y = np.array([1, 0] * 40)
    assert classify(x, y, [Split(np.arange(40), np.arange(40, 60), np.arange(60, 80))], l1=False).accuracy == 100


def test_a_long_title_is_not_cut(tmp_path):
    """Nothing is drawn at the edges."""
    image = pytest.importorskip("matplotlib.image")
    title = "IMDB, best unit of 100M-balanced-stride1-inner2-b128-8192-lr0.008-0"
    plot_unit(np.arange(9.0), np.arange(9) % 2, Unit(0, 0.0, 1), title, tmp_path / "unit.png")
    picture = image.imread(tmp_path / "unit.png")
    assert all((edge == 1).all() for edge in (picture[0], picture[:, 0], picture[:, -1]))


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    x, y = separable()
    plot_unit(x[:, 5], y, best_unit(x, y), "title", tmp_path / "unit.png")
    assert (tmp_path / "unit.png").read_bytes().startswith(b"\x89PNG")
    plot_unit(np.zeros(9), np.arange(9) % 2, Unit(0, 0.0, 1), "nothing", tmp_path / "unit.png")
    text = "a<é".encode()
    colour_text(
        [text], [np.array([0.5, -1.0, 0.25, 0.25], np.float32)], Unit(3, 0.0, -1), "<title>", tmp_path / "a.html"
    )
    page = (tmp_path / "a.html").read_text()
    assert "&lt;title&gt;" in page
    spans = ['rgba(220,38,38,0.50)">a', 'rgba(37,99,235,1.00)">&lt;', 'rgba(220,38,38,0.25)">é']
    assert all(span in page for span in spans)
    long = b"\n " + b"$x^$ <b> " * 30  # no formula, several lines
    colour_text([long, b"y" * 200], [np.zeros(len(long)), np.arange(200.0)], Unit(3, 0.0, 1), "$", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_l1_minimum_is_that_of_liblinear():
    """Several strengths and choices of rows at once; the weight of the constant is penalised, too."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    from blocksparse.models.sentiment.l1_logistic import fit

    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 30)) * rng.gamma(1, 1, size=30) + 0.3
    y = (x[:, :5].sum(1) + 2 * rng.normal(size=120) > 1).astype(np.int64)
    chosen = np.stack([np.arange(120) % 3 > 0, np.ones(120, bool), np.ones(120, bool)])
    strengths = [0.25, 0.0625, 1.0]
    made = fit(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(chosen), torch.tensor(strengths))
    for w, rows, c in zip(made.numpy(), chosen, strengths, strict=True):

        def objective(w, rows=rows, c=c):
            margin = (2 * y - 1) * (x @ w[:-1] + w[-1])
            return np.abs(w).sum() + c * np.log1p(np.exp(-margin[rows])).sum()

        model = linear_model.LogisticRegression(C=c, solver="liblinear", penalty="l1", tol=1e-8, max_iter=5000)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions have another name for the penalty
            model.fit(x[rows], y[rows])
        known = np.concatenate([model.coef_[0], model.intercept_])
        assert objective(w) == pytest.approx(objective(known), rel=1e-4)


def test_classify_at_once_is_classify():
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(1)
    y = rng.integers(0, 2, 200)
    x = (rng.normal(size=(200, 12)) + 1.2 * y[:, None] * (np.arange(12) < 3)).astype(np.float32)
    splits = cross_validation(y, 4)
    one, other = classify(x, y, splits), classify_at_once(x, y, splits, "cpu")
    assert other.accuracy == pytest.approx(one.accuracy, abs=1.5)
    assert other.folds == 4
    assert other.right.size == 200
    assert other.accuracy == pytest.approx(100 * other.right.mean())
    assert (one.right == other.right).mean() > 0.97  # the rows lie in the same order
    with pytest.raises(ValueError, match="have one label"):
        classify_at_once(x, np.zeros_like(y), splits, "cpu")
