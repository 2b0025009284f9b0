"""Test bed of `mesh bench chaos`: a mesh and clients under faults, and its recovery."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import structlog

from mesh.bench.stress.answers import HangUps
from mesh.bench.stress.checks import Expected
from mesh.qualification.chaos.clients import short_question, what_is_missing
from mesh.qualification.chaos.results import (
    Repair,
    account_of,
    events_of,
    newcomer_of,
    pauses_s,
    silence_s,
    tally,
)
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from mesh.lab.network import Lab
    from mesh.lab.systems import MeshSystem
    from mesh.qualification.chaos.clients import Crowd, Look, Question, Stream
    from mesh.qualification.chaos.faults import Done, Harm, Harming
    from mesh.qualification.chaos.options import ChaosOptions
    from mesh.qualification.chaos.results import Account, Tally


log = structlog.get_logger()

_POLL_S: Final = 0.5
# A mesh that is whole for a moment only, before it has noticed a loss, is not whole.
_SETTLE_S: Final = 1.5
ANSWERS_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True)
class Ground:
    """Up, with every question answered once.

    Attributes:
        lab: Host 0 is the head, `host1` and so on take part.
        mesh: On it.
        crowd: The clients.
        harming: Does harm.
        options: What the user says.
        questions: What is asked.
        expected: What each was answered, by its id.
    """

    lab: Lab
    mesh: MeshSystem
    crowd: Crowd
    harming: Harming
    options: ChaosOptions
    questions: tuple[Question, ...]
    expected: Mapping[str, Expected]

    @property
    def num_hosts(self) -> int:
        """That take part, the head apart."""
        return self.lab.num_hosts - 1

    def tally(self, streams: Iterable[Stream]) -> Tally:
        """What became of streams."""
        return tally(streams, self.expected, is_exact=self.options.exact)

    def missing(self, look: Look, since_s: float) -> str | None:
        """Why the mesh is not yet what it was; see `clients.what_is_missing`."""
        return what_is_missing(
            look,
            since_s=since_s,
            num_hosts=self.num_hosts,
            with_copies=self.options.awaits_copies and self.num_hosts > self.options.num_stages,
        )

    def wait_whole(self, since_s: float) -> float:
        """Wait until the mesh is what it was, starting again whoever left.

        Args:
            since_s: Every stream that was sent before must have gone on since; of `time.perf_counter`.

        Returns:
            When it was whole, of `time.perf_counter`.

        Raises:
            MeshError: If it is not in time.
        """
        healing = Healing(self, since_s)
        while (whole_s := healing.look()) is None:
            if healing.is_late:
                raise MeshError(f"not whole after {self.options.whole_timeout_s:g} s: {healing.missing}")
            time.sleep(_POLL_S)
        return whole_s


class Healing:
    """Watches a mesh become whole again.

    Args:
        ground: The mesh.
        since_s: See `Ground.wait_whole`; may be moved.

    Attributes:
        missing: What was missing at the latest look.
        latest: That look.
        rejoined: Hosts that were started again.
    """

    def __init__(self, ground: Ground, since_s: float) -> None:
        self._ground = ground
        self._begun_s = time.perf_counter()
        self._whole_s: float | None = None
        self.since_s = since_s
        self.missing: str | None = "nobody looked yet"
        self.latest: Look | None = None
        self.rejoined: list[int] = []

    @property
    def is_late(self) -> bool:
        """Whether it takes longer than the user allows."""
        return time.perf_counter() - self._begun_s > self._ground.options.whole_timeout_s

    def look(self) -> float | None:
        """Look once; returns since when it has been whole, once it has been for long enough."""
        ground = self._ground
        self.rejoined += ground.harming.start_who_left()
        look = self.latest = ground.crowd.look()
        self.missing = ground.missing(look, self.since_s)
        if self.missing is not None:
            self._whole_s = None
            return None
        if self._whole_s is None:
            self._whole_s = look.at_s
        return self._whole_s if look.at_s - self._whole_s >= _SETTLE_S else None


def undisturbed(crowd: Crowd, questions: tuple[Question, ...], num_at_once: int) -> dict[str, Expected]:
    """Ask everything while all is well.

    Raises:
        MeshError: If an answer is not sound.
    """
    log.info("asking_undisturbed", questions=len(questions), at_once=num_at_once)
    streams = crowd.ask_all(questions, num_at_once, timeout_s=ANSWERS_TIMEOUT_S)
    told = {stream.told.record.prompt_id: stream.told for stream in streams}
    expected = {question.id: Expected(question.turn, told[question.id]) for question in questions}
    found = tally(streams, expected, is_exact=True)
    if found.problems or found.num_refused:
        worst = found.problems[0].detail if found.problems else "turned away with 503"
        raise MeshError(f"undisturbed, a question was answered badly: {worst}")
    return expected


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


FOLDER: Final = "first-failure"


class FirstFailure:
    """Copies the logs of all hosts, and says what was wrong, once.

    Args:
        folder: Of the report; a folder in it is made when there is something to keep.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._is_kept = False

    def keep(self, ground: Ground, reason: str, streams: list[Stream]) -> None:
        """Keep it, unless something was kept before.

        Args:
            ground: Whose logs.
            reason: What went wrong.
            streams: That show it; what they should have been is written beside them.
        """
        if self._is_kept:
            return
        self._is_kept = True
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        for host in range(ground.lab.num_hosts):
            log = ground.mesh.log(host)
            if log.exists():
                shutil.copyfile(log, self._folder / log.name)
        names = {stream.told.record.prompt_id for stream in streams}
        fields = {
            "reason": reason,
            "streams": [stream.as_dict() for stream in streams],
            "undisturbed": {name: asdict(ground.expected[name]) for name in sorted(names)},
        }
        text = json.dumps(fields, indent=1, ensure_ascii=False)
        (self._folder / "failure.json").write_text(text + "\n", encoding="utf-8")
