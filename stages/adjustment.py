"""What changes a row's logits before anything is filtered or drawn: penalties first, then biases.

- `frequency_penalty` and `presence_penalty` as OpenAI defines them: an id that the answer holds `c` times
  loses `c * frequency + presence`. Only the answer counts, never the prompt, as at OpenAI and in vLLM.
- `repetition_penalty` as in CTRL (Keskar et al. 2019), with the usual care for signs: the logit of an id seen
  before is divided by it if it is positive and multiplied by it otherwise. Prompt and answer count, all of
  them or the latest `repetition_window` tokens, as in vLLM and llama.cpp.
- `logit_bias` is added last: minus 100 rules an id out and 100 brings it about, however often it came before.

Each is a function of the row and of the tokens before it, so a row computed again, or one that is rejected,
leaves nothing behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stages.sampling import Sampling


class LogitAdjustment:
    """One session's penalties and biases, ready to be applied.

    Args:
        sampling: The session's settings.
        num_prompt: How many of its first tokens are the prompt.
    """

    def __init__(self, sampling: Sampling, num_prompt: int = 0) -> None:
        self._num_prompt = num_prompt
        self._frequency = np.float32(sampling.frequency_penalty)
        self._presence = np.float32(sampling.presence_penalty)
        self._repetition = np.float32(sampling.repetition_penalty)
        self._window = sampling.repetition_window
        self._bias_ids = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self._counts_answer = bool(self._frequency) or bool(self._presence)
        self._counts_all = sampling.repetition_penalty != 1.0

    @property
    def needs_history(self) -> bool:
        """Whether it asks what came before."""
        return self._counts_answer or self._counts_all

    @property
    def is_idle(self) -> bool:
        """Whether it leaves every row as it is."""
        return not self.needs_history and not self._bias_ids.size

    def apply(
        self, logits: NDArray[np.float32], before: Sequence[int] | NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """The row as it is drawn from.

        Args:
            logits: float32, shape (n_vocab,); it is not changed.
            before: The session's tokens up to this row, the prompt's too; read only if `needs_history`.

        Returns:
            float32, shape (n_vocab,): `logits` itself if there is nothing to adjust.
        """
        if self.is_idle:
            return logits
        adjusted = logits.copy()
        if self.needs_history:
            self._penalise(adjusted, np.asarray(before, np.int64))
        adjusted[self._bias_ids] += self._biases
        return adjusted

    def _penalise(self, row: NDArray[np.float32], before: NDArray[np.int64]) -> None:
        # An id that stands in `seen` or `said` more than once is written as often, each time the same value.
        if self._counts_all:
            seen = before[-self._window :] if self._window else before
            values = row[seen]
            row[seen] = np.where(values > 0, values / self._repetition, values * self._repetition)
        if self._counts_answer:
            said = before[self._num_prompt :]
            counts = np.bincount(said)[said].astype(np.float32)
            row[said] = row[said] - (counts * self._frequency + self._presence)
