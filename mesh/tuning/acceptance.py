"""Acceptance of drafted tokens on recorded answers: windows as they are served, with intervals.

For each start in an answer it is known how many of `NUM_DRAFTED` drafted tokens equal the target's. A served
answer has windows only at some of them: the next begins behind the token that corrects the first wrong one.
Over all starts acceptance would be 2 to 7 points higher.

Intervals are of the bootstrap over prompts (Efron 1979): tokens of one answer are not independent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from mesh.tuning.conversation_file import Api

NUM_DRAFTED: Final = 4
"""Tokens of each draft that is counted."""
LEAST_PROMPTS: Final = 20
"""Below this number figures tell little."""
LEAST_TOKENS: Final = 2000
_NUM_RESAMPLES: Final = 1000
_SEED: Final = 1
_INTERVAL: Final = (2.5, 97.5)
_GRAM: Final = 4
# An answer of which half of the 4-grams were there before goes round in circles, and is easily foretold.
_MOST_REPEATED: Final = 0.5


@dataclass(frozen=True, eq=False)
class AnswerDrafts:
    """What a drafter foretold of one answer."""

    name: str
    """Of its recording, by which answers that two drafters foretold are paired."""
    prompt_id: str
    api: Api
    num_right: NDArray[np.int64]
    """For each start, how many of `NUM_DRAFTED` tokens are right."""
    num_tokens: int
    """Tokens of the answer."""
    num_covered: int
    """Those of them that the drafter can propose."""
    is_degenerate: bool
    """Whether the answer repeats itself, see `is_degenerate`."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of a drafter on some answers."""

    num_prompts: int
    num_tokens: int
    """Tokens of their answers."""
    num_windows: int
    num_degenerate: int
    """Answers that repeat themselves and are left out."""
    coverage: float
    """Share of the answers' tokens that it can propose."""
    unconditional: tuple[Interval, ...]
    """By position: windows that had the token accepted, of all."""
    conditional: tuple[float | None, ...]
    """By position: the same, of those that had all tokens before it accepted; None of none."""
    per_window: Interval
    """Accepted tokens of a window."""

    @property
    def is_enough(self) -> bool:
        """Whether there are prompts and tokens enough to tell."""
        return self.num_prompts >= LEAST_PROMPTS and self.num_tokens >= LEAST_TOKENS


@dataclass(frozen=True)
class Gain:
    """What one drafter has accepted more than another, on the same answers."""

    first: Interval
    """Difference of acceptance at the first position."""
    per_window: Interval
    """Difference of accepted tokens of a window."""


def windows(num_right: NDArray[np.int64]) -> NDArray[np.int64]:
    """Accepted tokens of the windows that a served answer would have had."""
    at, found = 0, []
    while at < len(num_right):
        found.append(int(num_right[at]))
        at += found[-1] + 1
    return np.array(found, np.int64)


def is_degenerate(tokens: NDArray[np.int32]) -> bool:
    """Whether half of an answer's 4-grams or more are repetitions."""
    text = tokens.tolist()
    grams = [tuple(text[at : at + _GRAM]) for at in range(len(text) - _GRAM + 1)]
    num_repeated = sum(count - 1 for count in Counter(grams).values())
    return num_repeated > 0 and num_repeated >= _MOST_REPEATED * len(grams)


def acceptance_of(answers: Sequence[AnswerDrafts]) -> Acceptance | None:
    """Acceptance over windows; None if there are none."""
    kept = [answer for answer in answers if not answer.is_degenerate]
    sums = _sums(kept)
    num_windows = int(sums[:, 0].sum())
    if not num_windows:
        return None
    num_tokens = sum(answer.num_tokens for answer in kept)
    accepted = sums[:, 1:].sum(0)
    reached = [num_windows, *accepted[:-1]]
    resampled = _rates(_resampled(sums))
    estimates = [
        _interval(value, resampled[:, index]) for index, value in enumerate(_rates(sums.sum(0)[None])[0])
    ]
    return Acceptance(
        num_prompts=len(sums),
        num_tokens=num_tokens,
        num_windows=num_windows,
        num_degenerate=len(answers) - len(kept),
        coverage=sum(answer.num_covered for answer in kept) / num_tokens,
        unconditional=tuple(estimates[:-1]),
        conditional=tuple(
            float(some / of) if of else None for some, of in zip(accepted, reached, strict=True)
        ),
        per_window=estimates[-1],
    )


def paired(
    before: Sequence[AnswerDrafts], after: Sequence[AnswerDrafts]
) -> tuple[list[AnswerDrafts], list[AnswerDrafts]]:
    """Drafts of two drafters of the same answers: one may have been erased before the other was measured."""
    first, second = ({each.name for each in answers} for answers in (before, after))
    return [each for each in before if each.name in second], [each for each in after if each.name in first]


def gain(before: Sequence[AnswerDrafts], after: Sequence[AnswerDrafts]) -> Gain | None:
    """Paired gain of one drafter over another; None if there are no windows.

    Args:
        before: Drafts of the one.
        after: Drafts of the other, in the same order of answers.
    """
    both = paired(before, after)
    sums = [_sums([each for each in answers if not each.is_degenerate]) for answers in both]
    if not sums[0][:, 0].sum():
        return None
    # The same prompts are drawn for both.
    resampled = [_rates(_resampled(each)) for each in sums]
    values = [_rates(each.sum(0)[None])[0] for each in sums]
    gains = values[1] - values[0]
    drawn = resampled[1] - resampled[0]
    return Gain(_interval(gains[0], drawn[:, 0]), _interval(gains[-1], drawn[:, -1]))


def expected_at(acceptance: Acceptance, num_positions: int) -> tuple[float, ...]:
    """Unconditional acceptance by position, beyond the counted ones as it falls from one to the next.

    Args:
        acceptance: As counted.
        num_positions: How many.
    """
    found = [estimate.value for estimate in acceptance.unconditional]
    falls = [after / before for before, after in pairwise(found) if before > 0]
    fall = float(np.mean(falls)) if falls else 0.0
    while len(found) < num_positions:
        found.append(found[-1] * min(1.0, fall))
    return tuple(found[:num_positions])


def _sums(answers: Sequence[AnswerDrafts]) -> NDArray[np.int64]:
    """For each prompt: windows, and those that had each position accepted; int64 [prompts, 1 + drafted]."""
    by_prompt: dict[str, NDArray[np.int64]] = {}
    for answer in answers:
        found = windows(answer.num_right)
        counts = [len(found), *(int((found > index).sum()) for index in range(NUM_DRAFTED))]
        by_prompt[answer.prompt_id] = by_prompt.get(answer.prompt_id, 0) + np.array(counts, np.int64)
    return np.array(list(by_prompt.values()), np.int64).reshape(-1, 1 + NUM_DRAFTED)


def _resampled(sums: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums over as many prompts as there are, drawn with replacement: [resamples, 1 + drafted]."""
    rng = np.random.default_rng(_SEED)
    drawn = rng.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), _NUM_RESAMPLES)
    found: NDArray[np.int64] = drawn @ sums
    return found


def _rates(sums: NDArray[np.int64]) -> NDArray[np.float64]:
    """Unconditional acceptance by position, then accepted tokens of a window: [..., drafted + 1]."""
    accepted = sums[:, 1:]
    both = np.concatenate([accepted, accepted.sum(1, keepdims=True)], 1)
    return both / np.maximum(sums[:, :1], 1)


def _interval(value: Any, resampled: NDArray[np.float64]) -> Interval:
    low, high = np.percentile(resampled, _INTERVAL)
    return Interval(float(value), float(low), float(high))
