"""What the log gets to see of an exception that nobody expected."""

from __future__ import annotations

import traceback

import structlog

log = structlog.get_logger()


def log_unexpected(error: BaseException) -> None:
    """Log where it happened, without its text and without local variables: both may hold a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    log.error(
        "request_failed_unexpectedly",
        error=type(error).__name__,
        at=[f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames)],
    )
