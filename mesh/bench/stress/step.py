"""One step of a ramp, and where a ramp saturates. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mesh.bench.serve.figures import Figures, work_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.bench.stress.judging import Judgement
    from mesh.bench.stress.order import Outcome

PERCENTILES: Final = (50.0, 90.0, 99.0)
# More users that bring less than this more are only waiting.
LEAST_GAIN: Final = 0.1


@dataclass(frozen=True)
class Step:
    """A load of one concurrency.

    Attributes:
        concurrency: Requests under way at once.
        figures: What was measured.
        judgement: What the answers were like.
        peer_tokens_per_s: The peer's rate under the same load; None if it was not measured.
    """

    concurrency: int
    figures: Figures
    judgement: Judgement
    peer_tokens_per_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Answered tokens a second, of all requests together."""
        return self.figures.output_throughput

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the peer."""
        return None if self.peer_tokens_per_s is None else self.tokens_per_s / self.peer_tokens_per_s


def step_of(
    concurrency: int, outcome: Outcome, judgement: Judgement, peer_tokens_per_s: float | None = None
) -> Step:
    """Work a load out; requests whose clients hung up are no part of its figures."""
    records = [
        one.record for one in outcome.told if one.record.failure is None or not one.record.failure.is_hang_up
    ]
    figures = work_out(records, outcome.duration_s, percentiles=PERCENTILES, slos=())
    return Step(concurrency, figures, judgement, peer_tokens_per_s)


def saturation(rates: Sequence[tuple[int, float]], least_gain: float = LEAST_GAIN) -> int | None:
    """The concurrency after which no higher one brings that much more throughput.

    Args:
        rates: Concurrency and tokens per second.
        least_gain: Share of the rate.

    Returns:
        None if the highest concurrency still brought more than all below it: then the ramp was too short.
    """
    ordered = sorted(rates)
    for index, (concurrency, rate) in enumerate(ordered[:-1]):
        if all(later <= rate * (1 + least_gain) for _, later in ordered[index + 1 :]):
            return concurrency
    return None
