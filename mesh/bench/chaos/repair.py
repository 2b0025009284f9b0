"""One harm and what came after it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mesh.bench.chaos.stream import Stream


@dataclass(frozen=True)
class Newcomer:
    """A request that was sent right after a harm.

    Attributes:
        took_s: To its first token, or to its refusal.
        outcome: `answer`, `503`, or what went wrong.
    """

    took_s: float
    outcome: str

    @property
    def is_sound(self) -> bool:
        """Whether it was answered, or told to come again."""
        return self.outcome in {"answer", "503"}


def newcomer_of(stream: Stream) -> Newcomer:
    """What a newcomer saw."""
    record = stream.told.record
    failure = record.failure
    if failure is None:
        return Newcomer(record.parts_s[0] - record.sent_s, "answer")
    took_s = record.ended_s - record.sent_s
    if stream.is_refused and failure.retry_after is not None:
        return Newcomer(took_s, "503")
    return Newcomer(took_s, f"{failure.kind}: {failure.message}")


@dataclass(frozen=True)
class Repair:
    """See above. All times in seconds.

    Attributes:
        number: Of the harm, from 0.
        kind: Of the harm.
        host: That it hit.
        at_s: When, since the first question was asked.
        hold_s: How long the host stayed cut off, or the process stopped; None for what is not taken back.
        whole_s: From the harm until the mesh was what it had been, spare hosts included; None if never.
        repair_s: What the head took for repairs, from its noticing on; None if it made none.
        pauses_s: Of each client that was being answered, the longest time between two tokens in that time,
            ascending.
        silence_s: The longest time in which one of them heard nothing at all, no comment ping either.
        newcomer: Who came right after it; None if nobody did.
        is_warm: Whether a copy of the lost layers was loaded already; None if the mesh does not say.
        reason: What the mesh says of it; empty if it noted nothing.
        rejoined: Hosts whose `mesh join` had ended and was started again.
        problem: Why the mesh was not whole in time; empty if it was.
    """

    number: int
    kind: str
    host: str
    at_s: float
    hold_s: float | None
    whole_s: float | None
    repair_s: float | None
    pauses_s: tuple[float, ...]
    silence_s: float
    newcomer: Newcomer | None
    is_warm: bool | None
    reason: str
    rejoined: tuple[int, ...]
    problem: str

    @property
    def worst_pause_s(self) -> float:
        """Of the client who waited longest; 0 if there was none."""
        return max(self.pauses_s, default=0.0)


def pauses_s(streams: Iterable[Stream], start_s: float, stop_s: float) -> tuple[float, ...]:
    """Of every stream that ran when that time began, its longest pause within it, the longest last.

    Streams whose clients hung up within it are left out: nobody knows how long they would have waited.
    """
    return tuple(sorted(each.pause_s(start_s, stop_s) for each in _running(streams, start_s, stop_s)))


def silence_s(streams: Iterable[Stream], start_s: float, stop_s: float) -> float:
    """The longest silence of any of them in that time; 0 without any."""
    return max((each.silence_s(start_s, stop_s) for each in _running(streams, start_s, stop_s)), default=0.0)


def _running(streams: Iterable[Stream], start_s: float, stop_s: float) -> Iterator[Stream]:
    for each in streams:
        record = each.told.record
        has_hung_up = record.failure is not None and record.failure.is_hang_up
        if record.sent_s < start_s < record.ended_s and not (has_hung_up and record.ended_s < stop_s):
            yield each
