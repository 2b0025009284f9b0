"""Structured logs on stderr."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING, Final, TextIO

import structlog
from rich.traceback import Traceback

from mesh.util.printable import printable, printable_values
from mesh.util.terminal import PrintableConsole

if TYPE_CHECKING:
    from structlog.typing import EventDict, ExcInfo, WrappedLogger

# What the renderer draws itself.
_EXCEPTIONS: Final = frozenset({"exc_info", "stack_info"})


class _StandardError:
    """Standard error at the time of writing: a progress bar replaces it while it draws.

    If the terminal was closed, events are lost, and nothing else fails: the shutdown must not stop half-way
    because it cannot log.
    """

    @staticmethod
    def write(text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    @staticmethod
    def flush() -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


class _PrintableFormatter(logging.Formatter):
    """Formatter of what is logged without a handler."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def set_up_logs(*, is_verbose: bool = False) -> None:
    """Set up logging of this process, before the first event.

    Args:
        is_verbose: Whether debug events are logged.
    """
    is_terminal = sys.stderr.isatty()
    if logging.lastResort is not None:
        # Of libraries, and of tasks whose failure asyncio reports.
        logging.lastResort.setFormatter(_PrintableFormatter())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if is_terminal else "iso", utc=not is_terminal),
    ]
    # Tracebacks without local variables: those hold prompts and keys.
    renderer: list[structlog.typing.Processor] = (
        [
            _escape_values,
            structlog.dev.ConsoleRenderer(pad_event_to=20, exception_formatter=_write_traceback),
        ]
        if is_terminal
        else [
            structlog.processors.ExceptionRenderer(
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            ),
            structlog.processors.JSONRenderer(),
        ]
    )
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if is_verbose else logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file=_StandardError()),  # type: ignore[arg-type]
    )


def _escape_values(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Escape control characters for a terminal; JSON has escapes of its own."""
    return {
        **printable_values({name: value for name, value in event.items() if name not in _EXCEPTIONS}),
        **{name: event[name] for name in _EXCEPTIONS & event.keys()},
    }


def _write_traceback(output: TextIO, exc_info: ExcInfo) -> None:
    """Write a traceback as structlog's `RichTracebackFormatter` does, its message in printable characters."""
    output.write("\n")
    console = PrintableConsole(file=output, color_system="truecolor")
    console.print(Traceback.from_exception(*exc_info, show_locals=False, word_wrap=True))
