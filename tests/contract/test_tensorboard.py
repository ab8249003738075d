"""The tensorboard backend keeps the contract, as TensorBoard's own reader sees it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nodetrack import naming
from nodetrack.backends.tensorboard import TensorboardConfig
from nodetrack.testing import BackendContract, Point

#: How many of each kind of value the reader is to keep: all.
ALL = dict.fromkeys(("scalars", "histograms", "images", "tensors", "compressedHistograms", "audio"), 0)


class TestTensorboard(BackendContract):
    keeps = frozenset({"version", "attempt"})
    keeps_superseded = False  # they stay in the file, and readers pass over them

    def config(self, tmp_path: Path) -> TensorboardConfig:
        return TensorboardConfig(log_dir=tmp_path / "events")

    def as_kept(self, value: float) -> float:
        (kept,) = struct.unpack("f", struct.pack("f", value))
        return kept

    def read_back(self, run: str, tmp_path: Path) -> Iterator[Point]:
        from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

        reader = EventMultiplexer(size_guidance=ALL)
        reader.AddRunsFromDirectory(str(tmp_path / "events" / "contract" / f"miner-7-{run}"))
        reader.Reload()
        for folder, kinds in reader.Runs().items():
            read = {"scalars": reader.Scalars, "histograms": reader.Histograms}
            read |= {"images": reader.Images, "tensors": reader.Tensors}
            for kind, items in read.items():
                for tag in kinds[kind]:
                    view, version, metric = naming.split(tag)
                    if view == "version":
                        for item in items(folder, tag):
                            value = item.value if kind == "scalars" else None
                            yield Point(metric, item.step, value, version, folder.partition("/")[0])

    def refused_config(self, tmp_path: Path) -> TensorboardConfig:
        (tmp_path / "a file").touch()
        return TensorboardConfig(log_dir=tmp_path / "a file" / "events")

    @contextmanager
    def unavailable(self, tmp_path: Path) -> Iterator[None]:
        """A folder stands where the file should be."""
        [file] = (tmp_path / "events").rglob("*tfevents*")
        kept = file.rename(file.with_name("kept"))
        file.mkdir()
        yield
        file.rmdir()
        kept.rename(file)
