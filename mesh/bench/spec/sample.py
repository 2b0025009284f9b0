"""One measured answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.bench.stream_client import Answer

MESH: Final = "mesh"
LLAMA_RPC: Final = "llama.cpp RPC"


@dataclass(frozen=True)
class DraftCounts:
    """What became of proposed tokens.

    Attributes:
        num_windows: Passes through the target, those without proposed tokens too; 0 where the server does not
            say.
        num_drafts: Passes that carried proposed tokens; 0 where the server does not say.
        num_drafted: Proposed tokens.
        num_accepted: Those that the target chose too.
        drafted_per_position: Entry `i`: passes that carried more than `i` proposed tokens.
        accepted_per_position: Entry `i`: passes that had more than `i` of them accepted.
        num_stale_rows: Rows that were void before their verdict.
        reason: What the controller says of its choice.
    """

    num_windows: int = 0
    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    num_stale_rows: int = 0
    reason: str = ""

    @classmethod
    def from_timings(cls, timings: Mapping[str, Any]) -> DraftCounts:
        """From the `timings` of an answer: ours or llama-server's, which is less."""
        ours = timings.get("speculation") or {}
        proposers = (ours.get("proposers") or {}).values()
        return cls(
            num_windows=ours.get("windows", 0),
            num_drafts=sum(proposer["drafts"] for proposer in proposers),
            num_drafted=timings.get("draft_n", 0),
            num_accepted=timings.get("draft_n_accepted", 0),
            drafted_per_position=add_up(proposer["drafted_per_position"] for proposer in proposers),
            accepted_per_position=add_up(proposer["accepted_per_position"] for proposer in proposers),
            num_stale_rows=ours.get("stale_rows", 0),
            reason=str(ours.get("reason", "")),
        )


@dataclass(frozen=True)
class Sample:
    """An answer and where it belongs.

    Attributes:
        turn: Samples of one turn are the same question under several settings, one right after the other.
        system: Who answered.
        server: How the server was started, by a name.
        setting: Name of the setting.
        workload: Name of the workload.
        question: Id of the question.
        delay_ms: One way, as asked for.
        is_raw: Whether it came from the completion endpoint.
        is_warm: Whether the question had been answered before.
        temperature: Of sampling; 0 is greedy.
        text: The answer.
        num_tokens: Its length.
        arrivals_ms: When its parts came, from the request.
        counts: What became of proposed tokens.
    """

    turn: int
    system: str
    server: str
    setting: str
    workload: str
    question: str
    delay_ms: float
    is_raw: bool
    is_warm: bool
    temperature: float
    text: str
    num_tokens: int
    arrivals_ms: tuple[float, ...]
    counts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return self.arrivals_ms[0]

    @property
    def tokens_per_s(self) -> float:
        """Decode rate, the first token left out; infinite if all came at once."""
        decode_ms = self.arrivals_ms[-1] - self.arrivals_ms[0]
        return (self.num_tokens - 1) / decode_ms * 1e3 if decode_ms > 0 else float("inf")

    @property
    def gaps_ms(self) -> tuple[float, ...]:
        """From each part's arrival to the next: inter-token latency as a reader sees it."""
        return tuple(
            later - earlier for earlier, later in zip(self.arrivals_ms, self.arrivals_ms[1:], strict=False)
        )

    @classmethod
    def of(cls, answer: Answer, **where: Any) -> Sample:
        """From a client's answer."""
        return cls(
            text=answer.text,
            num_tokens=answer.num_tokens,
            arrivals_ms=answer.arrivals_ms,
            counts=DraftCounts.from_timings(answer.timings),
            **where,
        )


def add_up(rows: Any) -> tuple[int, ...]:
    """Entry by entry, shorter rows counting as zero beyond their end."""
    total: list[int] = []
    for row in rows:
        total += [0] * (len(row) - len(total))
        for index, value in enumerate(row):
            total[index] += value
    return tuple(total)
