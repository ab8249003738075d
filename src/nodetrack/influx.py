"""`MetricsLogger`: measurements with tags and fields, as code that speaks to InfluxDB has them.

    metrics = MetricsLogger(prefix="miner_", uid=7, role="miner", config=hparams)
    metrics.log("training_step", tags={"window": 12, "stage": "train"}, fields={"loss": 0.5, "norms": norms})

A call is one row of the node's run: it is in the journal when `log` returns, and delivery takes it to every
backend of the run. What InfluxDB makes of a row is said in `nodetrack.backends.influxdb`.
"""

from __future__ import annotations

import json
import math
import operator
import os
import random
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Self, SupportsIndex, cast

from nodetrack import tracker
from nodetrack.active import active_run, set_active
from nodetrack.backends._line_protocol import MEASUREMENT
from nodetrack.errors import UsageError
from nodetrack.live_run import Run
from nodetrack.run_state import logger
from nodetrack.values import Text, TypedValue

#: Tags whose value grows: as a tag each value would be a new series, so they become fields.
_GROWING: Final = re.compile(
    r"(^|_)(attempt|batch|block|epoch|iteration|round|runtime_id|step|time|timestamp|window)s?$"
)
#: Names that tell the row's step, the first that there is.
_STEPS: Final = ("step", "global_step")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
#: A sample of the machine is shared by all rows for so long: it costs milliseconds on the caller's thread.
_SAMPLE_SECONDS: Final = 1.0
_LONGEST_LISTED: Final = 1000
_GPU: Final = "system/gpu/"


class MetricsLogger:
    """Logs measurements to the run of the node (`role`, `uid`).

    If such a run is active it is used as it is; one that is not given counts as the same. Otherwise a run is
    started, with InfluxDB as its backend: `host`, `port`, `database`, `org` and `token`, or INFLUXDB_HOST,
    INFLUXDB_PORT, INFLUXDB_DATABASE, INFLUXDB_ORG and INFLUXDB_TOKEN, or else the backend's own settings.
    A `host` without `http://` is spoken to by HTTPS. `prefix` begins the name of every measurement, `config`
    becomes the run's config, and `settings` are those of `nodetrack.init`. Raises what `init` raises.
    """

    def __init__(
        self,
        *,
        prefix: str = "",
        uid: str | int | None = None,
        version: str | None = None,
        role: str = "",
        config: object = None,
        group: str = "",
        job_type: str = "",
        host: str | None = None,
        port: int | None = None,
        database: str | None = None,
        org: str | None = None,
        token: str | None = None,
        **settings: object,
    ) -> None:
        self.prefix = prefix
        #: Calls that `sample_rate` left out.
        self.sampled_out = 0
        self._machine: _Machine | None = None
        self._foreign = _active_run_of(role, uid)
        backends = settings.pop("backends", None)
        self.run: Run = self._foreign or _started(
            [_backend(host, port, database, org, token)] if backends is None else backends,
            settings
            | {
                "role": role or None,
                "uid": uid,
                "version": version,
                "config": config,
                "group": group or None,
                "job_type": job_type or None,
            },
        )
        if self._foreign is not None and "influxdb" not in self._foreign.health().backends:
            logger.warning(
                "MetricsLogger logs to the active run %s, which has no backend 'influxdb': pass "
                'backends=["influxdb"] to init if its rows are to go there.',
                self._foreign.id,
            )

    def log(
        self,
        measurement: str,
        tags: Mapping[str, object] | None,
        fields: Mapping[str, object],
        timestamp: int | float | datetime | None = None,
        sample_rate: float = 1.0,
        with_system_metrics: bool = False,
        with_gpu_metrics: bool = False,
    ) -> None:
        """Record one row of `<prefix><measurement>`.

        Tags are kept as the row's context, so they have to be few; one that grows, such as `window` or
        `global_step`, becomes a field. A field is a number, a typed value or a text; of a list of numbers
        the fields `<name>_mean`, `_min`, `_max`, `_p50`, `_p90`, `_std` (of the whole, not of a sample)
        and `_count` are kept, None is left out. A field or tag `step`, else `global_step`, is the row's step.

        `timestamp`: nanoseconds as an int, seconds as a float, or a datetime; default: now. `sample_rate`:
        the share of calls to keep, which the row then names. `with_system_metrics`, `with_gpu_metrics`: add
        the newest values of the machine, of its NVIDIA GPUs. Raises RunFinishedError after the end of the
        run, and nothing for disk or network.
        """
        now = time.time_ns()
        if sample_rate < 1.0:
            if random.random() >= sample_rate:
                self.sampled_out += 1
                return
            fields = {**fields, "sample_rate": sample_rate}
        time_ns = _nanoseconds(timestamp, now)
        try:
            context, values = _sorted_out(tags or {}, fields)
            if with_system_metrics or with_gpu_metrics:
                values |= self._sample(system=with_system_metrics, gpu=with_gpu_metrics)
            step = _step(values)
        except Exception as error:  # whatever the caller's own classes raise, training goes on (P1)
            self.run._state.skip_row(error)  # noqa: SLF001 - as in `_write`
            return
        context[MEASUREMENT] = f"{self.prefix}{measurement}"
        self._write(context, values, step, time_ns)

    def close(self) -> None:
        """Finish the run, unless it was there before this logger."""
        if self._machine is not None:
            self._machine.close()
            self._machine = None
        if self._foreign is None:
            self.run.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(
        self, context: Mapping[str, str], values: Mapping[str, object], step: int | None, time_ns: int
    ) -> None:
        # Without a step, rows beside somebody else's must not move that one's counter.
        commit = None if self._foreign is None else False
        bound = self.run.bind(**context)
        # `Run.log` stamps the time of the call; here the caller may know better.
        bound._log_unusual(values, step, time_ns, commit)  # noqa: SLF001 - one thing in two files
        bound._state.say()  # noqa: SLF001 - as above

    def _sample(self, *, system: bool, gpu: bool) -> dict[str, object]:
        if self._machine is None:
            self._machine = _Machine(self.run)
        sample = self._machine.sample()
        return {name: value for name, value in sample.items() if (gpu if name.startswith(_GPU) else system)}


class _Machine:
    """The newest sample of the machine and of this process."""

    def __init__(self, run: Run) -> None:
        from nodetrack.delivery.system import SystemSampler

        self._sampler = SystemSampler(os.getpid(), run.folder)
        self._newest: dict[str, float] = {}
        self._taken_at = -math.inf

    def sample(self) -> dict[str, float]:
        if time.monotonic() - self._taken_at >= _SAMPLE_SECONDS:
            self._newest = self._sampler.sample()
            self._taken_at = time.monotonic()
        return self._newest

    def close(self) -> None:
        self._sampler.close()


# -- the run ---------------------------------------------------------------------------------------------


def _active_run_of(role: str, uid: str | int | None) -> Run | None:
    run = active_run()
    if run is None or (role and role != run.role) or (uid is not None and str(uid) != run.uid):
        return None
    return run


def _started(backends: object, arguments: Mapping[str, object]) -> Run:
    """A run of its own, which does not take the place of one that is active."""
    before = active_run()
    run = tracker.init(backends=backends, **arguments)  # type: ignore[arg-type]  # init checks what it is given
    if before is not None:
        set_active(before)
    return run


def _backend(
    host: str | None, port: int | None, database: str | None, org: str | None, token: str | None
) -> dict[str, object]:
    """The backend with what is given or found under the names that such code uses."""
    host = host or os.environ.get("INFLUXDB_HOST")
    url = None
    if host:
        address = host if "://" in host else f"https://{host}"
        url = f"{address}:{port or os.environ.get('INFLUXDB_PORT') or 8086}"
    given = {
        "url": url,
        "bucket": database or os.environ.get("INFLUXDB_DATABASE"),
        "org": org,
        "token": token,
    }
    return {"kind": "influxdb", **{name: value for name, value in given.items() if value}}


# -- tags and fields -------------------------------------------------------------------------------------


def _sorted_out(
    tags: Mapping[str, object], fields: Mapping[str, object]
) -> tuple[dict[str, str], dict[str, object]]:
    """What of the tags is context, and all that is a value."""
    context: dict[str, str] = {}
    values: dict[str, object] = {}
    for name, tag in tags.items():
        if tag is None:
            continue
        if _GROWING.search(str(name)):
            values.update(_value(str(name), tag))
        else:
            context[str(name)] = str(tag)
    for name, field in fields.items():
        values.update(_value(str(name), field))
    return context, values


def _value(name: str, value: object) -> dict[str, object]:
    """The metrics that a field becomes."""
    if value is None:
        return {}
    if isinstance(value, bool | int | float | Mapping | TypedValue):
        return {name: value}
    if isinstance(value, str):
        return {name: Text(value)}
    items = _items(value)
    if items is None:
        return {name: value if hasattr(value, "item") or hasattr(value, "__float__") else Text(str(value))}
    if not all(isinstance(item, bool | int | float) for item in items):
        return {name: Text(json.dumps(items, default=str))}
    numbers = cast("Sequence[float]", items)
    described: dict[str, object] = {f"{name}_{stat}": number for stat, number in statistics(numbers).items()}
    if len(items) <= _LONGEST_LISTED and all(
        type(item) is int for item in items
    ):  # the uids of peers, mostly
        described[name] = Text(json.dumps(items))
    return described


def _step(values: dict[str, object]) -> int | None:
    """The row's step, if the values tell it; one that is called so is not kept a second time."""
    for name in _STEPS:
        if isinstance(values.get(name), SupportsIndex):
            step = operator.index(cast("SupportsIndex", values[name]))
            if name == "step":
                del values[name]
            return step
    return None


def _items(value: object) -> list[object] | None:
    """The items of a list, an array or a tensor of any shape; None of a single value."""
    if getattr(value, "ndim", None) == 0:
        return None
    for call in ("detach", "cpu", "flatten", "tolist"):
        if hasattr(value, call):
            value = getattr(value, call)()
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return list(value)
    return None


def statistics(numbers: Sequence[float]) -> dict[str, float]:
    """Of the finite ones among the numbers: mean, min, max, p50, p90, std; and how many there are in all.

    Quantiles lie on straight lines between neighbours; the standard deviation divides by the count.
    """
    finite = sorted(float(number) for number in numbers if math.isfinite(number))
    found: dict[str, float] = {"count": len(numbers)}
    if len(finite) < len(numbers):
        found["nonfinite_count"] = len(numbers) - len(finite)
    if finite:
        mean = math.fsum(finite) / len(finite)
        found |= {"mean": mean, "min": finite[0], "max": finite[-1]}
        found |= {"p50": _quantile(finite, 0.5), "p90": _quantile(finite, 0.9)}
        found["std"] = math.sqrt(math.fsum((number - mean) ** 2 for number in finite) / len(finite))
    return found


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _nanoseconds(timestamp: object, now: int) -> int:
    if timestamp is None:
        return now
    if isinstance(timestamp, datetime):
        return (timestamp.astimezone(UTC) - _EPOCH) // _MICROSECOND * 1000
    if isinstance(timestamp, float) and math.isfinite(timestamp):
        return round(timestamp * 1e9)
    if isinstance(timestamp, SupportsIndex):
        return operator.index(timestamp)
    raise UsageError(
        f"timestamp takes nanoseconds as an int, seconds as a float, or a datetime, not {timestamp!r}."
    )
