"""Draft context: llama.cpp context of the draft model, its options, and confidences of its tokens.

Speed matters here, not exactness: the committed tokens are the target's own. So weights may be repacked,
flash attention is llama.cpp's choice, and all sessions share one KV cache and one batch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import llama_cpp
import numpy as np
from gguf.constants import GGMLQuantizationType

from speculative.draft import defaults
from speculative.draft.rows import DraftOutput

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from speculative.draft.rows import DraftSpan, SlotRows

MAX_ROWS: Final = 128
"""Most rows of one batch: from 64 on llama.cpp's attention works in tiles, and a row takes a third less."""
_ABORTED: Final = 2
_NO_ROOM: Final = 1


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


class DraftContext:
    """A loaded draft model with its KV cache. For one thread at a time, except `abort`.

    Args:
        path: The GGUF, or its first file if it is split.
        options: Sizes, threads and formats.
        num_tokens: How many token ids the target knows; the draft's logits beyond are left out.
        abort_flag: Two bytes that llama.cpp polls, shared with another process; its own unless given.

    Raises:
        DraftUnusable: If llama.cpp does not load it, if its state cannot be trimmed by position, or if there
            is no memory for its KV cache.
    """

    thread_id: int | None = None
    """Id of the thread that computes; None for that of the caller."""
    is_alive = True
    """Whether it can compute."""

    def __init__(self, path: Path, options: DraftOptions, num_tokens: int, *, abort_flag: Any = None) -> None:
        self._context: Any = None
        self._model: Any = None
        # Positions that a row lies before its token.
        self._shift = 0
        llama_cpp.llama_backend_init()
        self._model = _load(path, self._model_params(options))
        try:
            self._check(path)
            # llama.cpp polls this while it computes. libc's strlen reads the first byte of a C string as no
            # Python function could: without waiting for the interpreter lock at each of a thousand tensors.
            self._abort_flag = ctypes.create_string_buffer(2) if abort_flag is None else abort_flag
            self._abort_callback = llama_cpp.ggml_abort_callback(
                ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value
            )
            self._context = self._make_context(path, options)
        except BaseException:
            self.close()
            raise
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._n_vocab: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._num_tokens = min(num_tokens, self._n_vocab)
        self._batch = llama_cpp.llama_batch_init(MAX_ROWS, 0, 1)

    def decode(
        self, parts: Sequence[SlotRows[DraftSpan]], while_computing: AbstractContextManager[None]
    ) -> list[DraftOutput | None] | None:
        """Compute rows of different slots together, `MAX_ROWS` at most.

        Args:
            parts: The rows.
            while_computing: Entered for as long as llama.cpp computes.

        Returns:
            For each part, None or the output of its last row. None instead of a list if the decode was
            aborted: no row counts as computed.

        Raises:
            DraftUnusable: If llama.cpp fails.
        """
        for slot, span in parts:
            llama_cpp.llama_memory_seq_rm(self._memory, slot, span.start, -1)
        self._fill(parts)
        with while_computing:
            status = llama_cpp.llama_decode(self._context, self._batch)
        if not is_computed(status):
            return None
        outputs: list[DraftOutput | None] = []
        row = -1
        for _, span in parts:
            row += len(span.tokens)
            outputs.append(DraftOutput(self._logits(row)) if span.has_output else None)
        return outputs

    def abort(self) -> None:
        """End a decode in another thread, and all later ones, at once."""
        self._abort_flag[0] = b"\1"

    def resume(self) -> None:
        """Allow decodes again."""
        self._abort_flag[0] = b"\0"

    def is_end(self, token: int) -> bool:
        """Whether a token ends an answer."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    def end_tokens(self) -> frozenset[int]:
        """All tokens that end an answer."""
        return frozenset(filter(self.is_end, range(self._n_vocab)))

    def copy(self, source: int, slot: int, num_tokens: int) -> None:
        """Replace the rows of a slot by those of another's first tokens; they share the cells."""
        llama_cpp.llama_memory_seq_rm(self._memory, slot, 0, -1)
        if num_tokens > 0:
            llama_cpp.llama_memory_seq_cp(self._memory, source, slot, 0, num_tokens - self._shift)

    def free(self, slot: int) -> None:
        """Drop all rows of a slot."""
        llama_cpp.llama_memory_seq_rm(self._memory, slot, 0, -1)

    def close(self) -> None:
        """Free all memory."""
        if self._context is not None:
            llama_cpp.llama_batch_free(self._batch)
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

    def _check(self, path: Path) -> None:
        if llama_cpp.llama_model_is_recurrent(self._model) or llama_cpp.llama_model_is_hybrid(self._model):
            raise DraftUnusable(
                f"{path.name} has recurrent layers, whose state cannot go back to an earlier position after "
                "a rejection: choose a draft model with attention only"
            )
        if not llama_cpp.llama_model_has_decoder(self._model):
            raise DraftUnusable(f"{path.name} generates no text: choose a decoder as draft model")

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

    def _fill(self, parts: Sequence[SlotRows[DraftSpan]]) -> None:
        batch, row = self._batch, 0
        for slot, span in parts:
            last = row + len(span.tokens) - 1
            for position, token in enumerate(span.tokens, span.start):
                batch.token[row] = token
                batch.pos[row] = position
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = slot
                batch.logits[row] = span.has_output and row == last
                row += 1
        batch.n_tokens = row

    def _logits(self, row: int) -> NDArray[np.float32]:
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, shape=(self._n_vocab,))[: self._num_tokens]


def _require(name: str, value: object, holds: bool, need: str) -> None:  # noqa: FBT001 - reads as an assertion
    if not holds:
        raise ValueError(f"{name} is {value}: it must be {need}")


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


def is_computed(status: int) -> bool:
    """Whether llama.cpp computed a batch, by what it returned; if not, it was aborted.

    Raises:
        DraftUnusable: If it failed.
    """
    if status in {0, _ABORTED}:
        return status == 0
    reason = "its KV cache is full" if status == _NO_ROOM else f"llama.cpp returns {status}"
    raise DraftUnusable(f"the draft model cannot go on: {reason}")


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
