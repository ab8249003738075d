"""Samples of this machine and of real processes. There is no GPU: a stand-in answers for NVML."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nodetrack.delivery.container import Container, CpuUse, MemoryUse
from nodetrack.delivery.system import Gpus, SystemSampler

_RATES = {
    "system/cpu_percent",
    "system/disk_read_bytes_per_second",
    "system/disk_written_bytes_per_second",
    "system/network_sent_bytes_per_second",
    "system/network_received_bytes_per_second",
    "system/process/cpu_percent",
}


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts processes that print a line once they do what they are there for."""
    started: list[subprocess.Popen[str]] = []

    def begin(body: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", textwrap.dedent(body)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


# -- the machine ----------------------------------------------------------------------------------------


def test_a_sample_names_what_the_machine_and_the_process_use(tmp_path: Path) -> None:
    sampler = SystemSampler(os.getpid(), tmp_path)
    first = sampler.sample()
    assert first.keys() & _RATES == set()
    assert 0 < first["system/memory_percent"] <= 100
    assert 0 < first["system/memory_used_bytes"] < psutil.virtual_memory().total
    assert first["system/disk_free_bytes"] > 0
    assert first["system/process/memory_bytes"] > 1_000_000
    assert first["system/process/threads"] >= 1


def test_rates_come_with_the_second_sample(tmp_path: Path) -> None:
    sampler = SystemSampler(os.getpid(), tmp_path)
    first = sampler.sample()
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    second = sampler.sample()
    added = second.keys() - first.keys()
    assert {"system/cpu_percent", "system/process/cpu_percent"} <= added <= _RATES
    assert second["system/process/cpu_percent"] > 10
    assert all(value >= 0 for value in second.values())


def test_all_names_say_their_unit(tmp_path: Path) -> None:
    sampler = SystemSampler(os.getpid(), tmp_path)
    sampler.sample()
    time.sleep(0.01)
    for name in sampler.sample():
        assert name.startswith("system/")
        assert name.endswith(("_percent", "_bytes", "_bytes_per_second", "/threads", "_celsius", "_watts")), (
            name
        )


def test_a_folder_that_is_gone_costs_its_own_value_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = SystemSampler(os.getpid(), tmp_path / "gone")
    with caplog.at_level(logging.INFO, logger="nodetrack"):
        samples = [sampler.sample(), sampler.sample()]
    assert all("system/disk_free_bytes" not in sample for sample in samples)
    assert all("system/memory_percent" in sample for sample in samples)
    assert sum("lack its disk" in message for message in caplog.messages) == 1


class _Limited(Container):
    """A container of half a gigabyte and half a core, of which it uses a fifth and all."""

    def __init__(self) -> None:
        super().__init__(os.getpid())
        self._begun = time.monotonic()

    def memory(self) -> MemoryUse:
        return MemoryUse(100_000_000, 500_000_000)

    def cpu(self) -> CpuUse:
        return CpuUse((time.monotonic() - self._begun) / 2, 0.5)


def test_in_a_container_the_shares_are_those_of_its_limits(tmp_path: Path) -> None:
    sampler = SystemSampler(os.getpid(), tmp_path, container=_Limited())
    first = sampler.sample()
    assert (first["system/memory_used_bytes"], first["system/memory_percent"]) == (100_000_000, 20.0)
    assert "system/cpu_percent" not in first
    time.sleep(0.2)
    assert sampler.sample()["system/cpu_percent"] == pytest.approx(100, abs=20)


# -- processes ------------------------------------------------------------------------------------------


def test_children_count_with_their_parent(
    tmp_path: Path, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    parent = start("""
        import subprocess, sys
        body = "held = bytearray(80_000_000); print(flush=True); input()"
        child = subprocess.Popen([sys.executable, "-c", body], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
        print()
        input()
    """)
    sample = SystemSampler(parent.pid, tmp_path).sample()
    assert sample["system/process/memory_bytes"] > 80_000_000
    assert sample["system/process/threads"] >= 2


def test_the_process_that_looks_is_not_counted(tmp_path: Path) -> None:
    """The delivery process is a child of the trainer, which is played by a process of its own here."""
    looks = """
import os, pathlib, psutil
from nodetrack.delivery.system import SystemSampler
held = bytearray(80_000_000)
sample = SystemSampler(os.getppid(), pathlib.Path()).sample()
print(sample["system/process/memory_bytes"] - psutil.Process(os.getppid()).memory_info().rss)
"""
    trains = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {looks!r}], check=True)"
    command = [sys.executable, "-c", trains]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert abs(float(done.stdout)) < 40_000_000


def test_a_process_that_ends_ends_its_values(
    tmp_path: Path, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = start("print(); input()")
    sampler = SystemSampler(process.pid, tmp_path)
    assert "system/process/memory_bytes" in sampler.sample()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    as_zombie = sampler.sample()
    process.wait()
    as_gone = sampler.sample()
    for sample in (as_zombie, as_gone):
        assert not [name for name in sample if name.startswith("system/process/")]
        assert "system/memory_percent" in sample


def test_a_process_that_never_was_has_no_values(tmp_path: Path) -> None:
    sample = SystemSampler(2**22, tmp_path).sample()
    assert not [name for name in sample if name.startswith("system/process/")]
    assert "system/memory_percent" in sample


# -- GPUs -----------------------------------------------------------------------------------------------


class StandIn(types.ModuleType):
    """What of `pynvml` is used, for machines without a GPU: the shape of its answers, not the driver."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        """As in pynvml."""

    def __init__(self, gpus: int, *, has_driver: bool = True) -> None:
        super().__init__("pynvml")
        self.gpus = gpus
        self.has_driver = has_driver
        self.is_open = False
        self.broken: set[tuple[str, int]] = set()

    def nvmlInit(self) -> None:  # noqa: N802 - pynvml's names
        if not self.has_driver:
            raise self.NVMLError("Driver Not Loaded")
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> object:  # noqa: N802
        return self._answer("utilization", gpu, types.SimpleNamespace(gpu=90 + gpu, memory=5))

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> object:  # noqa: N802
        return self._answer("memory", gpu, types.SimpleNamespace(total=80, free=30, used=50))

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> object:  # noqa: N802
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._answer("temperature", gpu, 61)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> object:  # noqa: N802
        return self._answer("power", gpu, 312_500)

    def _answer(self, question: str, gpu: int, answer: object) -> object:
        if (question, gpu) in self.broken:
            raise self.NVMLError("GPU is lost")
        return answer


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Two GPUs, for whoever imports pynvml."""
    module = StandIn(2)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_each_gpu_is_sampled(tmp_path: Path, stand_in: StandIn) -> None:
    sampler = SystemSampler(os.getpid(), tmp_path)
    sample = sampler.sample()
    assert {name: value for name, value in sample.items() if "/gpu/" in name} == {
        "system/gpu/0/utilization_percent": 90.0,
        "system/gpu/0/memory_used_bytes": 50,
        "system/gpu/0/temperature_celsius": 61.0,
        "system/gpu/0/power_watts": 312.5,
        "system/gpu/1/utilization_percent": 91.0,
        "system/gpu/1/memory_used_bytes": 50,
        "system/gpu/1/temperature_celsius": 61.0,
        "system/gpu/1/power_watts": 312.5,
    }
    assert stand_in.is_open
    sampler.close()
    assert not stand_in.is_open
    assert not [name for name in sampler.sample() if "/gpu/" in name]


def test_a_gpu_that_fails_loses_what_it_does_not_answer_and_is_told_of_once(
    tmp_path: Path, stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    gpus = Gpus()
    stand_in.broken = {("power", 0), ("utilization", 1), ("memory", 1), ("temperature", 1), ("power", 1)}
    with caplog.at_level(logging.INFO, logger="nodetrack"):
        samples = [gpus.sample() for _ in range(3)]
    assert [sorted(sample) for sample in samples] == [
        [
            f"system/gpu/0/{name}"
            for name in ("memory_used_bytes", "temperature_celsius", "utilization_percent")
        ]
    ] * 3
    assert len(caplog.messages) == 5
    stand_in.broken.clear()
    assert len(gpus.sample()) == 8


@pytest.mark.parametrize("module", [None, StandIn(2, has_driver=False), StandIn(0)])
def test_without_the_package_a_driver_or_a_gpu_there_is_nothing_and_nothing_is_said(
    module: StandIn | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)  # None: it cannot be imported
    with caplog.at_level(logging.INFO, logger="nodetrack"):
        gpus = Gpus()
        assert gpus.sample() == {}
        gpus.close()
    assert not caplog.messages


def test_the_package_itself_is_asked_in_its_own_words() -> None:
    """The stand-in must not have names that pynvml lacks."""
    pynvml = pytest.importorskip("pynvml")
    used = [name for name in dir(StandIn) if name.lower().startswith("nvml")]
    assert len(used) == 10
    assert not [name for name in used if not hasattr(pynvml, name)]
