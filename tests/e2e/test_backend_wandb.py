"""The wandb backend with the real client, against a service on the loopback."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from tests.servers.fault_proxy import FaultProxy
from tests.servers.wandb_service import KEY, StoredRun, WandbService

import nodetrack
from nodetrack.backends.base import Batch, RunInfo
from nodetrack.backends.wandb import WandbBackend
from nodetrack.errors import BackendRefusedError, BackendUnavailableError, BatchRejectedError
from nodetrack.naming import unflatten_row
from nodetrack.records import (
    AttemptFinished,
    AttemptStarted,
    ConfigSet,
    ConsoleLine,
    Event,
    Record,
    Row,
    RunEdited,
    SummarySet,
    SystemRow,
)
from nodetrack.values import Histogram, Image, Table, Text

pytest.importorskip("wandb")

BEGAN_NS = 1_795_983_508_611_388_123
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c63f8cfc0f01f00050001"
    "ff56c72f0d0000000049454e44ae426082"
)


@dataclass
class Sender:
    """A run whose records are written by hand, and what the backend remembers of it between processes."""

    options: dict[str, object] = field(default_factory=dict)
    memory: dict[str, object] = field(default_factory=dict)
    info: RunInfo = field(default_factory=lambda: attempt(1, "0.1.0"))

    def backend(self) -> WandbBackend:
        backend = WandbBackend(WandbBackend.config_class(**self.options))
        backend.memory = dict(self.memory)
        return backend

    def deliver(self, *batches: Sequence[Record], info: RunInfo | None = None) -> WandbBackend:
        """What a delivery process does, from its start to its end."""
        backend = self.backend()
        backend.open(info or self.info)
        try:
            for records in batches:
                backend.write(Batch(run=info or self.info, records=records))
                self.memory = dict(backend.memory)
        finally:
            backend.close()
        return backend


def attempt(number: int, version: str, **further: object) -> RunInfo:
    known = {"project": "demo", "run": "abc", "role": "miner", "uid": "3", "name": "miner-3", **further}
    return RunInfo(attempt=f"a{number}", attempt_number=number, version=version, **known)


def row(step: int, context: Mapping[str, str] | None = None, at: int | None = None, **values: object) -> Row:
    return Row(
        offset=step,
        names=tuple(values),
        values=list(values.values()),
        step=step,
        time_ns=BEGAN_NS + (step if at is None else at) * 1_000_000,
        context=context or {},
    )


def rows(start: int, end: int) -> list[Row]:
    return [row(step, loss=step / 2) for step in range(start, end)]


def steps(service: WandbService, run: str = "abc") -> list[int]:
    """The steps of the rows, as they stand in W&B."""
    return [unflatten_row(stored).step for stored in service.runs[run].rows]


@pytest.fixture
def service() -> Iterator[WandbService]:
    with WandbService() as service:
        os.environ.update(service.environment)
        yield service


@pytest.fixture
def proxy(service: WandbService) -> Iterator[FaultProxy]:
    """Between the client and the service, and in its way where a test says so."""
    with FaultProxy(service.url) as proxy:
        os.environ["WANDB_BASE_URL"] = proxy.url
        yield proxy


@pytest.fixture
def sender() -> Sender:
    return Sender()


def test_a_row_is_there_when_write_returns(service: WandbService, sender: Sender) -> None:
    backend = sender.backend()
    backend.open(sender.info)
    backend.write(Batch(run=sender.info, records=rows(0, 5)))
    backend.write(Batch(run=sender.info, records=rows(5, 7)))
    assert steps(service) == [0, 1, 2, 3, 4, 5, 6]
    stored = service.runs["abc"].rows[3]
    assert stored["_step"] == 3
    assert stored["v0.1.0/loss"] == stored["latest/loss"] == 1.5
    assert stored["v0.1.0/step"] == 3
    assert stored["_timestamp"] == pytest.approx(BEGAN_NS / 1e9 + 0.003, abs=1e-6)
    backend.close()
    assert service.runs["abc"].state == "running"


def test_the_next_process_goes_on_in_the_same_run_and_each_version_keeps_its_step(
    service: WandbService, sender: Sender
) -> None:
    sender.deliver([AttemptStarted(offset=0, time_ns=BEGAN_NS, attempt={}), *rows(0, 3)])
    second = attempt(2, "0.2.0")
    sender.deliver([AttemptStarted(offset=0, time_ns=BEGAN_NS, attempt={}), *rows(3, 5)], info=second)
    run = service.runs["abc"]
    assert list(service.runs) == ["abc"]
    assert [stored["_step"] for stored in run.rows] == [0, 1, 2, 3, 4]
    assert "v0.1.0/loss" in run.rows[2]
    assert "v0.2.0/loss" in run.rows[3]
    assert run.values["version_history"] == ["0.1.0", "0.2.0"]
    assert run.values["current_version"] == "0.2.0"
    assert step_metrics(run.metrics) == {
        "v0.1.0/*": "v0.1.0/step",
        "v0.2.0/*": "v0.2.0/step",
        "latest/*": "latest/step",
    }


def step_metrics(metrics: Sequence[Mapping[str, object]]) -> dict[object, object]:
    """The name of the step metric by the name of the metric, as W&B's config has them."""
    names = [metric.get("1") or metric.get("2") for metric in metrics]
    return {
        name: names[metric["5"] - 1] for name, metric in zip(names, metrics, strict=True) if metric.get("5")
    }


def test_no_row_is_lost_when_the_step_goes_back(service: WandbService, sender: Sender) -> None:
    sender.deliver([row(10**6, a=1), *(row(step, a=2) for step in range(1, 101))])
    assert steps(service) == [10**6, *range(1, 101)]
    numbers = [stored["_step"] for stored in service.runs["abc"].rows]
    assert numbers == sorted(set(numbers))


def test_rows_of_one_step_are_one_row_and_a_context_comes_before_the_name(
    service: WandbService, sender: Sender
) -> None:
    sender.deliver(
        [
            row(7, loss=1),
            row(7, acc=2, at=8),
            row(7, {"stage": "val"}, loss=3, at=9),
            row(7, loss=4, at=10),
            row(8, loss=5, at=11),
        ]
    )
    assert [
        unflatten_row(stored).values.items() >= expected.items()
        for stored, expected in zip(
            service.runs["abc"].rows,
            [{"loss": 1, "acc": 2, "val/loss": 3}, {"loss": 4}, {"loss": 5}],
            strict=True,
        )
    ] == [True, True, True]
    assert steps(service) == [7, 7, 8]


@pytest.mark.case("C033")
def test_a_batch_that_comes_again_after_a_crash_is_recognised(service: WandbService, sender: Sender) -> None:
    """The service has it and the cursor does not: the process was killed between the two."""
    sender.deliver(rows(0, 4))
    kept = dict(sender.memory)
    sender.deliver([*rows(4, 7), row(7, a=1), row(7, b=1, at=8), *rows(8, 10)])
    sender.memory = kept
    sender.deliver([*rows(4, 7), row(7, a=1)], [row(7, b=1, at=8), *rows(8, 13)], rows(13, 15))
    assert steps(service) == list(range(15))
    sender.deliver(rows(15, 16))
    assert steps(service) == list(range(16))


@pytest.mark.case("C033")
def test_a_batch_whose_beginning_has_arrived_is_completed(service: WandbService, sender: Sender) -> None:
    sender.deliver(rows(0, 3))
    sender.memory = {}
    sender.deliver(rows(0, 6))
    assert steps(service) == list(range(6))


def test_rows_of_another_segment_may_come_before_those_that_come_again(
    service: WandbService, sender: Sender
) -> None:
    sender.deliver(rows(0, 3))
    sender.memory = {}
    sender.deliver([row(50, a=1, at=77)], rows(0, 4))
    assert steps(service) == [0, 1, 2, 50, 3]


def test_a_failing_service_gets_each_row_once(
    service: WandbService, proxy: FaultProxy, sender: Sender
) -> None:
    sender.options = {"confirm_seconds": 1.5}
    backend = sender.backend()
    backend.open(sender.info)
    backend.write(Batch(run=sender.info, records=rows(0, 2)))
    proxy.answer(503, times=None, on="file_stream")
    with pytest.raises(BackendUnavailableError, match=r"has 2 of the 5 rows of run abc"):
        backend.write(Batch(run=sender.info, records=rows(2, 5)))
    proxy.heal()
    write_until_taken(backend, Batch(run=sender.info, records=rows(2, 6)))
    assert steps(service) == list(range(6))
    backend.close()


def write_until_taken(backend: WandbBackend, batch: Batch) -> None:
    """What the worker does, without its pauses."""
    for _ in range(40):
        try:
            backend.write(batch)
        except BackendUnavailableError:
            continue
        return
    pytest.fail("the batch was never taken")


@pytest.mark.case("C033")
def test_a_lost_answer_repeats_no_row(service: WandbService, proxy: FaultProxy, sender: Sender) -> None:
    backend = sender.backend()
    backend.open(sender.info)
    proxy.lose_answer(on="file_stream", times=2)
    write_until_taken(backend, Batch(run=sender.info, records=rows(0, 5)))
    backend.close()
    assert steps(service) == list(range(5))


def test_rows_that_the_client_gave_up_are_noticed_and_sent_by_a_fresh_one(
    service: WandbService, sender: Sender
) -> None:
    """After a 4xx W&B's client never sends again and tells nobody; the worker reopens what keeps failing."""
    sender.options = {"confirm_seconds": 0.5}
    backend = sender.backend()
    backend.open(sender.info)
    backend.write(Batch(run=sender.info, records=rows(0, 2)))
    service.refuses_rows = (400, 1)
    for _ in range(2):
        with pytest.raises(BackendUnavailableError, match="has 2 of the 4 rows"):
            backend.write(Batch(run=sender.info, records=rows(2, 4)))
    sender.memory = dict(backend.memory)
    backend.close()
    sender.deliver(rows(2, 4))
    assert steps(service) == list(range(4))


@pytest.mark.case("C054")
def test_a_service_that_asks_for_time_is_given_it(
    service: WandbService, proxy: FaultProxy, sender: Sender
) -> None:
    backend = sender.backend()
    backend.open(sender.info)
    backend.write(Batch(run=sender.info, records=rows(0, 1)))
    proxy.answer(429, times=1, on="file_stream", retry_after=3)
    backend.write(Batch(run=sender.info, records=rows(1, 50)))
    assert steps(service) == list(range(50))
    sent = [request for request in proxy.requests if "file_stream" in request.path]
    refused = next(place for place, request in enumerate(sent) if request.status == 429)
    assert sent[refused + 1].at - sent[refused].at >= 3
    backend.close()


@pytest.mark.case("C003")
def test_a_run_that_is_gone_costs_one_warning(
    service: WandbService, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    sender.deliver(rows(0, 3))
    del service.runs["abc"]
    service.deleted.add("abc")
    with caplog.at_level(logging.WARNING, "nodetrack"):
        sender.deliver(rows(3, 5))
        sender.deliver(rows(5, 7))
    assert steps(service, "abc-2") == [3, 4, 5, 6]
    assert service.runs["abc-2"].values["previous_run"] == "abc"
    assert [warning[:24] for warning in warnings(caplog)] == ["W&B run abc is gone (the"]
    assert sender.memory["previous"] == ["abc"]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "nodetrack"]


@pytest.mark.case("C003")
def test_a_run_that_is_deleted_under_a_living_node_is_replaced(service: WandbService, sender: Sender) -> None:
    sender.options = {"confirm_seconds": 1}
    backend = sender.backend()
    backend.open(sender.info)
    backend.write(Batch(run=sender.info, records=[config(lr=1), *rows(0, 3)]))
    del service.runs["abc"]
    service.deleted.add("abc")
    write_until_taken(backend, Batch(run=sender.info, records=rows(3, 5)))
    backend.close()
    assert steps(service, "abc-2") == [3, 4]


def config(**values: object) -> ConfigSet:
    return ConfigSet(offset=0, time_ns=BEGAN_NS, config=values)


@pytest.mark.parametrize("status", [403, 500])
def test_an_id_that_nobody_can_verify_is_kept(service: WandbService, sender: Sender, status: int) -> None:
    sender.options = {"timeout_seconds": 1, "confirm_seconds": 0.5}
    sender.deliver(rows(0, 2))
    service.refuses_looks = (status, "not now")
    with pytest.raises((BackendUnavailableError, BackendRefusedError)):
        sender.deliver(rows(2, 4))
    service.refuses_looks = None
    sender.deliver(rows(2, 4))
    assert list(service.runs) == ["abc"]
    assert steps(service) == [0, 1, 2, 3]


def event(name: str, /, **data: object) -> Event:
    return Event(offset=0, time_ns=BEGAN_NS, name=name, data=data)


def test_a_step_back_is_taken_in_wandb_too_where_it_is_asked_for(
    service: WandbService, sender: Sender
) -> None:
    sender.options = {"rewind": True}
    sender.deliver(
        rows(0, 10), [event("rewind", step=4), *(row(step, at=100 + step, b=1) for step in (5, 6))]
    )
    assert steps(service) == [0, 1, 2, 3, 4, 5, 6]
    assert "latest/b" in service.runs["abc"].rows[-1]


@pytest.mark.case("C010")
def test_a_service_that_does_not_rewind_costs_one_warning(
    service: WandbService, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    sender.options = {"rewind": True}
    service.refuses_rewind = (400, "run is not terminal")
    with caplog.at_level(logging.WARNING, "nodetrack"):
        sender.deliver(
            rows(0, 10),
            [event("rewind", step=4), *(row(step, at=100 + step, b=1) for step in (5, 6))],
            [event("rewind", step=5), row(6, at=200, b=2)],
        )
    assert steps(service) == [*range(10), 5, 6, 6]
    [warning] = warnings(caplog)
    assert "was not taken back to step 4" in warning
    assert "run is not terminal" in warning


@pytest.mark.case("C071")
def test_rows_rotate_into_linked_runs(service: WandbService, sender: Sender) -> None:
    sender.options = {"rotate_rows": 1000}
    sender.deliver([config(lr=1), *rows(0, 3500)])
    ids = ["abc", "abc-2", "abc-3", "abc-4"]
    assert list(service.runs) == ids
    assert [len(service.runs[run].lines) for run in ids] == [1000, 1000, 1000, 500]
    assert [step for run in ids for step in steps(service, run)] == list(range(3500))
    configs = [service.runs[run].values for run in ids]
    assert [values.get("next_run") for values in configs] == ["abc-2", "abc-3", "abc-4", None]
    assert [values.get("previous_run") for values in configs] == [None, "abc", "abc-2", "abc-3"]
    assert {values["lr"] for values in configs} == {1}
    assert {service.runs[run].group for run in ids} == {"abc"}
    assert [service.runs[run].state for run in ids] == ["finished", "finished", "finished", "running"]


def test_rotation_goes_on_where_a_crash_left_it(service: WandbService, sender: Sender) -> None:
    sender.options = {"rotate_rows": 10}
    sender.deliver(rows(0, 25))
    sender.memory = {}
    sender.deliver(rows(0, 30), rows(30, 35))
    assert [step for run in service.runs for step in steps(service, run)] == list(range(35))
    assert [len(run.lines) for run in service.runs.values()] == [10, 10, 10, 5]


# ---------------------------------------------------------------------------------------------------
# Who is let in, and how long it takes to find out


@pytest.mark.parametrize(("status", "words"), [(401, "invalid api key"), (404, "entity team not found")])
def test_a_refusal_comes_in_wandbs_own_words(
    service: WandbService, sender: Sender, status: int, words: str
) -> None:
    service.refuses = (status, words)
    with pytest.raises(BackendRefusedError, match=f"{words}.*wandb login"):
        sender.deliver(rows(0, 1))


def test_without_a_key_nobody_is_asked(service: WandbService, sender: Sender, tmp_path: Path) -> None:
    os.environ["HOME"] = str(tmp_path)  # where `wandb login` keeps keys
    del os.environ["WANDB_API_KEY"]
    with pytest.raises(BackendRefusedError, match=r"set WANDB_API_KEY or run `wandb login`"):
        sender.deliver(rows(0, 1))
    assert service.calls == []


def test_key_and_address_may_be_options(service: WandbService, sender: Sender) -> None:
    sender.options = {"api_key": KEY, "base_url": service.url, "project": "other"}
    del os.environ["WANDB_API_KEY"], os.environ["WANDB_BASE_URL"]
    sender.deliver(rows(0, 1))
    assert service.runs["abc"].project == "other"


@pytest.mark.parametrize("fault", ["go_away", "hang", "answer"])
def test_a_service_that_cannot_be_had_is_no_refusal(proxy: FaultProxy, sender: Sender, fault: str) -> None:
    sender.options = {"timeout_seconds": 1}
    if fault == "answer":
        proxy.answer(503, times=None)
    else:
        getattr(proxy, fault)(**({"times": None} if fault == "hang" else {}))
    with pytest.raises(BackendUnavailableError):
        sender.deliver(rows(0, 1))
    assert cores() == []


def cores() -> list[str]:
    """W&B's processes that this one has."""
    return [child.name() for child in psutil.Process().children() if child.name() == "wandb-core"]


# ---------------------------------------------------------------------------------------------------
# What else a run is


def test_every_kind_of_value_arrives(service: WandbService, sender: Sender) -> None:
    backend = sender.deliver(
        [
            row(
                0,
                nan=math.nan,
                inf=-math.inf,
                big=2**60,
                histogram=Histogram(counts=[1, 2], edges=[0.0, 0.5, 2.0]).stored(),
                wide=Histogram(counts=[1] * 1000).stored(),
                text=Text("a sample").stored(),
                image=Image(PIXEL, caption="dot").stored(),
                table=Table(["a"], [[1]]).stored(),
                strange={"type": "hologram"},
            )
        ]
    )
    [stored] = service.runs["abc"].rows
    assert math.isnan(stored["latest/nan"])
    assert stored["latest/inf"] == -math.inf
    assert stored["latest/big"] == 2**60
    assert stored["latest/histogram"] == {"_type": "histogram", "values": [1, 2], "bins": [0, 0.5, 2]}
    assert sum(stored["latest/wide"]["values"]) == 1000
    assert stored["latest/text"] == "a sample"
    assert stored["latest/image"]["caption"] == "dot"
    assert stored["latest/image"]["path"] in service.runs["abc"].files
    assert stored["latest/table"]["_type"] == "table-file"
    assert backend.left_out == {"a 'hologram' value": 2}


def test_what_is_not_a_row_arrives_too(service: WandbService, sender: Sender) -> None:
    sender.info = attempt(1, "0.1.0", group="miners", job_type="training", tags=("x" * 70,), notes="first")
    sender.deliver(
        [
            AttemptStarted(offset=0, time_ns=BEGAN_NS, attempt={}),
            config(lr=1, model={"layers": 2}),
            event("define_metric", name="acc", step_metric="epoch", summary="max"),
            row(0, acc=1, epoch=1),
            SummarySet(offset=0, time_ns=BEGAN_NS, summary={"best": 3, "worse": 4}),
            SummarySet(offset=0, time_ns=BEGAN_NS, summary={"worse": None}),
            ConsoleLine(offset=0, time_ns=BEGAN_NS, stream="stdout", text="hello"),
            ConsoleLine(offset=0, time_ns=BEGAN_NS, stream="stderr", text="oh no"),
            SystemRow(
                offset=0, names=("system/cpu_ratio", "system/gpu/0/power"), values=[0.5, math.nan], time_ns=1
            ),
            event("alert", title="diverged", text="loss is NaN"),
            RunEdited(
                offset=0, time_ns=BEGAN_NS, fields={"tags": ["good"], "notes": "second", "name": "best"}
            ),
        ]
    )
    run = service.runs["abc"]
    assert run.values == {
        "lr": 1,
        "model": {"layers": 2},
        "version_history": ["0.1.0"],
        "current_version": "0.1.0",
    }
    assert (run.name, run.group, run.job_type, run.notes) == ("best", "miners", "training", "second")
    assert run.tags == ["x" * 63 + "…", "good"]
    assert run.summary["best"] == 3
    assert "worse" not in run.summary
    assert [line.split(" ", 1)[1] for line in run.console.values()] == ["hello", "ERROR oh no"]
    [sample] = map(json.loads, run.events)
    assert sample["system.cpu_ratio"] == 0.5
    assert "system.gpu.0.power" not in sample
    assert [alert["title"] for alert in run.alerts] == ["diverged"]
    assert step_metrics(run.metrics)["v0.1.0/acc"] == "v0.1.0/epoch"
    assert step_metrics(run.metrics)["latest/acc"] == "latest/epoch"


def test_the_newest_attempt_has_the_last_word_in_whatever_order_they_come(
    service: WandbService, sender: Sender
) -> None:
    for number in (3, 1, 4, 2, 3, 1, 4, 2):
        info = attempt(number, f"0.{number}.0", tags=(f"v0.{number}.0",))
        begin = [AttemptStarted(offset=0, time_ns=number, attempt={}), config(number=number)]
        end = [AttemptFinished(offset=0, time_ns=number, state="finished", exit_code=number, reason="")]
        sender.deliver([*begin, *(row(10 * number + place, a=1) for place in range(3)), *end], info=info)
    run = service.runs["abc"]
    assert run.values["number"] == 4
    assert run.values["current_version"] == "0.4.0"
    assert set(run.tags) == {f"v0.{number}.0" for number in (1, 2, 3, 4)}
    assert run.exit_code == 4


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [("finished", 0, ("finished", 0)), ("finished", 3, ("failed", 3)), ("crashed", 0, ("failed", 1))],
)
def test_the_end_of_the_newest_attempt_ends_the_run_which_can_be_resumed(
    service: WandbService, sender: Sender, state: str, code: int, expected: tuple[str, int]
) -> None:
    end = AttemptFinished(offset=0, time_ns=BEGAN_NS, state=state, exit_code=code, reason="")
    sender.deliver([*rows(0, 2), end])
    run = service.runs["abc"]
    assert (run.state, run.exit_code) == expected
    sender.deliver(
        [AttemptStarted(offset=0, time_ns=BEGAN_NS, attempt={}), *rows(2, 4)], info=attempt(2, "0.1.0")
    )
    assert run.state == "running"
    assert steps(service) == [0, 1, 2, 3]


def test_what_wandb_would_drop_in_silence_is_rejected_before_anything_is_sent(
    service: WandbService, sender: Sender
) -> None:
    backend = sender.backend()
    backend.open(sender.info)
    huge = row(1, text=Text("x" * 5_000_000).stored())
    with pytest.raises(BatchRejectedError, match="the row of step 1 has about"):
        backend.write(Batch(run=sender.info, records=[row(0, a=1), huge]))
    assert service.runs["abc"].lines == []
    with pytest.raises(BatchRejectedError, match="the config has about"):
        backend.write(Batch(run=sender.info, records=[config(text="x" * 9_500_000)]))
    backend.write(Batch(run=sender.info, records=[row(0, a=1), row(2, a=1)]))
    backend.close()
    assert steps(service) == [0, 2]


def test_nothing_is_left_behind(
    service: WandbService, sender: Sender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    sender.deliver(rows(0, 2))
    assert cores() == []
    assert list(temporary.glob("nodetrack-wandb-*")) == []
    assert list(Path.cwd().iterdir()) == []


def test_nothing_about_the_machine_leaves_it(proxy: FaultProxy, sender: Sender) -> None:
    sender.deliver([config(lr=1), *rows(0, 2)])
    sent = b"".join(request.body for request in proxy.requests)
    assert b"current_version" in sent
    for private in (socket.gethostname(), str(Path.cwd()), str(Path(__file__).parents[2]), sys.executable):
        assert private.encode() not in sent


def test_wandbs_process_may_be_killed(service: WandbService, sender: Sender) -> None:
    backend = sender.backend()
    backend.open(sender.info)
    backend.write(Batch(run=sender.info, records=[config(lr=1), *rows(0, 2)]))
    backend.write(Batch(run=sender.info, records=rows(2, 3)))
    [core] = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
    core.kill()
    for popen in gc.get_objects():  # wandb does not wait for a process that it finds dead
        if isinstance(popen, subprocess.Popen) and popen.pid == core.pid:
            popen.wait()
    write_until_taken(backend, Batch(run=sender.info, records=rows(3, 5)))
    backend.close()
    assert steps(service) == list(range(5))


def test_offline_runs_are_written_where_they_are_asked_for(sender: Sender, node, tmp_path: Path) -> None:
    """`node` reads what is there as `wandb sync` would."""
    sender.options = {"mode": "offline", "dir": tmp_path}
    sender.deliver([config(lr=1), *rows(0, 3)])
    sender.deliver(rows(3, 5))
    found = [unflatten_row(stored) for stored in node.wandb_rows()]
    assert [(stored.step, stored.values["loss"]) for stored in found] == [
        (step, step / 2) for step in range(5)
    ]
    assert [stored["_step"] for stored in node.wandb_rows()] == [0, 1, 2, 3, 4]
    assert cores() == []


SYNC = """
import sys
from pathlib import Path
from nodetrack.backends.factory import build_backend, parse_backends
from nodetrack.delivery.engine import Delivery
[config] = parse_backends([{"kind": "wandb", "batch_rows": 40}]).values()
delivery = Delivery(Path(sys.argv[1]), "demo", {"wandb": build_backend(config)}, follow=False)
delivery.start()
delivery.join()
"""


def test_a_delivery_process_that_is_killed_again_and_again_repeats_no_row(
    service: WandbService, tmp_path: Path
) -> None:
    """At random moments, most of them between a send and its cursor: that is where the time goes."""
    run = nodetrack.init(project="demo", id="abc", mode="offline", dir=tmp_path, version="0.1.0")
    for step in range(400):
        run.log({"loss": step / 2}, step=step)
    run.finish()
    chance = random.Random(7)
    for _ in range(6):
        seen = len(service.runs["abc"].lines) if "abc" in service.runs else 0
        with subprocess.Popen([sys.executable, "-c", SYNC, str(run.folder)]) as process:
            while process.poll() is None and len(service.runs.get("abc", StoredRun("")).lines) == seen:
                time.sleep(0.005)
            time.sleep(chance.random() / 2)
            process.kill()
    subprocess.run([sys.executable, "-c", SYNC, str(run.folder)], check=True, timeout=50)
    assert steps(service) == list(range(400))
    assert service.runs["abc"].state == "finished"
