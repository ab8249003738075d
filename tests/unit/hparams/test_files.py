"""Files as layers: encodings, and messages with file, line, column and the line itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nodetrack.errors import HparamsError
from nodetrack.hparams.files import read_layer
from nodetrack.hparams.layers import Origin

WriteFile = Callable[..., Path]


def read_values(path: Path) -> dict[str, object]:
    reading = read_layer(path, "project")
    assert reading is not None
    return dict(reading.layer.values)


def fault(path: Path) -> HparamsError:
    with pytest.raises(HparamsError) as caught:
        read_layer(path, "project")
    assert caught.value.path == path
    return caught.value


def test_a_file_is_a_layer_that_knows_the_line_of_each_key(write: WriteFile) -> None:
    path = write("hparams.json", '{\n "a": {\n  "b": 1}}')
    reading = read_layer(path, "project")
    assert reading is not None
    assert reading.layer.values == {"a": {"b": 1}}
    assert reading.layer.origin_of(("a", "b")) == Origin("project", str(path), path, 3, 3)
    assert reading.problems == ()


def test_a_missing_file_is_no_layer(folder: Path) -> None:
    assert read_layer(folder / "hparams.json", "project") is None


@pytest.mark.case("C070")
@pytest.mark.parametrize("text", ['{"name": "Zoë", "a": 1}', '{\r\n"a": 1\r\n}\r\n'])
def test_a_byte_order_mark_changes_nothing(write: WriteFile, text: str) -> None:
    plain, marked = write("a.json", text.encode()), write("b.json", b"\xef\xbb\xbf" + text.encode())
    assert read_values(plain) == read_values(marked)


@pytest.mark.case("C070")
def test_a_byte_order_mark_does_not_move_the_column_of_a_fault(write: WriteFile) -> None:
    error = fault(write("hparams.json", b'\xef\xbb\xbf{"a": 1,}'))
    assert (error.line, error.column) == (1, 8)


@pytest.mark.case("C070")
@pytest.mark.parametrize(
    ("encoding", "name"),
    [("utf-16", "UTF-16"), ("utf-16-le", "UTF-16"), ("utf-16-be", "UTF-16"), ("utf-32", "UTF-32")],
)
def test_a_file_in_another_unicode_encoding_is_named_as_such(
    write: WriteFile, encoding: str, name: str
) -> None:
    error = fault(write("hparams.json", '{"a": 1}'.encode(encoding)))
    assert f"line 1, column 1: the file is written in {name}; save it as UTF-8." in str(error)


@pytest.mark.case("C070")
def test_a_byte_that_is_not_utf_8_is_named_with_its_place(write: WriteFile) -> None:
    error = fault(write("hparams.json", b'{\n "\xc3\xa9": "caf\xe9"}'))
    assert (error.line, error.column) == (2, 11)
    assert "byte 0xE9 is not UTF-8" in str(error)


@pytest.mark.case("C070")
def test_a_fault_is_told_in_one_line_with_file_line_column_hint_and_the_line(write: WriteFile) -> None:
    error = fault(write("hparams.json", '{\n  "a": 1, // the first\n  "b": 2\n}'))
    assert (error.line, error.column) == (2, 11)
    assert str(error) == (
        f"{error.path}, line 2, column 11: JSON has no comments; delete the one that starts here. "
        'The line is: "a": 1, // the first'
    )


def test_a_long_line_is_shown_around_its_fault(write: WriteFile) -> None:
    error = fault(write("hparams.json", '{"a": [' + "1, " * 500 + "oops, " + "2, " * 500 + "3]}"))
    assert "oops" in str(error)
    assert len(str(error).partition("The line is: ")[2]) < 90


@pytest.mark.case("C070")
@pytest.mark.parametrize("content", ["", " \n\t", b"\xef\xbb\xbf"])
def test_an_empty_file_is_an_empty_object_and_said_to_be(write: WriteFile, content: object) -> None:
    path = write("hparams.json", content)
    reading = read_layer(path, "project")
    assert reading is not None
    assert reading.layer.values == {}
    assert [problem.message for problem in reading.problems] == [
        f"{path} is empty and read as {{}}; delete it or write values into it."
    ]


@pytest.mark.parametrize(
    ("text", "found"), [("[1]", "a list"), ("3", "a single value"), ("null", "a single value")]
)
def test_a_file_must_hold_an_object(write: WriteFile, text: str, found: str) -> None:
    assert f"line 1: {found} stands at the top; an object is expected" in str(
        fault(write("hparams.json", text))
    )


@pytest.mark.case("C069")
def test_a_repeated_key_is_a_problem_with_both_lines(write: WriteFile) -> None:
    path = write("hparams.json", '{"lr": 1,\n "lr": 2}')
    reading = read_layer(path, "project")
    assert reading is not None
    (problem,) = reading.problems
    assert problem.message.startswith(f"{path}, line 2, column 2: duplicate key 'lr', first on line 1;")
    assert problem.key == "lr"
    assert reading.layer.values == {"lr": 2}


def test_a_folder_in_the_place_of_a_file_is_named(folder: Path) -> None:
    (folder / "hparams.json").mkdir()
    assert "is a folder" in str(fault(folder / "hparams.json"))


def test_a_named_pipe_is_refused_rather_than_waited_on(folder: Path) -> None:
    os.mkfifo(folder / "hparams.json")
    assert "is not a regular file" in str(fault(folder / "hparams.json"))


def test_a_link_to_nothing_is_not_taken_for_a_missing_file(folder: Path) -> None:
    (folder / "hparams.json").symlink_to("gone.json")
    assert "is a link to nothing" in str(fault(folder / "hparams.json"))


def test_a_file_that_the_system_refuses_is_named_with_the_reason(folder: Path) -> None:
    path = folder / "hparams.json"
    path.symlink_to(path)
    assert "cannot be read: Too many levels of symbolic links." in str(fault(path))
