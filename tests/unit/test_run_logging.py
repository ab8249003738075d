"""What `Run.log` keeps, skips, counts and refuses."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import nodetrack
from nodetrack.errors import RunFinishedError, UsageError
from nodetrack.journal.folder import RunFolder
from nodetrack.journal.views import ViewRow, all_rows, current_rows
from nodetrack.live_run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run in a folder of its own."""
    return nodetrack.init(project="p", role="miner", uid=1, version="0.1.0", dir=tmp_path)


def logged(run: Run) -> list[ViewRow]:
    """Every row, read back from the journal of the live run."""
    return list(all_rows(RunFolder(run.folder, run.project)))


def only_row(run: Run) -> ViewRow:
    rows = logged(run)
    assert len(rows) == 1
    return rows[0]


def test_a_row_is_in_the_journal_when_log_returns(run: Run) -> None:
    run.log({"loss": 0.5, "accuracy": 1}, step=3)
    row = only_row(run)
    assert (row.step, row.values, row.version) == (3, {"loss": 0.5, "accuracy": 1}, "0.1.0")


def test_steps_are_counted_where_none_is_given(run: Run) -> None:
    for _ in range(3):
        run.log({"loss": 0.5})
    assert [row.step for row in logged(run)] == [0, 1, 2]
    assert run.step == 3


def test_commit_false_shares_its_step_with_the_next_call(run: Run) -> None:
    run.log({"a": 1.0}, commit=False)
    run.log({"b": 2.0})
    run.log({"a": 3.0})
    assert [row.step for row in logged(run)] == [0, 0, 1]
    rows = current_rows(RunFolder(run.folder, "p"))
    assert [(row.step, row.values) for row in rows] == [(0, {"a": 1.0, "b": 2.0}), (1, {"a": 3.0})]


def test_several_calls_at_one_step_are_one_row_and_the_last_value_counts(run: Run) -> None:
    """Hundreds of calls at one step, as a validator makes them."""
    for uid in range(300):
        run.log({f"score/{uid}": uid / 300}, step=7)
    run.log({"score/0": 9.0}, step=7)
    [row] = current_rows(RunFolder(run.folder, "p"))
    assert len(row.values) == 300
    assert row.values["score/0"] == 9.0
    assert len(logged(run)) == 301


@pytest.mark.case("C013")
def test_no_value_is_dropped_for_its_step(run: Run) -> None:
    run.log({"a": 1}, step=10**6)
    for step in range(1, 101):
        run.log({"a": 2}, step=step)
    run.log({"a": 3})
    assert len(logged(run)) == 102
    assert run.health().out_of_order == 101
    assert logged(run)[-1].step == 0, "calls without a step have a counter of their own"


@pytest.mark.case("C015")
def test_metrics_with_axes_of_their_own_are_kept_and_not_out_of_order(run: Run) -> None:
    run.define_metric("eval/*", step_metric="eval/step")
    run.log({"train/loss": 1.0}, step=4000)
    run.log({"eval/loss": 2.0, "eval/step": 1000}, step=1000)
    assert [row.step for row in logged(run)] == [4000, 1000]
    assert run.health().out_of_order == 0


@pytest.mark.case("C016")
def test_nan_and_infinity_survive_and_are_counted(run: Run) -> None:
    run.log({"loss": 0.1, "lr": 1.0}, step=6)
    run.log({"loss": math.nan, "lr": 1.0}, step=7)
    run.log({"loss": math.inf, "lr": -math.inf}, step=8)
    values = [row.values["loss"] for row in logged(run)]
    assert values[0] == 0.1
    assert math.isnan(values[1])
    assert values[2] == math.inf
    health = run.health()
    assert health.nonfinite == {"loss": 2, "lr": 1}
    assert health.first_nonfinite == {"loss": 7, "lr": 8}


@pytest.mark.case("C017")
def test_scalars_of_every_kind_are_kept_and_the_rest_is_named(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    values = {
        "a": np.float32(1.5),
        "b": torch.tensor(2.0, requires_grad=True),
        "c": np.zeros(3),
        "d": "x",
        "e": None,
        "f": True,
        "g": np.int64(7),
        "h": torch.ones(1, 1),
        "i": np.bool_(False),
        "j": [1.0],
        "k": object(),
        "l": 1 + 2j,
    }
    for _ in range(3):
        run.log(values)
    row = logged(run)[0]
    assert row.values == {"a": 1.5, "b": 2.0, "f": 1, "g": 7, "h": 1.0, "i": 0}
    assert all(type(value) in (int, float) for value in row.values.values())
    skipped = run.health().skipped
    assert set(skipped) == {"c", "d", "e", "j", "k", "l"}
    assert all(item.count == 3 for item in skipped.values())
    assert "3 values" in skipped["c"].reason
    assert len([record for record in caplog.records if "left out" in record.message]) == 6, (
        "one warning a name"
    )


def test_a_value_whose_item_raises_costs_only_itself(run: Run) -> None:
    class Broken:
        size = 1

        def item(self) -> float:
            raise RuntimeError("device lost")

    run.log({"broken": Broken(), "loss": 1.0}, step=1)
    assert only_row(run).values == {"loss": 1.0}
    assert "device lost" in run.health().skipped["broken"].reason


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (2**63 - 1, 2**63 - 1),
        (-(2**63), -(2**63)),
        (2**64 - 1, 2**64 - 1),
        (2**70, float(2**70)),
        (-(2**70), -float(2**70)),
    ],
)
def test_integers_are_exact_up_to_64_bits(run: Run, value: int, kept: float) -> None:
    run.log({"n": value, "loss": 0.1}, step=0)
    run.log({"n": value, "loss": 0.1}, step=1)
    assert [row.values["n"] for row in logged(run)] == [kept, kept]


def test_an_integer_beyond_a_float_is_left_out(run: Run) -> None:
    run.log({"n": 10**400, "loss": 0.1})
    assert only_row(run).values == {"loss": 0.1}


def test_nested_mappings_become_sections(run: Run) -> None:
    run.log({"train": {"loss": 0.1, "deep": {"er": 2}}, "lr": 1e-3}, step=0)
    assert only_row(run).values == {"train/loss": 0.1, "train/deep/er": 2, "lr": 1e-3}


@pytest.mark.parametrize(
    "name", ["step", "v1/x", "latest/x", "nodetrack/step", "a b", "Ä/ü", "a\nb", "x" * 1024]
)
def test_any_name_of_up_to_1024_bytes_is_kept_as_it_is(run: Run, name: str) -> None:
    run.log({name: 1.0}, step=0)
    assert only_row(run).values == {name: 1.0}


@pytest.mark.parametrize("name", ["", "x" * 10_240, "\ud800"])
def test_a_name_that_cannot_be_kept_costs_only_its_value(run: Run, name: str) -> None:
    run.log({name: 1.0, "loss": 2.0}, step=0)
    assert only_row(run).values == {"loss": 2.0}
    assert run.health().skipped[name].count == 1


@pytest.mark.parametrize("values", [{3: 1.0}, {None: 1.0}, {("a",): 1.0}, [0.1], "loss", None, 5, {"a", "b"}])
def test_what_is_no_mapping_of_names_is_the_callers_mistake(run: Run, values: object) -> None:
    with pytest.raises(UsageError):
        run.log(values)  # type: ignore[arg-type]


def test_an_empty_row_is_no_row(run: Run) -> None:
    run.log({}, step=5)
    run.log({"text": "only"}, step=5)
    assert logged(run) == []
    assert run.step == 0


@pytest.mark.parametrize(
    ("step", "kept"),
    [
        (-5, -5),
        (2**62, 2**62),
        (2.0, 2),
        (2.5, 2),
        (np.int64(9), 9),
        (10**30, 2**63 - 1),
        (math.nan, 0),
        ("7", 0),
    ],
)
def test_a_strange_step_loses_nothing(run: Run, step: object, kept: int) -> None:
    run.log({"a": 1.0}, step)  # type: ignore[arg-type]
    run.log({"a": 1.0}, step)  # type: ignore[arg-type]
    assert [row.step for row in logged(run)] == [kept, kept]


def test_a_step_that_had_to_be_changed_is_told_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        run.log({"a": 1.0}, step=2.5)  # type: ignore[arg-type]
    assert len([record for record in caplog.records if "no integer" in record.message]) == 1


@pytest.mark.case("C018")
def test_the_whole_call_signature_of_wandb_is_taken(run: Run) -> None:
    run.log({"step": 3, "x": 1}, None)
    run.log({"x": 1}, 5)
    run.log({"x": 1}, step=None, commit=False)
    assert [(row.step, row.values) for row in logged(run)] == [
        (0, {"step": 3, "x": 1}),
        (5, {"x": 1}),
        (1, {"x": 1}),
    ]


def test_bound_context_goes_with_every_row_and_leaves_the_run_alone(run: Run) -> None:
    evaluation = run.bind(stage="eval")
    evaluation.bind(split="test").log({"loss": 1.0}, step=1)
    evaluation.log({"loss": 2.0}, step=1)
    run.log({"loss": 3.0}, step=1, context={"stage": "train", "shard": 3})
    run.log({"loss": 4.0}, step=1)
    contexts = [dict(row.context) for row in logged(run)]
    assert contexts == [
        {"stage": "eval", "split": "test"},
        {"stage": "eval"},
        {"stage": "train", "shard": "3"},
        {},
    ]
    assert len(current_rows(RunFolder(run.folder, "p"))) == 4, "contexts are series of their own"


def test_typed_values_are_kept_beside_numbers(run: Run, tmp_path: Path) -> None:
    png = b"\x89PNG\r\n\x1a\n" + b"\0" * 20
    (tmp_path / "a.png").write_bytes(png)
    run.log(
        {
            "loss": 1.0,
            "weights": nodetrack.Histogram([0.0, 0.5, 1.0, math.nan], bins=2),
            "sample": nodetrack.Text("hello"),
            "image": nodetrack.Image(str(tmp_path / "a.png"), caption="c"),
            "scores": nodetrack.Table(["uid", "score"], [[1, 0.5], [2, np.float32(0.25)]]),
        },
        step=0,
    )
    values = only_row(run).values
    assert values["loss"] == 1.0
    assert values["weights"] == {
        "type": "histogram",
        "counts": [1.0, 2.0],
        "edges": [0.0, 0.5, 1.0],
        "nonfinite": 1,
    }
    assert values["sample"] == {"type": "text", "text": "hello"}
    assert values["image"] == {"type": "image", "format": "png", "data": png, "caption": "c"}
    assert values["scores"] == {"type": "table", "columns": ["uid", "score"], "data": [[1, 0.5], [2, 0.25]]}


def test_a_typed_value_over_the_limit_is_left_out(run: Run) -> None:
    run.log({"sample": nodetrack.Text("x" * 5_000_000), "loss": 1.0}, step=0)
    assert only_row(run).values == {"loss": 1.0}


def test_a_logged_value_does_not_follow_later_changes(run: Run) -> None:
    values = {"loss": 1.0}
    weights = torch.tensor(2.0)
    run.log(values | {"w": weights}, step=0)
    values["loss"] = 5.0
    weights += 1
    assert only_row(run).values == {"loss": 1.0, "w": 2.0}
    assert dict(run.summary) == {"loss": 1.0, "w": 2.0}


def test_eight_threads_share_a_run(run: Run) -> None:
    def work(number: int) -> None:
        bound = run.bind(thread=number)
        for step in range(500):
            bound.log({"a": float(step), f"own/{number}": 1}, step=step)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = logged(run)
    assert len(rows) == 4000
    for number in range(8):
        mine = [row.step for row in rows if row.context["thread"] == str(number)]
        assert mine == list(range(500))


def test_counted_steps_are_unique_over_threads(run: Run) -> None:
    threads = [threading.Thread(target=lambda: [run.log({"a": 1.0}) for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(row.step for row in logged(run)) == list(range(4000))


def test_a_forked_child_logs_to_the_run_and_does_not_end_it(run: Run) -> None:
    run.log({"who": 0.0}, step=0)
    child = os.fork()
    if child == 0:
        run.log({"who": 1.0}, step=1)
        run.finish()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    run.log({"who": 0.0}, step=2)
    rows = logged(run)
    assert sorted((row.step, row.values["who"]) for row in rows) == [(0, 0.0), (1, 1.0), (2, 0.0)]
    assert RunFolder(run.folder, "p").overview().state == "running"


def test_a_row_is_stamped_at_the_call(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the clock is set back: no row is lost, and each has the time of its call."""
    times = iter([1000, 500, 2000])
    monkeypatch.setattr("nodetrack.live_run.time_ns", lambda: next(times))
    for step in range(3):
        run.log({"a": 1.0}, step=step)
    assert [row.time_ns for row in logged(run)] == [1000, 500, 2000]


def test_after_finish_every_way_of_recording_is_refused_in_words(run: Run) -> None:
    run.log({"a": 1.0})
    run.finish()
    run.finish()
    for record in (
        lambda: run.log({"a": 1.0}),
        lambda: run.bind(stage="x").log({"a": 1.0}),
        lambda: run.summary.update({"a": 1}),
        lambda: run.config.update({"a": 1}),
        lambda: setattr(run, "tags", ("x",)),
        lambda: run.alert("x"),
        lambda: run.rewind(1),
        lambda: run.define_metric("a"),
    ):
        with pytest.raises(RunFinishedError, match="is finished"):
            record()
    assert dict(run.summary) == {"a": 1.0}
    assert run.health().state == "finished"


def test_the_summary_is_the_last_value_unless_told_otherwise(run: Run) -> None:
    run.define_metric("best/*", summary="max")
    run.define_metric("low", summary="min")
    run.define_metric("hidden", summary="none")
    run.define_metric("average", summary="mean")
    for value in (1.0, 3.0, math.nan, 2.0):
        run.log({"loss": value, "best/a": value, "low": value, "hidden": value, "average": value})
    run.summary["note"] = "hand-made"
    run.summary["loss"] = -1
    expected = {"loss": -1, "best/a": 3.0, "low": 1.0, "average": 2.0, "note": "hand-made"}
    assert dict(run.summary) == expected
    assert RunFolder(run.folder, "p").detail().summary == expected
    del run.summary["loss"]
    assert run.summary["loss"] == 2.0


def test_names_that_never_repeat_do_not_fill_the_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodetrack.run_state.MAX_KEY_SETS", 50)
    for number in range(200):
        run.log({f"m/{number}": float(number)}, step=number)
    assert len(run._key_sets) <= 50
    assert len(logged(run)) == 200
    assert run.step == 200
    assert len(run.summary) == 200


def test_a_rewind_goes_on_counting_behind_the_step(run: Run) -> None:
    for _ in range(76):
        run.log({"a": 1.0})
    run.rewind(50)
    run.log({"a": 2.0})
    assert run.step == 52
    rows = current_rows(RunFolder(run.folder, "p"))
    assert [row.step for row in rows] == list(range(52))
    assert rows[-1].values == {"a": 2.0}
    assert len(logged(run)) == 77, "what was superseded stays readable"


def test_an_unusable_summary_rule_is_refused(run: Run) -> None:
    with pytest.raises(UsageError, match="min, max"):
        run.define_metric("a", summary="best")  # type: ignore[arg-type]


def test_the_log_backend_writes_a_line_a_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = nodetrack.init(dir=tmp_path, backends=["log", "null"], version="1")
    with caplog.at_level(logging.INFO, "nodetrack.rows"):
        run.bind(stage="train").log({"loss": 15.0928, "text": nodetrack.Text("x")}, step=1)
    assert caplog.messages == ["step 1 (stage=train): loss=15.0928 text=<text>"]
    assert run.health().backends["log"].delivered == 1


def test_a_failing_backend_touches_neither_the_caller_nor_the_others(tmp_path: Path) -> None:
    run = nodetrack.init(dir=tmp_path, backends=["log", "null"])

    class Broken:
        def write(self, batch: object) -> None:
            raise ConnectionError("no route")

        def close(self) -> None: ...

    run._state.backends["log"] = Broken()  # type: ignore[assignment]
    for step in range(5):
        run.log({"a": 1.0}, step=step)
    health = run.health()
    assert (health.backends["log"].state, health.backends["log"].delivered) == ("down", 0)
    assert "no route" in health.backends["log"].last_error
    assert health.backends["null"].delivered == 5
    assert len(logged(run)) == 5


def test_a_mapping_that_fails_while_it_is_read_costs_its_row_and_nothing_else(run: Run) -> None:
    class Shifting(dict[str, float]):
        def __iter__(self) -> Iterator[str]:
            raise RuntimeError("dictionary changed size during iteration")

    run.log(Shifting(a=1.0), step=0)
    run.log({"a": 1.0}, step=1)
    assert only_row(run).step == 1
    assert "changed size" in run.health().skipped["(whole row)"].reason


def test_a_text_that_cannot_be_encoded_is_left_out(run: Run) -> None:
    run.log({"text": nodetrack.Text("\ud800"), "a": 1.0}, step=0)
    assert only_row(run).values == {"a": 1.0}


def test_a_forked_child_looks_after_its_own_segment(run: Run) -> None:
    """Its rows are synced, and tried again after a full disk, as its parent's are."""
    child = os.fork()
    if child == 0:
        idle = [thread.name for thread in threading.enumerate()]
        run.log({"a": 1.0}, step=0)
        busy = [thread.name for thread in threading.enumerate()]
        os._exit(0 if "nodetrack-keeper" not in idle and "nodetrack-keeper" in busy else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_histogram_of_values_that_are_too_far_apart_for_a_float_is_one() -> None:
    histogram = nodetrack.Histogram([1.0, math.nan, math.inf, 1e308, -1e308], bins=4)
    assert histogram.counts == [1, 0, 1, 1]
    assert histogram.edges == [-1e308, -5e307, 0.0, 5e307, 1e308]
    assert histogram.nonfinite == 2
