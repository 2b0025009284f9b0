"""Results of losses of a stage while an answer drafts: acceptance before and after, and their bounds."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from mesh.status import ProposerStatus
from meshbench.chaos.results import Tally, stream_lines
from meshbench.report_tools import Line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from meshbench.load_client.answers import AnswerRecord
    from meshbench.load_client.client import MeshSnapshot

# Tokens after a repair before acceptance counts again.
SETTLING_TOKENS: Final = 64
MOST_CHANGE: Final = 0.05


@dataclass(frozen=True)
class Counts:
    """Tokens of the drafter that were verified."""

    drafted: int = 0
    """Proposed."""
    accepted: int = 0
    """Those of them that the model chose too."""

    def __add__(self, other: Counts) -> Counts:
        """Sums of both."""
        return Counts(self.drafted + other.drafted, self.accepted + other.accepted)

    def __sub__(self, other: Counts) -> Counts:
        """Counts since `other`."""
        return Counts(self.drafted - other.drafted, self.accepted - other.accepted)

    @property
    def acceptance(self) -> float | None:
        """Share of accepted tokens; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(frozen=True)
class Sample:
    """State of the mesh while one answer runs."""

    at_s: float
    """When, of `time.perf_counter`."""
    positions: int
    """Tokens of the running answer, its prompt included; 0 when none runs."""
    counts: Counts
    """Since the start of the mesh."""
    ring: tuple[str, ...]
    """Addresses of the stages; empty while the ring is broken."""

    @classmethod
    def of(cls, snapshot: MeshSnapshot, drafter: str) -> Sample | None:
        """From `/mesh/status`; None without one.

        Args:
            snapshot: State of mesh and clients.
            drafter: Name of the proposer.
        """
        status = snapshot.status
        if status is None or status.speculation is None or status.sessions is None:
            return None
        found = status.speculation.proposers.get(drafter, ProposerStatus())
        stages = status.stages if status.ready else ()
        return cls(
            snapshot.at_s,
            status.sessions.positions,
            Counts(found.drafted, found.accepted),
            tuple(stage.address for stage in stages),
        )


@dataclass(frozen=True)
class WatchedAnswer:
    """An answer, with samples from before its request until after its end."""

    answer: AnswerRecord
    """Question and answer."""
    samples: tuple[Sample, ...]
    """In order; at least two."""
    killed_s: float | None = None
    """When a stage was killed, of `time.perf_counter`; None if none was."""

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return self.answer.record.num_input_tokens or 0

    @property
    def killed_tokens(self) -> int:
        """Tokens of the answer at the last sample before the loss."""
        return max(0, self._before_loss.positions - self.num_prompt)

    @property
    def repaired_tokens(self) -> int | None:
        """Tokens of the answer when another ring was there; None if there was none."""
        found = self._repaired
        return None if found is None else max(0, found.positions - self.num_prompt)

    @property
    def repair_s(self) -> float | None:
        """From the loss until another ring was there; None if there was none."""
        found = self._repaired
        return None if found is None or self.killed_s is None else found.at_s - self.killed_s

    @property
    def before(self) -> Counts:
        """From the request to the loss."""
        return self._before_loss.counts - self.samples[0].counts

    @property
    def after(self) -> Counts:
        """From some tokens after the repair to the end."""
        found = self.repaired_tokens
        return Counts() if found is None else self.from_token(found + SETTLING_TOKENS)

    def until_token(self, stop: int) -> Counts:
        """Counts of the answer up to a token."""
        reached = [one for one in self._running if one.positions - self.num_prompt <= stop]
        return reached[-1].counts - self.samples[0].counts if reached else Counts()

    def from_token(self, start: int) -> Counts:
        """Counts of the answer from a token on."""
        begin = next((one for one in self._running if one.positions - self.num_prompt >= start), None)
        return Counts() if begin is None else self.samples[-1].counts - begin.counts

    @property
    def _running(self) -> list[Sample]:
        return [one for one in self.samples if one.positions]

    @property
    def _before_loss(self) -> Sample:
        earlier = [one for one in self.samples if self.killed_s is not None and one.at_s <= self.killed_s]
        return earlier[-1] if earlier else self.samples[0]

    @property
    def _repaired(self) -> Sample | None:
        before, killed_s = self._before_loss, self.killed_s
        later = (one for one in self._running if killed_s is not None and one.at_s > killed_s)
        return next((one for one in later if one.ring and one.ring != before.ring), None)


def result_lines(
    lost: Sequence[WatchedAnswer], undisturbed: Mapping[str, WatchedAnswer], found: Tally
) -> list[Line]:
    """The table, with its bounds.

    Args:
        lost: Answers that lost a stage.
        undisturbed: Answers to the same questions without a loss, by question.
        found: Comparison of both.
    """
    before, after = (_sum(getattr(each, name) for each in lost) for name in ("before", "after"))
    repaired = [each for each in lost if each.repaired_tokens is not None]
    pairs = [(each, undisturbed[each.answer.record.prompt_id]) for each in lost]
    same_before = _sum(base.until_token(each.killed_tokens) for each, base in pairs)
    same_after = _sum(
        base.from_token(each.repaired_tokens + SETTLING_TOKENS)
        for each, base in pairs
        if each.repaired_tokens is not None
    )
    repairs_s = [each.repair_s for each in repaired if each.repair_s is not None]
    change = _less(after, before)
    later = f"from {SETTLING_TOKENS} tokens after the repair on"
    return [
        *stream_lines(found, f"{len(lost)} losses", is_exact=True),
        Line("losses after which another ring went on", len(repaired), len(lost)),
        Line(
            "losses with drafts before and after",
            sum(bool(each.before.drafted and each.after.drafted) for each in lost),
            len(lost),
        ),
        _acceptance_line("acceptance before the loss", before),
        _acceptance_line(f"acceptance {later}", after),
        Line(
            "change of acceptance, pooled",
            None if change is None else abs(change),
            MOST_CHANGE,
            is_ceiling=True,
        ),
        _acceptance_line("acceptance of the undisturbed answers until the same tokens", same_before),
        _acceptance_line("acceptance of the undisturbed answers from the same tokens on", same_after),
        Line("the latter less that after the repairs", _less(same_after, after), None),
        Line(
            "time from the loss to another ring, median, s",
            median(repairs_s) if repairs_s else None,
            None,
            note=f"at most {max(repairs_s):.2f}" if repairs_s else "",
        ),
    ]


def _sum(counts: Iterable[Counts]) -> Counts:
    return sum(counts, Counts())


def _less(one: Counts, other: Counts) -> float | None:
    """Difference of acceptance; None if either is unknown."""
    if one.acceptance is None or other.acceptance is None:
        return None
    return one.acceptance - other.acceptance


def _acceptance_line(title: str, counts: Counts) -> Line:
    note = f"{counts.accepted} of {counts.drafted} drafted tokens"
    return Line(title, counts.acceptance, None, note=note)
