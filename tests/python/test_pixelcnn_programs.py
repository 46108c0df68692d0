"""Programs around PixelCNN++: the example, the experiment, and the network that times are compared with."""

import importlib.util
import json
import queue
import re
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")
PIL = pytest.importorskip("PIL.Image")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "pixelcnn"))

from clothes import arms, report  # noqa: E402

import blocksparse.torch as bst  # noqa: E402
from blocksparse.models.images import write_png  # noqa: E402
from blocksparse.models.pixelcnn import data  # noqa: E402
from blocksparse.models.pixelcnn.config import ModelConfig  # noqa: E402
from blocksparse.models.pixelcnn.network import PixelCNN  # noqa: E402
from blocksparse.models.pixelcnn.sampling import sample  # noqa: E402
from blocksparse.models.pixelcnn.training import load_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def loaded(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_arms_of_the_example_cost_the_same():
    dense, sparse = (report.counts_of(name) for name in ("dense", "sparse"))
    assert sparse.parameters == pytest.approx(dense.parameters, rel=0.04)
    assert sparse.macs == pytest.approx(dense.macs, rel=0.04)


def test_the_example(tmp_path, monkeypatch):
    """All of it, with images and updates that are few."""
    images = torch.randint(0, 256, (24, 1, 5, 4), dtype=torch.uint8)
    monkeypatch.setattr(arms, "images", lambda quick: (images[:20], images[20:]))
    results = []
    for name in arms.ARMS:
        job, told, stops = arms.Job(name, 2, tmp_path / "state", True), queue.Queue(), threading.Event()
        stops.set()
        arms.work(job, told, stops.is_set)  # is stopped at once, and goes on
        assert not job.last.exists()
        stops.clear()
        arms.work(job, told, stops.is_set)
        assert [told.get()[1] for _ in range(told.qsize())] == [0, 0, 1, 2]
        model, size = load_model(job.last)
        drawn = sample(model, 2, size)
        done = sample(model, 2, size, given=images[20:22], rows=2)
        results.append(report.Result(job, report.read_log(job), report.counts_of(name), drawn, done))
    page = report.write(results, images[20:22], tmp_path / "out").read_text()
    assert "block-sparse, 2 x as deep" in page
    assert "$" not in page
    for name in ("curves", "layers", "dense", "sparse", "given", "dense-completed", "sparse-completed"):
        assert np.asarray(PIL.open(tmp_path / "out" / f"{name}.png")).size > 0
        assert f'src="{name}.png"' in page


def test_the_code_of_the_guide():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guide" / "pixelcnn.md").read_text(), re.DOTALL)
    made = {}
    exec(code, made)
    assert 7 < made["bits_per_dim"] < 20
    assert made["drawn"].shape == (4, 3, 16, 16)


def test_the_experiment_goes_on(tmp_path, monkeypatch, capsys):
    run = loaded(ROOT / "experiments" / "pixelcnn" / "run.py", "pixelcnn_run")
    sheet = np.random.default_rng(0).integers(0, 256, (20, 16, 3), np.uint8)
    PIL.fromarray(sheet).save(tmp_path / "sheet.png")
    config = {"data": ["sheet.png"], "epochs": 1, "evaluations": 2, "curve_images": 1, "samples": 1, "seeds": [0]}
    config |= {"training": {"batch": 6}, "arms": {"x2/g2": {"preset": "32-1-x2", "resnets": 1}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["run.py", tmp_path / "config.json", "--data", tmp_path, "--out", tmp_path / "out", "--device", "cpu"]
    words += ["--results", tmp_path / "results.jsonl"]
    monkeypatch.setattr(sys, "argv", [*map(str, words), "--minutes", "0"])
    assert run.main() == 0
    assert "stopped at update 0 of 3" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    with monkeypatch.context() as patch:
        patch.setattr(run, "write_png", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(OSError, match="full"):
            run.main()
    assert run.main() == 0  # draws what was not drawn
    (line,) = run.read_lines(tmp_path / "results.jsonl")
    assert [point[0] for point in line["curve"]] == [12, 18]
    assert line["valid"] != line["curve"][-1][3]  # of both test images, and of one
    assert (tmp_path / "results-x2-g2-seed0.png").exists()
    assert run.main() == 0  # has nothing left to do
    assert len(run.read_lines(tmp_path / "results.jsonl")) == 1
    monkeypatch.setitem(sys.modules, "run", run)
    report_of = loaded(ROOT / "experiments" / "pixelcnn" / "report.py", "pixelcnn_report")
    arms_of = report_of.read(tmp_path / "results.jsonl")
    assert report_of.unfinished(tmp_path / "out", arms_of) == {}
    dotted = report_of.unfinished(tmp_path / "out", {})
    assert dotted == {"x2-g2-seed0, not complete": [{"curve": line["curve"]}]}
    assert [len(axis.lines) for axis in report_of.draw(arms_of | dotted).axes] == [2, 1]  # no seconds of the dotted one
    assert f"| {line['step_ms']:.2f} | {line['seconds']:.0f} |" in report_of.table(arms_of)
    for text in ("", "nonsense", '{"a": 1}'):
        (tmp_path / "none.jsonl").write_text(text)
        with pytest.raises(ValueError, match=r"none\.jsonl is no file of results"):
            report_of.read(tmp_path / "none.jsonl")
    assert (line["curve_of"], line["timed"]) == ("1 of 2 test images, evenly", True)
    other = {key: value for key, value in line.items() if key != "curve_of"}  # as lines were at first
    both = {"x2/g2": [other, line | {"seed": 1, "timed": False}]}
    axes = report_of.draw(both | dotted).axes
    titles = "the first test images", "1 of 2 test images, evenly", "the first test images"
    assert tuple(axis.get_title() for axis in axes) == titles
    assert [len(axis.lines) for axis in axes] == [1, 2, 1]


def test_seeds_of_the_experiment_are_compared_with_themselves(monkeypatch):
    """And the seconds of a training that had company are in no mean."""
    monkeypatch.setitem(sys.modules, "run", loaded(ROOT / "experiments" / "pixelcnn" / "run.py", "pixelcnn_run"))
    report_of = loaded(ROOT / "experiments" / "pixelcnn" / "report.py", "pixelcnn_report")
    line = {"parameters": 10**6, "macs": 10**9, "valid_raw": 4.0, "step_ms": 10.0, "seconds": 100.0}
    dense = [line | {"arm": "dense", "seed": seed, "valid": 3.0 + seed} for seed in (0, 1)]
    dense[1] |= {"timed": False, "step_ms": 99.0, "seconds": 999.0}
    deep = [line | {"arm": "x2/g2", "seed": 1, "valid": 3.9, "timed": False}]
    alone = [line | {"arm": "x4/g4", "seed": 2, "valid": 3.0}]
    runs = {"dense": dense, "x2/g2": deep, "x4/g4": alone}
    arms_of = {arm: [run | {"machine": "card"} for run in lines] for arm, lines in runs.items()}
    assert report_of.table(arms_of).splitlines()[2:] == [
        "| dense | 1.00 | 1.00 | 3.5000 | 0: 3.0000, 1: 4.0000 |  | 4.0000 | 10.00 | 100 |",
        "| x2/g2 | 1.00 | 1.00 | 3.9000 | 1: 3.9000 | -0.1000 | 4.0000 |  |  |",
        "| x4/g4 | 1.00 | 1.00 | 3.0000 | 2: 3.0000 |  | 4.0000 | 10.00 | 100 |",
    ]


def test_noise_is_found(tmp_path, capsys):
    """Of colours that are what their random numbers say in the lower half of one image."""
    noise = loaded(ROOT / "experiments" / "pixelcnn" / "noise.py", "pixelcnn_noise")
    numbers = torch.rand(64, 13, 32, 32, generator=torch.Generator().manual_seed(0))[:, 10:]
    images = torch.full((64, 3, 32, 32), 100, dtype=torch.uint8)
    images[5, :, 16:] = 255 * (numbers[5, :, 16:] > 0.5).byte()
    images[6] = 255  # white is not noise
    write_png(tmp_path / "drawn.png", data.arrays_of(images))
    noise.pictures([tmp_path / "drawn.png"])
    line = json.loads(capsys.readouterr().out)
    assert (line["noisy"], line["at_ends"], line["as_their_numbers_say"]) == ([5], 1, 1)
    assert line["colours_inside"] > 1000
    model = PixelCNN(ModelConfig(3, 8, mixture=2)).eval()
    noise.of_model(model, torch.full((2, 3, 8, 8), 100, dtype=torch.uint8))
    exact, rounded, plain, patched = map(json.loads, capsys.readouterr().out.splitlines())
    assert exact["by_more_than_8"] == 0
    assert rounded["of"] == 2
    assert (plain["pure_pixels"], patched["pure_pixels"]) == (0, pytest.approx(0.75 * 8 / 64, abs=0.06))


def test_images_of_the_experiment_are_decoded_once(tmp_path, monkeypatch):
    """Until the file is another one, or what was kept is damaged."""
    run = loaded(ROOT / "experiments" / "pixelcnn" / "run.py", "pixelcnn_run")
    sheet, cache = np.random.default_rng(0).integers(0, 256, (20, 16, 3), np.uint8), tmp_path / "out" / "images.npz"
    PIL.fromarray(sheet).save(tmp_path / "sheet.png")
    read, times = run.data.read, []
    monkeypatch.setattr(run.data, "read", lambda *given: times.append(1) or read(*given))
    config = {"data": ["sheet.png"]}
    first = run.images_of(config, tmp_path, cache)
    for reads in (1, 2, 3):
        for ours, theirs in zip(run.images_of(config, tmp_path, cache), first, strict=True):
            assert torch.equal(ours, theirs)
        assert len(times) == reads
        if reads == 1:
            cache.write_bytes(cache.read_bytes()[:-100])
        else:
            PIL.fromarray(sheet).save(tmp_path / "sheet.png", compress_level=reads)
    assert run.images_of(config | {"shrink": 2}, tmp_path, cache)[0].shape[2:] == (2, 2)


def test_the_network_of_grouped_convolutions_is_the_same():
    """What ours is timed beside: PyTorch's groups, whose weights are the blocks of ours."""
    other = loaded(ROOT / "benchmarks" / "pixelcnn.py", "pixelcnn_benchmark")
    config = ModelConfig(3, 32, 1, 2, "diagonal", 2, 8)
    ours, theirs = PixelCNN(config).eval(), other.PlainPixelCNN(config).eval()
    with torch.no_grad():
        for name, stack in ours.convolutions.items():
            grouped, groups = theirs.convolutions[name], config.groups if stack.layouts else 1
            group_of = [
                torch.arange(n) // (config.filters // groups) % groups for n in (stack.kind.inputs, stack.kind.outputs)
            ]
            outputs = torch.argsort(group_of[1], stable=True)
            for i in range(stack.count):
                dense = (
                    bst.to_dense(stack.v[i], stack.layouts[0], kernel_size=stack.kind.kernel)
                    if stack.layouts
                    else stack.v[i]
                )
                parts = [dense[group_of[1] == g][:, group_of[0] == g] for g in range(groups)]
                grouped.v[i] = torch.cat(parts) if stack.layouts else dense
            for mine, its in ((stack.gain, grouped.gain), (stack.bias, grouped.bias)):
                mine.uniform_(0.5, 1)
                its.copy_(mine[:, outputs] if stack.layouts else mine)
        x = torch.rand(2, 3, 8, 8) * 2 - 1
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-3, atol=1e-4)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
