"""The backend for MLflow, through MLflow's own client: one MLflow run for each run.

The MLflow run is remembered beside the cursor and carries the tag `nodetrack.run`, so that it is found
again by a machine that has no cursor. Metrics, params and tags go in `log-batch` requests within MLflow's
limits. A server keeps a point once for each name, step, millisecond and value, so a batch may be sent twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Literal, Self, TypeVar, cast
from urllib.parse import unquote, urlsplit

from pydantic import Field, SecretStr, ValidationInfo, model_validator

from nodetrack.backends._mlflow_answers import FAULT, status_of, words_of
from nodetrack.backends._mlflow_names import new_params, short
from nodetrack.backends._mlflow_parcel import Parcel
from nodetrack.backends.base import Backend, BackendConfig, Batch, RunInfo, Sdk
from nodetrack.errors import BackendRefusedError, BackendUnavailableError, BatchRejectedError
from nodetrack.records import JsonValue

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

RUN_TAG: Final = "nodetrack.run"
#: The MLflow run that this one continues, because somebody deleted that one.
CONTINUES_TAG: Final = "nodetrack.continues"

_METRICS_A_REQUEST: Final = 1_000
_PARAMS_A_REQUEST: Final = 100
_OPEN_SECONDS: Final = 5
_NS_A_MS: Final = 1_000_000
#: A request that every server answers whom it lets in.
_HARMLESS: Final = "/api/2.0/mlflow/experiments/search"

_Item = TypeVar("_Item")


class MlflowConfig(BackendConfig):
    """The server or store, the experiment, and who we are.

    What is not given is read from MLflow's own variables.
    """

    kind: Literal["mlflow"] = "mlflow"
    tracking_uri: str | None = Field(
        None, description="such as http://mlflow:5000; else the variable MLFLOW_TRACKING_URI"
    )
    experiment: str | None = Field(None, description="made if it does not exist; else the project's name")
    username: str | None = Field(None, description="else MLFLOW_TRACKING_USERNAME")
    password: SecretStr | None = Field(None, description="else MLFLOW_TRACKING_PASSWORD")
    token: SecretStr | None = Field(None, description="else MLFLOW_TRACKING_TOKEN")
    timeout_seconds: int = Field(30, ge=1, description="seconds that one request may take once it is open")
    batch_rows: int = Field(200, ge=1, description="records sent at once, at most")

    @model_validator(mode="after")
    def _has_address(self, info: ValidationInfo) -> Self:
        """Said at the start, not by the delivery process. The context is that of `parse_backends`."""
        if info.context and not (self.tracking_uri or info.context["variables"].get("MLFLOW_TRACKING_URI")):
            raise ValueError("it has no address, so give it tracking_uri, or set MLFLOW_TRACKING_URI")
        return self

    def uri(self) -> str:
        """The tracking URI, with whatever password somebody wrote into it; "" if there is none."""
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")

    def destination(self) -> str:
        """See BackendConfig."""
        return f"{_public_uri(self.uri())} {self.experiment or ''}".strip()

    def public(self) -> dict[str, JsonValue]:
        """See BackendConfig."""
        public = super().public()
        return {**public, "tracking_uri": _public_uri(self.tracking_uri)} if self.tracking_uri else public


class MlflowBackend(Backend[MlflowConfig]):
    """Writes to one MLflow run."""

    config_class = MlflowConfig
    sdk = Sdk("mlflow", "mlflow")
    variables = (
        "MLFLOW_TRACKING_URI",
        "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_TOKEN",
        "MLFLOW_TRACKING_INSECURE_TLS",
        "MLFLOW_TRACKING_SERVER_CERT_PATH",
        "MLFLOW_TRACKING_CLIENT_CERT_PATH",
    )

    def __init__(self, config: MlflowConfig) -> None:
        super().__init__(config)
        self._client: MlflowClient | None = None
        self._experiment_id = ""
        self._run_id = ""
        #: What the MLflow run has, so that nothing is sent that it has already.
        self._params: dict[str, str] = {}
        self._tags: dict[str, str] = {}
        self._status: tuple[str, int | None] | None = None

    @property
    def url(self) -> str | None:
        """See Backend."""
        uri = _public_uri(self.config.uri()).rstrip("/")
        if not self._run_id or not uri.startswith("http"):
            return None
        return f"{uri}/#/experiments/{self._experiment_id}/runs/{self._run_id}"

    # -- opening -------------------------------------------------------------------------------------

    def open(self, run: RunInfo) -> None:
        """See Backend."""
        uri = self.config.uri()
        _refuse_unless_usable(uri)
        self._set_variables(uri)
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        try:
            self._client = MlflowClient(_public_uri(uri) if uri.startswith("http") else uri)
            self._experiment_id = self._find_experiment(self.config.experiment or run.project)
            self._take_up(run)
        except MlflowException as error:
            raise self._opening_error(error) from error
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(self.config.timeout_seconds)

    def close(self) -> None:
        """See Backend."""
        self._client = None

    def _set_variables(self, uri: str) -> None:
        """MLflow's client is set by variables alone: those of this process, which is the delivery process."""
        # Delivery tries again, without blocking for minutes.
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(min(_OPEN_SECONDS, self.config.timeout_seconds))
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # nothing leaves the node but what was asked for
        in_address = urlsplit(uri if uri.startswith("http") else "")
        for name, value, written in (
            ("USERNAME", self.config.username, in_address.username),
            ("PASSWORD", _revealed(self.config.password), in_address.password),
            ("TOKEN", _revealed(self.config.token), None),
        ):
            if given := value or unquote(written or ""):
                os.environ[f"MLFLOW_TRACKING_{name}"] = given

    @property
    def _open_client(self) -> MlflowClient:
        if self._client is None:
            raise BackendUnavailableError("The MLflow backend is not open.")
        return self._client

    def _find_experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._open_client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._open_client.create_experiment(name))
            except MlflowException:
                found = self._open_client.get_experiment_by_name(name)  # another node was faster
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise BackendRefusedError(
                f"The MLflow experiment {name!r} is deleted: restore it with  mlflow experiments restore "
                f"--experiment-id {found.experiment_id}  or name another one."
            )
        return str(found.experiment_id)

    def _take_up(self, run: RunInfo) -> None:
        """Go on with the MLflow run that is ours, or begin one."""
        mlflow_run, gone = self._find_run(run)
        if mlflow_run is None:
            mlflow_run = self._create_run(run, gone)
        self._run_id = str(mlflow_run.info.run_id)
        self.memory["mlflow_run"] = self._run_id
        self._params = dict(mlflow_run.data.params)
        self._tags = dict(mlflow_run.data.tags)
        self._status = (str(mlflow_run.info.status), mlflow_run.info.end_time)

    def _find_run(self, run: RunInfo) -> tuple[Run | None, str]:
        """Our MLflow run if there is one, else the id of the one that was deleted."""
        remembered = str(self.memory.get("mlflow_run") or "")
        if remembered and (found := self._get_run(remembered)) is not None:
            return found, ""
        from mlflow.entities import ViewType

        query = f"tags.`{RUN_TAG}` = '{run.run}'"  # a run id holds no quotation mark
        known = self._open_client.search_runs(
            [self._experiment_id],
            query,
            ViewType.ALL,
            max_results=100,
            order_by=["attributes.start_time ASC"],
        )
        alive = next((found for found in known if found.info.lifecycle_stage == "active"), None)
        gone = remembered or (str(known[-1].info.run_id) if known else "")
        return alive, gone

    def _get_run(self, run_id: str) -> Run | None:
        """The MLflow run; None only if the server says that it is deleted or has never been."""
        from mlflow.exceptions import MlflowException

        try:
            found = self._open_client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return found if found.info.lifecycle_stage == "active" else None

    def _create_run(self, run: RunInfo, gone: str) -> Run:
        facts = {
            RUN_TAG: run.run,
            "nodetrack.project": run.project,
            "nodetrack.role": run.role,
            "nodetrack.uid": run.uid,
            "nodetrack.environment": run.environment,
            "nodetrack.previous_run": run.previous_run or "",
            CONTINUES_TAG: gone,
        }
        name = run.name or "-".join(part for part in (run.role, run.uid) if part) or run.run
        return self._open_client.create_run(
            self._experiment_id,
            start_time=max(run.started_ns // _NS_A_MS, 0) or None,
            tags={key: short(value) for key, value in facts.items() if value},
            run_name=short(name),
        )

    def _opening_error(self, error: MlflowException) -> Exception:
        status = self._status_of(error)
        return self._refused(status, error) if status in (400, 401, 403, 404) else self._unavailable(error)

    def _refused(self, status: int, error: MlflowException) -> BackendRefusedError:
        return BackendRefusedError(
            f"{self._place} refuses us ({status}: {words_of(error)}): check the address and the "
            "credentials (MLFLOW_TRACKING_USERNAME and _PASSWORD, or MLFLOW_TRACKING_TOKEN)."
        )

    def _unavailable(self, error: MlflowException) -> BackendUnavailableError:
        return BackendUnavailableError(f"{self._place} cannot be had: {words_of(error)}")

    @property
    def _place(self) -> str:
        return f"MLflow at {_public_uri(self.config.uri())}"

    def _status_of(self, error: MlflowException) -> int:
        """The HTTP status of an answer, or the one that MLflow's error code stands for."""
        meant = int(error.get_http_status_code())  # type: ignore[no-untyped-call]  # MLflow gives it no types
        status = status_of(error, meant)
        return self._ask_status() if status is None else status

    def _ask_status(self) -> int:
        """Whether we are let in, as the status of a request that changes nothing; 500 if it does not tell."""
        from mlflow.exceptions import MlflowException
        from mlflow.utils.credentials import get_default_host_creds
        from mlflow.utils.rest_utils import http_request

        try:
            creds = get_default_host_creds(_public_uri(self.config.uri()))  # type: ignore[no-untyped-call]
            answer = http_request(  # type: ignore[no-untyped-call]
                creds, _HARMLESS, "GET", params={"max_results": 1}, raise_on_status=False
            )
        except MlflowException:
            return FAULT
        return int(answer.status_code) if answer.status_code in (401, 403, 404) else FAULT

    # -- writing -------------------------------------------------------------------------------------

    def write(self, batch: Batch) -> None:
        """See Backend."""
        from mlflow.exceptions import MlflowException

        parcel = self._packed(batch)
        try:
            try:
                self._send(parcel)
            except MlflowException as error:
                if self._status_of(error) not in (400, 404) or self._get_run(self._run_id) is not None:
                    raise
                self._take_up(batch.run)  # somebody deleted the MLflow run: go on in one that says so
                self._send(parcel)
        except MlflowException as error:
            raise self._writing_error(error) from error
        self._count_left_out(batch)

    def _writing_error(self, error: MlflowException) -> Exception:
        status = self._status_of(error)
        if status in (401, 403):
            return self._refused(status, error)
        if status in (400, 413, 422):
            return BatchRejectedError(f"{self._place} refuses it ({status}): {words_of(error)}")
        return self._unavailable(error)

    def _packed(self, batch: Batch) -> Parcel:
        parcel = Parcel(batch.run.version, batch.run.attempt, self._times())
        for record in batch.records:
            parcel.add(record)
        return parcel

    def _times(self) -> dict[str, int]:
        """When each tag was set that we have set: what is delivered late does not undo what came after it."""
        known = self.memory.get("times")
        if not isinstance(known, dict) or not all(isinstance(at, int) for at in known.values()):
            self.memory["times"] = known = {}
        return cast("dict[str, int]", known)

    def _send(self, parcel: Parcel) -> None:
        from mlflow.entities import Metric

        for points in _pieces(parcel.metrics, _METRICS_A_REQUEST):
            self._open_client.log_batch(self._run_id, metrics=[Metric(*point) for point in points])
        for config in parcel.configs:
            self._send_params(config)
        self._send_tags(parcel.tags)
        if parcel.status is not None and parcel.status != self._status:
            status, end_ms = parcel.status
            if end_ms is None:
                self._open_client.update_run(self._run_id, status)
            else:
                self._open_client.set_terminated(self._run_id, status, end_ms)
            self._status = parcel.status

    def _send_params(self, config: Mapping[str, str]) -> None:
        """Add what the MLflow run has not; should it have got others meanwhile, look and decide again."""
        from mlflow.exceptions import MlflowException

        try:
            self._log_params(new_params(self._params, config))
        except MlflowException as error:
            current = self._get_run(self._run_id) if self._status_of(error) == 400 else None
            if current is None or dict(current.data.params) == self._params:
                raise
            self._params = dict(current.data.params)
            self._log_params(new_params(self._params, config))

    def _log_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        for pairs in _pieces(list(params.items()), _PARAMS_A_REQUEST):
            self._open_client.log_batch(self._run_id, params=[Param(*pair) for pair in pairs])
            self._params.update(pairs)

    def _send_tags(self, tags: Mapping[str, str | None]) -> None:
        from mlflow.entities import RunTag

        new = [
            (key, value) for key, value in tags.items() if value is not None and self._tags.get(key) != value
        ]
        for pairs in _pieces(new, _PARAMS_A_REQUEST):
            self._open_client.log_batch(self._run_id, tags=[RunTag(*pair) for pair in pairs])
            self._tags.update(pairs)
        for key in [key for key, value in tags.items() if value is None and key in self._tags]:
            self._open_client.delete_tag(self._run_id, key)
            del self._tags[key]

    def _count_left_out(self, batch: Batch) -> None:
        for row in batch.rows:
            for value in row.values:
                if isinstance(value, Mapping):
                    self.leave_out(f"MLflow has no place for a {value['type']}")


# ---------------------------------------------------------------------------------------------------
# Addresses and errors


def _refuse_unless_usable(uri: str) -> None:
    if not uri:
        raise BackendRefusedError(
            "The MLflow backend has no address: give it tracking_uri, or set MLFLOW_TRACKING_URI."
        )
    scheme = uri.partition(":")[0].partition("+")[0]
    if scheme in ("sqlite", "postgresql", "mysql", "mssql") and find_spec("sqlalchemy") is None:
        raise BackendRefusedError(
            f"MLflow needs its full package to write to {_public_uri(uri)} itself: install it with  "
            "pip install mlflow  or give the address of an MLflow server."
        )


def _revealed(secret: SecretStr | None) -> str | None:
    return secret.get_secret_value() if secret is not None else None


def _public_uri(uri: str) -> str:
    """The address without the name and password that may stand in it."""
    return re.sub(r"(?<=://)[^/@]*@", "", uri)


def _pieces(items: Sequence[_Item], most: int) -> Iterator[list[_Item]]:
    for start in range(0, len(items), most):
        yield list(items[start : start + most])
