"""uvicorn's own few words, as events among ours."""

from __future__ import annotations

import logging

import structlog

log = structlog.get_logger()


class _AsEvents(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Without the traceback: the only ones that get this far are answers cut off at shutdown.
        log.log(record.levelno, "http_server", text=record.getMessage().strip())


def route_uvicorn_log() -> None:
    """Send warnings and errors of uvicorn's logger to ours, once per process."""
    logger = logging.getLogger("uvicorn.error")
    if not any(isinstance(handler, _AsEvents) for handler in logger.handlers):
        logger.addHandler(_AsEvents())
        logger.setLevel(logging.WARNING)
        logger.propagate = False
