"""From the pieces that a program writes to the lines that a person has seen, without secrets and bounded.

A progress bar writes its line again and again behind a carriage return, or moves the cursor up and writes
several. Of these only what stood there in the end is a line, and now and then what stands there meanwhile.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from nodetrack.redact import MASK, redact_text

#: So many characters of a line are kept. Twice as many are searched for secrets: one may lie across the end.
LONGEST_LINE: Final = 2_000
_SEARCHED: Final = 2 * LONGEST_LINE
#: Of each stream so many lines a second are kept, after so many at once. A long line counts as several.
LINES_A_SECOND: Final = 200
BURST: Final = 1_000
_CHARACTERS_OF_ONE: Final = 200
#: When the program ends in the middle of a flood, these were its last words.
LAST_LINES: Final = 50
#: How often a bar that is running is kept.
BAR_SECONDS: Final = 5
_NS: Final = 1_000_000_000
#: So long a private key may be, in lines.
_KEY_LINES: Final = 120

_MOVE: Final = re.compile(r"\r|\x1b\[(\d{0,4})A")
_INVISIBLE: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]?"  # colours, erasing, moving
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # titles, links
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0a-\x1f\x7f]"
)


class Line(NamedTuple):
    """What a person saw in one line, and when it ended."""

    time_ns: int
    stream: str
    text: str


class _Seen(NamedTuple):
    """A line before it is searched for secrets; `cut` characters of it are not here."""

    time_ns: int
    text: str
    cut: int = 0


class ConsoleStream:
    """Makes lines of what is written to one stream. Times are of the calls that wrote."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._valve = _Valve()
        self._key_lines = 0
        #: How many lines the cursor stands above the last one.
        self._above = 0
        #: What stands where a bar is running, and since when something new does.
        self._bar: _Seen | None = None
        self._bar_since_ns = 0
        self._begin_line()

    @property
    def is_flooded(self) -> bool:
        """Whether most lines are left out just now."""
        return self._valve.is_closed

    def add(self, time_ns: int, text: str) -> Iterator[Line]:
        """The lines that `text` ends."""
        *ended, rest = text.split("\n")
        for piece in ended:
            self._write(time_ns, piece)
            yield from self._end_line(time_ns)
        self._write(time_ns, rest)
        if self._is_bar:
            self._run_bar(self._seen(time_ns))
        yield from self.due(time_ns)

    def due(self, time_ns: int) -> Iterator[Line]:
        """The bar that has been running for a while."""
        if self._bar is not None and not 0 <= time_ns - self._bar_since_ns < BAR_SECONDS * _NS:
            bar, self._bar = self._bar, None
            yield from self._kept(bar)

    def end(self, time_ns: int) -> Iterator[Line]:
        """The line that was not ended, what stood in a running bar, and the last words of a flood."""
        last = self._seen(time_ns)
        if not last.text and self._bar is not None:
            last = self._bar
        if last.text:
            yield from self._kept(last)
        for seen in self._valve.end(time_ns):
            yield self._told(seen)

    def leave_out(self, count: int) -> None:
        """So many lines were lost before they came here."""
        self._valve.left_out += count

    # -- one line ------------------------------------------------------------------------------------

    def _begin_line(self) -> None:
        self._text = ""
        self._cut = 0
        self._is_bar = False
        #: Whether what comes next overwrites the line.
        self._returned = False

    def _write(self, time_ns: int, piece: str) -> None:
        if "\r" not in piece and "\x1b" not in piece:
            self._append(piece)
            return
        place = 0
        for move in _MOVE.finditer(piece):
            self._append(piece[place : move.start()])
            place = move.end()
            if move[0] != "\r":
                self._run_bar(self._seen(time_ns))
                self._begin_line()
                self._above += int(move[1] or 1)
            self._is_bar = self._returned = True
        self._append(piece[place:])

    def _append(self, piece: str) -> None:
        if not piece:
            return
        if self._returned:
            self._text, self._cut, self._returned = "", 0, False
        room = _SEARCHED - len(self._text)
        self._text += piece[:room]
        self._cut += max(0, len(piece) - room)

    def _end_line(self, time_ns: int) -> Iterator[Line]:
        """Where the cursor had been moved up, the line feed moves it down again and ends nothing."""
        seen, is_bar = self._seen(time_ns), self._is_bar
        self._begin_line()
        if self._above:
            self._above -= 1
            self._run_bar(seen)
            return
        if is_bar:
            self._bar = None
        yield from self._kept(seen)

    def _run_bar(self, seen: _Seen) -> None:
        if seen.text:
            if self._bar is None:
                self._bar_since_ns = seen.time_ns
            self._bar = seen

    def _seen(self, time_ns: int) -> _Seen:
        text = self._text if self._text.isprintable() else _INVISIBLE.sub("", self._text)
        return _Seen(time_ns, text.rstrip(), self._cut)

    # -- all lines -----------------------------------------------------------------------------------

    def _kept(self, seen: _Seen) -> Iterator[Line]:
        if self._is_of_a_key(seen.text):
            seen = _Seen(seen.time_ns, MASK)
        for passed in self._valve.let(seen):
            yield self._told(passed)

    def _is_of_a_key(self, text: str) -> bool:
        """Whether the line lies within a private key, each line of which alone looks harmless."""
        if self._key_lines:
            self._key_lines = 0 if "-----END" in text else self._key_lines - 1
            return True
        if "-----BEGIN" in text and "PRIVATE KEY" in text and "-----END" not in text:
            self._key_lines = _KEY_LINES
        return False

    def _told(self, seen: _Seen) -> Line:
        text = redact_text(seen.text)
        over = max(0, len(text) - LONGEST_LINE) + seen.cut
        if over:
            text = f"{text[:LONGEST_LINE]}… ({over} more characters)"
        return Line(seen.time_ns, self._name, text)


class _Valve:
    """Keeps a flood out, and says how much of it."""

    def __init__(self) -> None:
        self.left_out = 0
        self._newest: deque[_Seen] = deque(maxlen=LAST_LINES)
        self.is_closed = False
        self._room = float(BURST)
        self._at_ns = 0

    def let(self, seen: _Seen) -> Iterator[_Seen]:
        """The line, if there is room for it, behind the notice of those for which there was none.

        Once closed it stays so until there is room for a second's lines: one notice, not one for each line.
        """
        grown = max(0, seen.time_ns - self._at_ns) / _NS * LINES_A_SECOND
        self._room, self._at_ns = min(float(BURST), self._room + grown), seen.time_ns
        needed = 1 + len(seen.text) // _CHARACTERS_OF_ONE
        if self._room < (LINES_A_SECOND if self.is_closed else needed):
            self.is_closed = True
            self.left_out += 1
            self._newest.append(seen)
            return
        yield from self._notice(seen.time_ns, self.left_out)
        self.is_closed, self.left_out = False, 0
        self._newest.clear()
        self._room -= needed
        yield seen

    def end(self, time_ns: int) -> Iterator[_Seen]:
        """The last of the lines that were kept out."""
        yield from self._notice(time_ns, self.left_out - len(self._newest))
        yield from self._newest
        self.left_out = 0
        self._newest.clear()

    def _notice(self, time_ns: int, count: int) -> Iterator[_Seen]:
        if count > 0:
            yield _Seen(time_ns, f"[nodetrack: {count} lines left out, more than {LINES_A_SECOND} a second]")
