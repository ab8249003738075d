"""Runs as MLflow shows them: a real server, behind a proxy that can fail, read with MLflow's own client."""

from __future__ import annotations

import base64
import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.servers.fault_proxy import FaultProxy

import nodetrack
from nodetrack.backends._mlflow_names import LONGEST_VALUE, original
from nodetrack.backends.mlflow import CONTINUES_TAG, RUN_TAG, MlflowBackend, MlflowConfig
from nodetrack.delivery.engine import Delivery
from nodetrack.errors import BackendRefusedError, BackendUnavailableError, BatchRejectedError
from nodetrack.records import AttemptFinished, ConfigSet, JsonValue, RunEdited, SummarySet, SystemRow
from nodetrack.testing import Attempt
from nodetrack.values import Histogram

if TYPE_CHECKING:
    from tests.servers.mlflow_server import MlflowServer


class Place:
    """An experiment of the test's own, reached through the proxy."""

    def __init__(self, server: MlflowServer, proxy: FaultProxy, experiment: str) -> None:
        self.server, self.proxy, self.experiment = server, proxy, experiment

    def opened(self, attempt: Attempt, memory: dict[str, JsonValue] | None = None) -> MlflowBackend:
        backend = MlflowBackend(MlflowConfig(tracking_uri=self.proxy.url, experiment=self.experiment))
        backend.memory = copy.deepcopy(memory or {})
        backend.open(attempt.info)
        return backend

    @property
    def run(self) -> Any:  # MLflow's own type
        return self.server.run(self.experiment)

    def points(self, key: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in self.server.history(self.experiment, key)]

    def batches_sent(self) -> list[dict[str, Any]]:
        """The bodies of the `log-batch` requests."""
        sent = [request for request in self.proxy.requests if request.path.endswith("/runs/log-batch")]
        return [json.loads(request.body) for request in sent]


@pytest.fixture
def place(mlflow_server: MlflowServer, request: pytest.FixtureRequest) -> Iterator[Place]:
    with FaultProxy(mlflow_server.url) as proxy:
        yield Place(mlflow_server, proxy, request.node.name)


@pytest.fixture
def attempt() -> Attempt:
    return Attempt(f"run{id(object()):x}")


def test_a_run_is_shown_under_its_version_and_as_the_newest(place: Place, attempt: Attempt) -> None:
    """Steps, times and values are those of the rows; the link leads to the run."""
    backend = place.opened(attempt)
    row = attempt.row(7, {"loss": 0.25, "count": 3}, {"stage": "train"})
    backend.write(attempt.batch(*attempt.begin(), row))
    assert place.run.data.metrics == {
        "v0.1.0/train/loss": 0.25,
        "v0.1.0/train/count": 3.0,
        "latest/train/loss": 0.25,
        "latest/train/count": 3.0,
    }
    [point] = place.server.history(place.experiment, "latest/train/loss")
    assert (point.step, point.timestamp) == (7, row.time_ns // 1_000_000)
    info = place.run.info
    assert info.start_time == attempt.started_ns // 1_000_000
    assert backend.url == f"{place.proxy.url}/#/experiments/{info.experiment_id}/runs/{info.run_id}"


@pytest.mark.case("C051")
def test_names_that_mlflow_refuses_arrive_under_legal_ones(place: Place, attempt: Attempt) -> None:
    """Four metrics of a local version are four, and their names come back."""
    attempt.info = msgspec.structs.replace(attempt.info, version="1.2.0+cu121")
    names = {"mAP@50", "t(s)/gen", "a:b", "a_b"}
    place.opened(attempt).write(attempt.batch(attempt.row(1, dict.fromkeys(names, 0.5))))
    found = {original(key) for key in place.run.data.metrics}
    views = ("v1.2.0+cu121", "latest")
    assert found == {f"{view}/{name}" for view in views for name in names}


def test_a_name_of_1024_bytes_is_kept_by_a_tag(place: Place, attempt: Attempt) -> None:
    """MLflow takes 250 characters; the whole name is in a tag of the run."""
    name = "é" * 512
    place.opened(attempt).write(attempt.batch(attempt.row(1, {name: 0.5, name[:-1] + "e": 1.5})))
    found = {original(key, place.run.data.tags): value for key, value in place.run.data.metrics.items()}
    assert found[f"latest/{name}"] == 0.5
    assert len(found) == 4


@pytest.mark.case("C008")
def test_a_param_is_sent_once_and_a_changed_one_becomes_a_version(place: Place, attempt: Attempt) -> None:
    """MLflow never changes a param. Nothing raises, in a new process neither."""

    def config(value: int) -> ConfigSet:
        return ConfigSet(offset=0, time_ns=attempt.now_ns(), config={"a": value, "b": "x"})

    backend = place.opened(attempt)
    backend.write(attempt.batch(config(1)))
    backend.write(attempt.batch(config(1)))
    assert len(place.batches_sent()) == 1
    backend.write(attempt.batch(config(2)))
    assert place.run.data.params == {"a": "1", "a__v2": "2", "b": "x"}
    again = place.opened(attempt)
    for value in (2, 1, 3):
        again.write(attempt.batch(config(value)))
    assert place.run.data.params == {"a": "1", "a__v2": "2", "a__v3": "3", "b": "x"}


def test_two_processes_that_set_one_param_do_not_fail(place: Place, attempt: Attempt) -> None:
    """The second finds out that the run has another value by now, and adds its own."""
    one, other = place.opened(attempt), place.opened(attempt)
    one.write(attempt.batch(ConfigSet(offset=0, time_ns=1, config={"a": 1})))
    other.write(attempt.batch(ConfigSet(offset=0, time_ns=2, config={"a": 2})))
    assert place.run.data.params == {"a": "1", "a__v2": "2"}


@pytest.mark.case("C052")
def test_a_config_of_any_size_is_taken(place: Place, attempt: Attempt) -> None:
    """At most 100 params a request; a long value is cut and says so."""
    config: dict[str, JsonValue] = {f"p{number}": number for number in range(1_499)}
    place.opened(attempt).write(
        attempt.batch(ConfigSet(offset=0, time_ns=1, config={**config, "long": "x" * 10_000}))
    )
    assert [len(sent["params"]) for sent in place.batches_sent()] == [100] * 15
    params = place.run.data.params
    assert len(params) == 1_500
    assert len(params["long"]) == LONGEST_VALUE
    assert "10000 characters, sha256" in params["long"]


def test_a_request_holds_a_thousand_points_at_most(place: Place, attempt: Attempt) -> None:
    """And stays below the million bytes that a server takes, with the longest names there are."""
    values = {f"{'é' * 500}{number}": 0.123456789012345678 for number in range(600)}
    place.opened(attempt).write(attempt.batch(attempt.row(-(2**63), values)))
    sent = [request for request in place.proxy.requests if request.path.endswith("/runs/log-batch")]
    assert [len(body.get("metrics", ())) for body in place.batches_sent()][:2] == [1_000, 200]
    assert max(len(request.body) for request in sent) < 1_000_000
    assert len(place.run.data.metrics) == 1_200


def test_what_is_sent_again_is_there_once(place: Place, attempt: Attempt) -> None:
    """The server's key is name, step, millisecond, value: NaN and the infinities as well."""
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5}
    batch = attempt.batch(
        *attempt.begin(), attempt.row(3, values), attempt.row(3, values), *attempt.every_kind()
    )
    for _ in range(2):
        backend = place.opened(attempt)
        backend.write(batch)
        backend.write(batch)
    for key in ("latest/a", "latest/b", "latest/b::inf", "latest/c", "latest/d", "v0.1.0/d"):
        assert len(place.points(key)) == 2
    assert [value for _, value in place.points("latest/c::inf")] == [-1.0, -1.0]


def test_an_answer_that_is_lost_repeats_nothing(place: Place, attempt: Attempt) -> None:
    """The server has the batch, we do not know it and send it again."""
    batch = attempt.batch(*attempt.rows(*range(20)))
    backend = place.opened(attempt)
    place.proxy.lose_answer(on="log-batch")
    with pytest.raises(BackendUnavailableError):
        backend.write(batch)
    backend.write(batch)
    assert [step for step, _ in place.points("latest/train/loss")] == list(range(20))


def test_the_run_is_found_again_without_a_cursor(place: Place, attempt: Attempt) -> None:
    """On another machine, say: by its tag. With the cursor, by its id."""
    backend = place.opened(attempt)
    backend.write(attempt.batch(*attempt.rows(0)))
    place.opened(attempt).write(attempt.batch(*attempt.rows(1)))
    place.opened(attempt, backend.memory).write(attempt.batch(*attempt.rows(2)))
    assert [step for step, _ in place.points("latest/train/loss")] == [0, 1, 2]
    other = Attempt(f"{attempt.info.run}x")
    place.opened(other).write(other.batch(*other.rows(9)))
    assert [run.data.tags[RUN_TAG] for run in place.server.runs(place.experiment)].count(other.info.run) == 1
    assert len(place.server.runs(place.experiment)) == 2


@pytest.mark.case("C003")
@pytest.mark.parametrize("when", ["before it is opened", "while it is open"])
def test_a_deleted_run_is_continued_in_a_new_one(place: Place, attempt: Attempt, when: str) -> None:
    """Only because the server says that it is gone; the new one names it."""
    backend = place.opened(attempt)
    backend.write(attempt.batch(*attempt.begin(), *attempt.rows(0)))
    old = place.run.info.run_id
    place.server.client.delete_run(old)
    if when == "before it is opened":
        backend = place.opened(attempt, backend.memory)
    backend.write(attempt.batch(*attempt.begin(), *attempt.rows(1)))
    assert place.run.data.tags[CONTINUES_TAG] == old
    assert backend.memory["mlflow_run"] == place.run.info.run_id
    assert place.points("latest/train/loss")[0][0] == 1
    assert place.run.data.params["learning_rate"] == "0.1"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_answer_that_may_pass_costs_no_run(place: Place, attempt: Attempt, status: int) -> None:
    """Neither at the start nor later; afterwards it goes on as if nothing had been."""
    backend = place.opened(attempt)
    place.proxy.answer(status, times=3)
    batch = attempt.batch(*attempt.rows(0))
    with pytest.raises(BackendUnavailableError, match=str(status)):
        backend.write(batch)
    for _ in range(2):
        with pytest.raises(BackendUnavailableError, match=str(status)):
            place.opened(attempt, backend.memory)
    place.opened(attempt, backend.memory).write(batch)
    assert len(place.server.runs(place.experiment)) == 1


def test_a_batch_that_is_too_large_for_a_proxy_is_refused_for_good(place: Place, attempt: Attempt) -> None:
    """Delivery halves it then."""
    backend = place.opened(attempt)
    place.proxy.answer(413, body=b"Request Entity Too Large")
    with pytest.raises(BatchRejectedError, match="Request Entity Too Large"):
        backend.write(attempt.batch(*attempt.rows(0)))


def test_a_server_that_hangs_or_is_away_is_known_soon(place: Place, attempt: Attempt) -> None:
    """One try and no retries: delivery tries again by itself, and MLflow's default would wait for minutes."""
    place.proxy.hang()
    with pytest.raises(BackendUnavailableError, match="timed out"):
        place.opened(attempt)
    assert len(place.proxy.requests) == 1
    place.proxy.go_away()
    with pytest.raises(BackendUnavailableError, match="Connection refused"):
        place.opened(attempt)


def test_delivery_brings_a_journal_to_mlflow_whatever_happens_on_the_way(place: Place) -> None:
    """Three attempts, a proxy that fails in many ways, a cursor that is deleted: each row is there once."""
    run = None
    for number in range(3):
        run = nodetrack.init(project="p", id=run and run.id, mode="offline", version=f"0.{number}.0")
        for step in range(40):
            run.log({"loss": step + 0.5}, step=40 * number + step)
        run.finish()
    assert run is not None
    config = MlflowConfig(tracking_uri=place.proxy.url, experiment=place.experiment, batch_rows=25)
    for spoil in (place.proxy.lose_answer, place.proxy.cut_answer, place.proxy.cut_request):
        spoil(on="log-batch")
    place.proxy.answer(503, on="runs/update")
    for _ in range(2):
        delivery = Delivery(run.folder, "p", {"mlflow": MlflowBackend(config)}, follow=False)
        delivery.start()
        assert delivery.join(100)
        assert delivery.statuses()["mlflow"].delivered == 120
        (run.folder / "cursors" / "mlflow.json").unlink()
    assert place.points("latest/loss") == [(step, step % 40 + 0.5) for step in range(120)]
    assert place.points("v0.1.0/loss") == [(40 + step, step + 0.5) for step in range(40)]
    assert (place.run.info.status, place.run.data.tags["nodetrack.version"]) == ("FINISHED", "0.2.0")


@pytest.mark.slow
@pytest.mark.case("C019")
def test_a_server_that_is_restarted_has_everything(place: Place, attempt: Attempt) -> None:
    """What could not be sent meanwhile is sent again, to the same run."""
    backend = place.opened(attempt)
    backend.write(attempt.batch(*attempt.rows(0, 1)))
    late = attempt.batch(*attempt.rows(2, 3))
    place.server.stop()
    try:
        with pytest.raises(BackendUnavailableError):
            backend.write(late)
    finally:
        place.server.start()
    backend.write(late)
    assert [step for step, _ in place.points("latest/train/loss")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("status", "words"), [(401, "You are not authenticated"), (403, "Permission denied")]
)
def test_refused_credentials_are_said_in_the_servers_words(
    place: Place, attempt: Attempt, status: int, words: str
) -> None:
    """The answers are those of MLflow's own log-in, which needs packages of its own, so the proxy gives them.
    No password is in the message, not even of one in the address.
    """
    backend = place.opened(attempt)
    place.proxy.answer(status, body=words.encode(), times=2)
    with pytest.raises(BackendRefusedError, match=words):
        backend.write(attempt.batch(*attempt.rows(0)))
    in_address = place.proxy.url.replace("://", "://me:wr0ng@")
    with pytest.raises(BackendRefusedError, match=words) as refused:
        MlflowBackend(MlflowConfig(tracking_uri=in_address)).open(attempt.info)
    assert "wr0ng" not in str(refused.value)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, {"message": "Unauthorized"}),
        (403, {"error": {"code": 403, "status": "PERMISSION_DENIED"}}),
        (401, {"error_code": "401", "message": "Credential was not sent"}),
        (403, {"error_code": "INVALID_ACCESS_TOKEN", "message": "Invalid access token."}),
        (404, {"detail": "Not Found"}),
    ],
)
def test_a_refusal_in_the_json_of_somebody_before_the_server_is_a_refusal(
    place: Place, attempt: Attempt, status: int, body: dict[str, object]
) -> None:
    """As gateways and hosted services answer: the status decides, and the words are theirs."""
    place.proxy.answer(status, body=json.dumps(body).encode(), times=None)
    words = str(body.get("message", "")).rstrip(".") or next(iter(body))
    with pytest.raises(BackendRefusedError, match=f"{place.proxy.url} refuses us .{status}: .*{words}"):
        place.opened(attempt)
    place.proxy.heal()
    backend = place.opened(attempt)
    place.proxy.answer(status, body=json.dumps(body).encode(), times=None)
    with pytest.raises(BackendUnavailableError if status == 404 else BackendRefusedError):
        backend.write(attempt.batch(*attempt.rows(0)))


def test_a_fault_in_the_json_of_somebody_before_the_server_may_pass(place: Place, attempt: Attempt) -> None:
    place.proxy.answer(507, body=b'{"message": "no upstream"}', times=None)
    with pytest.raises(BackendUnavailableError, match="no upstream"):
        place.opened(attempt)


@pytest.mark.parametrize("way", ["options", "address", "variables"])
def test_credentials_are_sent_wherever_they_were_given(
    place: Place, attempt: Attempt, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As HTTP's basic authentication, which is MLflow's own."""
    options: dict[str, object] = {"tracking_uri": place.proxy.url, "experiment": place.experiment}
    if way == "options":
        options |= {"username": "me", "password": "p%41ss"}
    elif way == "address":
        options["tracking_uri"] = place.proxy.url.replace("://", "://me:p%2541ss@")
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "p%41ss")
    backend = MlflowBackend(MlflowConfig.model_validate(options))
    backend.open(attempt.info)
    sent = {request.headers["Authorization"] for request in place.proxy.requests}
    assert sent == {"Basic " + base64.b64encode(b"me:p%41ss").decode()}
    assert "p%" not in f"{backend.url}{backend.config.destination()}"


def test_a_deleted_experiment_is_refused_with_what_to_do(place: Place, attempt: Attempt) -> None:
    """MLflow keeps its name, so nobody can make it anew."""
    place.opened(attempt)
    place.server.client.delete_experiment(place.run.info.experiment_id)
    with pytest.raises(BackendRefusedError, match="is deleted: restore it with  mlflow experiments restore"):
        place.opened(attempt)


def test_status_and_labels_are_those_of_the_newest_attempt(place: Place) -> None:
    """Attempts are synced in any order, each twice; what comes late undoes nothing."""
    run = f"run{id(place):x}"
    attempts = {number: Attempt(run, number, f"0.{number}.0") for number in (3, 1, 4, 2)}
    memory: dict[str, JsonValue] = {}
    for number, attempt in attempts.items():
        failed = AttemptFinished(
            offset=0, time_ns=attempt.now_ns() + 10**9, state="terminated", exit_code=143, reason="SIGTERM"
        )
        note = RunEdited(offset=0, time_ns=attempt.now_ns(), fields={"notes": f"note {number}"})
        best = SummarySet(offset=0, time_ns=attempt.now_ns(), summary={"best": number, f"only {number}": "x"})
        end = failed if number == 4 else attempt.end()
        batch = attempt.batch(*attempt.begin(), note, best, *attempt.rows(number), end)
        for _ in range(2):
            backend = place.opened(attempts[4], memory)
            backend.write(batch)
            memory = backend.memory
    tags = place.run.data.tags
    assert place.run.info.status == "KILLED"
    assert (tags["mlflow.note.content"], tags["nodetrack.version"]) == ("note 4", "0.4.0")
    assert [tags["summary/best"], *(tags[f"summary/only {number}"] for number in attempts)] == ["4", *"xxxx"]
    assert {step for step, _ in place.points("latest/train/loss")} == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("state", "exit_code", "status"),
    [("finished", 0, "FINISHED"), ("crashed", 1, "FAILED"), ("terminated", 143, "KILLED")],
)
def test_the_run_ends_as_the_attempt_did(
    place: Place, attempt: Attempt, state: str, exit_code: int, status: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """And runs again with the next one. MLflow's own cheerful lines do not reach standard output."""
    backend = place.opened(attempt)
    backend.write(attempt.batch(*attempt.begin()))
    assert place.run.info.status == "RUNNING"
    end = AttemptFinished(offset=0, time_ns=attempt.now_ns(), state=state, exit_code=exit_code, reason="")
    backend.write(attempt.batch(end))
    assert (place.run.info.status, place.run.info.end_time) == (status, end.time_ns // 1_000_000)
    following = Attempt(attempt.info.run, 2)
    place.opened(following, backend.memory).write(following.batch(*following.begin()))
    assert place.run.info.status == "RUNNING"
    assert capfd.readouterr().out == ""


def test_labels_summary_and_system_metrics_have_their_places(place: Place, attempt: Attempt) -> None:
    """A removed summary entry goes away; system metrics stand where MLflow's page looks for them."""
    backend = place.opened(attempt)
    edited = RunEdited(
        offset=0,
        time_ns=attempt.now_ns(),
        fields={"name": "fast one", "notes": "a\nb", "tags": ["x", "y"], "group": "g", "job_type": None},
    )
    summary = SummarySet(offset=0, time_ns=attempt.now_ns(), summary={"best": 0.5, "gone": 1})
    system = SystemRow(offset=0, names=("system/cpu_percent",), values=[12.5], time_ns=5_000_000_000)
    backend.write(attempt.batch(edited, summary, system))
    backend.write(attempt.batch(SummarySet(offset=0, time_ns=attempt.now_ns(), summary={"gone": None})))
    tags = place.run.data.tags
    assert place.run.info.run_name == "fast one"
    assert tags["mlflow.note.content"] == "a\nb"
    assert (tags["nodetrack.tags"], tags["nodetrack.group"], tags["summary/best"]) == ("x, y", "g", "0.5")
    assert "summary/gone" not in tags
    assert place.points("system/cpu_percent") == [(5, 12.5)]


def test_what_mlflow_cannot_show_is_counted(place: Place, attempt: Attempt) -> None:
    """A histogram is no number; the rest of its row arrives."""
    backend = place.opened(attempt)
    backend.write(attempt.batch(attempt.row(0, {"h": Histogram([1.0]).stored(), "x": 1})))
    assert backend.left_out == {"MLflow has no place for a histogram": 1}
    assert place.points("latest/x") == [(0, 1.0)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own, of SQLAlchemy
def test_a_database_can_be_written_without_a_server(tmp_path: Path, attempt: Attempt) -> None:
    """With the full package of MLflow, which opens the database itself."""
    backend = MlflowBackend(MlflowConfig(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db"))
    backend.open(attempt.info)
    batch = attempt.batch(*attempt.begin(), *attempt.rows(0, 1))
    backend.write(batch)
    backend.write(batch)
    assert backend.url is None
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    assert len(client.get_metric_history(backend.memory["mlflow_run"], "latest/train/loss")) == 2
