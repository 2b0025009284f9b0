"""Assistant of Gemma 4: drafts beside the last stage, whose KV cache it reads.

Each token of a draft is a row of the assistant: the target's embedding of the token before, and the head
state of the row that this one was drawn from, or what the assistant gives in its place. All rows of a draft
stand at the newest token's position, and none is written to the cache (gemma4_assistant.md of Hugging Face's
transformers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spanmesh_proto.errors import InvalidWindow, StageFailed
from stages.runtime.bindings import llama_cpp
from stages.runtime.hidden_tap import HeadState
from stages.runtime.llama import last_complaint
from stages.runtime.stage_runtime import Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from stages.runtime.stage_runtime import StageRuntime

    Draw = Callable[[int, int, NDArray[np.float32]], int | None]

# Of llama_decode: the caches are full.
_NO_ROOM = 1


@dataclass(frozen=True)
class DraftStart:
    """What a draft begins with."""

    slot: int
    """Slot of the session, whose rows end before the newest token, or behind it with rejected ones."""
    position: int
    """Position of the newest token."""
    token: int
    """The newest token."""
    state: NDArray[np.float32]
    """Head state of the row that it was drawn from, float32 (n_embd)."""
    num_tokens: int
    """Most tokens to draft."""


class _Row(NamedTuple):
    draft: int
    token: int
    state: NDArray[np.float32]


class Assistant:
    """A loaded assistant beside a stage that has computed nothing yet. For the stage's computing thread.

    Args:
        path: Its file, which fits the model: where sizes differ, drafts are wrong without an error.
        runtime: The last stage, with two layers or more, loaded with `RuntimeOptions.has_reader`. It frees
            the assistant at its end.

    Raises:
        InvalidModel: If llama.cpp cannot load it.
        ModelDoesNotFit: If there is not enough memory for its buffers.
        StageFailed: If the stage has less than two layers, has computed rows, or was loaded without a reader.
    """

    def __init__(self, path: Path, runtime: StageRuntime) -> None:
        info = runtime.info
        if not info.is_tail or len(info.layers) < 2:
            raise StageFailed(
                f"{path.name} reads the KV caches of the last two layers, and layers {info.layers} of "
                f"{info.n_layers} are loaded here"
            )
        self._runtime = runtime
        self._context = runtime.add_reader(path)
        try:
            self._states = HeadState(self._context, info.n_embd)
        except ImportError as error:
            raise StageFailed(f"{path.name} cannot draft: {error}") from error
        self._states.keep(is_kept=True)
        vocabulary = llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(self._context))
        self._n_vocab: int = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._max_rows = min(runtime.num_slots, runtime.max_rows)
        self._batch = Batch(self._max_rows, info.n_embd, has_both=True)

    def draft(self, starts: Sequence[DraftStart], draw: Draw) -> list[tuple[int, ...]]:
        """Draft behind the newest tokens of some slots, all of them together.

        Rows of a slot from the newest token on, which were rejected, are dropped first.

        Args:
            starts: One for each slot.
            draw: Draws a token, given the index of the draft, the number of tokens that it has, and logits,
                float32 (n_vocab), valid until it returns; None ends the draft.

        Returns:
            Tokens of each draft; fewer than asked for where the context is full.

        Raises:
            InvalidWindow: If a slot ends before its newest token.
            StageFailed: If llama.cpp fails.
        """
        memory = self._runtime.memory
        for start in starts:
            memory.check_slot(start.slot)
            if start.position > memory.length(start.slot):
                raise InvalidWindow(
                    f"a draft begins at position {start.position}, but slot {start.slot} ends at "
                    f"{memory.length(start.slot)}"
                )
            memory.trim(start.slot, start.position)
        drafts: list[list[int]] = [[] for _ in starts]
        for first in range(0, len(starts), self._max_rows):
            some = list(enumerate(starts))[first : first + self._max_rows]
            rows = [_Row(index, start.token, start.state) for index, start in some if start.num_tokens > 0]
            while rows and (computed := self._compute(starts, rows)) is not None:
                rows = _drawn(rows, *computed, drafts, draw)
                rows = [row for row in rows if len(drafts[row.draft]) < starts[row.draft].num_tokens]
        return [tuple(draft) for draft in drafts]

    def _compute(
        self, starts: Sequence[DraftStart], rows: Sequence[_Row]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        """Logits and states of rows, the logits valid until the next call; None if there is no room."""
        self._batch.clear()
        for row in rows:
            start = starts[row.draft]
            self._batch.add(start.slot, start.position, [row.token], row.state[np.newaxis], 0)
        status = llama_cpp.llama_decode(self._context, self._batch.struct)
        if status == _NO_ROOM:
            return None
        states = self._states.rows(len(rows)) if status == 0 else None
        if states is None:
            raise StageFailed(f"the assistant failed with status {status}: {last_complaint()}")
        pointer = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, shape=(len(rows), self._n_vocab)), states


def _drawn(
    rows: Sequence[_Row],
    logits: NDArray[np.float32],
    states: NDArray[np.float32],
    drafts: Sequence[list[int]],
    draw: Draw,
) -> list[_Row]:
    """Draw a token behind each row, and put it into its draft; returns the rows of these tokens."""
    drawn = []
    for row, own, state in zip(rows, logits, states, strict=True):
        token = draw(row.draft, len(drafts[row.draft]), own)
        if token is not None:
            drafts[row.draft].append(token)
            drawn.append(_Row(row.draft, token, state))
    return drawn
