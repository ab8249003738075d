"""The backend that writes to InfluxDB 2 and 3, and to whatever speaks its write API, such as VictoriaMetrics.

One batch is one HTTP request, acknowledged by the status 204; nothing is sent from the client's background.
What becomes a tag and what a field is said in `_line_protocol`. Each point has a time of its own: where the
clock stands still or repeats itself, the next one is put a nanosecond later, always the same for the same
records, so that a batch that is sent again overwrites itself.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from time import time
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, cast
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from nodetrack.backends._bounded_http import BoundedPool
from nodetrack.backends._line_protocol import Lines
from nodetrack.backends._server_words import server_words, without_secrets
from nodetrack.backends.base import Backend, BackendConfig, Batch, RunInfo, Sdk
from nodetrack.errors import BackendRefusedError, BackendUnavailableError, BatchRejectedError
from nodetrack.records import JsonValue, Record

if TYPE_CHECKING:
    from influxdb_client.rest import ApiException

DEFAULT_URL: Final = "http://127.0.0.1:8086"
#: Each is also read with InfluxDB's own prefix: INFLUXDB_V2_URL.
_VARIABLES: Final = ("URL", "ORG", "BUCKET", "TOKEN")
_WRITTEN: Final = 204
_REFUSED: Final = frozenset({401, 403, 404})
_REJECTED: Final = frozenset({400, 413, 422})
_CONNECT_SECONDS: Final = 5.0
_LONGEST_WORDS: Final = 1_000
#: A clock that goes back by more was set: time begins anew. By less: each point is put behind the last.
_SET_BACK_NS: Final = 1_000_000_000
_LAST: Final = "last_time_ns"
#: So many attempts and writers are remembered; one that is forgotten goes on with the clock's own times.
_MOST_REMEMBERED: Final = 64


def variable(name: str) -> str:
    """What the environment says: `INFLUXDB_<name>` or `INFLUXDB_V2_<name>`; empty if neither is set."""
    return os.environ.get(f"INFLUXDB_{name}") or os.environ.get(f"INFLUXDB_V2_{name}") or ""


class InfluxdbConfig(BackendConfig):
    """Where the server is, and how it is spoken to. `token` is better left to the environment."""

    kind: Literal["influxdb"] = "influxdb"
    url: str = Field(
        default_factory=lambda: variable("URL") or DEFAULT_URL,
        validate_default=True,
        description="the server's address",
    )
    org: str = Field(default_factory=lambda: variable("ORG"), description="organisation; name or id")
    bucket: str = Field(
        default_factory=lambda: variable("BUCKET") or "nodetrack", description="bucket, or database"
    )
    token: SecretStr | None = Field(None, description="API token; default: INFLUXDB_TOKEN")
    measurement: str = Field("metrics", min_length=1, description="measurement of rows that name none")
    timeout_seconds: float = Field(10.0, gt=0, description="seconds that the server may take for an answer")
    gzip: bool = Field(True, description="compress what is sent")

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("an address such as https://influx.example.org:8086 is needed")
        if parts.username is not None:
            raise ValueError("an address holds no credentials: put the token into INFLUXDB_TOKEN")
        return url.rstrip("/")

    def destination(self) -> str:
        """See BackendConfig."""
        return f"{self.url}, bucket {self.bucket}{self.of_org}"

    @property
    def of_org(self) -> str:
        """The organisation in words, if there is one."""
        return f" of {self.org}" if self.org else ""

    def public(self) -> dict[str, JsonValue]:
        """See BackendConfig. The place as well where it came from the environment: another process may lack
        that.
        """
        return {**super().public(), "url": self.url, "org": self.org, "bucket": self.bucket}


class InfluxdbBackend(Backend[InfluxdbConfig]):
    """Rows as points of one measurement; see docs/backends.md for what stands where."""

    config_class = InfluxdbConfig
    sdk: ClassVar = Sdk("influxdb_client", "influxdb")
    variables: ClassVar = tuple(f"INFLUXDB_{v2}{name}" for v2 in ("", "V2_") for name in _VARIABLES)

    def __init__(self, config: InfluxdbConfig) -> None:
        super().__init__(config)
        self._lines = Lines(config.measurement, self.leave_out)
        self._times = PointTimes()
        self._client: _Client | None = None

    def open(self, run: RunInfo) -> None:  # noqa: ARG002 - the server need not know whose rows will come
        """See Backend. A write of no points is what every server of this protocol checks the token and the
        bucket for.
        """
        self.close()
        self._client = _Client(self.config)
        try:
            self._client.write(b"")
        except BatchRejectedError:
            return  # InfluxDB 2 lets us in first, and then says that a write needs points

    def write(self, batch: Batch) -> None:
        """See Backend."""
        if self._client is None:
            raise BackendUnavailableError("The backend 'influxdb' is not open.")
        times = self._times.of(batch, self.memory)
        text = "\n".join(self._lines.of(batch, times))
        try:
            if text:
                self._client.write(text.encode("utf-8", "backslashreplace"))
        except BatchRejectedError:
            self._times.keep(batch, times)
            raise

    def close(self) -> None:
        """See Backend."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    @property
    def url(self) -> str | None:
        """See Backend."""
        return self.config.url


class PointTimes:
    """The times of records as points, no two the same for one attempt and writer.

    They follow from the records and from the last time that was given, which is kept in the backend's memory:
    sent again, a record gets the same. A server may refuse a batch and keep most of its points, so the times
    of a refused batch stay with its records while it is taken apart.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, int], int] = {}

    def of(self, batch: Batch, memory: dict[str, JsonValue]) -> list[int]:
        """The time of each record; `memory` is moved on."""
        lasts = _times_in(memory.get(_LAST))
        memory[_LAST] = lasts
        # The companion apart: how its batches fall between the node's differs from one sending to the next.
        writer = f"{batch.run.attempt} {batch.writer}{' companion' if batch.companion else ''}"
        last = lasts.pop(writer, None)
        place = (batch.run.attempt, batch.segment)
        times = []
        for record in batch.records:
            time_ns = self._kept.get((*place, record.offset)) if self._kept else None
            if time_ns is None:
                time_ns = _time_of(record)
                if last is not None and last - _SET_BACK_NS <= time_ns <= last:
                    time_ns = last + 1
            times.append(time_ns)
            last = time_ns
        if last is not None:
            lasts[writer] = last  # behind all others: the first are forgotten first
        while len(lasts) > _MOST_REMEMBERED:
            del lasts[next(iter(lasts))]
        return times

    def keep(self, batch: Batch, times: Sequence[int]) -> None:
        """Of a batch that was refused: its records get these times again."""
        places = [(batch.run.attempt, batch.segment, record.offset) for record in batch.records]
        if places and places[0] not in self._kept:
            self._kept = dict(zip(places, times, strict=True))


def _times_in(remembered: JsonValue) -> dict[str, int]:
    """What is one of our times of what a cursor holds, which lies on a disk where anybody may write."""
    if not isinstance(remembered, dict):
        return {}
    return {writer: last for writer, last in remembered.items() if isinstance(last, int)}


class _Client:
    """The official client, one request a call."""

    def __init__(self, config: InfluxdbConfig) -> None:
        from influxdb_client.client.influxdb_client import InfluxDBClient
        from influxdb_client.service.write_service import WriteService

        self._config = config
        given = config.token.get_secret_value() if config.token is not None else variable("TOKEN")
        self._token = given.strip()
        if not (
            self._token.isascii() and self._token.isprintable()
        ):  # else the client says it, token and all
            raise BackendRefusedError(
                f"The token for InfluxDB at {config.url} holds a character that no token has: "
                "check INFLUXDB_TOKEN."
            )
        self._client = InfluxDBClient(
            url=config.url,
            token=self._token or None,  # type: ignore[arg-type]  # it sends no header then
            org=config.org,
            retries=False,  # delivery tries again, and knows for how long
        )
        rest: Any = self._client.api_client.rest_client
        rest.pool_manager = BoundedPool(
            rest.pool_manager,
            f"InfluxDB at {config.url}",
            config.timeout_seconds,
            lambda text: without_secrets(text, [self._token]),
        )
        self._service = WriteService(self._client.api_client)  # type: ignore[no-untyped-call]

    def write(self, lines: bytes) -> None:
        """Return when the server has the lines; raises as `nodetrack.backends.base` says."""
        from influxdb_client.rest import ApiException

        config = self._config
        packed = config.gzip and len(lines) > 0
        try:
            _, status, _ = self._service.post_write_with_http_info(  # type: ignore[no-untyped-call]
                org=config.org,
                bucket=config.bucket,
                # Not by the client, whose level 9 takes longer than all else of a catch-up together.
                body=gzip.compress(lines, compresslevel=1) if packed else lines,
                precision="ns",
                content_encoding="gzip" if packed else "identity",
                content_type="text/plain; charset=utf-8",
                _request_timeout=self._timeout(config.timeout_seconds),
            )
        except ApiException as error:
            raise self._meaning(error) from error
        if status != _WRITTEN:
            raise BackendUnavailableError(
                f"{config.url} answers a write with the status {status}, not {_WRITTEN}: it is no InfluxDB."
            )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()  # type: ignore[no-untyped-call]

    @staticmethod
    def _timeout(seconds: float) -> tuple[float, float]:
        """For the connection and for each answer, in milliseconds."""
        return min(seconds, _CONNECT_SECONDS) * 1000, seconds * 1000

    def _meaning(self, error: ApiException) -> Exception:
        config, words = self._config, self._words(error)
        if error.status in _REFUSED:
            return BackendRefusedError(
                f"InfluxDB at {config.url} refuses the bucket {config.bucket}{config.of_org} "
                f"({error.status}: {words}): check INFLUXDB_TOKEN, url, org and bucket."
            )
        if error.status in _REJECTED:
            return BatchRejectedError(f"InfluxDB at {config.url} answers {error.status}: {words}")
        return BackendUnavailableError(
            f"InfluxDB at {config.url} answers {error.status}: {words}", retry_after_seconds(error.headers)
        )

    def _words(self, error: ApiException) -> str:
        """What the server says, in one line."""
        said = next((said for said in (error.message, error.reason) if str(said).strip()), "")
        return server_words(str(said), [self._token], longest=_LONGEST_WORDS)


def retry_after_seconds(headers: Mapping[str, str] | None) -> float | None:
    """How long a server asks us to wait, in either form of the header; None if it does not say.

    https://www.rfc-editor.org/rfc/rfc9110#field.retry-after
    """
    asked = (headers or {}).get("Retry-After", "")
    if asked.strip().isdecimal():
        return float(asked)
    try:
        return max(0.0, parsedate_to_datetime(asked).timestamp() - time())
    except ValueError:
        return None


def _time_of(record: Record) -> int:
    """Each kind has a time but has it for itself; see records.py."""
    return cast("int", record.time_ns)  # type: ignore[attr-defined]
