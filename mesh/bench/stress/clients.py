"""What became of clients of whom some hang up, in counts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mesh.bench.stress.judging import Judgement
    from mesh.bench.stress.told import Told

_MISMATCHES: Final = "mesh_prefix_mismatches_total"


@dataclass(frozen=True)
class ClientCounts:
    """Of all loads of a run.

    Attributes:
        num_requests: That were sent.
        num_finished: That were answered to their end.
        num_failed: That were not, though their clients waited.
        num_hung_up_early: Whose clients hung up before they had a token.
        num_hung_up_late: Whose clients hung up in the answer.
        num_unlike: Whose text, as far as it came, is not the one that was given alone.
        num_prompt_tokens: Of the finished ones.
        num_cached_tokens: How many of those the stages held already.
        num_begun_anew: Sessions whose slot did not hold what it was believed to hold, by `/metrics`; None if
            the mesh does not count them.
    """

    num_requests: int
    num_finished: int
    num_failed: int
    num_hung_up_early: int
    num_hung_up_late: int
    num_unlike: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_begun_anew: int | None

    def rows(self) -> list[tuple[str, str]]:
        """Name and figure of each, for a table."""
        begun_anew = "not counted" if self.num_begun_anew is None else str(self.num_begun_anew)
        return [
            ("requests", str(self.num_requests)),
            ("finished", str(self.num_finished)),
            ("hung up before the first token", str(self.num_hung_up_early)),
            ("hung up in the answer", str(self.num_hung_up_late)),
            ("failed", str(self.num_failed)),
            ("texts unlike the one given alone", str(self.num_unlike)),
            ("cached tokens", f"{self.num_cached_tokens} of {self.num_prompt_tokens} in finished prompts"),
            ("begun anew, the slot held something else", begun_anew),
        ]


def count_clients(
    told: Iterable[Told], judgements: Iterable[Judgement], num_begun_anew: int | None
) -> ClientCounts:
    """Add all loads up."""
    records = [one.record for one in told]
    judged = tuple(judgements)
    finished = [record for record in records if record.failure is None]
    early, late = (
        sum(one.num_hung_up_early for one in judged),
        sum(one.num_hung_up_late for one in judged),
    )
    return ClientCounts(
        num_requests=len(records),
        num_finished=len(finished),
        num_failed=len(records) - len(finished) - early - late,
        num_hung_up_early=early,
        num_hung_up_late=late,
        num_unlike=sum(one.num_forks for one in judged),
        num_prompt_tokens=sum(record.num_input_tokens or 0 for record in finished),
        num_cached_tokens=sum(record.num_cached_tokens or 0 for record in finished),
        num_begun_anew=num_begun_anew,
    )


def prefix_mismatches(exposition: str) -> int | None:
    """What `/metrics` says, of all models together; None if it does not count them."""
    values = [
        float(line.rpartition(" ")[2])
        for line in exposition.splitlines()
        if line.startswith((f"{_MISMATCHES}{{", f"{_MISMATCHES} "))
    ]
    return round(sum(values)) if values else None
