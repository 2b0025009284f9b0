"""Kinds of drafters and their parts: the context that computes, and the text of a session.

A new kind is a member of `DrafterKind` and a row of `KINDS`, with a context of its own, and a text of its own
if its rows read more than tokens. `mesh.draft.drafter` recognizes its files.

Model context: the context of a draft model, a small model that reads tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import llama_cpp
import numpy as np

from speculative.draft.context import (
    DraftContext,
    DraftOutput,
    DraftSpan,
    DraftUnusable,
    RowBatch,
    is_computed,
    timed_ms_per_token,
)
from speculative.draft.feature_context import Eagle3Context, MtpContext
from speculative.draft.session import DraftSequence, FeatureSequence
from speculative.proposer import DrafterKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from speculative.draft.context import Context, ContextSetup, DraftFile, DraftOptions, SlotRows


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


@dataclass(frozen=True)
class KindParts:
    """Parts of a drafter that depend on its kind."""

    context: type[DraftContext]
    """Loads its file and computes the spans of its sequences."""
    sequence: Callable[[str, DraftOptions, Context], DraftSequence]
    """Makes the text of a session, given the name in its proposals. Of a kind that reads features it is a
    `speculative.proposer.FeatureReader`."""
    most_drafted: int = 1
    """Most tokens that are drafted from one output."""


def load_context(file: DraftFile, setup: ContextSetup, *, abort_flag: Any = None) -> DraftContext:
    """Load a drafter in this process, which llama.cpp may abort, and draft a few tokens with it.

    Args:
        file: The drafter.
        setup: See `ContextSetup`.
        abort_flag: See `DraftContext`.

    Raises:
        DraftUnusable: If the file cannot serve as a drafter of its kind, or there is no memory for its KV
            cache.
    """
    try:
        kind = KINDS[file.kind].context
        context = kind(file, setup, abort_flag=abort_flag)
        try:
            context.ms_per_token = timed_ms_per_token(context, kind.timed_span, setup.clock_s)
        except BaseException:
            context.close()
            raise
    except (ImportError, ValueError) as error:
        raise DraftUnusable(str(error)) from error
    return context


def _sequence(name: str, options: DraftOptions, context: Context) -> DraftSequence:
    return DraftSequence(name, options, context.is_end)


def _eagle3_sequence(name: str, options: DraftOptions, context: Context) -> FeatureSequence:
    return FeatureSequence(name, options, context.is_end)


def _mtp_sequence(name: str, options: DraftOptions, context: Context) -> FeatureSequence:
    zeros = np.zeros(context.feature_width, np.float32)
    return FeatureSequence(name, options, context.is_end, zeros=zeros)


KINDS: Final[Mapping[DrafterKind, KindParts]] = {
    DrafterKind.MODEL: KindParts(ModelContext, _sequence),
    DrafterKind.EAGLE3: KindParts(Eagle3Context, _eagle3_sequence),
    DrafterKind.MTP: KindParts(MtpContext, _mtp_sequence),
}
