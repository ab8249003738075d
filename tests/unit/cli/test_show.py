"""`nodetrack show`."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import TYPE_CHECKING

import pytest

from nodetrack import Histogram, Text
from nodetrack.cli.terminal import clock
from nodetrack.delivery.companion import companion_writer
from nodetrack.journal.recover import read_header
from nodetrack.journal.writer import KeySet

if TYPE_CHECKING:
    from conftest import Lab


def parts(printed: str) -> dict[str, list[str]]:
    """The parts of the page by their titles; the first, which has none, under ""."""
    found: dict[str, list[str]] = {}
    for block in printed.split("\n\n"):
        title, *lines = block.splitlines()
        found["" if not found else title] = [title, *lines] if not found else lines
    return found


@pytest.mark.case("C007")
def test_a_config_that_changed_between_attempts_is_shown_with_both_values(lab: Lab) -> None:
    """A changed hyper-parameter never stops a restart: both configs are kept, and the change is shown."""
    with lab.start(config={"lr": 1e-3, "seed": 1}) as run:
        lab.log_steps(run, range(5))
    with lab.start(config={"lr": 1e-4, "seed": 1}, version="0.1.1"):
        pass
    report = lab.json("show", "miner-1", "--json")
    assert [version["config"]["lr"] for version in report["config_history"]] == [1e-3, 1e-4]
    assert [attempt["config_changes"] for attempt in report["attempts"]] == [{}, {"lr": [1e-3, 1e-4]}]
    assert [attempt["starting_step"] for attempt in report["attempts"]] == [0, 5]  # where the change begins
    second = report["attempts"][1]["attempt"]
    changes = parts(lab.out("show", "miner-1"))["Config changes"]
    assert changes[-1].split() == [second, "lr", "0.001", "→", "0.0001"]


@pytest.mark.case("C031")
def test_a_run_can_be_looked_at_while_it_logs_and_after_it_was_killed(lab: Lab) -> None:
    """Rows, config and summary are there from the first moment; no clean end is needed for any of them."""
    logs = "for step in range(10): run.log({'loss': 1.0 / (step + 1)}, step=step)"
    process = lab.open_node(f"{logs}\nprint('logged')\nsys.stdin.read()")
    assert process.stdout is not None
    assert process.stdout.readline() == "logged\n"
    alive = lab.json("show", "miner-1", "--json")
    process.kill()
    process.wait()
    dead = lab.json("show", "miner-1", "--json")
    assert (alive["run"]["state"], dead["run"]["state"]) == ("running", "crashed")
    for report in (alive, dead):
        assert (report["rows"], report["config"], report["summary"]) == (10, {"lr": 0.1}, {"loss": 0.1})
    assert len(lab.lines("export", "miner-1")) == 10


@pytest.mark.case("C061")
def test_a_value_that_is_not_finite_breaks_no_strict_parser(lab: Lab) -> None:
    with lab.start(config={"limit": math.inf, "floor": -math.inf, "none": math.nan}) as run:
        run.log({"loss": math.nan, "up": math.inf, "down": -math.inf}, step=7)
        run.summary["best"] = math.nan
    report = lab.json("show", "miner-1", "--json")
    assert report["config"] == {"limit": "Infinity", "floor": "-Infinity", "none": "NaN"}
    assert report["summary"] == {"loss": "NaN", "up": "Infinity", "down": "-Infinity", "best": "NaN"}
    assert {line["metric"]: line["values"]["0.1.0"] for line in report["last_values"]} == {
        "down": "-Infinity",
        "loss": "NaN",
        "up": "Infinity",
    }
    for command in (("export", "miner-1"), ("journal", "cat", "miner-1"), ("tail", "miner-1", "--json")):
        text = lab.out(*command)
        assert len(lab.lines(*command)) == text.count("\n")
        assert '"NaN"' in text
        assert '"-Infinity"' in text


def test_the_page_begins_with_who_the_run_is_and_how_it_stands(lab: Lab) -> None:
    run = lab.start(tags=["eu"], notes="a\nb", group="night", job_type="training", environment="dev")
    run.log({"a": 1.0}, step=7)
    run.finish(3)
    head = parts(lab.out("show", run.id))[""]
    assert head[0].rstrip() == "miner-1  crashed (exit code 3)"
    assert head[1].rstrip() == f"run {run.id}, miner 1 of project p (dev)"
    facts = dict(line.split(maxsplit=1) for line in head[2:])
    assert facts["version"].rstrip() == "0.1.0"
    assert facts["logged"].rstrip() == "1 row, next step 8"
    assert "-m pytest" in facts["command"] or sys.executable in facts["command"]
    assert facts["ran"].rstrip().endswith("in 1 attempt")
    assert [facts[name].rstrip() for name in ("group", "tags", "notes")] == ["night", "eu", "a\\nb"]


def test_what_there_is_nothing_of_is_not_shown(lab: Lab) -> None:
    lab.start().finish()
    printed = lab.out("show", "miner-1")
    assert [title for title in parts(printed) if title] == ["Attempts"]
    assert "notes" not in printed


def test_every_attempt_is_shown_with_its_version_and_its_end(lab: Lab) -> None:
    lab.node("run.log({'a': 1.0}, step=4)\nraise ValueError('no data left')")
    lab.killed_node("run.log({'a': 1.0}, step=5)")
    lab.start(version="0.2.0").finish()
    ended = [(attempt["version"], attempt["state"], attempt["reason"]) for attempt in
             lab.json("show", "miner-1", "--json")["attempts"]]  # fmt: skip
    assert ended == [
        ("0.1.0", "crashed", "ValueError: no data left"),
        ("0.1.0", "crashed", "killed: the process ended without a word"),
        ("0.2.0", "finished", ""),
    ]
    first, second, third = parts(lab.out("show", "miner-1"))["Attempts"][2:]
    assert first.rstrip().endswith("crashed (ValueError: no data left)")
    assert second.rstrip().endswith("crashed (killed: the process ended without a word)")
    assert third.split()[1] == "0.2.0"
    assert third.rstrip().endswith("finished")


def test_the_commit_is_shown_and_whether_it_had_changes(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    from nodetrack import tracker
    from nodetrack.machine import GitState

    monkeypatch.setattr(tracker, "git_state", lambda _: GitState("c0ffee" * 6 + "cafe", "main", True, None))
    lab.start().finish()
    assert "commit   c0ffeec0ffee on main, with uncommitted changes" in lab.out("show", "miner-1")


def test_secrets_are_masked_in_the_config(lab: Lab) -> None:
    lab.start(config={"wandb": {"api_key": "verysecret"}, "num_tokens": 5}).finish()
    printed = lab.out("show", "miner-1") + lab.out("show", "miner-1", "--json")
    assert "verysecret" not in printed
    assert re.search(r"^num_tokens +5 *$", printed, re.MULTILINE)


def test_the_config_stands_under_dotted_keys_with_its_values_aligned(lab: Lab) -> None:
    lab.start(config={"lr": 0.1, "optimizer": {"name": "adam", "betas": [0.9, 0.95]}, "extra": {}}).finish()
    lines = [line.rstrip() for line in parts(lab.out("show", "miner-1"))["Config"]]
    assert lines == [
        "lr               0.1",
        'optimizer.name   "adam"',
        "optimizer.betas  [0.9,0.95]",
        "extra            {}",
    ]


def test_a_long_value_of_the_config_does_not_fill_the_page(lab: Lab) -> None:
    lab.start(config={"layers": "x" * 5000}).finish()
    assert "x" * 199 + "…" in lab.out("show", "miner-1")
    assert "x" * 200 not in lab.out("show", "miner-1")
    assert "x" * 5000 in lab.out("show", "miner-1", "--all")


def test_a_long_command_line_does_not_fill_the_page(lab: Lab) -> None:
    lab.node("pass\n" + "# " + "y" * 5000)
    assert "yyy…" in lab.out("show", "miner-1")
    assert "y" * 201 not in lab.out("show", "miner-1")
    assert "y" * 5000 in lab.out("show", "miner-1", "--all")


def test_what_happened_comes_before_what_was_set(lab: Lab) -> None:
    with lab.start(config={"lr": 0.1}) as run:
        run.log({"a": math.nan})
    with lab.start(config={"lr": 0.2}) as run:
        run.alert("look")
    titles = list(parts(lab.out("show", "miner-1")))
    assert titles == [
        *("", "Attempts", "Config changes", "Last values", "Events", "Values that are not finite", "Config")
    ]


def test_an_attempt_that_goes_back_is_shown_with_the_step_that_it_really_logs_from(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(100))
    with lab.start() as run:
        run.rewind(79)
        lab.log_steps(run, range(80, 90))
    assert [attempt["starting_step"] for attempt in lab.json("show", "miner-1", "--json")["attempts"]] == [
        0,
        80,
    ]
    heading, _, first, second = parts(lab.out("show", "miner-1"))["Attempts"]
    place = heading.index("from step")
    assert [line[place:].split()[0] for line in (first, second)] == ["0", "80"]


def test_an_attempt_started_at_a_time_of_the_clock(lab: Lab) -> None:
    lab.start().finish()
    (attempt,) = lab.json("show", "miner-1", "--json")["attempts"]
    started = clock(attempt["started_ns"], milliseconds=False)
    assert f" {started} " in parts(lab.out("show", "miner-1"))["Attempts"][-1]


def test_last_values_stand_side_by_side_by_version_in_pep_440_order(lab: Lab) -> None:
    for version, value in (("1.9", 1.0), ("1.10", 2.0), ("1.10rc1", 3.0)):
        with lab.start(version=version) as run:
            run.log({"loss": value})
    heading, _, cells = parts(lab.out("show", "miner-1"))["Last values"]
    assert heading.split() == ["metric", "1.9", "1.10rc1", "1.10"]
    assert cells.split() == ["loss", "1", "3", "2"]


@pytest.mark.case("C001")
def test_all_attempts_shows_what_each_attempt_logged_last(lab: Lab) -> None:
    """The attempt that crashed further on stays readable beside the one that came back from before it."""
    with lab.start() as first:
        lab.log_steps(first, range(16))
    with lab.start() as second:
        lab.log_steps(second, range(10, 13), plus=100)
    heading, _, cells = parts(lab.out("show", "miner-1", "--all-attempts"))["Last values"]
    assert heading.split() == ["metric", first.attempt, second.attempt]
    assert cells.split() == ["a", "15", "112"]
    report = lab.json("show", "miner-1", "--all-attempts", "--json")
    assert (report["last_values_by"], report["last_values_of"]) == (
        "attempt",
        [first.attempt, second.attempt],
    )


def test_a_metric_in_two_contexts_has_two_last_values(lab: Lab) -> None:
    with lab.start() as run:
        run.bind(stage="train").log({"loss": 1.0})
        run.bind(stage="eval").log({"loss": 2.0})
    lines = parts(lab.out("show", "miner-1"))["Last values"][2:]
    assert [line.split() for line in lines] == [["loss", "[stage=eval]", "2"], ["loss", "[stage=train]", "1"]]
    assert [line["context"] for line in lab.json("show", "miner-1", "--json")["last_values"]] == [
        {"stage": "eval"},
        {"stage": "train"},
    ]


def test_the_summary_is_a_column_where_it_says_more_than_the_last_values(lab: Lab) -> None:
    with lab.start() as run:
        run.define_metric("loss", summary="min")
        for loss in (2.0, 1.0, 3.0):
            run.log({"loss": loss})
        run.summary["note"] = "good"
    heading, _, loss, note = parts(lab.out("show", "miner-1"))["Last values"]
    assert heading.split() == ["metric", "0.1.0", "summary"]
    assert loss.split() == ["loss", "3", "1"]
    assert note.split() == ["note", '"good"']


def test_typed_values_are_told_in_a_few_words(lab: Lab) -> None:
    with lab.start() as run:
        run.log({"h": Histogram([1.0, 2.0], bins=8), "t": Text("first line\nsecond \x1b[31mline" * 9)})
    printed = lab.out("show", "miner-1")
    assert "histogram of 8 bins" in printed
    assert "“first line\\nsecond \\x1b[31mline" in printed
    assert "\x1b" not in printed


def test_what_happened_to_the_run_is_shown(lab: Lab) -> None:
    with lab.start() as run:
        run.define_metric("loss", summary="min")
        run.log({"loss": math.nan}, step=3)
        run.rewind(1)
        run.alert("loss is NaN", "look at it")
    shown = parts(lab.out("show", "miner-1"))
    assert [" ".join(line.rpartition(run.attempt)[2].split()) for line in shown["Events"][2:]] == [
        "rewind went back to step 2: earlier rows from there on are superseded",
        "alert loss is NaN: look at it",
    ]
    assert shown["Values that are not finite"][-1].split() == ["loss", "1"]


def test_a_run_with_thousands_of_metrics_is_shown_in_part_unless_all_is_asked_for(lab: Lab) -> None:
    config = {f"key_{index:03}": index for index in range(100)}
    with lab.start(config=config) as run:
        run.log({f"m/{index:04}": float(index) for index in range(3000)})
        for index in range(30):
            run.alert(f"alert {index}")
    page = lab.out("show", "miner-1")
    assert page.count("\n") < 140
    assert "2960 more metrics left out: --all shows all." in page
    assert "80 more values left out: --all shows all." in page
    assert "20 earlier events left out: --all shows all." in page
    assert "alert 29" in page
    everything = lab.out("show", "miner-1", "--all")
    assert "left out" not in everything
    assert "m/2999" in everything
    assert re.search(r"^key_099 +99 *$", everything, re.MULTILINE)


def test_many_attempts_and_versions_are_shown_in_part(lab: Lab) -> None:
    for index in range(12):
        with lab.start(version=f"0.{index}", config={"lr": index}) as run:
            run.log({"a": index})
    page = lab.out("show", "miner-1")
    assert "2 earlier attempts left out" in page
    assert "8 earlier versions left out" in page
    assert "1 earlier change left out" in page
    assert parts(page)["Last values"][0].split() == ["metric", "0.8", "0.9", "0.10", "0.11"]


def test_damage_is_told(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(10))
    (path,) = lab.segments(run)
    damaged = bytearray(path.read_bytes())
    damaged[-200] ^= 0xFF
    path.write_bytes(damaged)
    assert "1 damaged record left out" in parts(lab.out("show", "miner-1"))["Damage"][0]
    assert lab.json("show", "miner-1", "--json")["damage"]["corrupt"] == 1


def test_a_run_is_found_by_id_beginning_of_id_name_or_node(lab: Lab) -> None:
    run = lab.start(name="the first")
    run.finish()
    for reference in (run.id, run.id[:6], "the first", "miner-1"):
        assert lab.json("show", reference, "--json")["run"]["run"] == run.id


def test_of_several_runs_with_a_name_the_others_are_named_in_a_remark(lab: Lab) -> None:
    others = [lab.start(uid=uid, name="twin", project=f"p{uid}") for uid in range(7)]
    for run in others[1:]:
        run.finish()
    result = lab.run("show", "twin", "--json")
    assert json.loads(result.stdout)["run"]["run"] == others[0].id
    newest_first = ", ".join(run.id for run in others[:1:-1])
    assert result.stderr == (
        f"nodetrack: 'twin' is taken to be run {others[0].id}; "
        f"it is also the name of {newest_first} and 1 more.\n"
    )
    assert lab.run("show", others[3].id).stderr == ""


@pytest.mark.parametrize("command", ["show", "tail", "export", "journal cat", "journal verify"])
def test_every_command_says_which_of_several_runs_it_means(lab: Lab, command: str) -> None:
    lab.start().finish()
    lab.start(project="q").finish()
    assert "'miner-1' is taken to be run " in lab.run(*command.split(), "miner-1").stderr


def test_a_mark_of_the_journal_is_nothing_for_people(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(3))
        run._attempt.state.mark()
        lab.log_steps(run, range(3, 6))
    assert lab.json("show", "miner-1", "--json")["rows"] == 6
    for command in ("tail", "export", "export --all-attempts"):
        assert [line["step"] for line in lab.lines(*command.split(), "miner-1", "--json")] == list(range(6))
    assert lab.out("tail", "miner-1").count("\n") == 7
    assert "Damage" not in lab.out("show", "miner-1")
    assert lab.run("journal", "verify").exit_code == 0


def test_the_newest_sample_of_the_machine_is_shown_in_readable_units(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(3))
    assert lab.json("show", "miner-1", "--json")["system"] is None
    of = read_header(run.folder / run.attempt / "segment-000001.ntj")
    assert of is not None
    writer = companion_writer(run.folder / run.attempt, of)
    names = ("system/memory_used_bytes", "system/disk_read_bytes_per_second", "system/cpu_percent")
    for values in ([1, 2, 3], [1_500_000_000, 2_500.0, 12.5]):
        writer.write_system(KeySet(names, {}), 1_764_547_200_000_000_000, values)
    writer.close()
    report = lab.json("show", "miner-1", "--json")
    assert report["system"]["values"] == dict(zip(names, [1_500_000_000, 2_500.0, 12.5], strict=True))
    assert report["rows"] == 3
    [machine] = [lines for title, lines in parts(lab.out("show", "miner-1")).items() if "Machine" in title]
    assert [line.split(maxsplit=1)[1] for line in machine[2:]] == ["1.50 GB", "2.50 kB/s", "12.5"]
