"""Structured logs on stderr."""

from __future__ import annotations

import contextlib
import logging
import sys

import structlog


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


def set_up_logs(*, is_verbose: bool = False) -> None:
    """Set up logging of this process, before the first event.

    Args:
        is_verbose: Whether debug events are logged.
    """
    is_terminal = sys.stderr.isatty()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if is_terminal else "iso", utc=not is_terminal),
    ]
    # Tracebacks without local variables: those hold prompts and keys.
    renderer: list[structlog.typing.Processor] = (
        [
            structlog.dev.ConsoleRenderer(
                pad_event_to=20, exception_formatter=structlog.dev.RichTracebackFormatter(show_locals=False)
            )
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
