"""What the head itself says of a repair, by its log. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_DONE: Final = frozenset({"repaired", "moved"})
_BROKEN: Final = frozenset({"ring_broken", "moving"})
_COPY: Final = "(had a copy)"


@dataclass(frozen=True)
class Account:
    """Of one harm.

    Attributes:
        num_repairs: How often the ring was made whole in that time, planned moves included.
        is_warm: Whether a copy of all that moved was loaded already; None if nothing moved.
        reason: Why, and how: one line; empty if the head noted nothing.
        repair_s: What the repairs took from the head's noticing on, together; None if there was none.
    """

    num_repairs: int
    is_warm: bool | None
    reason: str
    repair_s: float | None


def events_of(lines: str) -> list[dict[str, Any]]:
    """The events of a log that is JSON lines; other lines, such as what is meant for people, are left out."""
    found = []
    for line in lines.splitlines():
        if line.startswith("{"):
            try:
                event = json.loads(line)
            except ValueError:  # the end of a line that is still being written
                continue
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                found.append(event)
    return found


def account_of(events: Iterable[dict[str, Any]]) -> Account:
    """What became of a harm, by the events since."""
    causes: list[str] = []
    ways: list[str] = []
    took_s: list[float] = []
    for event in events:
        if event["event"] in _BROKEN and "reason" in event:
            causes.append(str(event["reason"]))
        elif event["event"] in _DONE:
            ways.append(str(event.get("how", "")))
            took_s.append(float(event.get("seconds", 0.0)))
    moves = sum(way.count(" to ") for way in ways)
    copies = sum(way.count(_COPY) for way in ways)
    return Account(
        num_repairs=len(ways),
        is_warm=copies == moves if moves else None,
        reason="; ".join(dict.fromkeys([*causes, *ways])),
        repair_s=round(sum(took_s), 3) if ways else None,
    )
