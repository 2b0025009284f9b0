"""Draft context: a drafter in llama.cpp with its KV cache; its options, rows and confidences.

`Context` is what drafting needs of it. `DraftContext` is what all kinds of drafters have in common in the
process that computes; a kind derives its own context.

Speed matters here, not exactness: the committed tokens are the target's own. So weights may be repacked,
flash attention is llama.cpp's choice, and all sessions share one KV cache and one batch.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, Protocol, TypeVar

import llama_cpp
import numpy as np
from gguf.constants import GGMLQuantizationType

from speculative.draft import defaults

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from speculative.proposer import DrafterKind

Span = TypeVar("Span", bound="DraftSpan")
MAX_ROWS: Final = 128
"""Most rows of one batch: from 64 on llama.cpp's attention works in tiles, and a row takes a third less."""
_NUM_TIMED_TOKENS: Final = 4
_ABORTED: Final = 2
_NO_ROOM: Final = 1


@dataclass(frozen=True)
class DraftSpan:
    """Consecutive rows to be computed for a session."""

    start: int
    """Absolute position of the first row's token. The cache's rows from there on are invalid."""
    tokens: tuple[int, ...]
    """Token ids, one a row."""
    has_output: bool = field(kw_only=True)
    """Whether the last row returns an output."""

    @property
    def stop(self) -> int:
        """Position after the last row's token."""
        return self.start + len(self.tokens)


class SlotRows(NamedTuple, Generic[Span]):
    """Rows of one session."""

    slot: int
    """Its sequence in the KV cache."""
    span: Span
    """The rows."""


class DraftOutput(NamedTuple):
    """Output of a span: the tokens behind its last row are drafted from it, one or a block of them."""

    values: NDArray[np.float32]
    """Logits, float32 (drafted, num_tokens), by position. Or a lattice, float32 (drafted, k + k × k): the ids
    of k candidates, then their scores behind each candidate of the position before. A view that the next
    `decode` overwrites."""
    state: NDArray[np.float32] | None = None
    """Output state, float32 (values,), of drafters whose chains go on from it; None for others."""
    confidences: NDArray[np.float32] | None = None
    """float32 (drafted,): the drafter's own estimates of acceptance; None if it gives none."""
    num_candidates: int = 0
    """Of a lattice: k. 0 for logits."""

    @property
    def num_drafted(self) -> int:
        """Number of positions."""
        return len(self.values)

    def logits(self, index: int, previous: int, num_tokens: int) -> NDArray[np.float32]:
        """Logits of one position, float32 (num_tokens,).

        Args:
            index: Index of the position.
            previous: Token that was chosen for the position before.
            num_tokens: Number of token ids; others than the candidates of a lattice get no probability.
        """
        count = self.num_candidates
        row: NDArray[np.float32] = self.values[index]
        if not count:
            return row
        behind = 0
        if index:
            # Scores of the first position do not depend on a candidate.
            same = np.flatnonzero(self.values[index - 1, :count] == previous)
            behind = int(same[0]) if len(same) else 0
        scores = row[count * (1 + behind) : count * (2 + behind)]
        ids = row[:count].astype(np.int64)
        logits = np.full(num_tokens, -np.inf, np.float32)
        is_known = (ids >= 0) & (ids < num_tokens)
        logits[ids[is_known]] = scores[is_known]
        return logits


class DraftUnusable(Exception):
    """The draft model cannot be loaded or used; the message gives the reason, in one line."""


@dataclass(frozen=True)
class DraftOptions:
    """Options of the draft model.

    Raises:
        ValueError: If a value is out of its range; the text names it.
    """

    draft_max: int = defaults.DRAFT_MAX
    """Tokens that it drafts beyond those in flight."""
    draft_min: int = defaults.DRAFT_MIN
    """Shortest draft that is offered, unless fewer were requested."""
    p_min: float = defaults.P_MIN
    """A draft ends at a token whose probability by the draft model is below this."""
    ctx_size: int = 4096
    """Positions of one session; beyond them nothing is proposed."""
    num_sessions: int = 1
    """Concurrent sessions."""
    num_threads: int = defaults.NUM_THREADS
    """Threads of llama.cpp; they spin, so no more than cores that no stage uses."""
    num_gpu_layers: int = defaults.NUM_GPU_LAYERS
    """Layers on the GPU, if there is one; -1 for all."""
    kv_type: str = defaults.KV_TYPE
    """Format of the KV cache, in llama.cpp's words."""
    niceness: int = 0
    """How much the thread yields to others on its host, 0 to 18 (Linux only)."""

    def __post_init__(self) -> None:
        _require("draft_max", self.draft_max, self.draft_max >= 1, "1 or more")
        _require(
            "draft_min",
            self.draft_min,
            1 <= self.draft_min <= self.draft_max,
            f"from 1 to draft_max, {self.draft_max}",
        )
        _require("p_min", self.p_min, 0.0 <= self.p_min <= 1.0, "from 0 (off) to 1")
        _require("ctx_size", self.ctx_size, self.ctx_size >= 2, "2 or more")
        _require("num_sessions", self.num_sessions, self.num_sessions >= 1, "1 or more")
        _require("num_threads", self.num_threads, self.num_threads >= 1, "1 or more")
        _require("num_gpu_layers", self.num_gpu_layers, self.num_gpu_layers >= -1, "-1 (all) or more")
        _require("niceness", self.niceness, 0 <= self.niceness <= 18, "from 0 to 18")


@dataclass(frozen=True)
class DraftFile:
    """A drafter's file, and how it is to be loaded."""

    kind: DrafterKind
    """Its kind."""
    path: Path
    """The GGUF, or its first file if it is split."""
    options: DraftOptions
    """Sizes, threads and formats."""
    num_tokens: int
    """Number of token ids of the target; higher ones are never drafted."""
    feature_width: int = 0
    """Values of a row of features that it is given; 0 if it reads none, or its file says how many."""


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


class HeadRows(Protocol):
    """What a context's graphs give beside logits, for every row."""

    def rows(self, num_rows: int) -> NDArray[np.float32] | None:
        """Rows of the last decode, float32 (num_rows, n_embd); None if its graph gives none."""


@dataclass(frozen=True)
class ContextSetup:
    """What contexts need from outside of speculation; all of it can be pickled."""

    prepare: Callable[[], None]
    """Called first in a process that a drafter has for itself."""
    complaint: Callable[[], str]
    """Latest error that llama.cpp logged in the calling process."""
    make_tap: Callable[[int, int], GraphTap]
    """Makes the evaluation callback, given the values of a row and the most rows."""
    make_head_rows: Callable[[Any, int], HeadRows | None]
    """Has a context of llama.cpp keep what its graphs give beside logits, given the values of a row; None if
    this llama.cpp cannot."""
    clock_s: Callable[[], float]
    """Monotonic clock, seconds."""


class Context(Protocol):
    """A loaded drafter with its KV cache. For one thread at a time, except `abort`."""

    num_tokens: int
    """Number of token ids, from 0, that it gives logits of: those that drafter and target share."""
    ms_per_token: float
    """Time of a token when it was loaded, in ms, the way to another process included."""
    feature_width: int
    """Values of a row of features; 0 if it reads none."""
    most_drafted: int
    """Most tokens that are drafted from one output."""
    thread_id: int | None
    """Id of the thread that computes; None for that of the caller."""

    @property
    def is_alive(self) -> bool:
        """Whether it can compute."""

    def decode(
        self, parts: Sequence[SlotRows[Any]], while_computing: AbstractContextManager[None]
    ) -> list[DraftOutput | None] | None:
        """Compute rows of different slots together.

        Args:
            parts: The rows, of the spans that sequences of its kind plan.
            while_computing: Entered for as long as llama.cpp computes.

        Returns:
            For each part, None or the output of its last row. None instead of a list if the decode was
            aborted: no row counts as computed.

        Raises:
            DraftUnusable: If llama.cpp fails.
        """

    def abort(self) -> None:
        """End a decode in another thread, and all later ones, at once."""

    def resume(self) -> None:
        """Allow decodes again."""

    def is_end(self, token: int) -> bool:
        """Whether a token ends an answer."""

    def copy(self, source: int, slot: int, num_tokens: int) -> None:
        """Replace the rows of a slot by those of another's first tokens; they share the cells."""

    def free(self, slot: int) -> None:
        """Drop all rows of a slot."""

    def close(self) -> None:
        """Free all memory."""


class RowBatch:
    """A reusable `llama_batch` of at most `MAX_ROWS` rows.

    Args:
        width: Values of a row; 0 for rows of tokens only.
        has_tokens: Whether each row has a token id.
        num_sections: Positions of a row: four of values that are rotated in sections (M-RoPE), of which text
            uses all but the last alike.
    """

    def __init__(self, width: int, *, has_tokens: bool, num_sections: int = 1) -> None:
        self._values = np.zeros((MAX_ROWS, width), np.float32)
        self._tokens = np.zeros(MAX_ROWS, np.int32)
        self._num_alike = max(1, num_sections - 1)
        self._positions = np.zeros(num_sections * MAX_ROWS, np.int32)
        self._num_slots = np.ones(MAX_ROWS, np.int32)
        self._slots = np.zeros(MAX_ROWS, np.int32)
        self._outputs = np.zeros(MAX_ROWS, np.int8)
        slot_pointer = ctypes.POINTER(ctypes.c_int32)
        self._slot_pointers = (slot_pointer * MAX_ROWS)(
            *(ctypes.cast(self._slots.ctypes.data + 4 * row, slot_pointer) for row in range(MAX_ROWS))
        )
        self._struct = llama_cpp.llama_batch(
            n_tokens=0,
            token=_pointer(self._tokens, ctypes.c_int32) if has_tokens else None,
            embd=_pointer(self._values, ctypes.c_float) if width else None,
            pos=_pointer(self._positions, ctypes.c_int32),
            n_seq_id=_pointer(self._num_slots, ctypes.c_int32),
            seq_id=ctypes.cast(self._slot_pointers, ctypes.POINTER(slot_pointer)),
            logits=_pointer(self._outputs, ctypes.c_int8),
        )

    def fill(
        self,
        tokens: Sequence[int] | None,
        positions: Sequence[int],
        slots: Sequence[int],
        *,
        has_output: bool | Sequence[bool],
        values: NDArray[np.float32] | None = None,
    ) -> Any:
        """The batch with these rows."""
        count = len(positions)
        if values is not None:
            self._values[:count] = values
        if tokens is not None:
            self._tokens[:count] = tokens
        # Section by section.
        self._positions[count * self._num_alike :] = 0
        self._positions[: count * self._num_alike] = np.tile(positions, self._num_alike)
        self._slots[:count] = slots
        self._outputs[:count] = has_output
        self._struct.n_tokens = count
        return self._struct


class DraftContext(ABC):
    """A drafter in this process, which llama.cpp may abort; see `Context`.

    Args:
        file: The drafter.
        setup: See `ContextSetup`.
        abort_flag: Two bytes that llama.cpp polls, shared with another process; its own unless given.

    Raises:
        DraftUnusable: If llama.cpp does not load it, if its kind cannot run it, or if there is no memory for
            its KV cache.
        ImportError: If its kind needs a tap, and the compiled callback is missing.
    """

    thread_id: int | None = None
    is_alive = True
    feature_width = 0
    most_drafted = 1
    ms_per_token = 0.0
    _shift: ClassVar[int] = 0
    """Positions that a row lies before its token."""

    def __init__(self, file: DraftFile, setup: ContextSetup, *, abort_flag: Any = None) -> None:
        self._context: Any = None
        self._model: Any = None
        self._kind = file.kind
        self._setup = setup
        self.feature_width = file.feature_width
        llama_cpp.llama_backend_init()
        self._model = _load(file.path, self._model_params(file.options))
        try:
            self._check(file.path)
            # llama.cpp polls this while it computes. libc's strlen reads the first byte of a C string as no
            # Python function could: without waiting for the interpreter lock at each of a thousand tensors.
            self._abort_flag = ctypes.create_string_buffer(2) if abort_flag is None else abort_flag
            self._abort_callback = llama_cpp.ggml_abort_callback(
                ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value
            )
            self._context = self._make_context(file.path, file.options)
        except BaseException:
            self.close()
            raise
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._n_vocab: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.num_tokens = min(file.num_tokens, self._n_vocab)

    @abstractmethod
    def decode(
        self, parts: Sequence[SlotRows[Any]], while_computing: AbstractContextManager[None]
    ) -> list[DraftOutput | None] | None:
        """See `Context.decode`."""

    @abstractmethod
    def _check(self, path: Path) -> None:
        """Read facts of the loaded model; raise `DraftUnusable` if this kind cannot run it."""

    @staticmethod
    @abstractmethod
    def timed_span(number: int, context: Context) -> DraftSpan:
        """A span of one row with an output, behind those of the numbers before, from 0.

        Args:
            number: Its number.
            context: A context of this kind.
        """

    def abort(self) -> None:
        """See `Context.abort`."""
        self._abort_flag[0] = b"\1"

    def resume(self) -> None:
        """See `Context.resume`."""
        self._abort_flag[0] = b"\0"

    def is_end(self, token: int) -> bool:
        """See `Context.is_end`."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    def end_tokens(self) -> frozenset[int]:
        """All tokens that end an answer."""
        return frozenset(filter(self.is_end, range(self._n_vocab)))

    def copy(self, source: int, slot: int, num_tokens: int) -> None:
        """See `Context.copy`."""
        llama_cpp.llama_memory_seq_rm(self._memory, slot, 0, -1)
        if num_tokens > 0:
            llama_cpp.llama_memory_seq_cp(self._memory, source, slot, 0, num_tokens - self._shift)

    def free(self, slot: int) -> None:
        """See `Context.free`."""
        llama_cpp.llama_memory_seq_rm(self._memory, slot, 0, -1)

    def close(self) -> None:
        """See `Context.close`."""
        if self._context is not None:
            llama_cpp.llama_free(self._context)
            self._context = None
        if self._model is not None:
            llama_cpp.llama_model_free(self._model)
            self._model = None

    def _model_params(self, options: DraftOptions) -> Any:
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = True
        params.n_gpu_layers = options.num_gpu_layers
        return params

    def _context_params(self, options: DraftOptions) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = options.ctx_size * options.num_sessions
        params.n_batch = params.n_ubatch = MAX_ROWS
        params.n_seq_max = options.num_sessions
        params.kv_unified = True
        # A pruned sliding-window cache may lack rows that a trim goes back to.
        params.swa_full = True
        params.n_threads = params.n_threads_batch = options.num_threads
        params.type_k = params.type_v = _kv_type(options.kv_type)
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO
        params.no_perf = True
        params.abort_callback = self._abort_callback
        params.abort_callback_data = ctypes.addressof(self._abort_flag)
        return params

    def _make_context(self, path: Path, options: DraftOptions) -> Any:
        context = llama_cpp.llama_init_from_model(self._model, self._context_params(options))
        if context is None:
            raise DraftUnusable(
                f"llama.cpp cannot make a context of {options.num_sessions} × {options.ctx_size} positions "
                f"with a KV cache of {options.kv_type} for the draft model {path.name}"
            )
        return context

    def _logits(self, row: int) -> NDArray[np.float32]:
        """Logits of one row, float32 (1, num_tokens); see `DraftOutput`."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, shape=(1, self._n_vocab))[:, : self.num_tokens]


def _require(name: str, value: object, holds: bool, need: str) -> None:  # noqa: FBT001 - reads as an assertion
    if not holds:
        raise ValueError(f"{name} is {value}: it must be {need}")


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))


def _kv_type(name: str) -> int:
    if name.upper() not in GGMLQuantizationType.__members__:
        raise DraftUnusable(f"llama.cpp has no format {name} for the KV cache of a draft model")
    return int(GGMLQuantizationType[name.upper()].value)


def _load(path: Path, params: Any) -> Any:
    if not path.is_file():
        raise DraftUnusable(f"{path} is not a file: give the path of a GGUF model as draft")
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if model is None:
        raise DraftUnusable(
            f"llama.cpp cannot load {path} as a draft model: the file may not be a complete GGUF"
        )
    return model


def metadata_of(model: Any, key: str) -> str | None:
    """A value of a loaded model's metadata, as llama.cpp writes it; None without one."""
    length = llama_cpp.llama_model_meta_val_str(model, key.encode(), None, 0)
    if length < 0:
        return None
    buffer = ctypes.create_string_buffer(length + 1)
    llama_cpp.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode()


def is_computed(status: int) -> bool:
    """Whether llama.cpp computed a batch, by what it returned; if not, it was aborted.

    Raises:
        DraftUnusable: If it failed.
    """
    if status in {0, _ABORTED}:
        return status == 0
    reason = "its KV cache is full" if status == _NO_ROOM else f"llama.cpp returns {status}"
    raise DraftUnusable(f"the draft model cannot go on: {reason}")


def timed_ms_per_token(
    context: Context, span_of: Callable[[int, Context], DraftSpan], clock_s: Callable[[], float]
) -> float:
    """Shortest time of a few drafted tokens, in ms. The first only warms up.

    Args:
        context: The drafter; no slot has rows yet.
        span_of: `DraftContext.timed_span` of its kind.
        clock_s: Monotonic clock, seconds.

    Raises:
        DraftUnusable: If llama.cpp fails.
        ValueError: If the logits are not finite.
    """
    times_ms = []
    for number in range(_NUM_TIMED_TOKENS):
        started_s, num_drafted = clock_s(), 0
        rows = SlotRows(0, span_of(number, context))
        for output in context.decode([rows], nullcontext()) or ():
            if output is None:
                continue
            token = 0
            for index in range(output.num_drafted):
                logits = output.logits(index, token, context.num_tokens)
                token = int(np.argmax(logits))
                probability(logits, token)
            num_drafted = output.num_drafted
        times_ms.append((clock_s() - started_s) * 1000 / max(1, num_drafted))
    context.free(0)
    return min(times_ms)


def probability(logits: NDArray[np.float32], token: int) -> float:
    """The softmax probability of one token, at temperature 1.

    Args:
        logits: float32, shape (n_vocab,).
        token: Token id.

    Raises:
        ValueError: If the relevant logits are not finite.
    """
    scaled = logits - logits.max()
    chosen = float(scaled[token])
    np.exp(scaled, out=scaled)
    share = float(np.exp(chosen)) / float(scaled.sum())
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"the draft model's logits give token {token} a probability of {share}")
    return share
