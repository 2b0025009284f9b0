"""How sessions share the rows of a draft model's next batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_FEW_ROWS: Final = 4
_MAX_ROWS_BESIDE_DRAFTS: Final = 8


MAX_ROWS_UNASKED: Final = 64
"""Most rows of a batch that nobody waits for yet: it delays whoever asks meanwhile."""


def share_rows(wanted: Sequence[int], max_rows: int) -> list[int]:
    """Rows for each session.

    A session that drafts wants a row or two, and waits for them; one whose prompt is still to be read wants
    hundreds. So few rows are granted first, and beside them a prompt only gets a small part of the batch.
    Who comes first gets more: the caller lets sessions take turns at that.

    Args:
        wanted: How many rows each session could use.
        max_rows: Rows of the batch.
    """
    granted = [rows if rows <= _FEW_ROWS else 0 for rows in wanted]
    room = max_rows
    for index, rows in enumerate(granted):
        granted[index] = min(rows, room)
        room -= granted[index]
    if any(granted):
        room = min(room, _MAX_ROWS_BESIDE_DRAFTS)
    for index, rows in enumerate(wanted):
        if rows > _FEW_ROWS:
            granted[index] = min(rows, room)
            room -= granted[index]
    return granted
