"""Heartbeat: which stages are lost, by their silence or by what they tell, and whether windows are.

A failure detector by heartbeats (Chandra and Toueg 1996). Time in which the coordinator itself was late is
not counted, so that a busy machine does not lose living stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spanmesh_proto import windows_pb2 as wire

# A batch may take so long, or so many times as long as its rows took on the average: other programs, or
# weights that are read from a disk, slow it down. The first batch of a stage has nothing to compare with.
_LONGEST_BATCH_S: Final = 60.0
_LONGEST_FIRST_BATCH_S: Final = 600.0
_SLOWER: Final = 8


class LivenessMonitor:
    """Silence of each stage, in time during which it could have been heard.

    Args:
        num_stages: Stages of the pipeline.
        interval_s: Interval of the pings to each stage, in seconds.
        timeout_s: Silence after which a stage is lost, in seconds.
    """

    def __init__(self, num_stages: int, interval_s: float, timeout_s: float) -> None:
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._silent_s = [0.0] * num_stages

    def note_reply(self, stage: int) -> None:
        """Record a reply of a stage."""
        self._silent_s[stage] = 0.0

    def note_all(self) -> None:
        """Record a verdict: every stage computed its window."""
        self._silent_s = [0.0] * len(self._silent_s)

    def tick(self, elapsed_s: float) -> tuple[int, ...]:
        """Record the end of an interval; returns the stages that are lost.

        Args:
            elapsed_s: Its length. Of a longer one only the interval counts: replies that came meanwhile are
                still unread, and are recorded before the next tick.
        """
        counted_s = min(elapsed_s, self._interval_s)
        self._silent_s = [silent_s + counted_s for silent_s in self._silent_s]
        return tuple(stage for stage, silent_s in enumerate(self._silent_s) if silent_s > self._timeout_s)


class BatchMonitor:
    """Batches that are computed for so long that the stage must stand still, though it answers.

    Args:
        num_stages: Stages of the pipeline.
        interval_s: Interval of the pings to each stage, in seconds.
    """

    def __init__(self, num_stages: int, interval_s: float) -> None:
        self._interval_s = interval_s
        self._busy_s = [0.0] * num_stages

    def tick(self, elapsed_s: float, pongs: Sequence[wire.Pong | None]) -> tuple[int, ...]:
        """Record the end of an interval; returns the stages that stand still.

        A stage's own time jumps when its machine was stopped, so that it alone does not count.

        Args:
            elapsed_s: Its length; see `LivenessMonitor.tick`.
            pongs: Latest of each stage.
        """
        counted_s = min(elapsed_s, self._interval_s)
        found = []
        for stage, pong in enumerate(pongs):
            age_s = 0.0 if pong is None else pong.activity.batch_age_us / 1e6
            self._busy_s[stage] = min(self._busy_s[stage] + counted_s, age_s)
            if pong is not None and self._busy_s[stage] > _longest_batch_s(pong):
                found.append(stage)
        return tuple(found)


class WindowMonitor:
    """Windows that were lost without a failure: awaited, and nowhere in the ring.

    A window in flight waits at a stage, is computed there, or is on its way. Where no stage has had anything
    to do for a while, and each has read all that was sent to it, it is lost. While others keep the stages
    busy, it is lost once far more verdicts have come than can overtake it.

    Args:
        num_slots: Concurrent sessions.
        interval_s: Interval of the pings to each stage, in seconds.
        timeout_s: Time without anything to do after which windows are lost, in seconds.
    """

    def __init__(self, num_slots: int, interval_s: float, timeout_s: float) -> None:
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        # A chunk may wait for a few chunks of each other session, and between two of them for a window of
        # each: see `stages.serving.scheduler`. Windows of one session that are in flight are a few dozens.
        self._most_overtaking = 64 * num_slots + 8 * num_slots**2
        self._still_s = 0.0
        self._seen: tuple[int, ...] = ()
        self._done: tuple[tuple[int, ...], ...] = ()

    def note_verdict(self) -> None:
        """Record that a verdict came."""
        self._still_s = 0.0

    def tick(
        self,
        elapsed_s: float,
        pongs: Sequence[wire.Pong | None],
        *,
        num_overtaking: int | None,
        num_sent: int,
        num_received: int,
    ) -> bool:
        """Record the end of an interval; returns whether windows are lost.

        Args:
            elapsed_s: Its length; see `LivenessMonitor.tick`.
            pongs: Latest of each stage.
            num_overtaking: Verdicts since the latest one of the session that has waited longest; None if no
                session waits for the stages.
            num_sent: Messages to the first stage so far.
            num_received: Bundles of verdicts so far.
        """
        told = [pong for pong in pongs if pong is not None]
        seen, seen_before = tuple(pong.sent_us for pong in told), self._seen
        if num_overtaking is None or len(told) < len(pongs):
            self._still_s = 0.0
            return False
        if len(seen) == len(seen_before) and any(map(int.__eq__, seen, seen_before)):
            # Of a stage that has not answered in this interval nothing is known.
            return False
        self._seen = seen
        done, done_before = tuple(map(_num_done, told)), self._done
        self._done = done
        sent = [num_sent, *(pong.activity.num_sent for pong in told)]
        received = [*(pong.activity.num_received for pong in told), num_received]
        if sent != received or done != done_before or any(map(_has_work, told)):
            self._still_s = 0.0
        else:
            self._still_s += min(elapsed_s, self._interval_s)
        return num_overtaking > self._most_overtaking or self._still_s > self._timeout_s


def longest_batch_s(num_rows: int, earlier_rows: int, earlier_s: float) -> float:
    """Longest time, in seconds, that a batch may take.

    Args:
        num_rows: Its rows.
        earlier_rows: Rows of all batches before it; 0 if it is the first.
        earlier_s: Time that these took together, in seconds.
    """
    if not earlier_rows:
        return _LONGEST_FIRST_BATCH_S
    return max(_LONGEST_BATCH_S, _SLOWER * num_rows * earlier_s / earlier_rows)


def _longest_batch_s(pong: wire.Pong) -> float:
    stats = pong.stats
    return longest_batch_s(pong.activity.batch_rows, stats.num_rows, stats.compute_us / 1e6)


def _num_done(pong: wire.Pong) -> tuple[int, ...]:
    stats, activity = pong.stats, pong.activity
    return stats.num_windows, stats.num_dropped_windows, activity.num_received, activity.num_sent


def _has_work(pong: wire.Pong) -> bool:
    return bool(pong.activity.batch_age_us or pong.stats.num_queued_windows)
