"""What the machine and the trainer's processes use. Sampled in the delivery process, it costs the trainer
nothing.

Every name begins with `system/` and ends in its unit. A rate or a share of time is the mean since the sample
before, so the first sample has none. What a machine does not tell is left out; nothing here raises for it.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import psutil

from nodetrack.delivery.container import Container
from nodetrack.journal.writer import JournalWriter, KeySet
from nodetrack.records import StoredValue

_log = logging.getLogger("nodetrack")
_MILLI: Final = 1e-3


class Sampler(Protocol):
    """Where samples come from."""

    def sample(self) -> dict[str, float]:
        """The values as they are now, by name."""
        ...


class SystemRecorder:
    """Writes samples to a journal. Names that stay the same are written once a segment."""

    def __init__(self, writer: JournalWriter, sampler: Sampler) -> None:
        self._writer = writer
        self._sampler = sampler
        self._key_sets: dict[tuple[str, ...], KeySet] = {}

    def record(self) -> None:
        """Take a sample and write it."""
        time_ns = time.time_ns()
        sample = self._sampler.sample()
        if not sample:
            return
        names = tuple(sample)
        key_set = self._key_sets.setdefault(names, KeySet(names, {}))
        values: list[StoredValue] = list(sample.values())
        with self._writer.lock:
            self._writer.write_system(key_set, time_ns, values)


class SystemSampler:
    """Samples the machine, the process `pid` with its children, the disk under `folder`, and the GPUs."""

    def __init__(
        self, pid: int, folder: Path, *, container: Container | None = None, gpus: Gpus | None = None
    ) -> None:
        self._container = container or Container(pid)
        self._tree = _ProcessTree(pid)
        self._gpus = gpus or Gpus()
        self._folder = folder
        self._before: dict[str, float] = {}
        self._before_at = 0.0
        self._failed: set[str] = set()

    def sample(self) -> dict[str, float]:
        """The values as they are now, by name."""
        sample: dict[str, float] = {}
        counters: dict[str, float] = {}
        for probe in (self._cpu, self._memory, self._disk, self._network, self._processes, self._gpu):
            try:
                probe(sample, counters)
            except (OSError, RuntimeError, psutil.Error) as error:  # one answer less, not one sample less
                self._note(probe.__name__.lstrip("_"), error)
        sample |= self._rates(counters)
        return sample

    def close(self) -> None:
        """Let go of the GPUs' driver."""
        self._gpus.close()

    def _note(self, what: str, error: Exception) -> None:
        if what not in self._failed:
            self._failed.add(what)
            _log.info("The samples of the machine lack its %s: %s.", what, error)

    def _rates(self, counters: Mapping[str, float]) -> dict[str, float]:
        """How fast the counters have grown since the last sample."""
        now = time.monotonic()
        seconds, before = now - self._before_at, self._before
        self._before, self._before_at = dict(counters), now
        if seconds <= 0:
            return {}
        return {
            name: max(0.0, (count - before[name]) / seconds)
            for name, count in counters.items()
            if name in before
        }

    # -- probes: values go to `sample`, what has to be compared with the next time to `counters` -------

    def _cpu(self, sample: dict[str, float], counters: dict[str, float]) -> None:
        """Of all cores of the machine, or of those that the container may use."""
        use = self._container.cpu()
        if use is not None:
            counters["system/cpu_percent"] = 100 * use.used_seconds / use.cores
            return
        percent = psutil.cpu_percent()
        if self._before_at:
            sample["system/cpu_percent"] = percent

    def _memory(self, sample: dict[str, float], _: dict[str, float]) -> None:
        machine, container = psutil.virtual_memory(), self._container.memory()
        used, total = machine.total - machine.available, machine.total
        if container is not None and container.limit_bytes < total:
            used, total = container.used_bytes, container.limit_bytes
        sample["system/memory_used_bytes"] = used
        sample["system/memory_percent"] = 100 * used / total

    def _disk(self, sample: dict[str, float], counters: dict[str, float]) -> None:
        sample["system/disk_free_bytes"] = psutil.disk_usage(str(self._folder)).free
        moved = psutil.disk_io_counters()
        if moved is not None:
            counters["system/disk_read_bytes_per_second"] = moved.read_bytes
            counters["system/disk_written_bytes_per_second"] = moved.write_bytes

    def _network(self, _: dict[str, float], counters: dict[str, float]) -> None:
        """Without the loopback: what a node says to itself is no traffic."""
        cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo"]
        counters["system/network_sent_bytes_per_second"] = sum(card.bytes_sent for card in cards)
        counters["system/network_received_bytes_per_second"] = sum(card.bytes_recv for card in cards)

    def _processes(self, sample: dict[str, float], _: dict[str, float]) -> None:
        sample.update(self._tree.sample())

    def _gpu(self, sample: dict[str, float], _: dict[str, float]) -> None:
        sample.update(self._gpus.sample())


# ---------------------------------------------------------------------------------------------------
# The trainer's processes


class _Seen(NamedTuple):
    """A process, told from a later one of the same number."""

    pid: int
    created_at: float


class _ProcessTree:
    """A process and all below it, but for the one that looks: delivery is a child of the trainer."""

    def __init__(self, pid: int) -> None:
        self._cpu_seconds: dict[_Seen, float] = {}
        self._at = 0.0
        try:
            self._process: psutil.Process | None = psutil.Process(pid)
        except psutil.Error:
            self._process = None

    def sample(self) -> dict[str, float]:
        """What they use together; nothing once the process is gone."""
        if self._process is None or not _is_alive(self._process):
            return {}
        cpu_seconds: dict[_Seen, float] = {}
        memory = threads = 0
        for process in self._all(self._process):
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    cpu_seconds[_Seen(process.pid, process.create_time())] = times.user + times.system
                    memory += process.memory_info().rss
                    threads += process.num_threads()
            except psutil.Error:  # it has ended meanwhile, or is another user's
                continue
        if not cpu_seconds:
            return {}
        sample = {"system/process/memory_bytes": memory, "system/process/threads": threads}
        return self._cpu_percent(cpu_seconds) | sample

    def _all(self, process: psutil.Process) -> Iterator[psutil.Process]:
        below, own = process.children(recursive=True), psutil.Process()
        spared = {own, *own.children(recursive=True)} if own in below else set()
        yield process
        yield from (child for child in below if child not in spared)

    def _cpu_percent(self, cpu_seconds: dict[_Seen, float]) -> dict[str, float]:
        """100 is one core. What a child used that has ended since the last sample is not known any more."""
        now = time.monotonic()
        before, seconds = self._cpu_seconds, now - self._at
        self._cpu_seconds, self._at = cpu_seconds, now
        if not before or seconds <= 0:
            return {}
        used = sum(total - before.get(process, 0.0) for process, total in cpu_seconds.items())
        return {"system/process/cpu_percent": max(0.0, 100 * used / seconds)}


def _is_alive(process: psutil.Process) -> bool:
    """Whether it runs; one that has ended may be listed until its parent takes note."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


# ---------------------------------------------------------------------------------------------------
# GPUs


class Gpus:
    """NVIDIA's GPUs, asked through `nvidia-ml-py`. Without that package or a driver there are none."""

    def __init__(self) -> None:
        self._nvml, self._handles = _driver()
        self._failed: set[str] = set()

    def sample(self) -> dict[str, float]:
        """What each GPU answers. One that does not answer, or not to all, has fewer values."""
        sample: dict[str, float] = {}
        for index, handle in enumerate(self._handles):
            for name, ask in _gpu_questions(self._nvml).items():
                try:
                    sample[f"system/gpu/{index}/{name}"] = ask(handle)
                except self._nvml.NVMLError as error:
                    self._note(f"{name} of GPU {index}", error)
        return sample

    def close(self) -> None:
        """Let go of the driver."""
        if self._nvml is not None:
            nvml, self._nvml, self._handles = self._nvml, None, []
            try:
                nvml.nvmlShutdown()
            except nvml.NVMLError as error:
                _log.debug("NVML could not be closed: %s.", error)

    def _note(self, what: str, error: Exception) -> None:
        if what not in self._failed:
            self._failed.add(what)
            _log.info("The samples of the machine lack %s: %s.", what, error)


def _driver() -> tuple[Any, list[Any]]:  # Any: the package has no types
    """The module and a handle for each GPU."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None, []
    try:
        nvml.nvmlInit()
        return nvml, [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:  # mostly: no driver
        _log.debug("No GPU is sampled: %s.", error)
        return None, []


def _gpu_questions(nvml: Any) -> dict[str, Callable[[Any], float]]:
    return {
        "utilization_percent": lambda handle: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "memory_used_bytes": lambda handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
        "temperature_celsius": lambda handle: float(
            nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        ),
        "power_watts": lambda handle: nvml.nvmlDeviceGetPowerUsage(handle) * _MILLI,
    }
