"""How likely a text goes on as it did before, by how much speaks for it.

Evidence is a small whole number: where a continuation was found sets its start (`MATCHED`, `NEARBY`), and
each token that came as foretold adds two. Starting values and chances were fitted to rewritten files of five
Python packages (not those of the benchmark); a session's own hits and misses correct the chances as it goes.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

PER_TOKEN: Final = 2

# Evidence of a context that agrees over so many tokens; a match of one says next to nothing.
MATCHED: Final = (0, 2, 4, 5, 6, 6, 7, 7, 7, 7, 8, 8, 9, 9, 10, 10, 14)

# What is added for being found 0, 1, … tokens behind the place where the text was left.
NEARBY: Final = (4, *[2] * 3, *[1] * 12)

# From each of these amounts of evidence on, the chance that the next token comes as foretold.
_STEPS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 16, 24, 40, 64, 128)
_CHANCES: Final = (0.10, 0.19, 0.33, 0.46, 0.58, 0.67, 0.78, 0.86, 0.93, 0.96, 0.98, 0.991, 0.998)
_LAST: Final = len(_STEPS) - 1
# The step of each amount of evidence, up to where the last one begins.
_STEP_OF: Final = tuple(max(bisect_right(_STEPS, evidence) - 1, 0) for evidence in range(_STEPS[-1]))


class EvidenceTable:
    """The chance of the next token for each amount of evidence, learning as it goes.

    Args:
        prior_weight: How many of its own observations weigh as much as the fitted chance.
    """

    def __init__(self, prior_weight: float = 8.0) -> None:
        self._hits = [chance * prior_weight for chance in _CHANCES]
        self._trials = [prior_weight] * len(_STEPS)
        self._chances = list(_CHANCES)

    def chances(self, evidence: int, count: int) -> tuple[float, ...]:
        """For each of the next `count` tokens the chance that it is right if those before it were."""
        chances = self._chances
        steps = _STEP_OF[evidence : evidence + PER_TOKEN * count : PER_TOKEN]
        return tuple([chances[step] for step in steps]) + (chances[_LAST],) * (count - len(steps))

    def learn(self, evidence: int, num_right: int, *, is_missed: bool) -> None:
        """Note what became of a continuation.

        Args:
            evidence: For its first token.
            num_right: So many tokens came as foretold.
            is_missed: Whether then one did not.
        """
        while num_right:
            step = _step_of(evidence)
            num_here = num_right
            if step < _LAST:
                num_here = min(num_right, -((evidence - _STEPS[step + 1]) // PER_TOKEN))
            self._note(step, num_here, num_here)
            num_right -= num_here
            evidence += PER_TOKEN * num_here
        if is_missed:
            self._note(_step_of(evidence), 0, 1)

    def _note(self, step: int, num_hits: int, num_trials: int) -> None:
        self._hits[step] += num_hits
        self._trials[step] += num_trials
        self._chances[step] = self._hits[step] / self._trials[step]


def _step_of(evidence: int) -> int:
    return _STEP_OF[evidence] if evidence < len(_STEP_OF) else _LAST
