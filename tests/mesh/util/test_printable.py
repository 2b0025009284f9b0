"""Text from elsewhere on a terminal: it is shown, and controls nothing."""

from __future__ import annotations

import io
import logging
import re
import sys
import unicodedata
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Group
from rich.table import Table
from rich.text import Text

from mesh.util.logs import set_up_logs
from mesh.util.printable import one_line, printable, say
from mesh.util.terminal import PrintableConsole

if TYPE_CHECKING:
    from collections.abc import Iterator

# Clears the screen, sets the window's title, the same in one character each, and turns the direction.
HOSTILE: Final = "a\x1b[2J\x1b]0;owned\x07\x9b2J\x9d0;owned\x9c\u202eb\x7f\u2028\ud83dc"
ESCAPED: Final = r"a\u001b[2J\u001b]0;owned\u0007\u009b2J\u009d0;owned\u009c\u202eb\u007f\u2028\ud83dc"
# What a renderer itself writes: colours and styles.
STYLE: Final = re.compile(r"\x1b\[[\d;]*m")


class Terminal(io.StringIO):
    """Standard error of a person who watches."""

    def isatty(self) -> bool:
        return True


@contextmanager
def log_on_a_terminal() -> Iterator[Terminal]:
    """The terminal to which this process logs."""
    shown, before = Terminal(), structlog.get_config()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", shown)
        patch.setattr(logging, "lastResort", logging.StreamHandler(shown))
        set_up_logs()
        try:
            yield shown
        finally:
            structlog.configure(**before)


def test_control_characters_are_shown_as_escapes() -> None:
    assert printable(HOSTILE) == one_line(HOSTILE) == ESCAPED
    assert printable("rings\rback\r\n") == "rings\\u000dback\r\n"
    assert one_line("two\n\tlines\U000e0041") == r"two\u000a\u0009lines\U000e0041"


@pytest.mark.parametrize(
    "text",
    [
        "two\n\tlines",
        "Füße, 日本語\u3000かな",
        "نص و\u200cکلمه",
        "👩\u200d👩\u200d👧 🇪🇺",
        "non\u00a0breaking",
        "\ue0b0",
    ],
)
def test_text_of_all_scripts_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


@given(st.text())
def test_nothing_that_controls_a_terminal_is_left(text: str) -> None:
    kinds = {
        unicodedata.category(char) for char in printable(text).replace("\r\n", "\n") if char not in "\t\n"
    }
    assert not kinds & {"Cc", "Cs", "Zl", "Zp"}
    directions = {unicodedata.bidirectional(char) for char in printable(text)}
    assert not directions & {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    assert one_line(text).isprintable()
    assert printable(printable(text)) == printable(text)


def test_what_is_said_controls_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE)
    say(HOSTILE, err=True)
    assert capsys.readouterr() == (f"{ESCAPED}\n", f"{ESCAPED}\n")


def test_tables_and_other_things_drawn_show_escapes() -> None:
    shown = io.StringIO()
    console = PrintableConsole(file=shown, markup=False, width=200, force_terminal=True)
    table = Table("host", title=HOSTILE)
    table.add_row(HOSTILE)
    console.print(table, Text(HOSTILE), Group(HOSTILE, Text(HOSTILE, style="bold")), HOSTILE)
    drawn = STYLE.sub("", shown.getvalue())
    # A `Text` drops the bell by itself.
    assert (drawn.count(ESCAPED), drawn.count(ESCAPED.replace(r"\u0007", ""))) == (4, 2)
    assert printable(drawn) == drawn
    # The column is as wide as what it shows.
    assert {len(line) for line in drawn.splitlines() if line[0] in "┏┃┡│└"} == {len(ESCAPED) + 4}


def test_a_log_on_a_terminal_shows_escapes() -> None:
    with log_on_a_terminal() as terminal:
        log = structlog.get_logger()
        log.info(HOSTILE, path=HOSTILE, fields=[HOSTILE, {"a": HOSTILE}], error=ValueError(HOSTILE))
        try:
            int("x")
        except ValueError as error:
            error.args = (HOSTILE,)
            log.exception("failed")
            of_a_library = logging.LogRecord("a", logging.ERROR, "", 0, HOSTILE, (), sys.exc_info())
        assert logging.lastResort is not None
        logging.lastResort.handle(of_a_library)
    drawn = STYLE.sub("", terminal.getvalue())
    assert printable(drawn) == drawn
    assert f"path={ESCAPED}" in drawn
    # Five in the event, one in its traceback, two in what the library said.
    assert drawn.count("owned") == 2 * 8


def test_values_without_control_characters_are_logged_as_they_are() -> None:
    with log_on_a_terminal() as terminal:
        structlog.get_logger().info("ready", hosts=["a", "b"], seconds=1.5, model="Füße 日本", none=None)
    assert "hosts=['a', 'b'] model='Füße 日本' none=None seconds=1.5" in STYLE.sub("", terminal.getvalue())
