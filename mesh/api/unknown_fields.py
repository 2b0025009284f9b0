"""Fields that nobody here knows: accepted, and each one logged once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Iterable

log = structlog.get_logger()

_MAX_NAMES: Final = 256
_MAX_NAME_CHARS: Final = 64


class UnknownFields:
    """Remembers which names were logged. Bounded, since clients choose them."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Log the names that are new."""
        for name in names:
            if name not in self._seen and len(self._seen) < _MAX_NAMES and len(name) <= _MAX_NAME_CHARS:
                self._seen.add(name)
                log.info("unknown_field_ignored", field=name)
