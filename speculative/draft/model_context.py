"""Model context: the context of a draft model, a small model that reads tokens only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import llama_cpp

from speculative.draft.context import (
    DraftContext,
    DraftOutput,
    DraftSpan,
    DraftUnusable,
    RowBatch,
    is_computed,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from speculative.draft.context import ContextSetup, DraftFile, SlotRows


class ModelContext(DraftContext):
    """A loaded draft model; see `DraftContext`."""

    def __init__(self, file: DraftFile, setup: ContextSetup, *, abort_flag: Any = None) -> None:
        super().__init__(file, setup, abort_flag=abort_flag)
        self._batch = RowBatch(0, has_tokens=True)

    def decode(
        self, parts: Sequence[SlotRows[DraftSpan]], while_computing: AbstractContextManager[None]
    ) -> list[DraftOutput | None] | None:
        """Compute rows, `MAX_ROWS` at most; see `Context.decode`."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        has_output: list[bool] = []
        for slot, span in parts:
            llama_cpp.llama_memory_seq_rm(self._memory, slot, span.start, -1)
            num_rows = len(span.tokens)
            tokens += span.tokens
            positions += range(span.start, span.stop)
            slots += [slot] * num_rows
            has_output += [False] * (num_rows - 1) + [span.has_output]
        batch = self._batch.fill(tokens, positions, slots, has_output=has_output)
        with while_computing:
            status = llama_cpp.llama_decode(self._context, batch)
        if not is_computed(status):
            return None
        outputs: list[DraftOutput | None] = []
        row = -1
        for _, span in parts:
            row += len(span.tokens)
            outputs.append(DraftOutput(self._logits(row)) if span.has_output else None)
        return outputs

    def _check(self, path: Path) -> None:
        if llama_cpp.llama_model_is_recurrent(self._model) or llama_cpp.llama_model_is_hybrid(self._model):
            raise DraftUnusable(
                f"{path.name} has recurrent layers, whose state cannot go back to an earlier position after "
                "a rejection: choose a draft model with attention only"
            )
        if not llama_cpp.llama_model_has_decoder(self._model):
            raise DraftUnusable(f"{path.name} generates no text: choose a decoder as draft model")

    @staticmethod
    def timed_span(number: int, feature_width: int) -> DraftSpan:  # noqa: ARG004 - it reads none
        """See `DraftContext.timed_span`."""
        return DraftSpan(number, (0,), has_output=True)
