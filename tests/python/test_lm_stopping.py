"""Trainings that are stopped, killed, or begun twice: nothing is lost, nothing stays behind."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest
from ranks import free_port
from tiny_language_models import SHORT, SIZE, TINY, lm, same, sentences

from blocksparse.models import checkpoint
from blocksparse.models.files import remove_leftovers, write_whole
from blocksparse.models.folder import locked
from blocksparse.models.language.training import Trainer, read_text, train

pytestmark = pytest.mark.usefixtures("one_thread")

HOW = ["--updates", 12, "--batch", 8, "--steps", 16, "--lr", 4e-3, "--warmup", 4, "--device", "cpu"]
HOST = re.sub(r"[^\w-]", "-", socket.gethostname())


@pytest.fixture(autouse=True)
def _interrupts_count():
    """A shell's background job begins with SIGINT ignored, and so would the trainings of this file."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(sentences(600))
    return path


@pytest.fixture(scope="module")
def whole(text):
    """Weights, average, moments and all else at the end of a training that nobody stopped."""
    out = text.parent / "whole"
    assert lm("train", "--text", text, "--out", out, *SIZE, *HOW, "--save-every", 5) == 0
    return checkpoint.load(out / "last.safetensors")


def words(text, out, *more):
    return ["train", "--text", text, "--out", out, *SIZE, *HOW, *more]


def is_whole(path, whole):
    tensors, header = checkpoint.load(path)
    return same(tensors, whole[0]) and header == whole[1]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def log_of(folder):
    """Its lines but for seconds, which are never the same."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["seconds"] for line in lines] == sorted(line.pop("seconds") for line in lines)
    return lines


@pytest.fixture
def at(monkeypatch):
    """Does something at the end of an update."""

    def patch(update, act):
        step = Trainer.step

        def and_then(self):
            bits = step(self)
            if self.update == update:
                act()
            return bits

        monkeypatch.setattr(Trainer, "step", and_then)

    return patch


# ---- Signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_update_and_saves(text, whole, tmp_path, capfd, at, number, status):
    before = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]
    at(7, lambda: signal.raise_signal(number))
    out = tmp_path / "out"
    assert lm(*words(text, out, "--save-every", 5)) == status
    last = out / "last.safetensors"
    said = capfd.readouterr().err
    assert said.index("stops after this update and writes") < said.index("is written")  # not when it has ended
    assert f"{last} is written, after update 7 of 12; the same command with --resume goes on\n" in said
    assert said.endswith("\nblocksparse: stopped\n")
    assert checkpoint.load(last)[1]["update"] == 7
    assert names(out) == ["last.safetensors", "log.jsonl"]
    assert [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)] == before
    assert lm(*words(text, out, "--save-every", 5, "--resume")) == 0
    assert is_whole(last, whole)
    assert [line["update"] for line in log_of(out)] == [5, 10, 12]


def test_a_signal_before_the_first_update(text, tmp_path, capsys, monkeypatch):
    read = read_text
    monkeypatch.setattr(
        "blocksparse.models.language.train_command.read_text",
        lambda paths: signal.raise_signal(signal.SIGTERM) or read(paths),
    )
    assert lm(*words(text, tmp_path / "out")) == 143
    assert "no update is done, there is no checkpoint yet\n" in capsys.readouterr().err
    assert names(tmp_path / "out") == ["log.jsonl"]


def test_a_signal_in_the_middle_of_a_save(text, whole, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert lm(*words(text, out, "--until", 2)) == 0
    sync = os.fsync
    monkeypatch.setattr("os.fsync", lambda descriptor: signal.raise_signal(signal.SIGTERM) or sync(descriptor))
    assert lm(*words(text, out, "--resume", "--save-every", 5)) == 143
    monkeypatch.setattr("os.fsync", sync)
    assert names(out) == ["last.safetensors", "log.jsonl"]
    assert lm(*words(text, out, "--resume")) == 0
    assert is_whole(out / "last.safetensors", whole)


def test_a_signal_ends_a_long_evaluation(text, tmp_path, monkeypatch, capsys):
    """And the checkpoint is there all the same."""
    read = []
    loss_of = sys.modules["blocksparse.models.language.network"].loss_of

    def slow(*arguments):
        read.append(1)
        if len(read) == 2:
            signal.raise_signal(signal.SIGINT)
        return loss_of(*arguments)

    monkeypatch.setattr("blocksparse.models.language.network.loss_of", slow)
    assert lm(*words(text, tmp_path / "out", "--valid", text, "--save-every", 3)) == 130
    assert len(read) == 2
    assert checkpoint.load(tmp_path / "out" / "last.safetensors")[1]["update"] == 3
    assert "valid" not in json.loads((tmp_path / "out" / "log.jsonl").read_text())


def stops(counts):
    """For `stop`: says so each time that it has been asked so many times; 0 for never again."""
    left = iter(counts)
    asked = [next(left)]

    def stop():
        asked[0] -= 1
        if asked[0] == 0:
            asked[0] = next(left)
            return True
        return False

    return stop


@pytest.mark.parametrize("evaluate_every", [None, 2])
def test_a_stopped_trainings_log_is_that_of_one_never_stopped(text, tmp_path, evaluate_every):
    """Wherever it is stopped: between updates, in evaluations, in the last one, in one that is made up for."""
    data, valid = read_text([text]), read_text([text])[:700]
    how = {"save_every": 4, "evaluate_every": evaluate_every, "streams": 2}

    def trained(out, stop):
        runs = 0
        done = False
        while not done and runs < 60:
            trainer = Trainer(TINY, SHORT, data, "cpu")
            if (out / "last.safetensors").exists():
                trainer.resume(out / "last.safetensors")
            done = train(trainer, out, valid, **how, stop=stop)
            lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
            assert [line["update"] for line in lines if "stopped" in line][:-1] == []
            assert done or trainer.update == 0 or lines[-1]["update"] <= trainer.update
            runs += 1
        return runs, log_of(out)

    runs, whole = trained(tmp_path / "whole", lambda: False)
    assert runs == 1
    assert whole[-1]["update"] == SHORT.updates
    assert all("valid" in line for line in whole)
    for turn, counts in enumerate([[2], [5], [6], [7], [5, 2, 1, 3], [3, 1, 2, 2, 1, 9, 2, 2, 2, 1], [9] * 6]):
        out = tmp_path / str(turn)
        runs, log = trained(out, stops([*counts, 0]))
        assert runs > 1
        assert log == whole, counts
        assert same(
            checkpoint.load(out / "last.safetensors")[0], checkpoint.load(tmp_path / "whole" / "last.safetensors")[0]
        )


def test_a_signal_in_the_last_evaluation(text, tmp_path, monkeypatch, capsys):
    """All updates are done, but not all that was asked for."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert lm(*words(text, whole, "--valid", text)) == 0
    evaluate = Trainer.evaluate
    monkeypatch.setattr(Trainer, "evaluate", lambda *a: signal.raise_signal(signal.SIGTERM) or evaluate(*a))
    assert lm(*words(text, out, "--valid", text)) == 143
    assert "is written, after update 12 of 12; the same command with --resume goes on\n" in capsys.readouterr().err
    assert lm(*words(text, out, "--valid", text, "--resume")) == 143
    assert "is as it was, after update 12 of 12; the same command goes on\n" in capsys.readouterr().err
    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    assert lm(*words(text, out, "--valid", text, "--resume")) == 0
    assert log_of(out) == log_of(whole)
    assert "valid" in log_of(out)[-1]


SLOW = """
import sys, time
from blocksparse import __main__
from blocksparse.models.language.training import Trainer
def step(self):
    print("updating", flush=True)
    time.sleep(100)
Trainer.step = step
sys.exit(__main__.main(sys.argv[1:]))
"""


def test_a_second_ctrl_c_stops_at_once(text, tmp_path):
    command = [sys.executable, "-c", SLOW, "lm", *map(str, words(text, tmp_path / "out"))]
    running = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert any("updating" in line for line in running.stdout)
    running.send_signal(signal.SIGINT)
    assert "Ctrl-C again stops at once" in running.stderr.readline() + running.stderr.readline()
    assert running.poll() is None
    running.send_signal(signal.SIGINT)
    said = running.communicate(timeout=20)[1]
    assert running.returncode == 130
    assert said == "\nblocksparse: stopped at once\n"


def test_all_processes_stop_after_the_same_update(text, tmp_path):
    """The signal comes to `torchrun`, at any time; the first process writes, and the checkpoint goes on."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()]
    command += ["-m", "blocksparse", "lm", *words(text, out, "--updates", 100000, "--save-every", 3)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    running = subprocess.Popen(
        list(map(str, command)), env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    while not (out / "last.safetensors").exists() and running.poll() is None:
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    said = running.communicate(timeout=120)[1]
    assert len(re.findall(r"is written, after update (\d+) of 100000", said)) == 1, said
    assert "died" not in said
    assert names(out) == ["last.safetensors", "log.jsonl"]
    update = checkpoint.load(out / "last.safetensors")[1]["update"]
    assert f"after update {update} " in said


# ---- What killed runs leave, and two at a time -----------------------------------------------------------------------

KILLS = """
import os, random, signal, sys, time
from pathlib import Path
from blocksparse import __main__
from blocksparse.models.language import command
times, seed = int(sys.argv[1]), int(sys.argv[2])
rng = random.Random(seed)
for i in range(times):
    child = os.fork()
    if child == 0:
        os._exit(__main__.main(["lm", *sys.argv[3:], "--resume"]))
    time.sleep(rng.uniform(0.1, 2))
    number = rng.choice([signal.SIGKILL, signal.SIGTERM])
    try:
        os.kill(child, number)
    except ProcessLookupError:
        pass
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
sys.exit(__main__.main(["lm", *sys.argv[3:], "--resume"]))
"""


def test_killed_again_and_again_it_ends_with_the_same_bits(text, whole, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLS, "6", "1", *words(text, out, "--save-every", 1)]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert is_whole(out / "last.safetensors", whole)
    assert names(out) == ["last.safetensors", "log.jsonl"]
    assert [json.loads(x)["update"] for x in (out / "log.jsonl").read_text().splitlines()] == list(range(1, 13))


def dead_process():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_what_killed_runs_have_left_is_removed(text, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    dead, alive = dead_process(), os.getppid()
    left = [f".last.safetensors.{HOST}.{dead}.part", f".other.{HOST}.{dead}.part", f".last.safetensors.{dead}"]
    others = [
        f".last.safetensors.{HOST}.{alive}.part",
        f".last.safetensors.elsewhere.{dead}.part",
        f".last.safetensors.{alive}",
        f".mine.{dead}",
        "last.safetensors.1",
    ]
    for name in (*left, *others):
        (out / name).write_bytes(b"half")
    for process in (dead, alive):  # a library's files
        (out / f".last.safetensors.{HOST}.{process}.dir").mkdir()
        (out / f".last.safetensors.{HOST}.{process}.dir" / ".tmp1").write_bytes(b"half")
    others += [f".last.safetensors.{HOST}.{alive}.dir"]
    assert lm(*words(text, out, "--until", 1)) == 0
    assert names(out) == sorted([*others, "last.safetensors", "log.jsonl"])


@pytest.mark.parametrize("name", ["x", "n" * 255], ids=["short", "long"])
def test_temporary_names_are_those_that_are_removed(tmp_path, monkeypatch, name):
    def killed(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)
    monkeypatch.setattr("pathlib.Path.unlink", lambda *_, **__: None)  # as if nothing was run any more
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / name, b"abc")
    (left,) = names(tmp_path)
    monkeypatch.undo()
    os.rename(tmp_path / left, tmp_path / left.replace(f".{os.getpid()}.", f".{dead_process()}."))
    remove_leftovers(tmp_path)
    assert names(tmp_path) == []


HOLD = """
import sys, time
from pathlib import Path
from blocksparse.models.folder import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that trains into the folder."""
    running = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "out"], stdout=subprocess.PIPE, text=True)
    assert running.stdout.readline() == "locked\n"
    yield running
    running.kill()
    running.wait()


def test_two_at_a_time_are_refused(text, whole, tmp_path, capsys, holder):
    out = tmp_path / "out"
    for more in ([], ["--resume"]):
        assert lm(*words(text, out, *more)) == 2
        said = capsys.readouterr().err
        assert re.search(rf"is in use by process {holder.pid} on \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d", said)
        assert said.count("\n") == 1
    with pytest.raises(ValueError, match=f"in use by process {holder.pid} "):
        train(Trainer(TINY, SHORT, read_text([text]), "cpu"), out, None)
    assert names(out) == [".lock"]
    holder.kill()  # the lock of a dead process does not block
    holder.wait()
    assert names(out) == [".lock"]
    assert lm(*words(text, out)) == 0
    assert names(out) == ["last.safetensors", "log.jsonl"]


def test_a_lock_is_let_go(tmp_path):
    with locked(tmp_path / "out"), locked(tmp_path / "out"):
        assert names(tmp_path / "out") == [".lock"]
    assert names(tmp_path / "out") == []
    (tmp_path / "out" / ".lock").write_text("damaged")
    with locked(tmp_path / "out"):
        pass
    with pytest.raises(RuntimeError), locked(tmp_path / "out"):
        raise RuntimeError
    assert names(tmp_path / "out") == []


def test_a_lock_that_cannot_be_written(tmp_path, monkeypatch):
    """The disk is full: nothing stays behind."""
    monkeypatch.setattr("json.dumps", lambda about: "x" * 10_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="out cannot be written"), locked(tmp_path / "out"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path / "out") == []


def test_a_folder_that_cannot_be_made(text, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert lm(*words(text, tmp_path / "file")) == 2
    assert "file cannot be written" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"
