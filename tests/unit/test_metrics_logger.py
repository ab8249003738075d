"""`MetricsLogger`: the rows that its calls become, read where a backend gets them."""

from __future__ import annotations

import ast
import inspect
import logging
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

import nodetrack
from nodetrack import influx
from nodetrack.backends.memory import MemoryBackend
from nodetrack.errors import RunFinishedError, UsageError
from nodetrack.influx import MetricsLogger
from nodetrack.records import Row
from nodetrack.run_state import logger as run_logger

NOW_NS = 1_700_000_000_123_456_789


@pytest.fixture
def metrics() -> MetricsLogger:
    return MetricsLogger(project="p", role="miner", uid=7, backends=["memory"])


def rows(metrics: MetricsLogger) -> list[Row]:
    return [row for batch in MemoryBackend.of(metrics.run.id) for row in batch.rows]


def logged(metrics: MetricsLogger, fields: Mapping[str, object], **arguments: Any) -> dict[str, Any]:
    """The values of the row that a call becomes."""
    metrics.log("m", arguments.pop("tags", {}), fields, **arguments)
    return dict(rows(metrics)[-1].items())


def test_a_call_is_one_row_with_the_measurement_and_the_tags_as_its_context() -> None:
    metrics = MetricsLogger(
        prefix="miner_",
        uid=7,
        version="1.2.3",
        role="miner",
        config={"lr": 0.1},
        group="g",
        job_type="training",
        project="p",
        backends=["memory"],
    )
    metrics.log("training_step", {"stage": "train", "peer": 3, "none": None}, {"loss": 0.5, "tokens": 128})
    (row,) = rows(metrics)
    assert dict(row.items()) == {"loss": 0.5, "tokens": 128}
    assert row.context == {"measurement": "miner_training_step", "stage": "train", "peer": "3"}
    run = metrics.run
    assert (run.role, run.uid, run.version, run.group, run.job_type) == (
        "miner",
        "7",
        "1.2.3",
        "g",
        "training",
    )
    assert dict(run.config) == {"lr": 0.1}


def test_it_takes_the_arguments_in_the_order_that_such_code_gives_them() -> None:
    assert list(inspect.signature(MetricsLogger.log).parameters)[1:] == [
        "measurement",
        "tags",
        "fields",
        "timestamp",
        "sample_rate",
        "with_system_metrics",
        "with_gpu_metrics",
    ]


def test_a_tag_that_grows_becomes_a_field(metrics: MetricsLogger) -> None:
    """Each of its values would be a new series for the server."""
    tags = {"window": 12, "sync_window": 11, "global_step": 40, "current_block": 5, "role_of_peer": "x"}
    metrics.log("m", tags, {"loss": 1.0})
    (row,) = rows(metrics)
    assert row.context == {"measurement": "m", "role_of_peer": "x"}
    assert dict(row.items()) == {
        "window": 12, "sync_window": 11, "global_step": 40, "current_block": 5, "loss": 1.0
    }  # fmt: skip


def test_a_step_or_else_a_global_step_is_the_rows_step(metrics: MetricsLogger) -> None:
    metrics.log("m", {"global_step": 40}, {"loss": 1.0})
    metrics.log("m", {"global_step": 40}, {"loss": 1.0, "step": 7})
    metrics.log("m", {}, {"loss": 1.0})
    metrics.log("m", {}, {"loss": 1.0})
    assert [row.step for row in rows(metrics)] == [40, 7, 0, 1]
    assert "step" not in rows(metrics)[1].names


def test_a_list_of_numbers_is_described(metrics: MetricsLogger) -> None:
    found = logged(metrics, {"norm": [4.0, 1.0, 2.0, 3.0, 10.0]})
    assert found == {
        "norm_count": 5,
        "norm_mean": 4.0,
        "norm_min": 1.0,
        "norm_max": 10.0,
        "norm_p50": 3.0,
        "norm_p90": pytest.approx(7.6),
        "norm_std": pytest.approx(math.sqrt(10)),
    }


def test_a_list_of_whole_numbers_is_kept_as_it_is_too(metrics: MetricsLogger) -> None:
    """It may be the uids of peers."""
    found = logged(metrics, {"peers": [3, 1, 2]})
    assert found["peers"] == {"type": "text", "text": "[3, 1, 2]"}
    assert found["peers_count"] == 3


def test_numbers_that_are_not_finite_are_counted_beside_the_statistics(metrics: MetricsLogger) -> None:
    found = logged(metrics, {"x": [1.0, float("nan"), 3.0, float("inf")], "none": []})
    assert (found["x_count"], found["x_nonfinite_count"], found["x_mean"], found["x_max"]) == (4, 2, 2.0, 3.0)
    assert found["none_count"] == 0
    assert "none_mean" not in found


def test_an_array_is_a_list_and_a_scalar_a_number(metrics: MetricsLogger) -> None:
    numpy = pytest.importorskip("numpy")
    found = logged(metrics, {"a": numpy.array([[1.0, 2.0], [3.0, 6.0]]), "s": numpy.float32(0.5)})
    assert (found["a_mean"], found["a_count"], found["s"]) == (3.0, 4, 0.5)


def test_what_is_no_number_is_a_text_and_none_is_left_out(metrics: MetricsLogger) -> None:
    found = logged(
        metrics, {"word": "abc", "where": Path("/x"), "mixed": [1, "a"], "none": None, "yes": True}
    )
    texts = {name: value["text"] for name, value in found.items() if name != "yes"}
    assert texts == {"word": "abc", "where": "/x", "mixed": '[1, "a"]'}
    assert found["yes"] == 1


@pytest.mark.parametrize(
    ("timestamp", "time_ns"),
    [
        (NOW_NS, NOW_NS),
        (1_700_000_000.5, 1_700_000_000_500_000_000),
        (datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=UTC), 1_700_000_000_123_456_000),
        (datetime(2023, 11, 15, 0, 13, 20, tzinfo=timezone(timedelta(hours=2))), 1_700_000_000_000_000_000),
    ],
)
def test_the_caller_may_give_the_time(metrics: MetricsLogger, timestamp: Any, time_ns: int) -> None:
    metrics.log("m", {}, {"a": 1.0}, timestamp)
    assert rows(metrics)[0].time_ns == time_ns


def test_a_time_that_is_none_is_the_callers_mistake(metrics: MetricsLogger) -> None:
    with pytest.raises(UsageError, match="'yesterday'"):
        metrics.log("m", {}, {"a": 1.0}, timestamp="yesterday")  # type: ignore[arg-type]  # the mistake


def test_a_share_of_the_calls_is_kept_and_says_so(
    metrics: MetricsLogger, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = iter([0.05, 0.15, 0.09, 0.95])
    monkeypatch.setattr("nodetrack.influx.random.random", lambda: next(draws))
    for number in range(4):
        metrics.log("m", {}, {"a": number}, sample_rate=0.1)
    assert [dict(row.items()) for row in rows(metrics)] == [
        {"a": 0, "sample_rate": 0.1},
        {"a": 2, "sample_rate": 0.1},
    ]
    assert metrics.sampled_out == 2


def test_the_machine_is_in_the_row_if_asked_for(metrics: MetricsLogger) -> None:
    without = logged(metrics, {"a": 1.0})
    with_it = logged(metrics, {"a": 1.0}, with_system_metrics=True)
    assert without == {"a": 1.0}
    assert with_it["system/memory_used_bytes"] > 0
    assert not any(name.startswith("system/gpu") for name in with_it)
    gpu = logged(metrics, {"a": 1.0}, with_gpu_metrics=True)
    assert all(name == "a" or name.startswith("system/gpu/") for name in gpu)
    metrics.close()


def test_a_field_that_cannot_be_read_costs_its_row_alone(metrics: MetricsLogger) -> None:
    class Broken:
        def tolist(self) -> list[float]:
            raise RuntimeError("device lost")

    metrics.log("m", {}, {"a": Broken()})
    metrics.log("m", {}, {"a": [10**400, 1]})
    assert logged(metrics, {"a": 1.0}) == {"a": 1.0}
    assert metrics.run.health().skipped["(whole row)"].count == 2


def test_an_active_run_of_the_node_is_used_and_its_counter_left_alone() -> None:
    run = nodetrack.init(project="p", role="miner", uid=7, backends=["memory"])
    run.log({"loss": 1.0})
    for arguments in ({}, {"role": "miner"}, {"uid": "7"}):
        with MetricsLogger(**arguments) as metrics:  # type: ignore[arg-type]  # each of them is one
            assert metrics.run is run
            metrics.log("m", {}, {"a": 1.0})
    run.log({"loss": 2.0})
    assert [row.step for row in rows(metrics) if "loss" in row.names] == [0, 1]
    assert not run.finished


def test_an_active_run_without_influxdb_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    nodetrack.init(project="p", backends=["memory"])
    run_logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING, logger="nodetrack"):
            MetricsLogger()
    finally:
        run_logger.removeHandler(caplog.handler)
    assert "no backend 'influxdb'" in caplog.text


def test_another_node_gets_a_run_of_its_own_and_the_active_one_stays() -> None:
    run = nodetrack.init(project="p", role="miner", uid=7)
    with MetricsLogger(project="p", role="validator", uid=7, backends=["memory"]) as metrics:
        assert metrics.run.id != run.id
        assert nodetrack.run is run
    assert metrics.run.finished
    with pytest.raises(RunFinishedError):
        metrics.log("m", {}, {"a": 1.0})


def test_its_backend_is_influxdb_as_the_arguments_or_the_environment_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert influx._backend(None, None, None, None, None) == {"kind": "influxdb"}
    assert influx._backend("db.example.org", 443, "tplr", "o", "t") == {
        "kind": "influxdb", "url": "https://db.example.org:443", "bucket": "tplr", "org": "o", "token": "t"
    }  # fmt: skip
    monkeypatch.setenv("INFLUXDB_HOST", "http://127.0.0.1")
    monkeypatch.setenv("INFLUXDB_PORT", "8428")
    monkeypatch.setenv("INFLUXDB_DATABASE", "d")
    assert influx._backend(None, None, None, None, None) == {
        "kind": "influxdb", "url": "http://127.0.0.1:8428", "bucket": "d"
    }  # fmt: skip


def test_there_is_no_server_and_no_token_in_the_source() -> None:
    """Other than a placeholder: who writes where is for the operator to say."""
    tree = ast.parse(Path(influx.__file__).read_text(encoding="utf-8"))
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert not [text for text in texts if isinstance(text, str) and re.search(r"[\w-]{30,}", text)]
