"""What the head itself says of a repair, by its log. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    """What became of a harm, by the events since.

    A ring that breaks is `repaired`, which says how long it took. One that is left is `moving` until it is
    `ring_whole_again`.
    """
    causes: list[str] = []
    ways: list[str] = []
    took_s: list[float] = []
    moving_s: float | None = None
    for event in events:
        match event["event"]:
            case "ring_broken":
                causes.append(str(event["reason"]))
            case "repaired":
                ways.append(str(event["how"]))
                took_s.append(float(event["seconds"]))
            case "moving":
                ways.append(str(event["how"]))
                moving_s = _time_s(event)
            case "ring_whole_again" if moving_s is not None:
                took_s.append(_time_s(event) - moving_s)
                moving_s = None
    moves = sum(way.count(" to ") for way in ways)
    copies = sum(way.count(_COPY) for way in ways)
    return Account(
        num_repairs=len(took_s),
        is_warm=copies == moves if moves else None,
        reason="; ".join(dict.fromkeys([*causes, *ways])),
        repair_s=round(sum(took_s), 3) if took_s else None,
    )


def _time_s(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()
