"""The Aim backend keeps the contract, read with Aim's own reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodetrack.backends.aim import RUN_TAG, AimConfig
from nodetrack.testing import BackendContract, Point

pytestmark = pytest.mark.filterwarnings("ignore")  # Aim's own, of SQLAlchemy and others


class TestAim(BackendContract):
    keeps = frozenset({"version", "context"})
    kept_types = frozenset({"histogram", "text", "image"})
    keeps_repeated_steps = False
    large_batch_rows = 1_000

    def config(self, tmp_path: Path) -> AimConfig:
        return AimConfig(repo=str(tmp_path))

    def read_back(self, run: str, tmp_path: Path) -> Iterator[Point]:
        from aim.sdk import Repo

        repo = Repo.from_path(str(tmp_path))
        [found] = [each for each in repo.iter_runs() if RUN_TAG + run in each.tags]
        for metric in found.metrics():
            if not metric.context.to_dict():
                continue  # of the machine, not of the code
            steps, (values, *_) = metric.data.items_list()
            for step, value in zip(steps, values, strict=True):
                yield self._point(metric, step, value)
        for series in self._typed(found):
            for step in series.data.items_list()[0]:
                yield self._point(series, step, None)

    @staticmethod
    def _typed(run: Any) -> Iterator[Any]:
        """Aim has no one call for texts, images and distributions of one run."""
        from aim.sdk.sequence_collection import SingleRunSequenceCollection
        from aim.sdk.sequences.distribution_sequence import Distributions
        from aim.sdk.sequences.image_sequence import Images
        from aim.sdk.sequences.text_sequence import Texts

        for kind in (Texts, Images, Distributions):
            yield from SingleRunSequenceCollection(run, seq_cls=kind)

    @staticmethod
    def _point(series: Any, step: int, value: float | None) -> Point:
        context = dict(series.context.to_dict())  # it is shared
        version = context.pop("version")
        context.pop("writer", None)
        return Point(series.name, step, value, version, None, tuple(sorted(context.items())))

    def test_two_processes_of_one_attempt(self, tmp_path: Path) -> None:
        """Aim tells them apart by a context of their own."""
        self.keeps_repeated_steps = True
        super().test_two_processes_of_one_attempt(tmp_path)

    def refused_config(self, tmp_path: Path) -> AimConfig:
        return AimConfig(repo="aim://127.0.0.1:1")

    def unreachable_config(self, tmp_path: Path) -> AimConfig:
        (tmp_path / "file").touch()
        return AimConfig(repo=str(tmp_path / "file"))
