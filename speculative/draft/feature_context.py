"""Feature context: llama.cpp context of a drafter that reads hidden states of the target.

EAGLE-3 files have two graphs: the encoder joins the features of three layers into one row, the decoder takes
a token and that row, or its own output state. MTP heads take a token and the head state. Everything is read
through llama.cpp's public API and its evaluation callback, by the names of the graphs' tensors.
"""

from __future__ import annotations

import ctypes
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import llama_cpp
import numpy as np

from speculative.draft.context import MAX_ROWS, DraftContext, DraftUnusable, is_computed
from speculative.draft.rows import DraftOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from speculative.draft.context import DraftOptions
    from speculative.draft.feature_sequence import FeatureSpan
    from speculative.draft.rows import SlotRows

_ENCODED: Final = "fc_out"
# llama.cpp's name of the node that writes a layer's values into the KV cache, behind the one for keys.
_CACHED: Final = "cache_v_l{layer} (view)"
_NONE: Final = np.empty((0, 0), np.float32)


class FeatureKind(StrEnum):
    """Kinds of drafters that read features."""

    EAGLE3 = "eagle3"
    """Outputs of several layers (Li et al. 2025)."""
    MTP = "mtp"
    """The head state, by a head for multi-token prediction (DeepSeek-V3 2024)."""


_STATE: Final = {FeatureKind.EAGLE3: "eagle3_prenorm-0", FeatureKind.MTP: "h_nextn"}


class GraphTap(Protocol):
    """Evaluation callback that copies one tensor of a graph by its name, or ends the graph behind it."""

    callback: Any
    """For llama.cpp."""
    user_data: int | None
    """Its argument; None for none."""

    def copy(self, name: str) -> None:
        """Set the tensor to copy."""

    def end_behind(self, name: str) -> None:
        """Set the tensor behind which a graph ends; one without it runs to its end. Nothing is copied."""

    def rows(self) -> NDArray[np.float32] | None:
        """Rows copied since `copy`, float32 (rows, width); None if the graph had no such tensor."""


class _Batch:
    """A reusable `llama_batch` of rows of values, with token ids or without.

    Args:
        width: Values of a row.
        has_tokens: Whether each row has a token id as well.
    """

    def __init__(self, width: int, *, has_tokens: bool) -> None:
        self._values = np.zeros((MAX_ROWS, width), np.float32)
        self._tokens = np.zeros(MAX_ROWS, np.int32)
        self._positions = np.zeros(MAX_ROWS, np.int32)
        self._num_slots = np.ones(MAX_ROWS, np.int32)
        self._slots = np.zeros(MAX_ROWS, np.int32)
        self._outputs = np.zeros(MAX_ROWS, np.int8)
        slot_pointer = ctypes.POINTER(ctypes.c_int32)
        self._slot_pointers = (slot_pointer * MAX_ROWS)(
            *(ctypes.cast(self._slots.ctypes.data + 4 * row, slot_pointer) for row in range(MAX_ROWS))
        )
        self.struct = llama_cpp.llama_batch(
            n_tokens=0,
            token=_pointer(self._tokens, ctypes.c_int32) if has_tokens else None,
            embd=_pointer(self._values, ctypes.c_float),
            pos=_pointer(self._positions, ctypes.c_int32),
            n_seq_id=_pointer(self._num_slots, ctypes.c_int32),
            seq_id=ctypes.cast(self._slot_pointers, ctypes.POINTER(slot_pointer)),
            logits=_pointer(self._outputs, ctypes.c_int8),
        )

    def fill(
        self,
        values: NDArray[np.float32],
        tokens: Sequence[int] | None,
        positions: Sequence[int],
        slots: Sequence[int],
        *,
        has_outputs: bool,
    ) -> Any:
        """The batch with these rows, at most `MAX_ROWS`."""
        count = len(values)
        self._values[:count] = values
        if tokens is not None:
            self._tokens[:count] = tokens
        self._positions[:count] = positions
        self._slots[:count] = slots
        self._outputs[:count] = has_outputs
        self.struct.n_tokens = count
        return self.struct


class _Row(NamedTuple):
    values: NDArray[np.float32]
    token: int
    position: int
    slot: int


class FeatureContext(DraftContext):
    """A loaded drafter with its KV cache. For one thread at a time, except `abort`.

    Args:
        path: The GGUF, with embedding and head.
        kind: Its kind.
        options: Sizes, threads and formats.
        num_tokens: Number of token ids of the target; the drafter's logits beyond are left out.
        make_tap: Makes the evaluation callback, given the values of a row and the most rows.
        abort_flag: See `DraftContext`.

    Attributes:
        width: Values of a row of its own state.
        feature_width: Values of a row of features.

    Raises:
        DraftUnusable: If llama.cpp does not load it, or there is no memory for its KV cache.
    """

    def __init__(
        self,
        path: Path,
        kind: FeatureKind,
        options: DraftOptions,
        num_tokens: int,
        make_tap: Callable[[int, int], GraphTap],
        *,
        abort_flag: Any = None,
    ) -> None:
        self._kind = kind
        self._make_tap = make_tap
        # A sequence that stays empty: llama.cpp checks positions of encoded rows against the cache.
        self._spare_slot = options.num_sessions
        super().__init__(path, options, num_tokens, abort_flag=abort_flag)
        # The first row of EAGLE-3 is that of the second token.
        self._shift = 1 if kind is FeatureKind.EAGLE3 else 0
        self._rows = _Batch(self.width, has_tokens=True)
        self._encoder_rows = _Batch(self.feature_width, has_tokens=False)

    def decode(  # type: ignore[override]  # its own kind of rows
        self, parts: Sequence[SlotRows[FeatureSpan]], while_computing: AbstractContextManager[None]
    ) -> list[DraftOutput | None] | None:
        """Compute rows of different slots: those without an output first, then one with for each slot.

        Args:
            parts: The rows.
            while_computing: Entered for as long as llama.cpp computes.

        Returns:
            For each part, None or the output of its last row. None instead of a list if it was aborted: no
            row counts as computed.

        Raises:
            DraftUnusable: If llama.cpp fails.
        """
        with while_computing:
            inputs = self._inputs(parts)
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

    def _inputs(self, parts: Sequence[SlotRows[FeatureSpan]]) -> list[NDArray[np.float32]] | None:
        """Input rows of each part: encoded features, then the state of a row that has no feature."""
        features = [part.span.features for part in parts]
        if self._kind is FeatureKind.EAGLE3:
            encoded = self._encode(np.concatenate([rows for rows in features if len(rows)] or [_NONE]))
            if encoded is None:
                return None
            features = np.split(encoded, np.cumsum([len(rows) for rows in features])[:-1])
        inputs = []
        for part, rows in zip(parts, features, strict=True):
            state = part.span.state
            own = [rows] if len(rows) else []
            inputs.append(np.concatenate([*own, state[None]]) if state is not None else rows)
        return inputs

    def _encode(self, features: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """One row for each row of features; None if it was aborted."""
        encoded = [np.empty((0, self.width), np.float32)]
        for first in range(0, len(features), MAX_ROWS):
            some = features[first : first + MAX_ROWS]
            self._tap.copy(_ENCODED)
            slots = [self._spare_slot] * len(some)
            batch = self._encoder_rows.fill(some, None, range(len(some)), slots, has_outputs=True)
            if not is_computed(llama_cpp.llama_encode(self._context, batch)):
                return None
            encoded.append(self._tapped(_ENCODED, len(some)))
        return np.concatenate(encoded)

    def _absorb(self, rows: Sequence[_Row]) -> bool:
        """Compute rows for the cache only; False if it was aborted."""
        # Nothing reads the output of such a row, and no later layer its keys and values: the drafter has one
        # layer, whose attention and feed-forward network would be computed in vain.
        self._tap.end_behind(_CACHED.format(layer=self._layer))
        return is_computed(llama_cpp.llama_decode(self._context, self._batch_of(rows, has_outputs=False)))

    def _step(self, rows: Sequence[_Row]) -> list[DraftOutput] | None:
        """Compute rows with outputs, one a slot; None if it was aborted."""
        name = _STATE[self._kind]
        self._tap.copy(name)
        if not is_computed(llama_cpp.llama_decode(self._context, self._batch_of(rows, has_outputs=True))):
            return None
        states = self._tapped(name, len(rows))
        return [DraftOutput(self._logits(row), states[row]) for row in range(len(rows))]

    def _batch_of(self, rows: Sequence[_Row], *, has_outputs: bool) -> Any:
        return self._rows.fill(
            np.stack([row.values for row in rows]),
            [row.token for row in rows],
            [row.position for row in rows],
            [row.slot for row in rows],
            has_outputs=has_outputs,
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
        params.load_mtp = self._kind is FeatureKind.MTP
        return params

    def _check(self, path: Path) -> None:
        # llama.cpp calls the head of a model with recurrent layers a hybrid model, after its architecture. A
        # context of type MTP has a plain cache for its attention all the same, which is trimmed as any other.
        self.width: int = llama_cpp.llama_model_n_embd(self._model)
        self.feature_width = self.width
        self._layer = 0
        if self._kind is FeatureKind.MTP:
            self._layer = _trunk_layers(self._model)
        else:
            target = _metadata(self._model, "eagle3.target_hidden_size")
            if target is None:
                raise DraftUnusable(f"{path.name} does not say how wide the features are that it reads")
            self.feature_width = 3 * int(target)

    def _context_params(self, options: DraftOptions) -> Any:
        params = super()._context_params(options)
        params.n_seq_max = options.num_sessions + 1
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        if self._kind is FeatureKind.MTP:
            params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
        self._tap = self._make_tap(self.width, MAX_ROWS)
        params.cb_eval = self._tap.callback
        if self._tap.user_data is not None:
            params.cb_eval_user_data = self._tap.user_data
        return params


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))


def _trunk_layers(model: Any) -> int:
    """Number of layers before those for multi-token prediction."""
    architecture = _metadata(model, "general.architecture")
    num_layers = _metadata(model, f"{architecture}.block_count") or "0"
    num_heads = _metadata(model, f"{architecture}.nextn_predict_layers") or "0"
    return int(num_layers) - int(num_heads)


def _metadata(model: Any, key: str) -> str | None:
    buffer = ctypes.create_string_buffer(64)
    length = llama_cpp.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode() if length >= 0 else None
