"""Harm after harm, each repaired before the next, while streams run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from mesh.bench.chaos.account import account_of, events_of
from mesh.bench.chaos.ground import ANSWERS_TIMEOUT_S, Healing
from mesh.bench.chaos.question import short_question
from mesh.bench.chaos.repair import Repair, newcomer_of, pauses_s, silence_s
from mesh.bench.stress.answers import HangUps

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.bench.chaos.account import Account
    from mesh.bench.chaos.first_failure import FirstFailure
    from mesh.bench.chaos.ground import Ground
    from mesh.bench.chaos.harm import Harm
    from mesh.bench.chaos.harming import Done
    from mesh.bench.chaos.look import Look
    from mesh.bench.chaos.stream import Stream

log = structlog.get_logger()

_POLL_S: Final = 0.5
_NEWCOMER_TIMEOUT_S: Final = 200.0
# Within this a harm shows, if only by streams that stand still.
_SHOWS_S: Final = 1.0
_TAKEN_BACK: Final = frozenset({"cut-off", "stop"})


@dataclass(frozen=True)
class _Episode:
    """A harm, and the time until the mesh was whole again."""

    done: Done
    stop_s: float
    is_whole: bool
    healing: Healing
    account: Account


class Harmed:
    """Streams run while in the block.

    Args:
        ground: What is harmed.
        keep: Keeps the first failure.

    Attributes:
        streams: Of this block, as they end.
    """

    def __init__(self, ground: Ground, keep: FirstFailure) -> None:
        self._ground = ground
        self._keep = keep
        self._episodes: list[_Episode] = []
        self._begun_s = time.perf_counter()
        self._num_before = len(ground.crowd.streams)
        self._num_checked = self._num_before

    @property
    def streams(self) -> list[Stream]:
        """That have ended since this began."""
        return self._ground.crowd.streams[self._num_before :]

    def begin(self) -> None:
        """Have all streams run; raises MeshError if they do not."""
        ground = self._ground
        options = ground.options
        hang_ups = HangUps(options.hang_up_share, options.seed)
        ground.crowd.keep_asking(ground.questions, options.num_streams, hang_ups)
        ground.wait_whole(time.perf_counter())

    def end(self) -> None:
        """Have the streams run to their ends; raises MeshError if they do not end."""
        self._ground.crowd.let_end(timeout_s=ANSWERS_TIMEOUT_S)
        self._check()

    def suffer(self, harm: Harm, do: Callable[[Look], Done]) -> None:
        """Wait, do harm, and see the mesh become whole again.

        Args:
            harm: What is done; its number is the newcomer's.
            do: Does it.

        Raises:
            MeshError: If the mesh is not whole again in time, not even after its hosts were started anew.
        """
        ground = self._ground
        time.sleep(harm.wait_s)
        log_begin = self._log_size()
        done = do(ground.crowd.look())
        ground.crowd.probe(harm.number, short_question(harm.number))
        log.info("harmed", number=harm.number, kind=harm.kind, host=done.host)
        healing = Healing(ground, done.at_s + _SHOWS_S)
        is_whole, stop_s = self._see_it_heal(done, healing)
        account = account_of(events_of(self._log_since(log_begin)))
        self._episodes.append(_Episode(done, stop_s, is_whole, healing, account))
        log.info(
            "repaired" if is_whole else "not_repaired",
            number=harm.number,
            took_s=round(stop_s - done.at_s, 1),
            missing=healing.missing,
            how=account.reason,
        )
        if not is_whole:
            self._keep.keep(ground, f"harm {harm.number} ({harm.kind}): {healing.missing}", [])
            self._start_anew(done)
        self._check()

    def repairs(self) -> list[Repair]:
        """What came of each harm, once the streams have ended."""
        return [self._repair(episode) for episode in self._episodes]

    def _see_it_heal(self, done: Done, healing: Healing) -> tuple[bool, float]:
        """Whether the mesh became whole in time, and when it was, or was given up."""
        takes_back_s = done.at_s + done.harm.hold_s if done.harm.kind in _TAKEN_BACK else None
        # Until a host that is told to leave has left, all is well.
        is_to_leave = done.harm.kind == "leave"
        while True:
            if takes_back_s is not None and time.perf_counter() >= takes_back_s:
                self._ground.harming.take_back(done)
                healing.since_s = time.perf_counter()
                takes_back_s = None
            whole_s = healing.look()
            if is_to_leave and done.host in healing.rejoined:
                healing.since_s = time.perf_counter()
                is_to_leave = False
            elif whole_s is not None and takes_back_s is None and not is_to_leave:
                return True, whole_s
            if healing.is_late:
                return False, time.perf_counter()
            time.sleep(_POLL_S)

    def _start_anew(self, done: Done) -> None:
        """A bench that goes on needs its hosts: those that are not ready lose all and join again."""
        ground = self._ground
        ground.harming.take_back(done)
        ready = ground.crowd.look().ready_hosts
        for host in range(1, ground.lab.num_hosts):
            if f"host{host}" not in ready:
                ground.lab.kill(host)
        ground.wait_whole(time.perf_counter())

    def _log_size(self) -> int:
        return self._ground.mesh.log(0).stat().st_size

    def _log_since(self, begin: int) -> str:
        with self._ground.mesh.log(0).open("rb") as file:
            file.seek(begin)
            return file.read().decode(errors="replace")

    def _check(self) -> None:
        """Keep the first stream that is not what it should be."""
        new = self._ground.crowd.streams[self._num_checked :]
        self._num_checked += len(new)
        for stream in new:
            problems = self._ground.tally([stream]).problems
            if problems:
                log.warning("bad_stream", request=problems[0].request, what=problems[0].detail)
                reason = f"{problems[0].request}: {problems[0].kind}: {problems[0].detail}"
                self._keep.keep(self._ground, reason, [stream])

    def _repair(self, episode: _Episode) -> Repair:
        done, healing = episode.done, episode.healing
        streams = self.streams
        return Repair(
            number=done.harm.number,
            kind=done.harm.kind,
            host=f"host{done.host}",
            at_s=done.at_s - self._begun_s,
            hold_s=done.harm.hold_s if done.harm.kind in _TAKEN_BACK else None,
            whole_s=episode.stop_s - done.at_s if episode.is_whole else None,
            pauses_s=pauses_s(streams, done.at_s, episode.stop_s),
            silence_s=silence_s(streams, done.at_s, episode.stop_s),
            newcomer=newcomer_of(
                self._ground.crowd.wait_probe(done.harm.number, timeout_s=_NEWCOMER_TIMEOUT_S)
            ),
            repair_s=episode.account.repair_s,
            is_warm=episode.account.is_warm,
            reason=episode.account.reason,
            rejoined=tuple(dict.fromkeys(healing.rejoined)),
            problem="" if episode.is_whole else healing.missing or "",
        )
