"""Block context: a DFlash, DSpark or DFlash2 drafter in llama.cpp.

All three join the features of some layers into a row and inject its keys and values into the cache, without
attention of their own; then they draft a block of tokens in one pass (DFlash, Chen et al. 2026). DSpark adds
to the logits what follows each drafted token, within the graph, and tells how sure it is. DFlash2 gives a
lattice instead of logits: a few candidates for each position, scored by the candidate before.

Everything is read through llama.cpp's public API and its evaluation callback, confidences where two functions
of its library are found by their C++ names.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import llama_cpp
import numpy as np

from speculative.draft.block_sequence import BlockSpan
from speculative.draft.context import (
    MAX_ROWS,
    DraftContext,
    DraftOutput,
    DraftUnusable,
    RowBatch,
    SlotRows,
    is_computed,
    metadata_of,
)
from speculative.proposer import DrafterKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from speculative.draft.context import Context, ContextSetup, DraftFile, DraftOptions, HeadRows

_LATTICE: Final = "dflash2_lattice"
# llama.cpp's, for files that do not say.
_BLOCK_SIZE: Final = 16
_NUM_SECTIONS: Final = 4


class BlockContext(DraftContext):
    """A loaded block drafter; see `DraftContext`.

    Each session has a cache of its own: in a shared one, bits would depend on the order in which other
    sessions freed their cells. A block leaves no rows in it.
    """

    # The feature of a position is read with the token behind it.
    _shift = 1

    def __init__(self, file: DraftFile, setup: ContextSetup, *, abort_flag: Any = None) -> None:
        self._confidences: HeadRows | None = None
        super().__init__(file, setup, abort_flag=abort_flag)
        self.most_drafted = min(self._block_drafts, file.options.draft_max)
        num_sections = _NUM_SECTIONS if self._has_sections else 1
        self._feature_rows = RowBatch(self.feature_width, has_tokens=False, num_sections=num_sections)
        self._block_rows = RowBatch(0, has_tokens=True)

    def decode(
        self, parts: Sequence[SlotRows[BlockSpan]], while_computing: AbstractContextManager[None]
    ) -> list[DraftOutput | None] | None:
        """Read features, then draft a block for each slot that asks for one; see `Context.decode`."""
        with while_computing:
            # llama.cpp computes consecutive sequences together, in the order of their numbers.
            ordered = sorted(parts, key=lambda part: part.slot)
            for slot, span in ordered:
                start = 0 if span.is_anew else span.start - self._shift
                llama_cpp.llama_memory_seq_rm(self._memory, slot, start, -1)
            if not self._inject(ordered):
                return None
            outputs: dict[int, DraftOutput] = {}
            for run in self._runs([part for part in ordered if part.span.has_output]):
                drafted = self._draft(run)
                if drafted is None:
                    return None
                outputs |= drafted
        return [outputs.get(part.slot) for part in parts]

    def copy(self, source: int, slot: int, num_tokens: int) -> None:
        """See `Context.copy`; caches of two sessions share no cells."""
        llama_cpp.llama_memory_seq_rm(self._memory, slot, 0, -1)
        if num_tokens > self._shift:
            # llama.cpp copies whole sequences only.
            llama_cpp.llama_memory_seq_cp(self._memory, source, slot, -1, -1)
            llama_cpp.llama_memory_seq_rm(self._memory, slot, num_tokens - self._shift, -1)

    @staticmethod
    def timed_span(number: int, context: Context) -> BlockSpan:
        """See `DraftContext.timed_span`."""
        features = np.zeros((1, context.feature_width), np.float32)
        return BlockSpan(
            1 + number,
            (0,),
            features,
            None,
            has_output=True,
            is_anew=number == 0,
            num_drafted=context.most_drafted,
        )

    def _inject(self, parts: Sequence[SlotRows[BlockSpan]]) -> bool:
        """Compute keys and values of all features; False if it was aborted."""
        features = np.concatenate([span.features for _, span in parts])
        slots = [slot for slot, span in parts for _ in span.tokens]
        positions = [position - self._shift for _, span in parts for position in range(span.start, span.stop)]
        for first in range(0, len(features), MAX_ROWS):
            some = slice(first, first + MAX_ROWS)
            batch = self._feature_rows.fill(
                None, positions[some], slots[some], has_output=False, values=features[some]
            )
            if not is_computed(llama_cpp.llama_decode(self._context, batch)):
                return False
        return True

    def _runs(self, parts: Sequence[SlotRows[BlockSpan]]) -> Iterator[list[SlotRows[BlockSpan]]]:
        """Parts that are drafted together.

        llama.cpp divides a batch into blocks of one length, and takes others without an error.
        """
        by_length = sorted(parts, key=lambda part: (part.span.num_drafted, part.slot))
        for num_drafted, same in itertools.groupby(by_length, lambda part: part.span.num_drafted):
            left = list(same)
            most = max(1, MAX_ROWS // (num_drafted + self._num_anchor_rows))
            for first in range(0, len(left), most):
                yield left[first : first + most]

    def _draft(self, parts: Sequence[SlotRows[BlockSpan]]) -> dict[int, DraftOutput] | None:
        """Outputs by slot; None if it was aborted."""
        num_rows = parts[0].span.num_drafted + self._num_anchor_rows
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for slot, span in parts:
            tokens += [span.tokens[-1], *[self._mask] * (num_rows - 1)]
            positions += range(span.stop - 1, span.stop - 1 + num_rows)
            slots += [slot] * num_rows
        batch = self._block_rows.fill(tokens, positions, slots, has_output=not self._num_candidates)
        if self._tap is not None:
            self._tap.copy(_LATTICE)
        is_done = is_computed(llama_cpp.llama_decode(self._context, batch))
        for slot, span in parts:
            llama_cpp.llama_memory_seq_rm(self._memory, slot, span.stop - 1, -1)
        if not is_done:
            return None
        rows = self._lattice(len(tokens)) if self._num_candidates else self._all_logits(len(tokens))
        confidences = None
        if self._confidences is not None and (found := self._confidences.rows(len(tokens))) is not None:
            confidences = found[:, 0]
        outputs = {}
        for index, (slot, _) in enumerate(parts):
            some = slice(index * num_rows + self._num_anchor_rows, (index + 1) * num_rows)
            outputs[slot] = DraftOutput(
                rows[some],
                confidences=None if confidences is None else confidences[some],
                num_candidates=self._num_candidates,
            )
        return outputs

    def _all_logits(self, num_rows: int) -> NDArray[np.float32]:
        pointer = llama_cpp.llama_get_logits(self._context)
        # A later run of the same decode writes there, too.
        return np.ctypeslib.as_array(pointer, shape=(num_rows, self._n_vocab))[:, : self.num_tokens].copy()

    def _lattice(self, num_rows: int) -> NDArray[np.float32]:
        rows = None if self._tap is None else self._tap.rows()
        if rows is None or len(rows) != num_rows:
            raise DraftUnusable(
                f"llama.cpp's graph of this {self._kind} drafter has no tensor {_LATTICE} of {num_rows} "
                "rows: use another file"
            )
        return rows[:, : self._num_candidates * (self._num_candidates + 1)]

    def _check(self, path: Path) -> None:
        """Read the lengths of the file."""
        self._n_embd: int = llama_cpp.llama_model_n_embd(self._model)
        self._mask: int = llama_cpp.llama_vocab_mask(llama_cpp.llama_model_get_vocab(self._model))
        if self._mask < 0:
            raise DraftUnusable(f"{path.name} has no mask token")
        block_size = int(metadata_of(self._model, "dflash.block_size") or _BLOCK_SIZE)
        is_anchored = self._says("dflash.sample_from_anchor")
        # Rows of a block that foretell no token.
        self._num_anchor_rows = 0 if self._kind is DrafterKind.DSPARK and is_anchored else 1
        self._block_drafts = block_size - self._num_anchor_rows
        if self._block_drafts < 1:
            raise DraftUnusable(f"{path.name} has blocks of {block_size} rows, which draft nothing")
        self._num_candidates = 0
        if self._kind is DrafterKind.DFLASH2:
            self._num_candidates = int(metadata_of(self._model, "dflash.selector_top_k") or 0)
        self._has_sections = llama_cpp.llama_model_rope_type(self._model) == llama_cpp.LLAMA_ROPE_TYPE_MROPE

    def _says(self, key: str) -> bool:
        """What the file says, as llama.cpp reads it; where it says nothing, true."""
        return metadata_of(self._model, key) in {None, "true"}

    def _model_params(self, options: DraftOptions) -> Any:
        params = super()._model_params(options)
        params.use_extra_bufts = False
        return params

    def _context_params(self, options: DraftOptions) -> Any:
        params = super()._context_params(options)
        params.kv_unified = False
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._tap = self._setup.make_tap(self._n_embd, MAX_ROWS) if self._num_candidates else None
        if self._tap is not None:
            params.cb_eval = self._tap.callback
            if self._tap.user_data is not None:
                params.cb_eval_user_data = self._tap.user_data
        return params

    def _make_context(self, path: Path, options: DraftOptions) -> Any:
        context = super()._make_context(path, options)
        is_causal = metadata_of(self._model, "dflash.attention.causal") == "true"
        llama_cpp.llama_set_causal_attn(context, is_causal)
        if self._kind is DrafterKind.DSPARK and self._says("dflash.has_confidence_head"):
            self._confidences = self._setup.make_head_rows(context, self._n_embd)
        return context
