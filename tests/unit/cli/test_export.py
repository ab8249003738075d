"""`nodetrack export`: complete, and the same bytes each time."""

from __future__ import annotations

import base64
import csv
import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nodetrack import Histogram, Image, Table, Text

if TYPE_CHECKING:
    from conftest import Lab

FORMATS = ("jsonl", "csv", "parquet")
PNG = b"\x89PNG\r\n\x1a\n not much of an image"


def parquet_rows(path: str | Path) -> list[dict[str, Any]]:
    """All rows, as pyarrow's own reader gives them."""
    from pyarrow import parquet

    return parquet.read_table(path).to_pylist()


def csv_rows(path: str | Path) -> list[dict[str, str]]:
    """All rows, as Python's own reader gives them."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def everything(lab: Lab) -> None:
    """Two attempts with contexts, typed values, values that are not finite, and integers of all sizes."""
    with lab.start() as run:
        for step in range(10):
            run.log({"loss": 1 / (step + 1), "count": step, "step": step / 2}, step=step)
        run.bind(stage="eval", split='a,\n"b"').log({"loss": math.nan, "context.x": 1.0}, step=9)
    with lab.start(version="0.2.0") as run:
        run.log({"loss": math.inf, "count": 2**63 - 1, "big": 2**64 - 1, "metric.y": -math.inf}, step=10)
        run.log({"big": 0.5, "h": Histogram([1.0, 2.0, math.nan], bins=2), "t": Text("ünï\ncode")}, step=11)
        run.log(
            {"i": Image(PNG, caption="dot"), "tab": Table(["a", "b"], [[1, "x"], [math.inf, None]])}, step=12
        )


@pytest.mark.case("C001")
def test_a_step_that_a_later_attempt_logs_again_wins_and_the_earlier_stays_readable(lab: Lab) -> None:
    """The job comes back from an older checkpoint: nothing is dropped, and each step is there once."""
    with lab.start() as first:
        lab.log_steps(first, range(16))
    with lab.start() as second:
        lab.log_steps(second, range(10, 21), plus=100)
    rows = lab.lines("export", "miner-1")
    assert [row["step"] for row in rows] == list(range(21))
    assert rows[12]["values"] == {"a": 112.0}
    assert [row["attempt"] for row in rows] == [first.attempt] * 10 + [second.attempt] * 11
    every = lab.lines("export", "miner-1", "--all-attempts")
    assert len(every) == 16 + 11
    of_first = {row["step"]: row["values"]["a"] for row in every if row["attempt"] == first.attempt}
    assert of_first[12] == 12.0


@pytest.mark.case("C002")
def test_rows_behind_a_rewind_are_superseded_and_still_exportable(lab: Lab) -> None:
    """Going back leaves one value a step, rising from step to step; nothing is deleted for it."""
    with lab.start() as first:
        lab.log_steps(first, range(126))
    with lab.start() as second:
        second.rewind(120)
        lab.log_steps(second, range(121, 131), plus=100)
    rows = lab.lines("export", "miner-1")
    assert [row["step"] for row in rows] == list(range(131))
    assert [row["values"]["a"] for row in rows[119:123]] == [119.0, 120.0, 221.0, 222.0]
    every = lab.lines("export", "miner-1", "--all-attempts")
    superseded = [row for row in every if row not in rows]
    assert [row["step"] for row in superseded] == list(range(121, 126))
    assert {row["attempt"] for row in superseded} == {first.attempt}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("options", [(), ("--all-attempts",)], ids=["current", "all"])
def test_the_same_journal_gives_the_same_bytes(lab: Lab, form: str, options: tuple[str, ...]) -> None:
    """Also in another process, where sets and hashes are ordered anew."""
    everything(lab)
    export = ("export", "miner-1", *options, "--format", form, "-o")
    for seed, name in enumerate(("one", "two")):
        variables = {**os.environ, "PYTHONHASHSEED": str(seed)}
        subprocess.run([sys.executable, "-m", "nodetrack", *export, name], check=True, env=variables)
    lab.out(*export, "three")
    assert Path("one").read_bytes() == Path("two").read_bytes() == Path("three").read_bytes() != b""


def test_jsonl_holds_every_value_as_it_was_logged(lab: Lab) -> None:
    everything(lab)
    rows = lab.lines("export", "miner-1")
    assert list(rows[0]) == ["run", "step", "time_ns", "version", "attempt", "context", "values"]
    assert rows[3]["values"] == {"count": 3, "loss": 1 / 4, "step": 1.5}
    assert rows[3]["context"] == {}
    at_nine = {json.dumps(row["context"]): row["values"] for row in rows if row["step"] == 9}
    assert at_nine == {
        "{}": {"count": 9, "loss": 0.1, "step": 4.5},
        '{"split": "a,\\n\\"b\\"", "stage": "eval"}': {"context.x": 1.0, "loss": "NaN"},
    }
    assert rows[-3]["values"] == {
        "big": 2**64 - 1,
        "count": 2**63 - 1,
        "loss": "Infinity",
        "metric.y": "-Infinity",
    }
    assert rows[-2]["values"]["h"]["counts"] == [1, 1]
    assert rows[-2]["values"]["t"] == {"type": "text", "text": "ünï\ncode"}
    assert base64.b64decode(rows[-1]["values"]["i"]["data"]) == PNG
    assert rows[-1]["values"]["tab"]["data"] == [[1, "x"], ["Infinity", None]]


def test_csv_has_a_column_for_each_metric_and_each_key_of_the_context(lab: Lab) -> None:
    """A metric that is called like another column gets `metric.` in front."""
    everything(lab)
    lab.out("export", "miner-1", "-o", "rows.csv")
    rows = csv_rows("rows.csv")
    assert list(rows[0]) == [
        *("run", "step", "time_ns", "version", "attempt", "context.split", "context.stage"),
        *("big", "metric.context.x", "count", "h", "i", "loss", "metric.metric.y", "metric.step", "t", "tab"),
    ]
    assert (rows[3]["step"], rows[3]["loss"], rows[3]["metric.step"], rows[3]["big"]) == (
        "3",
        "0.25",
        "1.5",
        "",
    )
    (evaluation,) = (row for row in rows if row["context.stage"])
    assert (evaluation["loss"], evaluation["context.split"]) == ("NaN", 'a,\n"b"')
    assert (rows[-3]["big"], rows[-3]["loss"], rows[-3]["metric.metric.y"]) == (
        str(2**64 - 1),
        "Infinity",
        "-Infinity",
    )
    assert json.loads(rows[-2]["t"]) == {"type": "text", "text": "ünï\ncode"}
    assert base64.b64decode(json.loads(rows[-1]["i"])["data"]) == PNG
    assert float(rows[2]["loss"]) == 1 / 3


def test_parquet_has_types_that_hold_every_value(lab: Lab) -> None:
    everything(lab)
    lab.out("export", "miner-1", "-o", "rows.parquet")
    from pyarrow import parquet

    schema = parquet.read_schema("rows.parquet")
    kinds = {name: str(schema.field(name).type) for name in schema.names}
    assert kinds["count"] == kinds["step"] == kinds["time_ns"] == "int64"
    assert kinds["loss"] == kinds["metric.step"] == "double"
    assert kinds["big"] == "string"  # 2**64 - 1 beside 0.5: a float would round it
    assert kinds["h"] == kinds["context.stage"] == "string"
    rows = parquet_rows("rows.parquet")
    assert [row["step"] for row in rows] == [*range(10), 9, 10, 11, 12]
    assert rows[3]["loss"] == 0.25
    assert rows[3]["big"] is None
    assert math.isnan(rows[10]["loss"])
    assert rows[11]["loss"] == math.inf
    assert (rows[11]["count"], rows[11]["big"], rows[12]["big"]) == (2**63 - 1, str(2**64 - 1), "0.5")


@pytest.mark.parametrize("form", FORMATS)
def test_a_run_without_rows_is_exported_as_no_rows(lab: Lab, form: str) -> None:
    lab.start().finish()
    lab.out("export", "miner-1", "--format", form, "-o", "rows")
    readers = {"jsonl": lambda path: Path(path).read_text(), "csv": csv_rows, "parquet": parquet_rows}
    assert not readers[form]("rows")


def test_parquet_in_many_groups_is_one_table(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    everything(lab)
    lab.out("export", "miner-1", "-o", "one.parquet")
    monkeypatch.setattr("nodetrack.cli.formats._GROUP_CELLS", 50)
    lab.out("export", "miner-1", "-o", "many.parquet")
    from pyarrow import parquet

    assert parquet.ParquetFile("many.parquet").num_row_groups == 7
    assert repr(parquet_rows("many.parquet")) == repr(parquet_rows("one.parquet"))


def test_several_runs_are_exported_one_after_the_other_each_once(lab: Lab) -> None:
    runs = []
    for uid in (1, 2):
        with lab.start(uid=uid) as run:
            run.log({f"of_{uid}": 1.0}, step=0)
        runs.append(run.id)
    rows = lab.lines("export", "miner-2", "miner-1", runs[1])
    assert [row["run"] for row in rows] == [runs[1], runs[0]]
    lab.out("export", "miner-1", "miner-2", "-o", "rows.csv")
    assert [(row["run"], row["of_1"], row["of_2"]) for row in csv_rows("rows.csv")] == [
        (runs[0], "1.0", ""),
        (runs[1], "", "1.0"),
    ]


def test_the_format_follows_from_the_name_of_the_file(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(3))
    lab.out("export", "miner-1", "-o", "rows.csv")
    lab.out("export", "miner-1", "-o", "rows.parquet", "--format", "jsonl")
    assert len(csv_rows("rows.csv")) == 3
    assert Path("rows.parquet").read_text() == lab.out("export", "miner-1")


def test_json_is_another_word_for_jsonl(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(3))
    assert lab.out("export", "miner-1", "--json", "-o", "rows.csv") == ""
    assert Path("rows.csv").read_text() == lab.out("export", "miner-1", "--format", "jsonl")
    assert lab.out("journal", "cat", "miner-1", "--json") == lab.out("journal", "cat", "miner-1")


def test_the_file_changes_at_once_and_only_if_all_went_well(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(3))
    Path("rows.jsonl").write_text("what was there\n")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "rows.jsonl")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        result = lab.run("export", "miner-1", "-o", "rows.jsonl")
    assert (result.exit_code, result.stderr) == (2, "nodetrack: rows.jsonl: No space left on device.\n")
    assert Path("rows.jsonl").read_text() == "what was there\n"
    with Path("rows.jsonl").open() as opened_before:
        lab.out("export", "miner-1", "-o", "rows.jsonl")
        assert opened_before.read() == "what was there\n"  # who reads it meanwhile sees one or the other
    assert Path("rows.jsonl").read_text().count("\n") == 3
    assert [path.name for path in Path().iterdir() if "rows" in path.name] == ["rows.jsonl"]
    plain = Path("plain")
    plain.touch()
    assert stat.S_IMODE(Path("rows.jsonl").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_an_export_that_lacks_rows_says_so(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(10))
    (path,) = lab.segments(run)
    damaged = bytearray(path.read_bytes())
    damaged[-200] ^= 0xFF
    path.write_bytes(damaged)
    result = lab.run("export", "miner-1")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 9
    assert "1 damaged record left out: `nodetrack journal verify` names the files." in result.stderr


def test_parquet_without_pyarrow_says_what_to_install(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.start().finish()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = lab.run("export", "miner-1", "-o", "rows.parquet")
    assert result.exit_code == 2
    assert "pip install 'nodetrack[parquet]'" in result.stderr
    assert not Path("rows.parquet").exists()


def test_parquet_is_not_written_to_a_terminal(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    from nodetrack.cli import export

    lab.start().finish()
    monkeypatch.setattr(export, "_is_terminal", lambda: True)
    result = lab.run("export", "miner-1", "--format", "parquet")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--output" in result.stderr


@pytest.mark.parametrize("name", ["rows.xlsx", "rows.json", "rows"])
def test_a_name_that_says_no_format_is_an_error_that_names_the_three(lab: Lab, name: str) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(3))
    result = lab.run("export", "miner-1", "-o", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"nodetrack: The name of {name} says no format: end it in .jsonl, .csv or .parquet, "
        "or choose with --format jsonl|csv|parquet.\n"
    )
    assert not Path(name).exists()
    for option in (("--format", "jsonl"), ("--json",)):
        lab.out("export", "miner-1", "-o", name, *option)
        assert Path(name).read_text().count("\n") == 3


def test_the_suffix_may_be_in_capitals(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(3))
    lab.out("export", "miner-1", "-o", "ROWS.CSV")
    assert Path("ROWS.CSV").read_text().startswith("run,step,")
