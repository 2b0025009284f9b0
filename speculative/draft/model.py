"""Draft model: the proposer of tokens from a small model.

Speculative decoding with a separate draft model (Leviathan et al. 2023, Chen et al. 2023), run continuously
as in PipeInfer (Butler et al. 2024): while windows are in flight it drafts on from them, and after a
rejection it trims its own KV cache and continues there. It samples as the target's sampler would, with the
same noise (Daliri et al. 2024, drafter-invariant speculative decoding), so the two agree above temperature 0
as well.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from speculative.draft.context import DraftContext, probability
from speculative.draft.isolated_context import opened
from speculative.draft.rows import DraftSpan, SlotRows
from speculative.draft.session import DraftSequence
from speculative.draft.worker import DraftSession, DraftThread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from speculative.draft.context import DraftOptions
    from speculative.draft.isolated_context import IsolatedContext, ProcessSetup
    from speculative.draft.worker import Choose
    from speculative.proposer import Proposal

NAME: Final = "draft"

_NUM_TIMED_TOKENS: Final = 4


class DraftModel:
    """A loaded draft model, its thread, and its sessions. One for each coordinator.

    Args:
        path: The GGUF, or its first file if it is split.
        options: Options of the draft model.
        num_tokens: Number of token ids of the target; higher ones are never proposed.
        clock_s: Monotonic clock, seconds.
        setup: Of the process that computes; None to compute in this process, which llama.cpp may abort.

    Raises:
        DraftUnusable: If the file cannot serve as a draft model, or there is no memory for its KV cache.
    """

    def __init__(
        self,
        path: Path,
        options: DraftOptions,
        *,
        num_tokens: int,
        clock_s: Callable[[], float],
        setup: ProcessSetup | None = None,
    ) -> None:
        self._options = options
        make = partial(DraftContext, path, options, num_tokens)
        self._context = opened(
            make, setup, num_sessions=options.num_sessions, num_tokens=num_tokens, clock_s=clock_s
        )
        self._thread = DraftThread(self._context, options, clock_s, _time_token_ms(self._context, clock_s))

    @property
    def draft_ms_per_token(self) -> float:
        """Time of a drafted token, in ms: a running mean, of whole batches if several sessions draft."""
        return self._thread.ms_per_token

    @property
    def is_alive(self) -> bool:
        """Whether it can draft: neither the process that computes nor the thread has ended."""
        return self._context.is_alive and self._thread.failure is None

    def open(self, choose: Choose, client: str | None = None) -> DraftProposer:
        """A proposer for one session; at most `options.num_sessions` may be open at once.

        Args:
            choose: Returns the token for an absolute position, given the draft's logits before it, float32,
                shape (n_vocab,), and the tokens at all positions before it. Called on the draft's thread;
                must not keep the array. With the target's own sampler and seed the two share their noise.
            client: Client of the session, which reuses rows of the same client's sessions only; None where
                the API is open.
        """
        sequence = DraftSequence(NAME, self._options, self._context.is_end)
        return DraftProposer(self._thread, DraftSession(sequence, choose, client))

    def close(self) -> None:
        """End the thread at once and free all memory; proposers then propose nothing."""
        self._thread.close()
        self._context.close()


class DraftProposer:
    """Proposer for one session; see `speculative.proposer.Proposer`. From `DraftModel.open`."""

    name = NAME

    def __init__(self, thread: DraftThread, session: DraftSession) -> None:
        self._thread = thread
        self._session = session
        thread.add(session)

    @property
    def draft_ms_per_token(self) -> float | None:
        """As `DraftModel.draft_ms_per_token`."""
        return self._thread.ms_per_token

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens; little is computed until a proposal is requested."""
        with self._thread.text_of(self._session) as sequence:
            sequence.extend(tokens)

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """Tokens drafted after `after` so far; the thread drafts on meanwhile."""
        with self._thread.text_of(self._session) as sequence:
            return sequence.propose(max_tokens, after)

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Set the function that the draft's thread calls when a short proposal would now be longer."""
        with self._thread.text_of(self._session):
            self._session.on_ready = on_ready

    def close(self) -> None:
        """Remove the session, at any time."""
        self._thread.remove(self._session)


def _time_token_ms(context: DraftContext | IsolatedContext, clock_s: Callable[[], float]) -> float:
    """Shortest time of a few tokens: the estimate before the first session. The first only warms up."""
    times_ms = []
    for position in range(_NUM_TIMED_TOKENS):
        started_s = clock_s()
        rows = SlotRows(0, DraftSpan(position, (0,), has_output=True))
        for output in context.decode([rows], nullcontext()) or ():
            if output is not None:
                probability(output.logits, int(np.argmax(output.logits)))
        times_ms.append((clock_s() - started_s) * 1000)
    context.free(0)
    return min(times_ms)
