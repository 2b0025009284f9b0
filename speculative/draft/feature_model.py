"""Feature model: the proposer of tokens from a drafter that reads hidden states of the target.

The drafter runs on the coordinator, in the thread of `speculative.draft.worker`. Stages send features there
(`mesh.coordinator.feature_streams`); what is late or lost costs acceptance only.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from speculative.draft.context import probability
from speculative.draft.feature_context import FeatureContext, FeatureKind
from speculative.draft.feature_sequence import FeatureSequence, FeatureSpan
from speculative.draft.isolated_context import opened
from speculative.draft.model import DraftProposer
from speculative.draft.rows import SlotRows
from speculative.draft.worker import DraftSession, DraftThread

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from speculative.draft.context import DraftOptions
    from speculative.draft.feature_context import GraphTap
    from speculative.draft.isolated_context import ProcessSetup
    from speculative.draft.worker import Choose

_NUM_TIMED_TOKENS: Final = 4


class FeatureModel:
    """A loaded drafter, its thread, and its sessions. One for each coordinator.

    Args:
        path: The GGUF, with embedding and head.
        kind: Its kind.
        options: Options; `draft_max` is the greatest distance of a drafted token from the last feature.
        num_tokens: Number of token ids of the target; higher ones are never proposed.
        make_tap: See `FeatureContext`.
        clock_s: Monotonic clock, seconds.
        setup: Of the process that computes; None to compute in this process, which llama.cpp may abort.

    Raises:
        DraftUnusable: If the file cannot serve as a drafter, or there is no memory for its KV cache.
    """

    def __init__(
        self,
        path: Path,
        kind: FeatureKind,
        options: DraftOptions,
        *,
        num_tokens: int,
        make_tap: Callable[[int, int], GraphTap],
        clock_s: Callable[[], float],
        setup: ProcessSetup | None = None,
    ) -> None:
        self._kind = kind
        self._options = options
        make = partial(FeatureContext, path, kind, options, num_tokens, make_tap)
        self._context = opened(
            make, setup, num_sessions=options.num_sessions, num_tokens=num_tokens, clock_s=clock_s
        )
        self._zeros = None
        if kind is FeatureKind.MTP:
            self._zeros = np.zeros(self._context.feature_width, np.float32)
        try:
            ms_per_token = self._time_token_ms(clock_s)
        except BaseException:
            self._context.close()
            raise
        self._thread = DraftThread(self._context, options, clock_s, ms_per_token)

    @property
    def draft_ms_per_token(self) -> float:
        """Time of a drafted token, in ms: a running mean, of whole batches if several sessions draft."""
        return self._thread.ms_per_token

    @property
    def is_alive(self) -> bool:
        """Whether it can draft: neither the process that computes nor the thread has ended."""
        return self._context.is_alive and self._thread.failure is None

    def open(self, choose: Choose, client: str | None = None) -> FeatureProposer:
        """A proposer for one session; see `speculative.draft.model.DraftModel.open`."""
        sequence = FeatureSequence(self._kind.value, self._options, self._context.is_end, zeros=self._zeros)
        session = DraftSession(sequence, choose, client)
        return FeatureProposer(self._kind.value, self._thread, session, sequence)

    def close(self) -> None:
        """End the thread at once and free all memory; proposers then propose nothing."""
        self._thread.close()
        self._context.close()

    def _time_token_ms(self, clock_s: Callable[[], float]) -> float:
        """Shortest time of a few tokens: the estimate before the first session. The first only warms up."""
        times_ms = []
        features = np.zeros((1, self._context.feature_width), np.float32)
        for token in range(1, 1 + _NUM_TIMED_TOKENS):
            started_s = clock_s()
            span = FeatureSpan(token, (0,), features, None, has_output=True, is_anew=token == 1)
            for output in self._context.decode([SlotRows(0, span)], contextlib.nullcontext()) or ():
                if output is not None:
                    probability(output.logits, int(np.argmax(output.logits)))
            times_ms.append((clock_s() - started_s) * 1000)
        self._context.free(0)
        return min(times_ms)


class FeatureProposer(DraftProposer):
    """Proposer for one session; see `speculative.proposer.FeatureReader`. From `FeatureModel.open`.

    Args:
        name: Name of the drafter's kind.
        thread: The drafter's thread.
        session: The session, with `sequence`.
        sequence: Text of the session.
    """

    def __init__(
        self, name: str, thread: DraftThread, session: DraftSession, sequence: FeatureSequence
    ) -> None:
        super().__init__(thread, session)
        self.name = name
        self._sequence = sequence

    def take_features(self, start: int, rows: NDArray[np.float32]) -> None:
        """Take features of committed positions; see `speculative.proposer.FeatureReader`."""
        with self._thread.text_of(self._session):
            self._sequence.take_features(start, rows)
