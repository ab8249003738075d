"""A node's life line: its standard input. The end of file says "stop", whoever caused it.

The one who started the node holds the other end. Closing it asks for an orderly stop; and if the holder dies,
even by SIGKILL, the operating system closes it, so no node is ever left behind.
"""

from __future__ import annotations

import os
import select
import time


class LifeLine:
    """Polled between steps and waited on instead of `time.sleep`, so it needs no thread."""

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._cut = False

    def is_cut(self) -> bool:
        """Whether the node should stop. Returns at once."""
        return self.wait(0.0)

    def wait(self, seconds: float) -> bool:
        """Sleeps for `seconds`, or until the line is cut. Returns whether it is."""
        deadline = time.monotonic() + seconds
        while not self._cut:
            left = max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self._descriptor], [], [], left)
            if not readable:
                return False
            # Whatever is typed at a node that was started by hand is read and ignored; Ctrl-D cuts the line.
            self._cut = not os.read(self._descriptor, 4096)
        return True
