"""Kinds of drafters: the llama.cpp context of each, and the text of its sessions.

A new kind is a member of `DrafterKind` and a row of `KINDS`, with a context of its own, and a text of its own
if its rows read more than tokens. `mesh.draft.drafter` recognizes its files.

EAGLE-3 files have two graphs: the encoder joins the features of three layers into one row, the decoder takes
a token and that row, or its own output state. MTP heads take a token and the head state. Everything is read
through llama.cpp's public API and its evaluation callback, by the names of the graphs' tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import llama_cpp
import numpy as np

from speculative.draft.block_context import BlockContext
from speculative.draft.block_sequence import BlockSequence
from speculative.draft.context import (
    MAX_ROWS,
    DraftContext,
    DraftOutput,
    DraftSpan,
    DraftUnusable,
    RowBatch,
    is_computed,
    metadata_of,
    timed_ms_per_token,
)
from speculative.draft.session import DraftSequence, FeatureSequence, FeatureSpan
from speculative.proposer import DrafterKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from speculative.draft.context import Context, ContextSetup, DraftFile, DraftOptions, SlotRows

_ENCODED: Final = "fc_out"
# llama.cpp's name of the node that writes a layer's values into the KV cache, behind the one for keys.
_CACHED: Final = "cache_v_l{layer} (view)"
_NONE: Final = np.empty((0, 0), np.float32)
MOST_IN_BLOCK: Final = 64
"""Most tokens of a block."""


class _Row(NamedTuple):
    values: NDArray[np.float32]
    token: int
    position: int
    slot: int


class FeatureContext(DraftContext):
    """A loaded drafter that reads features; see `DraftContext`.

    Attributes:
        width: Values of a row of its own state.
    """

    _state: ClassVar[str]
    """Name of the tensor with the output states."""
    _layer = 0
    """Its layer, as llama.cpp counts them."""

    def __init__(self, file: DraftFile, setup: ContextSetup, *, abort_flag: Any = None) -> None:
        # A sequence that stays empty: llama.cpp checks positions of encoded rows against the cache.
        self._spare_slot = file.options.num_sessions
        super().__init__(file, setup, abort_flag=abort_flag)
        self._rows = RowBatch(self.width, has_tokens=True)

    def decode(
        self, parts: Sequence[SlotRows[FeatureSpan]], while_computing: AbstractContextManager[None]
    ) -> list[DraftOutput | None] | None:
        """Compute rows: those without an output first, then one with for each slot; see `Context.decode`."""
        with while_computing:
            inputs = self._inputs([part.span for part in parts])
            if inputs is None:
                return None
            absorbed: list[_Row] = []
            stepped: list[_Row] = []
            for (slot, span), values in zip(parts, inputs, strict=True):
                start = span.start - self._shift
                llama_cpp.llama_memory_seq_rm(self._memory, slot, 0 if span.is_anew else start, -1)
                rows = [
                    _Row(row, token, position, slot)
                    for position, (row, token) in enumerate(zip(values, span.tokens, strict=True), start)
                ]
                num_absorbed = len(rows) - span.has_output
                absorbed += rows[:num_absorbed]
                stepped += rows[num_absorbed:]
            for first in range(0, len(absorbed), MAX_ROWS):
                if not self._absorb(absorbed[first : first + MAX_ROWS]):
                    return None
            outputs = self._step(stepped) if stepped else []
            if outputs is None:
                return None
        left = iter(outputs)
        return [next(left) if part.span.has_output else None for part in parts]

    def _joined(self, features: list[NDArray[np.float32]]) -> list[NDArray[np.float32]] | None:
        """Input rows of these features; None if it was aborted."""
        return features

    def _inputs(self, spans: Sequence[FeatureSpan]) -> list[NDArray[np.float32]] | None:
        """Input rows of each span: of its features, then the state of a row that has no feature."""
        joined = self._joined([span.features for span in spans])
        if joined is None:
            return None
        inputs = []
        for span, rows in zip(spans, joined, strict=True):
            own = [rows] if len(rows) else []
            inputs.append(rows if span.state is None else np.concatenate([*own, span.state[None]]))
        return inputs

    def _absorb(self, rows: Sequence[_Row]) -> bool:
        """Compute rows for the cache only; False if it was aborted."""
        # Nothing reads the output of such a row, and no later layer its keys and values: the drafter has one
        # layer, whose attention and feed-forward network would be computed in vain.
        self._tap.end_behind(_CACHED.format(layer=self._layer))
        return is_computed(llama_cpp.llama_decode(self._context, self._batch_of(rows, has_output=False)))

    def _step(self, rows: Sequence[_Row]) -> list[DraftOutput] | None:
        """Compute rows with outputs, one a slot; None if it was aborted."""
        self._tap.copy(self._state)
        if not is_computed(llama_cpp.llama_decode(self._context, self._batch_of(rows, has_output=True))):
            return None
        states = self._tapped(self._state, len(rows))
        return [DraftOutput(self._logits(row), states[row]) for row in range(len(rows))]

    def _batch_of(self, rows: Sequence[_Row], *, has_output: bool) -> Any:
        return self._rows.fill(
            [row.token for row in rows],
            [row.position for row in rows],
            [row.slot for row in rows],
            has_output=has_output,
            values=np.stack([row.values for row in rows]),
        )

    def _tapped(self, name: str, num_rows: int) -> NDArray[np.float32]:
        rows = self._tap.rows()
        if rows is None or len(rows) != num_rows:
            raise DraftUnusable(
                f"llama.cpp's graph of this {self._kind} drafter has no tensor {name} of {num_rows} rows: "
                "use another file"
            )
        return rows

    def _model_params(self, options: DraftOptions) -> Any:
        params = super()._model_params(options)
        params.use_extra_bufts = False
        params.load_mtp = False
        return params

    def _check(self, path: Path) -> None:  # noqa: ARG002 - kinds name it
        self.width: int = llama_cpp.llama_model_n_embd(self._model)
        self.feature_width = self.width

    def _context_params(self, options: DraftOptions) -> Any:
        params = super()._context_params(options)
        params.n_seq_max = options.num_sessions + 1
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._tap = self._setup.make_tap(self.width, MAX_ROWS)
        params.cb_eval = self._tap.callback
        if self._tap.user_data is not None:
            params.cb_eval_user_data = self._tap.user_data
        return params

    @staticmethod
    def timed_span(number: int, context: Context) -> FeatureSpan:
        """See `DraftContext.timed_span`."""
        features = np.zeros((1, context.feature_width), np.float32)
        return FeatureSpan(1 + number, (0,), features, None, has_output=True, is_anew=number == 0)


class Eagle3Context(FeatureContext):
    """A loaded EAGLE-3 drafter (Li et al. 2025); see `DraftContext`."""

    _state = "eagle3_prenorm-0"
    # The first row is that of the second token.
    _shift = 1

    def __init__(self, file: DraftFile, setup: ContextSetup, *, abort_flag: Any = None) -> None:
        super().__init__(file, setup, abort_flag=abort_flag)
        self._encoder_rows = RowBatch(self.feature_width, has_tokens=False)

    def _joined(self, features: list[NDArray[np.float32]]) -> list[NDArray[np.float32]] | None:
        encoded = self._encode(np.concatenate([rows for rows in features if len(rows)] or [_NONE]))
        if encoded is None:
            return None
        return np.split(encoded, np.cumsum([len(rows) for rows in features])[:-1])

    def _encode(self, features: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """One row for each row of features; None if it was aborted."""
        encoded = [np.empty((0, self.width), np.float32)]
        for first in range(0, len(features), MAX_ROWS):
            some = features[first : first + MAX_ROWS]
            self._tap.copy(_ENCODED)
            slots = [self._spare_slot] * len(some)
            batch = self._encoder_rows.fill(None, range(len(some)), slots, has_output=True, values=some)
            if not is_computed(llama_cpp.llama_encode(self._context, batch)):
                return None
            encoded.append(self._tapped(_ENCODED, len(some)))
        return np.concatenate(encoded)

    def _check(self, path: Path) -> None:
        super()._check(path)
        target = metadata_of(self._model, "eagle3.target_hidden_size")
        if target is None:
            raise DraftUnusable(f"{path.name} does not say how wide the features are that it reads")
        self.feature_width = 3 * int(target)


class MtpContext(FeatureContext):
    """A loaded head for multi-token prediction (DeepSeek-V3 2024); see `DraftContext`."""

    _state = "h_nextn"

    def _model_params(self, options: DraftOptions) -> Any:
        params = super()._model_params(options)
        params.load_mtp = True
        return params

    def _check(self, path: Path) -> None:
        # llama.cpp calls the head of a model with recurrent layers a hybrid model, after its architecture. A
        # context of type MTP has a plain cache for its attention all the same, which is trimmed as any other.
        super()._check(path)
        self._layer = _trunk_layers(self._model)

    def _context_params(self, options: DraftOptions) -> Any:
        params = super()._context_params(options)
        params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
        return params


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
    def timed_span(number: int, context: Context) -> DraftSpan:  # noqa: ARG004 - it reads no features
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


def _trunk_layers(model: Any) -> int:
    """Number of layers before those for multi-token prediction."""
    architecture = metadata_of(model, "general.architecture")
    num_layers = metadata_of(model, f"{architecture}.block_count") or "0"
    num_heads = metadata_of(model, f"{architecture}.nextn_predict_layers") or "0"
    return int(num_layers) - int(num_heads)


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


def _block_sequence(name: str, options: DraftOptions, context: Context) -> BlockSequence:
    return BlockSequence(name, options, context.is_end, most_drafted=context.most_drafted)


KINDS: Final[Mapping[DrafterKind, KindParts]] = {
    DrafterKind.MODEL: KindParts(ModelContext, _sequence),
    DrafterKind.EAGLE3: KindParts(Eagle3Context, _eagle3_sequence),
    DrafterKind.MTP: KindParts(MtpContext, _mtp_sequence),
    DrafterKind.DFLASH: KindParts(BlockContext, _block_sequence, MOST_IN_BLOCK),
    DrafterKind.DSPARK: KindParts(BlockContext, _block_sequence, MOST_IN_BLOCK),
    DrafterKind.DFLASH2: KindParts(BlockContext, _block_sequence, MOST_IN_BLOCK),
}
