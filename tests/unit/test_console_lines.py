"""From what a program writes to the lines that a person has seen."""

from __future__ import annotations

import random

import pytest

from nodetrack.console_lines import (
    BAR_SECONDS,
    BURST,
    LAST_LINES,
    LINES_A_SECOND,
    LONGEST_LINE,
    ConsoleStream,
)

SECOND = 1_000_000_000
UP = "\x1b[A"


class Screen:
    """A stream whose clock the test sets."""

    def __init__(self) -> None:
        self.stream = ConsoleStream("stdout")
        self.now = 1_000 * SECOND
        self.lines: list[str] = []

    def write(self, *texts: str, seconds: float = 0.0) -> list[str]:
        """Writes the texts, that many seconds behind each other, and returns the lines that this made."""
        before = len(self.lines)
        for text in texts:
            self.now += int(seconds * SECOND)
            self.lines += [line.text for line in self.stream.add(self.now, text)]
        return self.lines[before:]

    def end(self) -> list[str]:
        """The lines that are left in the end."""
        return [line.text for line in self.stream.end(self.now)]


@pytest.fixture
def screen() -> Screen:
    """An empty one."""
    return Screen()


# -- lines ----------------------------------------------------------------------------------------------


def test_a_line_is_what_stands_before_a_line_feed_however_it_was_written(screen: Screen) -> None:
    assert screen.write("a", "b", "\n", "c\nd\n", "\n", "e") == ["ab", "c", "d", ""]
    assert screen.end() == ["e"]


def test_lines_do_not_depend_on_how_the_text_was_cut() -> None:
    chosen = random.Random(7)
    text = "one\r\ntwo\n\x1b[31mred\x1b[0m\n  0%\r 50%\r100%\nlast ünïcödé 🙂\n"
    for _ in range(200):
        screen, places = Screen(), sorted(chosen.sample(range(len(text)), 6))
        pieces = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
        assert screen.write(*pieces) == ["one", "two", "red", "100%", "last ünïcödé 🙂"], pieces


def test_a_line_has_the_time_at_which_it_ended() -> None:
    stream = ConsoleStream("stderr")
    assert list(stream.add(1, "a")) == []
    [line] = stream.add(2, "b\n")
    assert line == (2, "stderr", "ab")


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ("\x1b[1;31mred\x1b[0m and \x1b[4mlined\x1b[24m", "red and lined"),
        ("\x1b]0;a title\x07text", "text"),
        ("\x1b]8;;https://a.example\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("bell\x07 and null\x00", "bell and null"),
        ("a\tb", "a\tb"),
        ("trailing  ", "trailing"),
        ("cut off \x1b[3", "cut off"),
        ("\ud83d half", "\ud83d half"),
    ],
)
def test_what_is_not_seen_is_not_kept(screen: Screen, written: str, seen: str) -> None:
    assert screen.write(written + "\n") == [seen]


def test_a_long_line_is_cut_and_says_so(screen: Screen) -> None:
    [line] = screen.write("x" * 1_000_000, "y" * 500, "\n")
    assert line == "x" * LONGEST_LINE + f"… ({1_000_500 - LONGEST_LINE} more characters)"
    assert screen.write("x" * LONGEST_LINE + "\n") == ["x" * LONGEST_LINE]


# -- progress bars --------------------------------------------------------------------------------------


def test_of_a_progress_bar_the_last_state_is_kept(screen: Screen) -> None:
    bar = [f"\r{percent:3}%|{'#' * (percent // 10)}" for percent in range(0, 101, 5)]
    assert screen.write(*bar, "\n", "next\n", seconds=0.1) == ["100%|##########", "next"]


def test_a_bar_that_writes_its_return_behind_itself_is_one_too(screen: Screen) -> None:
    assert screen.write(*(f"{percent}%\r" for percent in range(101)), "\n") == ["100%"]


def test_a_bar_that_wipes_itself_leaves_nothing(screen: Screen) -> None:
    assert screen.write("\r 50%", "\r     \r", "next\n") == ["next"]


def test_a_running_bar_is_kept_now_and_then(screen: Screen) -> None:
    kept = screen.write(*(f"\r{second} of 60" for second in range(60)), seconds=1)
    assert kept == [f"{second} of 60" for second in range(BAR_SECONDS, 60, BAR_SECONDS + 1)]
    assert screen.end() == ["59 of 60"]


def test_a_bar_that_stands_still_is_kept_once_it_is_due(screen: Screen) -> None:
    assert screen.write("\r50%") == []
    assert list(screen.stream.due(screen.now + SECOND)) == []
    [line] = screen.stream.due(screen.now + BAR_SECONDS * SECOND)
    assert (line.text, line.time_ns) == ("50%", screen.now)
    assert list(screen.stream.due(screen.now + 100 * SECOND)) == []


def test_bars_below_each_other_are_no_flood_of_lines(screen: Screen) -> None:
    """As tqdm writes an inner bar: down, the bar, up again."""
    written = ["\r outer 0%"]
    for step in range(600):
        written += ["\n", f"\r inner {step}", UP]
    kept = screen.write(*written, seconds=1 / 30)
    assert kept[0] == " outer 0%"
    assert 600 / 30 / BAR_SECONDS < len(kept) < 3 * 600 / 10 / BAR_SECONDS
    assert all(line.startswith(" inner") for line in kept[1:])
    assert screen.write("\n", "\n", "done\n")[-1:] == ["done"]


def test_a_display_of_several_lines_is_no_flood_of_lines(screen: Screen) -> None:
    """As rich writes it: up to its first line, and all lines again, in one call."""
    height = 4
    lines = "\n".join(f"task {number}" for number in range(height))
    again = "\r\x1b[2K" + "\x1b[1A\x1b[2K" * (height - 1)
    first = screen.write(lines)
    assert first == ["task 0", "task 1", "task 2"]
    kept = screen.write(*(again + lines for _ in range(100)), seconds=0.1)
    assert 1 <= len(kept) <= 4
    assert screen.write("\n", "after\n")[-1] == "after"


# -- secrets --------------------------------------------------------------------------------------------


def test_secrets_are_masked(screen: Screen) -> None:
    token = "hf_" + "a1B2" * 8
    assert screen.write(
        f"token {token}\n",
        "db at postgres://u:pass@h/x\n",
        "api_key=abc lr=0.1\n",
        f"\x1b[1mhf_\x1b[0m{token[3:]}\n",
    ) == ["token ***", "db at postgres://***@h/x", "api_key=*** lr=0.1", "***"]


def test_a_secret_across_pieces_or_across_the_longest_line_is_masked(screen: Screen) -> None:
    token = "hf_" + "a1B2" * 10
    assert screen.write(token[:10], token[10:], "\n") == ["***"]
    [line] = screen.write("x " * (LONGEST_LINE // 2 - 5) + token + " end\n")
    assert "hf_a" not in line


def test_the_lines_of_a_private_key_are_masked(screen: Screen) -> None:
    key = [
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        *["b3BlbnNzaC1rZXk"] * 8,
        "-----END OPENSSH PRIVATE KEY-----",
    ]
    lines = screen.write("".join(f"{line}\n" for line in ["before", *key, "after"]))
    assert lines == ["before", *["***"] * 10, "after"]


def test_a_key_that_never_ends_does_not_hide_the_rest(screen: Screen) -> None:
    lines = screen.write("-----BEGIN PRIVATE KEY-----\n", *(f"{number}\n" for number in range(300)))
    assert lines[-1] == "299"


def test_a_key_in_a_flood_is_masked_among_the_last_words(screen: Screen) -> None:
    screen.write("x\n" * (BURST + 100))
    screen.write("-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\n")
    assert "MIIEvQIBADANBg" not in screen.end()


# -- floods ---------------------------------------------------------------------------------------------


def test_a_flood_is_cut_and_what_is_left_out_is_counted(screen: Screen) -> None:
    kept = screen.write("".join(f"{number}\n" for number in range(5000)))
    assert kept == [str(number) for number in range(BURST)]
    assert screen.write("calm again\n", seconds=30) == [
        f"[nodetrack: {5000 - BURST} lines left out, more than {LINES_A_SECOND} a second]",
        "calm again",
    ]
    assert screen.write("and so on\n") == ["and so on"]


def test_a_lasting_flood_is_told_of_once_a_second_and_nothing_is_uncounted(screen: Screen) -> None:
    kept = screen.write(*(f"{number}\n" for number in range(20_000)), seconds=1 / 2000)
    notices = [line for line in kept if line.startswith("[nodetrack")]
    lines = [line for line in kept if not line.startswith("[nodetrack")]
    assert 0 < len(notices) <= 11
    assert len(lines) <= BURST + 10 * LINES_A_SECOND
    end = screen.end()
    counted = sum(int(line.split()[1]) for line in [*notices, *end] if line.startswith("[nodetrack"))
    assert len(lines) + counted + sum(not line.startswith("[nodetrack") for line in end) == 20_000


def test_the_last_words_of_a_flood_are_kept(screen: Screen) -> None:
    screen.write("".join(f"{number}\n" for number in range(5000)))
    notice, *last = screen.end()
    assert notice == (
        f"[nodetrack: {5000 - BURST - LAST_LINES} lines left out, more than {LINES_A_SECOND} a second]"
    )
    assert last == [str(number) for number in range(5000 - LAST_LINES, 5000)]


def test_long_lines_count_as_several(screen: Screen) -> None:
    assert 0 < len(screen.write(("x" * LONGEST_LINE + "\n") * BURST)) < BURST / 5


def test_lines_within_the_limit_are_all_kept_for_ever(screen: Screen) -> None:
    count = 20 * LINES_A_SECOND
    assert screen.write(*(f"{number}\n" for number in range(count)), seconds=1.01 / LINES_A_SECOND) == [
        str(number) for number in range(count)
    ]


def test_a_clock_that_is_set_back_stops_nothing(screen: Screen) -> None:
    screen.write("\r1%", "\n")
    screen.now -= 10_000 * SECOND
    assert screen.write("a\n", "\r2%", "\r3%", "\n", seconds=1) == ["a", "3%"]
    screen.write("\r4%")
    screen.now -= 10_000 * SECOND
    assert screen.write("\r5%") == ["5%"]
