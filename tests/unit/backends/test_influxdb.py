"""What is sent to InfluxDB, against a server on loopback that answers as the test says.

Whether real servers take it is tried in `tests/e2e/test_influxdb.py`.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator, Mapping
from typing import cast
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from tests.servers.fault_proxy import FaultProxy

from nodetrack.backends._line_protocol import escape_key, field_key
from nodetrack.backends.base import Batch, RunInfo
from nodetrack.backends.factory import parse_backends
from nodetrack.backends.influxdb import InfluxdbBackend, InfluxdbConfig, retry_after_seconds
from nodetrack.errors import (
    BackendRefusedError,
    BackendUnavailableError,
    BatchRejectedError,
    SettingsError,
)
from nodetrack.records import (
    AttemptFinished,
    AttemptStarted,
    ConfigSet,
    ConsoleLine,
    Event,
    JsonValue,
    Record,
    Row,
    StoredValue,
    SystemRow,
)
from nodetrack.values import Histogram, Table, Text

NOW_NS = 1_700_000_000_000_000_000
RUN = RunInfo(
    project="p", run="ab12", attempt="0003-aa00", attempt_number=3, version="0.1.0", role="miner", uid="7"
)
TAGS = "environment=prod,project=p,role=miner,run=ab12,uid=7,version=0.1.0"
COMMON = 'attempt=3,runtime_id="0003-aa00"'
#: A field of one line: its name, up to the equals sign, and its value.
FIELD = re.compile(r'((?:\\.|[^,=\\])+)=("(?:\\.|[^"\\])*"|[^,]+)')


@pytest.fixture
def server() -> Iterator[FaultProxy]:
    """Takes everything, until it is told otherwise."""
    with FaultProxy() as server:
        yield server


@pytest.fixture
def backend(server: FaultProxy) -> Iterator[InfluxdbBackend]:
    backend = InfluxdbBackend(InfluxdbConfig(url=server.url, org="o", bucket="b", token="secret"))
    backend.open(RUN)
    server.requests.clear()
    yield backend
    backend.close()


def row(
    values: Mapping[str, StoredValue],
    step: int = 5,
    time_ns: int = NOW_NS,
    offset: int = 0,
    context: Mapping[str, str] = {},
) -> Row:
    names, items = tuple(values), list(values.values())
    return Row(offset=offset, names=names, values=items, step=step, time_ns=time_ns, context=context)


def batch(*records: Record, writer: int = 1, run: RunInfo = RUN) -> Batch:
    return Batch(run=run, records=records, writer=writer, segment=writer)


def sent(server: FaultProxy) -> list[str]:
    """Every line that reached the server."""
    return [line for request in server.requests for line in unpacked(request.body).splitlines()]


def unpacked(body: bytes) -> str:
    return gzip.decompress(body).decode() if body else ""


def fields(line: str) -> dict[str, str]:
    """The fields of a line of ours, whose tags hold no space."""
    text = line.split(" ", 1)[1].rsplit(" ", 1)[0]
    return dict(FIELD.findall(text))


def time_of(line: str) -> int:
    return int(line.rsplit(" ", 1)[1])


# -- lines ---------------------------------------------------------------------------------------------


def test_a_row_is_one_line_with_the_standard_tags(backend: InfluxdbBackend, server: FaultProxy) -> None:
    backend.write(batch(row({"train/loss": 0.25, "count": 3})))
    assert sent(server) == [f"metrics,{TAGS} train/loss=0.25,count=3,step=5,{COMMON} {NOW_NS}"]


def test_group_job_type_and_context_are_tags_too(backend: InfluxdbBackend, server: FaultProxy) -> None:
    run = msgspec.structs.replace(RUN, group="g 1", job_type="training")
    backend.write(batch(row({"loss": 1.0}, context={"stage": "val", "uid": "9", "empty": ""}), run=run))
    assert sent(server)[0].split(" loss=")[0] == (
        r"metrics,context_uid=9,environment=prod,group=g\ 1,job_type=training,project=p,role=miner,run=ab12,"
        "stage=val,uid=7,version=0.1.0"
    )


def test_nothing_that_grows_is_a_tag(backend: InfluxdbBackend, server: FaultProxy) -> None:
    """Each new value of a tag is a new series, for ever."""
    for number in (1, 2):
        run = msgspec.structs.replace(RUN, attempt=f"000{number}-aa", attempt_number=number)
        backend.write(batch(row({"loss": 1.0}, step=number, time_ns=NOW_NS + number), run=run))
    assert {line.split(" ", 1)[0] for line in sent(server)} == {f"metrics,{TAGS}"}


def test_the_context_may_name_the_measurement(backend: InfluxdbBackend, server: FaultProxy) -> None:
    backend.write(batch(row({"loss": 1.0}, context={"measurement": "training step"})))
    assert sent(server)[0].startswith(rf"training\ step,{TAGS} loss=1.0")


@pytest.mark.case("C045")
def test_a_field_never_changes_its_type(backend: InfluxdbBackend, server: FaultProxy) -> None:
    """The first value fixes a field's type at the server, and a later one of another type is refused."""
    values = [0, 0.5, True, -3, 2**63, 1e300]
    backend.write(
        batch(*(row({"loss": value}, time_ns=NOW_NS + index) for index, value in enumerate(values)))
    )
    backend.write(batch(row({"loss": Text("high").stored()})))
    written = [fields(line).get("loss") for line in sent(server)]
    assert written == ["0", "0.5", "1.0", "-3", str(2**63), "1e+300", None]
    assert fields(sent(server)[-1])["loss_text"] == '"high"'
    assert not re.search(r"=(\d+[iu]|[tTfF]\w*)[, ]", "\n".join(sent(server)))


@pytest.mark.case("C046")
def test_a_value_that_is_not_finite_is_named_by_a_marker(
    backend: InfluxdbBackend, server: FaultProxy
) -> None:
    nan, inf = float("nan"), float("inf")
    backend.write(batch(row({"a": 1.0, "b": nan}), row({"b": nan}), row({"a": inf, "b": -inf})))
    assert [re.split(",step=", line.split(" ", 1)[1])[0] for line in sent(server)] == [
        'a=1.0,b_nonfinite="nan"',
        'b_nonfinite="nan"',
        'a_nonfinite="inf",b_nonfinite="-inf"',
    ]


def test_large_values_whose_sum_is_not_finite_are_finite(
    backend: InfluxdbBackend, server: FaultProxy
) -> None:
    backend.write(batch(row({"a": 1.7e308, "b": 1.7e308})))
    assert "a=1.7e+308,b=1.7e+308" in sent(server)[0]


@pytest.mark.case("C046")
def test_a_row_with_nothing_to_show_is_not_sent(backend: InfluxdbBackend, server: FaultProxy) -> None:
    """A point without fields would be refused; what is left out is counted."""
    image = {"type": "image", "format": "png", "data": "", "caption": None}
    backend.write(batch(row({"x": image, "y": Table(["a"]).stored()})))
    assert server.requests == []
    assert sum(backend.left_out.values()) == 2


@pytest.mark.parametrize(
    ("metric", "field"),
    [
        ("loss", "loss"),
        ("step", "step_value"),
        ("step_value", "step_value_value"),
        ("critic_value", "critic_value"),
        ("version", "version_value"),
        ("time", "time_value"),
        ("loss_nonfinite", "loss_nonfinite_value"),
        ("sample_text", "sample_text_value"),
        ("grad_histogram_p50", "grad_histogram_p50_value"),
        ("_value", "_value_value"),
    ],
)
def test_a_metric_whose_name_is_taken_stands_beside_it(metric: str, field: str) -> None:
    assert field_key(metric) == field


def test_a_metric_and_a_context_of_one_name_are_both_kept(
    backend: InfluxdbBackend, server: FaultProxy
) -> None:
    backend.write(batch(row({"stage": 2.0}, context={"stage": "val"})))
    assert "stage=val" in sent(server)[0]
    assert fields(sent(server)[0])["stage_value"] == "2.0"


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("a b", r"a\ b"),
        ("a,b=c", r"a\,b\=c"),
        ('say "hi"', r"say\ \x22hi\x22"),
        ("back\\slash\\", r"back\x5cslash\x5c"),
        ("line\nfeed\ttab", r"line\nfeed\ttab"),
        ("größe 損失 😀", r"größe\ 損失\ 😀"),
    ],
)
def test_names_are_written_so_that_every_server_reads_them_alike(name: str, written: str) -> None:
    assert escape_key(name) == written


def test_a_text_cannot_end_its_line(backend: InfluxdbBackend, server: FaultProxy) -> None:
    """Else what a model wrote could be taken for points."""
    text = 'one\nmetrics,run=x loss=0 1\r\n"two" \\'
    backend.write(batch(row({"sample": Text(text).stored()})))
    assert fields(sent(server)[0])["sample_text"] == (r'"one\\nmetrics,run=x loss=0 1\\n\"two\" \\"')
    assert len(sent(server)) == 1


def test_a_long_text_is_cut_and_that_is_counted(backend: InfluxdbBackend, server: FaultProxy) -> None:
    backend.write(batch(row({"sample": Text("ä" * 50_000).stored()})))
    assert fields(sent(server)[0])["sample_text"] == f'"{"ä" * 30_000}"'
    assert sum(backend.left_out.values()) == 1


def test_a_histogram_is_its_statistics_and_its_counts(backend: InfluxdbBackend, server: FaultProxy) -> None:
    histogram = Histogram(counts=[0, 1, 3, 0], edges=[0, 1, 2, 3, 4])
    backend.write(batch(row({"grad": histogram.stored(), "bare": Histogram(counts=[1, 2]).stored()})))
    found = fields(sent(server)[0])
    statistics = {name: found[f"grad_histogram_{name}"] for name in ("count", "mean", "min", "max", "p50")}
    assert statistics == {"count": "4.0", "mean": "2.25", "min": "1.0", "max": "3.0", "p50": repr(2 + 1 / 3)}
    assert json.loads(json.loads(found["grad_histogram"]))["counts"] == [0, 1, 3, 0]
    assert found["bare_histogram_count"] == "3.0"
    assert "bare_histogram_mean" not in found


def test_system_samples_are_a_measurement_of_their_own(backend: InfluxdbBackend, server: FaultProxy) -> None:
    names, values = ("system/cpu_ratio", "system/gpu0_memory_bytes"), cast("list[StoredValue]", [0.5, 4096])
    backend.write(batch(SystemRow(offset=0, names=names, values=values, time_ns=NOW_NS), writer=4))
    assert sent(server) == [f"system,{TAGS} cpu_ratio=0.5,gpu0_memory_bytes=4096,{COMMON} {NOW_NS}"]


def test_what_happened_is_told_by_events(backend: InfluxdbBackend, server: FaultProxy) -> None:
    """For annotations in Grafana: a title, a text, and the kind as a tag. Console lines are not sent."""
    backend.write(
        batch(
            AttemptStarted(offset=0, time_ns=NOW_NS, attempt={}),
            ConfigSet(offset=1, time_ns=NOW_NS + 1, config={"lr": 0.1}),
            Event(offset=2, time_ns=NOW_NS + 2, name="alert", data={"title": "high", "text": "loss is 9"}),
            Event(offset=3, time_ns=NOW_NS + 3, name="rewind", data={"step": 40}),
            Event(offset=4, time_ns=NOW_NS + 4, name="define_metric", data={"name": "loss"}),
            ConsoleLine(offset=5, time_ns=NOW_NS + 5, stream="stdout", text="hello"),
            AttemptFinished(
                offset=6, time_ns=NOW_NS + 6, state="crashed", exit_code=-9, reason="killed by SIGKILL"
            ),
        )
    )
    kinds = [cast("re.Match[str]", re.search(r",event=(\w+)", line))[1] for line in sent(server)]
    assert kinds == ["attempt_started", "config", "alert", "rewind", "attempt_finished"]
    started, config, alert, rewind, finished = map(fields, sent(server))
    assert started["title"] == '"attempt 3 of version 0.1.0 started"'
    assert config["text"] == r'"{\"lr\":0.1}"'
    assert (alert["title"], alert["text"]) == ('"high"', '"loss is 9"')
    assert (rewind["title"], rewind["step"]) == ('"rewind 40"', "40")
    assert (finished["title"], finished["state"], finished["exit_code"], finished["text"]) == (
        '"attempt 3 crashed"',
        '"crashed"',
        "-9",
        '"killed by SIGKILL"',
    )


# -- times ---------------------------------------------------------------------------------------------


@pytest.mark.case("C047")
def test_under_a_clock_that_stands_still_no_row_overwrites_another(
    backend: InfluxdbBackend, server: FaultProxy
) -> None:
    """Two processes of one attempt, each with 1000 rows of one time; sent again they are the same points."""
    rows = [row({"loss": float(step)}, step=step, offset=step) for step in range(1000)]
    for size in (100, 333):  # and cut differently the second time
        backend.memory = {}
        for writer in (1, 2):
            for start in range(0, 1000, size):
                backend.write(batch(*rows[start : start + size], writer=writer))
                backend.memory = json.loads(json.dumps(backend.memory))  # as it comes from the cursor
    lines = sent(server)
    assert len(lines) == 4000
    keys = {(line.split(" ", 1)[0], time_of(line)) for line in lines}
    assert len(keys) == 2000
    assert sorted(lines[:2000]) == sorted(lines[2000:])


def test_what_the_delivery_process_adds_does_not_move_the_times_of_rows(
    backend: InfluxdbBackend, server: FaultProxy
) -> None:
    """Its samples come between the rows in one sending and behind them in the next: same points."""
    rows = [row({"loss": 0.5}, time_ns=NOW_NS + offset, offset=offset) for offset in range(0, 300, 100)]
    sample = SystemRow(offset=0, names=("system/x",), values=[1], time_ns=NOW_NS + 150)
    finish = AttemptFinished(offset=9, time_ns=NOW_NS + 400, state="crashed", exit_code=-1, reason="killed")
    companion = Batch(run=RUN, records=[sample, finish], segment=2, companion=True)
    backend.write(batch(rows[0]))
    backend.write(companion)
    backend.write(batch(*rows[1:]))
    backend.memory = {}
    backend.write(batch(*rows))
    backend.write(companion)
    lines = sent(server)
    assert sorted(lines[:5]) == sorted(lines[5:])
    assert not any("writer=" in line for line in lines)


def test_a_clock_that_goes_back_a_little_keeps_the_order(
    backend: InfluxdbBackend, server: FaultProxy
) -> None:
    times = [NOW_NS, NOW_NS - 5_000_000, NOW_NS, NOW_NS + 1, NOW_NS + 10]
    backend.write(batch(*(row({"a": 1.0}, time_ns=time_ns) for time_ns in times)))
    written = [time_of(line) for line in sent(server)]
    assert written == [NOW_NS, NOW_NS + 1, NOW_NS + 2, NOW_NS + 3, NOW_NS + 10]


def test_a_clock_that_was_set_back_is_believed(backend: InfluxdbBackend, server: FaultProxy) -> None:
    hour = 3_600_000_000_000
    times = [NOW_NS, NOW_NS - hour, NOW_NS - hour, NOW_NS - hour + 5]
    backend.write(batch(*(row({"a": 1.0}, time_ns=time_ns) for time_ns in times)))
    assert [time_of(line) for line in sent(server)] == [
        NOW_NS,
        NOW_NS - hour,
        NOW_NS - hour + 1,
        NOW_NS - hour + 5,
    ]


def test_a_refused_batch_keeps_its_times_while_it_is_taken_apart(
    backend: InfluxdbBackend, server: FaultProxy
) -> None:
    """The server may have kept all of it but one row: the rest must not come to stand beside itself."""
    rows = [row({"a": float(index)}, offset=index) for index in range(4)]
    server.answer(422, times=2)
    for part in (rows, rows[:2]):
        memory = json.loads(json.dumps(backend.memory))
        with pytest.raises(BatchRejectedError):
            backend.write(batch(*part))
        backend.memory = memory
    for part in (rows[1:2], rows[2:]):
        backend.write(batch(*part))
    backend.write(batch(row({"a": 4.0}, offset=4)))
    times = {line.split(" a=")[1][0]: time_of(line) for line in sent(server)}
    assert times == {str(index): NOW_NS + index for index in range(5)}
    whole, taken_apart = unpacked(server.requests[0].body).splitlines(), sent(server)[-4:-1]
    assert whole[1:] == taken_apart


@pytest.mark.parametrize(
    "junk", ["text", 5, None, [1], {"0003-aa00 1": "x"}, {"0003-aa00 1": [1]}, {"0003-aa00 1": None}]
)
def test_junk_in_the_memory_is_no_time(backend: InfluxdbBackend, server: FaultProxy, junk: JsonValue) -> None:
    """It comes from a file beside the journal."""
    backend.memory = {"last_time_ns": junk}
    backend.write(batch(row({"a": 1.0})))
    assert [time_of(line) for line in sent(server)] == [NOW_NS]
    assert backend.memory == {"last_time_ns": {"0003-aa00 1": NOW_NS}}


def test_few_attempts_are_remembered(backend: InfluxdbBackend) -> None:
    """What is kept with every cursor must not grow with every restart."""
    for number in range(1000):
        run = msgspec.structs.replace(RUN, attempt=f"{number:04}-aa")
        backend.write(batch(row({"a": 1.0}), run=run))
    assert len(json.dumps(backend.memory)) < 5_000


# -- requests ------------------------------------------------------------------------------------------


@pytest.mark.case("C044")
def test_a_batch_is_one_request_and_is_there_when_write_returns(
    backend: InfluxdbBackend, server: FaultProxy
) -> None:
    rows = [row({"a": float(step)}, step=step, time_ns=NOW_NS + step) for step in range(5000)]
    backend.write(batch(*rows))
    (request,) = server.requests
    assert len(unpacked(request.body).splitlines()) == 5000
    assert urlsplit(request.path).path == "/api/v2/write"
    assert parse_qs(urlsplit(request.path).query) == {"org": ["o"], "bucket": ["b"], "precision": ["ns"]}
    assert request.headers["Authorization"] == "Token secret"


@pytest.mark.case("C044")
@pytest.mark.parametrize("status", [200, 202])
def test_only_204_is_an_acknowledgement(backend: InfluxdbBackend, server: FaultProxy, status: int) -> None:
    """What a proxy or a login page answers is none."""
    server.answer(status, body=b"<html>Welcome</html>")
    with pytest.raises(BackendUnavailableError, match=f"status {status}"):
        backend.write(batch(row({"a": 1.0})))


@pytest.mark.parametrize("status", [400, 413, 422])
def test_what_is_wrong_with_a_batch_is_told_in_the_servers_words(
    backend: InfluxdbBackend, server: FaultProxy, status: int
) -> None:
    server.answer(status, body=b'{"code":"x","message":"field type\\nconflict"}')
    with pytest.raises(
        BatchRejectedError, match=f"^InfluxDB at {server.url} answers {status}: field type conflict$"
    ):
        backend.write(batch(row({"a": 1.0})))


@pytest.mark.case("C054")
@pytest.mark.parametrize("status", [429, 503])
def test_how_long_to_wait_is_passed_on(backend: InfluxdbBackend, server: FaultProxy, status: int) -> None:
    server.answer(status, retry_after=7)
    with pytest.raises(BackendUnavailableError) as caught:
        backend.write(batch(row({"a": 1.0})))
    assert caught.value.retry_after_seconds == 7
    assert len(server.requests) == 1  # the client tries nothing by itself


def test_an_answer_may_name_the_time_of_the_next_try() -> None:
    assert retry_after_seconds({"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"}) == 0
    assert cast("float", retry_after_seconds({"Retry-After": "Fri, 31 Dec 2199 23:59:59 GMT"})) > 1e9
    assert retry_after_seconds({"Retry-After": "soon"}) is None
    assert retry_after_seconds(None) is None


@pytest.mark.parametrize("status", [401, 403, 404])
@pytest.mark.parametrize("at_open", [True, False])
def test_a_refusal_names_the_bucket_and_what_to_check(
    backend: InfluxdbBackend, server: FaultProxy, status: int, at_open: bool
) -> None:
    server.answer(status, body=b'{"code":"unauthorized","message":"unauthorized access"}')
    with pytest.raises(
        BackendRefusedError,
        match=rf"{server.url} refuses the bucket b of o .{status}: unauthorized access.: check INFLUX",
    ) as caught:
        backend.open(RUN) if at_open else backend.write(batch(row({"a": 1.0})))
    assert "secret" not in str(caught.value)


def test_to_open_writes_no_point(server: FaultProxy) -> None:
    backend = InfluxdbBackend(InfluxdbConfig(url=server.url, bucket="b"))
    backend.open(RUN)
    backend.close()
    assert [request.body for request in server.requests] == [b""]
    assert "Authorization" not in server.requests[0].headers


def test_a_server_that_wants_points_lets_us_in(server: FaultProxy) -> None:
    """InfluxDB 2 looks at the token and the bucket first."""
    server.answer(400, body=b'{"code":"invalid","message":"writing requires points"}')
    InfluxdbBackend(InfluxdbConfig(url=server.url)).open(RUN)


@pytest.mark.parametrize("fault", ["hang", "cut_request", "cut_answer", "lose_answer", "away", "500"])
def test_a_server_in_trouble_is_tried_again(server: FaultProxy, fault: str) -> None:
    """Each of these is something else than a refusal; afterwards the same backend goes on."""
    backend = InfluxdbBackend(InfluxdbConfig(url=server.url, timeout_seconds=1.0))
    backend.open(RUN)
    if fault == "away":
        server.go_away()
    elif fault == "500":
        server.answer(500, body=b"oops")
    else:
        getattr(server, fault)()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any but these two
        backend.write(batch(row({"a": 1.0})))
    assert not isinstance(caught.value, BackendRefusedError | BatchRejectedError)
    server.come_back()
    backend.write(batch(row({"a": 1.0})))
    backend.close()


def test_a_server_may_take_its_time_for_the_first_answer_too(
    server: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow server would never get a row otherwise; the five seconds are for a connection."""
    monkeypatch.setattr("nodetrack.backends.influxdb._CONNECT_SECONDS", 0.2)
    server.delay(1)
    backend = InfluxdbBackend(InfluxdbConfig(url=server.url, timeout_seconds=30))
    backend.open(RUN)
    backend.close()


@pytest.mark.parametrize("kept_alive", [True, False])
@pytest.mark.parametrize("fault", ["drip_head", "drip_body", "hang"])
def test_no_answer_takes_longer_than_it_may(server: FaultProxy, fault: str, kept_alive: bool) -> None:
    """However often a byte of it comes. Afterwards the same backend goes on, and no thread is left."""
    backend = InfluxdbBackend(InfluxdbConfig(url=server.url, timeout_seconds=0.5))
    if kept_alive:
        backend.open(RUN)
    server.hang() if fault == "hang" else server.drip(on_body=fault == "drip_body")
    with pytest.raises(
        BackendUnavailableError, match=rf"^InfluxDB at {server.url} has not answered within 0.5 s\.$"
    ):
        backend.write(batch(row({"a": 1.0}))) if kept_alive else backend.open(RUN)
    backend.open(RUN)
    backend.close()
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


@pytest.mark.parametrize("status", [200, 400, 401, 500])
def test_no_answer_fills_the_memory(status: int) -> None:
    with FaultProxy() as server:
        backend = InfluxdbBackend(InfluxdbConfig(url=server.url))
        backend.open(RUN)
        server.flood(status)
        with pytest.raises((BackendUnavailableError, BackendRefusedError, BatchRejectedError)) as caught:
            backend.write(batch(row({"a": 1.0})))
        assert len(str(caught.value)) < 2_000
        backend.write(batch(row({"a": 1.0})))
        backend.close()
    assert server.requests[1].flooded_bytes < 100_000_000  # what lay in buffers when we left


def test_one_connection_is_enough(server: FaultProxy) -> None:
    """An answer that was read to its end leaves the connection for the next."""
    backend = InfluxdbBackend(InfluxdbConfig(url=server.url))
    backend.open(RUN)
    (connection,) = server._connections
    server.answer(503, body=b"busy")
    with pytest.raises(BackendUnavailableError):
        backend.write(batch(row({"a": 1.0})))
    backend.write(batch(row({"a": 1.0})))
    assert server._connections == {connection}
    backend.close()


@pytest.mark.parametrize("status", [400, 401, 503])
@pytest.mark.parametrize(
    "body",
    [
        b"bad token: s3cr/t==",
        b'{"message": "no such token: s3cr\\/t=="}',
        b"x" * 995 + b"s3cr/t==",
        b"GET /write?token=s3cr%2Ft%3D%3D",
        b"",
    ],
)
def test_what_a_server_repeats_of_the_token_is_masked(server: FaultProxy, status: int, body: bytes) -> None:
    """Its words come into the cursor, the log and the quarantine."""
    backend = InfluxdbBackend(InfluxdbConfig(url=server.url, token="s3cr/t=="))
    backend.open(RUN)
    server.answer(status, body=body, headers={"X-Influx-Error": "Authorization: Token s3cr/t=="})
    with pytest.raises((BackendUnavailableError, BackendRefusedError, BatchRejectedError)) as caught:
        backend.write(batch(row({"a": 1.0})))
    backend.close()
    told: BaseException | None = caught.value
    while told is not None:  # a traceback shows them all
        assert "s3cr/" not in str(told)
        told = told.__cause__
    assert "s3cr%" not in str(caught.value)
    assert "***" in str(caught.value) or body.startswith(b"xx")


def test_other_secrets_in_what_a_server_says_are_masked_too(
    backend: InfluxdbBackend, server: FaultProxy
) -> None:
    server.answer(503, body=b"no route to https://me:hunter2@influx/")
    with pytest.raises(BackendUnavailableError, match=r"https://\*\*\*@influx"):
        backend.write(batch(row({"a": 1.0})))


def test_a_token_that_no_header_may_hold_is_not_repeated(server: FaultProxy) -> None:
    backend = InfluxdbBackend(InfluxdbConfig(url=server.url, token="sec\nret"))
    with pytest.raises(BackendRefusedError, match="check INFLUXDB_TOKEN") as caught:
        backend.open(RUN)
    assert "sec" not in str(caught.value)


def test_a_connection_that_is_not_secure_is_told_with_its_place(server: FaultProxy) -> None:
    url = server.url.replace("http", "https")  # where nobody speaks TLS
    with pytest.raises(BackendUnavailableError, match=rf"^InfluxDB at {url} gives no secure connection: \w+"):
        InfluxdbBackend(InfluxdbConfig(url=url)).open(RUN)


@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_that_is_no_text_is_told_with_its_place(
    backend: InfluxdbBackend, server: FaultProxy, status: int
) -> None:
    server.answer(status, body=b"\xff\xfe\x80")
    with pytest.raises(BackendUnavailableError, match=rf"{server.url} answers .*{status}"):
        backend.write(batch(row({"a": 1.0})))


# -- config --------------------------------------------------------------------------------------------


def test_the_environment_says_where_and_with_what(
    server: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFLUXDB_URL", f"{server.url}/")
    monkeypatch.setenv("INFLUXDB_V2_TOKEN", "from the environment")
    monkeypatch.setenv("INFLUXDB_ORG", "")
    monkeypatch.setenv("INFLUXDB_V2_ORG", "org")
    config = parse_backends(["influxdb"])["influxdb"]
    assert config.destination() == f"{server.url}, bucket nodetrack of org"
    assert config.public() == {"kind": "influxdb", "url": server.url, "org": "org", "bucket": "nodetrack"}
    InfluxdbBackend(cast("InfluxdbConfig", config)).open(RUN)
    assert server.requests[0].headers["Authorization"] == "Token from the environment"
    assert InfluxdbBackend.forward_env() == {
        "INFLUXDB_URL": f"{server.url}/",
        "INFLUXDB_V2_TOKEN": "from the environment",
        "INFLUXDB_ORG": "",
        "INFLUXDB_V2_ORG": "org",
    }


@pytest.mark.parametrize("url", ["influx.example.org:8086", "ftp://x", "http://", "https://me:pw@host"])
def test_an_address_that_cannot_be_used_is_told_when_it_is_written(url: str) -> None:
    with pytest.raises(SettingsError, match="url"):
        parse_backends([{"kind": "influxdb", "url": url}])
