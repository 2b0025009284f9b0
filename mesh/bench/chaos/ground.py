"""What harms are done on: a mesh that is up, its clients, and what they were told while all was well."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from mesh.bench.chaos.look import what_is_missing
from mesh.bench.chaos.tally import tally
from mesh.bench.stress.checks import Expected
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mesh.bench.chaos.crowd import Crowd
    from mesh.bench.chaos.harming import Harming
    from mesh.bench.chaos.look import Look
    from mesh.bench.chaos.options import ChaosOptions
    from mesh.bench.chaos.question import Question
    from mesh.bench.chaos.stream import Stream
    from mesh.bench.chaos.tally import Tally
    from mesh.lab.network import Lab
    from mesh.lab.systems import MeshSystem

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
        """Why the mesh is not yet what it was; see `look.what_is_missing`."""
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
