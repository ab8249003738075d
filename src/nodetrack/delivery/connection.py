"""Why a service cannot be reached, in words: the same for every client library, which each wrap it anew."""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
from collections.abc import Iterator
from typing import Final

from nodetrack.errors import BackendRefusedError, describe

UNREACHED: Final = "cannot be reached"
_NO_WAY: Final = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
#: Of a destination, what says where: `http://metrics:8086` of `http://metrics:8086, bucket nodes`.
_ADDRESS: Final = re.compile(r"\w+://[^\s,/]+")
#: No chain of errors is that long, unless it bites its tail.
_MOST_LINKS: Final = 50


def describe_failure(error: BaseException | None, destination: str) -> str:
    """An error of a backend in one line. What the connection is to blame for is said as
    "cannot be reached at http://metrics:8086: connection refused"; a service that has answered has its say.
    """
    has_answered = (
        isinstance(error, BackendRefusedError) or getattr(error, "retry_after_seconds", None) is not None
    )
    reason = None if error is None or has_answered else _reason(error)
    if reason is None:
        return describe(error)
    address = _ADDRESS.search(destination)
    place = address.group() if address is not None else destination
    return f"{UNREACHED} at {place}: {reason}" if place else f"{UNREACHED}: {reason}"


def _reason(error: BaseException) -> str | None:
    return next((words for link in _links(error) if (words := _words(link)) is not None), None)


def _links(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it was raised from, or holds as an argument, nearest first."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _MOST_LINKS:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        context = None if link.__suppress_context__ else link.__context__
        inner = (link.__cause__, context, *link.args, getattr(link, "reason", None))
        waiting += [other for other in inner if isinstance(other, BaseException)]


def _words(error: BaseException) -> str | None:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, socket.gaierror):
        return "name not known"
    if isinstance(error, ConnectionResetError | ConnectionAbortedError | BrokenPipeError):
        return "connection broken off"
    if isinstance(error, ssl.SSLError):
        return f"no secure connection ({getattr(error, 'verify_message', '') or error.reason or error})"
    if isinstance(error, OSError) and error.errno in _NO_WAY:
        return os.strerror(error.errno).lower()
    return None
