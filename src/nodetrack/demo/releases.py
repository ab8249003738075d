"""The two versions of the demo's code. A real node has one; here they lie side by side to be switched."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Protocol, cast

from torch import Tensor

from nodetrack.demo.versions import VERSIONS
from nodetrack.errors import DemoError


class Release(Protocol):
    """What differs between versions; each is a module of that name."""

    def window_batches(
        self, text: Tensor, seed: int, uid: str, window: int, batch_size: int, sequence_length: int
    ) -> Iterator[Tensor]:
        """The batches of one window, without end."""


def load_release(version: str) -> Release:
    """The code of that version. Raises DemoError for one that was never released."""
    if version not in VERSIONS:
        raise DemoError(f"The demo has no version {version!r}; it has {' and '.join(VERSIONS)}.")
    return cast("Release", importlib.import_module(f"nodetrack.demo.release_{version.replace('.', '_')}"))
