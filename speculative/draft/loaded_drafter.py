"""Loaded drafter: the proposers of tokens from a small model, or from hidden states of the target.

Speculative decoding with a separate draft model (Leviathan et al. 2023, Chen et al. 2023), run continuously
as in PipeInfer (Butler et al. 2024): while windows are in flight it drafts on from them, and after a
rejection it trims its own KV cache and continues there. It samples as the target's sampler would, with the
same noise (Daliri et al. 2024, drafter-invariant speculative decoding), so the two agree above temperature 0
as well.

Drafters that read hidden states run in the same way. Stages send features to the coordinator
(`mesh.coordinator.feature_plug`); what is late or lost costs acceptance only.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from speculative.draft.kinds import KINDS
from speculative.draft.worker import DraftSession, DraftThread
from speculative.proposer import FeatureReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from speculative.draft.context import Context, DraftFile
    from speculative.draft.worker import Choose
    from speculative.proposer import Proposal


class LoadedDrafter:
    """A loaded drafter, its thread, and its sessions. One for each coordinator.

    Args:
        file: The drafter.
        context: It in llama.cpp, which is closed with this.
        clock_s: Monotonic clock, seconds.
    """

    def __init__(self, file: DraftFile, context: Context, *, clock_s: Callable[[], float]) -> None:
        self._kind = file.kind
        self._options = file.options
        self._context = context
        self._thread = DraftThread(context, file.options, clock_s)

    @property
    def num_tokens(self) -> int:
        """Number of token ids, from 0, that it shares with the target."""
        return self._context.num_tokens

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
        sequence = KINDS[self._kind].sequence(self._kind.proposer, self._options, self._context)
        return DraftProposer(self._thread, DraftSession(sequence, choose, client))

    def close(self) -> None:
        """End the thread at once and free all memory; proposers then propose nothing."""
        self._thread.close()
        self._context.close()


class DraftProposer:
    """Proposer for one session; see `speculative.proposer.Proposer`. From `LoadedDrafter.open`."""

    take_features: Callable[[int, NDArray[np.float32]], None]
    """Of drafters that read features only: see `speculative.proposer.FeatureReader`."""

    def __init__(self, thread: DraftThread, session: DraftSession) -> None:
        self.name = session.sequence.name
        self._thread = thread
        self._session = session
        if isinstance(session.sequence, FeatureReader):
            # No method bound to this object: it would keep itself, and its features, alive.
            self.take_features = partial(_take_features, thread, session, session.sequence)
        thread.add(session)

    @property
    def draft_ms_per_token(self) -> float | None:
        """As `LoadedDrafter.draft_ms_per_token`."""
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


def _take_features(
    thread: DraftThread, session: DraftSession, reader: FeatureReader, start: int, rows: NDArray[np.float32]
) -> None:
    with thread.text_of(session):
        reader.take_features(start, rows)
