"""Files of JSON lines: what is left out of them, and which files are none."""

import pytest

from blocksparse.models.lines import add_line, missing, need_known, need_lines, read_lines


@pytest.mark.parametrize(
    "content",
    [b"some text\n", b'{\n  "name": 1\n}\n', b'{"name": 1,\n "b": 2}\n', b'{"a": 1\ntext', b"\xff\xfe\x00{", b"[1,\n"],
)
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    for read in (read_lines, need_lines):
        with pytest.raises(ValueError, match="/file is no file of results: it has no line of results, needs one JSON"):
            read(path)


@pytest.mark.parametrize(("content", "needed"), [("[1]\n", "an object"), ("5", "an object"), ('{"a": 1}', "name")])
def test_lines_of_something_else_are_refused(tmp_path, content, needed):
    (tmp_path / "file").write_text(content)
    with pytest.raises(ValueError, match=f"/file, line 1 is no line of results, needs {needed}"):
        read_lines(tmp_path / "file", ("name",))


@pytest.mark.parametrize("before", [None, "", '{"name": "a", "va', "{"])
def test_half_a_first_line_is_left_out(tmp_path, before):
    """The first write may have been stopped, or be another process's and under way."""
    path = tmp_path / "file"
    if before is not None:
        path.write_text(before)
    assert read_lines(path, ("name",)) == []
    add_line(path, {"name": 1})
    assert read_lines(path, ("name",)) == [{"name": 1}]


@pytest.mark.parametrize("half", ['{"name": 2, "va', "ame"])
def test_half_a_line_among_whole_ones_is_left_out(tmp_path, half):
    path = tmp_path / "file"
    add_line(path, {"name": 1})
    with open(path, "a") as file:
        file.write(half)
    assert read_lines(path) == [{"name": 1}]
    add_line(path, {"name": 3})
    assert read_lines(path) == [{"name": 1}, {"name": 3}]


def test_missing_lines(tmp_path, capsys):
    path, wanted = tmp_path / "file", [{"arm": arm, "seed": 0} for arm in "abc"]
    add_line(path, {"arm": "a", "seed": 0, "loss": 1.0})
    add_line(path, {"arm": "b", "seed": 1, "loss": 1.0})
    assert [each["arm"] for each in missing(path, wanted)] == ["b", "c"]
    assert [each["arm"] for each in missing(path, wanted, again=["a"])] == ["a", "b", "c"]
    assert capsys.readouterr().out == ""
    assert list(missing(path, wanted[:1])) == []
    assert capsys.readouterr().out == f"nothing is left to do: all that was asked for is in {path}\n"


def test_missing_lines_as_far_as_time_goes(tmp_path, capsys, monkeypatch):
    """The longest before is what the next may take."""
    clock = [100.0]
    monkeypatch.setattr("blocksparse.models.lines.time.monotonic", lambda: clock[0])
    begun = []
    for each in missing(tmp_path / "file", [{"arm": arm} for arm in "abcd"], minutes=1):
        begun.append(each["arm"])
        clock[0] += 25
    assert begun == ["a", "b"]
    assert capsys.readouterr().out == "c and what follows is left for another run: 1 minutes are over\n"


def test_names_of_arms():
    assert need_known(None, ["a", "b", "c"]) == ["a", "b", "c"]
    assert need_known(["c", "a"], ["a", "b", "c"]) == ["a", "c"]
    with pytest.raises(ValueError, match="there is no arm d, e, needs one of a, b, c"):
        need_known(["e", "a", "d"], ["a", "b", "c"])
