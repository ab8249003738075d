"""How nodetrack speaks in a program that has set up no logging: on standard error, with its name in front.

A program with logging of its own gets the same records through it, and nothing is printed here.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

_logger: Final = logging.getLogger("nodetrack")


class _Voice(logging.Handler):
    """Prints records as long as the root logger has no handler, to whatever standard error is at that
    moment.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        if not logging.getLogger().handlers and sys.stderr is not None:
            sys.stderr.write(f"nodetrack: {self.format(record)}\n")


def speak_up() -> None:
    """From now on remarks and warnings are printed, if nobody else takes care of them. Twice is once."""
    if not any(isinstance(handler, _Voice) for handler in _logger.handlers):
        _logger.addHandler(_Voice())
    if _logger.level == logging.NOTSET and not logging.getLogger().handlers:
        _logger.setLevel(logging.INFO)
