"""What became of the clients' streams. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesh.bench.stress.checks import Problem, judge_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mesh.bench.chaos.stream import Stream
    from mesh.bench.stress.checks import Expected


@dataclass(frozen=True)
class Tally:
    """Of many streams.

    Attributes:
        num_streams: That began; those that were refused with 503 did not.
        num_failed: How many of them have not all of their answer, though their clients waited.
        num_hung_up_early: How many had clients that hung up before the first token.
        num_hung_up_late: The same after it.
        num_unlike: How many of those that did not fail are not what the undisturbed run said, in text or
            token ids, as far as they came.
        num_refused: Requests turned away with 503 before their answer began.
        problems: Everything that must not be: of failed streams, unsound ones, and unlike ones where equal
            texts are promised.
    """

    num_streams: int
    num_failed: int
    num_hung_up_early: int
    num_hung_up_late: int
    num_unlike: int
    num_refused: int
    problems: tuple[Problem, ...]


def tally(streams: Iterable[Stream], expected: Mapping[str, Expected], *, is_exact: bool) -> Tally:
    """Look at every stream.

    Args:
        streams: Those of the clients.
        expected: What the undisturbed run said, by what was asked.
        is_exact: Whether every text must be that.
    """
    everybody = list(streams)
    told = [stream.told for stream in everybody if not stream.is_refused]
    judgement = judge_all(told, expected, is_exact=is_exact, text_of=None)
    problems = list(judgement.problems)
    num_unlike = judgement.num_forks
    for one in told:
        alone = expected[one.record.prompt_id].alone
        is_compared = alone is not None and one.record.failure is None
        # Other ids can make the same text.
        if alone is not None and is_compared and one.text == alone.text and one.token_ids != alone.token_ids:
            num_unlike += 1
            if is_exact:
                problems.append(Problem("text", one.record.prompt_id, "the same text of other token ids"))
    return Tally(
        num_streams=len(told),
        num_failed=sum(one.record.failure is not None for one in told) - judgement.num_hung_up,
        num_hung_up_early=judgement.num_hung_up_early,
        num_hung_up_late=judgement.num_hung_up_late,
        num_unlike=num_unlike,
        num_refused=len(everybody) - len(told),
        problems=tuple(problems),
    )
