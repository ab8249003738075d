"""Rows in real servers of InfluxDB's protocol, read back with their own readers.

InfluxDB 1.6 is strict: it judges types, names and overwriting. VictoriaMetrics is lenient: what it does not
understand it drops without a word, so that what arrived has to be counted.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.servers.fault_proxy import FaultProxy
from tests.servers.influxdb1 import BUCKET, InfluxDb1, influxdb1
from tests.servers.victoria_metrics import VictoriaMetrics, victoria_metrics

import nodetrack
from nodetrack.backends.base import Batch, RunInfo
from nodetrack.backends.influxdb import InfluxdbBackend, InfluxdbConfig
from nodetrack.delivery.engine import Delivery
from nodetrack.delivery.worker import Status
from nodetrack.errors import BackendRefusedError, BatchRejectedError
from nodetrack.influx import MetricsLogger
from nodetrack.records import Row
from nodetrack.testing.batches import STRANGE_NAMES

NOW_NS = 1_700_000_000_000_000_000


@pytest.fixture(scope="module")
def influx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InfluxDb1]:
    with influxdb1(tmp_path_factory.mktemp("influxdb")) as server:
        yield server


@pytest.fixture(scope="module")
def victoria(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VictoriaMetrics]:
    with victoria_metrics(tmp_path_factory.mktemp("victoria")) as server:
        yield server


def backend_for(server: InfluxDb1 | VictoriaMetrics | FaultProxy, **options: Any) -> InfluxdbBackend:
    return InfluxdbBackend(InfluxdbConfig(url=server.url, bucket=BUCKET, **options))


def logged(values: list[dict[str, object]], uid: str, **arguments: object) -> Path:
    """A finished attempt of a node of the test's own; its run's folder."""
    run = nodetrack.init(project="p", role="miner", uid=uid, mode="offline", **arguments)
    for step, row in enumerate(values):
        run.log(row, step=step)
    run.finish()
    return run.folder


def send(folder: Path, backend: InfluxdbBackend, seconds: float = 60) -> Status:
    delivery = Delivery(folder, "p", {"influxdb": backend}, follow=False)
    delivery.start()
    assert delivery.join(seconds)
    return delivery.statuses()["influxdb"]


def batch(run: RunInfo, *rows: Row) -> Batch:
    return Batch(run=run, records=rows)


def run_info(uid: str) -> RunInfo:
    return RunInfo(project="p", run=f"run-{uid}", attempt="0001-aa00", version="0.1.0", role="miner", uid=uid)


def row(index: int, values: dict[str, Any], context: dict[str, str] | None = None) -> Row:
    return Row(
        offset=index,
        names=tuple(values),
        values=list(values.values()),
        step=index,
        time_ns=NOW_NS + index * 1_000_000,
        context=context or {},
    )


@pytest.mark.case("C044")
def test_each_row_of_a_run_arrives_once(influx: InfluxDb1) -> None:
    """Sent twice, the second time from its beginning, it is there once: same tags, same times."""
    folder = logged([{"loss": step / 3, "lr": 0.1} for step in range(1000)], "once", version="0.1.0")
    for _ in range(2):
        status = send(folder, backend_for(influx, batch_rows=100))
        assert (status.state, status.delivered, status.quarantined) == ("done", 1000, 0)
        (folder / "cursors" / "influxdb.json").unlink()
    points = influx.points("metrics", "uid='once'")
    assert [(point.fields["step"], point.fields["loss"]) for point in points] == [
        (step, step / 3) for step in range(1000)
    ]
    tags = {"environment": "prod", "project": "p", "role": "miner", "uid": "once", "version": "0.1.0"}
    assert points[0].tags == {**tags, "run": folder.name}
    assert points[0].fields["runtime_id"].startswith("0001-")


@pytest.mark.case("C045")
def test_a_strict_server_takes_whole_and_broken_numbers_of_one_metric(influx: InfluxDb1) -> None:
    values: list[dict[str, object]] = [
        {"x": 0},
        {"x": 0.5},
        {"x": True},
        {"x": nodetrack.Text("word")},
        {"x": float("nan")},
        {"x": 2**40},
    ]
    assert send(logged(values, "types"), backend_for(influx)).quarantined == 0
    points = influx.points("metrics", "uid='types'")
    assert [point.fields.get("x") for point in points] == [0, 0.5, 1, None, None, 2**40]
    assert (points[3].fields["x_text"], points[4].fields["x_nonfinite"]) == ("word", "nan")
    types = influx.field_types("metrics")
    assert (types["x"], types["x_text"], types["x_nonfinite"]) == ("float", "string", "string")
    assert (types["step"], types["attempt"], types["runtime_id"]) == ("float", "float", "string")


@pytest.mark.case("C046")
def test_rows_of_nothing_but_nan_arrive(influx: InfluxDb1) -> None:
    nan = float("nan")
    status = send(logged([{"a": 1, "b": nan}, {"b": nan}, {"a": 2}], "nan"), backend_for(influx))
    assert (status.delivered, status.quarantined) == (3, 0)
    points = influx.points("metrics", "uid='nan'")
    assert [(point.fields.get("a"), point.fields.get("b_nonfinite")) for point in points] == [
        (1, "nan"),
        (None, "nan"),
        (2, None),
    ]


@pytest.mark.case("C047")
def test_under_a_clock_that_stands_still_every_row_is_kept(
    influx: InfluxDb1, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes, each with 1000 rows of one nanosecond."""
    monkeypatch.setattr("nodetrack.live_run.time_ns", lambda: NOW_NS)
    for uid in ("still-1", "still-2"):
        folder = logged([{"still": step} for step in range(1000)], uid)
        for _ in range(2):
            send(folder, backend_for(influx, batch_rows=64))
            (folder / "cursors" / "influxdb.json").unlink()
        points = influx.points("metrics", f"uid='{uid}'")
        assert [point.fields["still"] for point in points] == list(range(1000))


@pytest.mark.case("C050")
@pytest.mark.parametrize("proxied", [False, True], ids=["in_order", "with_lost_answers"])
def test_one_bad_row_of_500_costs_only_itself(influx: InfluxDb1, proxied: bool) -> None:
    """The server refuses another type of a field, and keeps the rest of the batch or not as it likes."""
    measurement = f"bad_{proxied}"
    _post(influx, f'{measurement} odd="a text, as somebody else has it" {time.time_ns()}')
    values: list[dict[str, object]] = [{"fine": step} for step in range(500)]
    values[200] = {"odd": 1.5}
    folder = logged(values, f"bad-{proxied}")
    with FaultProxy(influx.url) as proxy:
        if proxied:
            proxy.lose_answer(times=3, on="/write?")
        status = send(folder, backend_for(proxy, measurement=measurement))
    assert (status.state, status.delivered, status.quarantined) == ("done", 499, 1)
    points = influx.points(measurement, f"uid='bad-{proxied}'")
    assert [point.fields["fine"] for point in points] == [step for step in range(500) if step != 200]
    (refused,) = (folder / "quarantine" / "influxdb.jsonl").read_text().splitlines()
    assert "field type conflict" in json.loads(refused)["reason"]


@pytest.mark.case("C054")
def test_a_server_that_asks_for_time_gets_it_and_then_everything(influx: InfluxDb1) -> None:
    """For as long as it asked no request comes; afterwards nothing is missing."""
    folder = logged([{"slow": step} for step in range(300)], "slow")
    with FaultProxy(influx.url) as proxy:
        proxy.answer(204, on="/write?")  # the one that opens
        proxy.answer(429, retry_after=3, on="/write?")
        assert send(folder, backend_for(proxy)).delivered == 300
        refused, after = [request.at for request in proxy.requests_on("/write?")[1:3]]
    assert after - refused >= 3
    assert len(influx.points("metrics", "uid='slow'")) == 300


@pytest.mark.slow
@pytest.mark.case("C050")
def test_a_server_that_was_away_for_long_is_filled_up(victoria: VictoriaMetrics) -> None:
    """Absent, then in all kinds of trouble, then well: no row is missing."""
    folder = logged([{"away": step} for step in range(500)], "away")
    with FaultProxy(victoria.url, away=True) as proxy:
        backend = backend_for(proxy, batch_rows=50, timeout_seconds=1.0)
        delivery = Delivery(folder, "p", {"influxdb": backend}, follow=False)
        delivery.start()
        threading.Event().wait(0.5)
        proxy.answer(500, times=2)
        for fault in (proxy.hang, proxy.cut_request, proxy.cut_answer, proxy.lose_answer):
            fault(on="/write?")
        proxy.answer(503, retry_after=0)
        proxy.come_back()
        assert delivery.join(90)
        assert len({request.fault for request in proxy.requests}) == 6
    series = victoria.export('{__name__="metrics_away",uid="away"}')
    assert {value for one in series for value in one.values} == set(range(500))


def test_an_unknown_bucket_is_refused_in_the_servers_words(influx: InfluxDb1) -> None:
    backend = InfluxdbBackend(InfluxdbConfig(url=influx.url, bucket="absent"))
    with pytest.raises(BackendRefusedError, match='database not found: "absent"'):
        backend.open(run_info("x"))


def test_something_that_is_no_influxdb_is_refused(influx: InfluxDb1) -> None:
    """Its own address, without the proxy of this test, knows no such path."""
    backend = InfluxdbBackend(InfluxdbConfig(url=influx.own_url))
    with pytest.raises(BackendRefusedError, match="404"):
        backend.open(run_info("x"))


def test_a_wrong_point_is_refused_in_the_servers_words(influx: InfluxDb1) -> None:
    backend = backend_for(influx, measurement="typed")
    _post(influx, f'typed odd="x" {NOW_NS}')
    backend.open(run_info("typed"))
    with pytest.raises(BatchRejectedError, match="field type conflict"):
        backend.write(batch(run_info("typed"), row(0, {"odd": 1.0})))
    backend.close()


def written(name: str) -> str:
    """How a name is said to be written by docs/backends.md."""
    for char, text in (("\\", r"\x5c"), ('"', r"\x22"), ("\n", r"\n"), ("\t", r"\t")):
        name = name.replace(char, text)
    return name


def test_any_text_is_the_name_of_a_metric_or_of_a_context(
    influx: InfluxDb1, victoria: VictoriaMetrics
) -> None:
    """One row a name, so that a row that a server drops is missed."""
    run = run_info("names")
    for server in (influx, victoria):
        backend = backend_for(server, measurement="names")
        backend.open(run)
        for index, name in enumerate(STRANGE_NAMES):
            backend.write(batch(run, row(index, {name: index + 0.5}, {f"key {name}": name})))
        backend.close()
    expected = {
        index + 0.5: (f"{written(name)}_value" if name in ("step", "time") else written(name), written(name))
        for index, name in enumerate(STRANGE_NAMES)
    }
    found = {}
    for point in influx.points("names"):
        ((field, value),) = [item for item in point.fields.items() if isinstance(item[1], float)]
        ((_, context),) = [item for item in point.tags.items() if item[0].startswith("key ")]
        assert point.tags[f"key {context}"] == context
        found[value] = field, context
    assert found == expected
    found = {}
    for series in victoria.export('{uid="names"}'):
        if series.values[0] % 1:
            ((key, context),) = [item for item in series.labels.items() if item[0].startswith("key ")]
            assert key == f"key {context}"
            found[series.values[0]] = series.name.removeprefix("names_"), context
    assert found == expected


def test_any_text_is_the_name_of_a_measurement(influx: InfluxDb1, victoria: VictoriaMetrics) -> None:
    run = run_info("measurements")
    for server in (influx, victoria):
        backend = backend_for(server)
        backend.open(run)
        for index, name in enumerate(STRANGE_NAMES):
            backend.write(batch(run, row(index, {"value of it": index + 0.5}, {"measurement": name})))
        backend.close()
    expected = {rf"\x23{name[1:]}" if name.startswith("#") else written(name) for name in STRANGE_NAMES}
    names = {name for series in influx.query("SHOW MEASUREMENTS") for (name,) in series["values"]}
    assert expected <= names
    series = victoria.export('{uid="measurements",__name__=~".*value of it"}')
    assert {one.name.removesuffix("_value of it") for one in series} == expected


def _post(influx: InfluxDb1, line: str) -> None:
    backend = backend_for(influx, gzip=False)
    backend.open(run_info("x"))
    assert backend._client is not None
    backend._client.write(line.encode())
    backend.close()


# -- the whole way: a logger, a journal, a delivery process, a server -------------------------------------


def test_a_metrics_logger_brings_its_measurements_to_the_server(
    influx: InfluxDb1, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tags of the reference; what it calls a tag and what grows is a field."""
    monkeypatch.setenv("INFLUXDB_HOST", "http://127.0.0.1")
    monkeypatch.setenv("INFLUXDB_PORT", influx.url.rsplit(":", 1)[1])
    monkeypatch.setenv("INFLUXDB_DATABASE", BUCKET)
    arguments: dict[str, Any] = {"prefix": "miner_", "uid": "logger", "version": "0.2.0", "role": "miner"}
    with MetricsLogger(project="p", group="g", job_type="training", **arguments) as metrics:
        for window in range(50):
            tags = {"window": window, "stage": "train"}
            metrics.log("step", tags, {"loss": [0.5, 1.5], "note": 'a "b"'}, NOW_NS, with_system_metrics=True)
    points = influx.points("miner_step")
    assert [point.fields["window"] for point in points] == list(range(50))
    assert [point.time_ns for point in points] == list(range(NOW_NS, NOW_NS + 50))
    assert points[0].tags == {
        "project": "p",
        "environment": "prod",
        "role": "miner",
        "uid": "logger",
        "version": "0.2.0",
        "run": metrics.run.id,
        "group": "g",
        "job_type": "training",
        "stage": "train",
    }
    fields = points[0].fields
    assert (fields["loss_mean"], fields["loss_count"], fields["note_text"]) == (1.0, 2, 'a "b"')
    assert fields["runtime_id"] == metrics.run.attempt
    assert fields["system/memory_used_bytes"] > 0


def test_a_run_is_delivered_by_its_own_process(influx: InfluxDb1, victoria: VictoriaMetrics) -> None:
    """As training code has it: `init`, `log`, `finish`."""
    for uid, server in (("influx", influx), ("victoria", victoria)):
        backend = {"kind": "influxdb", "url": server.url, "bucket": BUCKET}
        run = nodetrack.init(project="p", role="miner", uid=uid, backends=[backend])
        for step in range(200):
            run.log({"live": step})
        run.finish()
        health = run.health().backends["influxdb"]
        assert (health.logged, health.delivered, health.missing) == (200, 200, None)
    assert len(influx.points("metrics", "uid='influx'")) == 200
    match, found, limit = '{__name__="metrics_live",uid="victoria"}', [], time.monotonic() + 30
    while len(found) < 200 and time.monotonic() < limit:  # it shows new points after a while
        found = [value for one in victoria.export(match) for value in one.values]
    assert sorted(found) == list(range(200))
