"""Whole model in one process by llama.cpp's C interface alone, against which stages on a card are held.

No tap, no windows and no messages take part: prompts and tokens of all sessions go through one context with
llama.cpp's own sizes of batches, and the token with the largest logit is fed back.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import llama_cpp
import numpy as np

from spanmesh_proto.errors import InvalidModel, ModelDoesNotFit, StageFailed
from stages.runtime.devices import GpuPlacing, read_file_layers
from stages.runtime.llama import init_backend, last_complaint
from stages.runtime.stage_runtime import Batch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from stages.runtime.devices import Device

# llama.cpp's defaults.
_BATCH_ROWS: Final = 2048
_KERNEL_ROWS: Final = 512


@dataclass(frozen=True)
class WholeRates:
    """Rates of a whole model."""

    tokens_per_s: float
    """Decoded tokens of all sessions together."""
    tokens: tuple[int, ...]
    """The tokens of the first session."""


class WholeModel:
    """A whole model on one device; see `loaded`.

    Args:
        model: llama.cpp's handle of the model.
        context: Its context.
    """

    def __init__(self, model: Any, context: Any) -> None:
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
        self._batch = Batch(_BATCH_ROWS, None)

    def prefill_s(self, prompt: Sequence[int]) -> float:
        """Time until the first token of an answer, in seconds; nothing is kept."""
        start_s = time.perf_counter()
        self._feed_prompt(0, prompt)
        took_s = time.perf_counter() - start_s
        self._forget()
        return took_s

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> WholeRates:
        """Continue all prompts together, and time all tokens but each session's first; nothing is kept.

        Args:
            prompts: Token ids of each session.
            num_tokens: Tokens of each answer, at least two.
        """
        tokens = [self._feed_prompt(session, prompt) for session, prompt in enumerate(prompts)]
        said = [tokens[0]]
        start_s = time.perf_counter()
        for step in range(num_tokens - 1):
            self._batch.clear()
            for session, (prompt, token) in enumerate(zip(prompts, tokens, strict=True)):
                self._batch.add(session, len(prompt) + step, [token], None, first_output=0)
            tokens = [int(token) for token in self._run(num_outputs=len(prompts)).argmax(axis=1)]
            said.append(tokens[0])
        took_s = time.perf_counter() - start_s
        self._forget()
        return WholeRates(len(prompts) * (num_tokens - 1) / took_s, tuple(said))

    def _feed_prompt(self, session: int, prompt: Sequence[int]) -> int:
        """The token with the largest logit after a prompt."""
        token = 0
        for start in range(0, len(prompt), _BATCH_ROWS):
            chunk = prompt[start : start + _BATCH_ROWS]
            self._batch.clear()
            self._batch.add(session, start, chunk, None, first_output=len(chunk) - 1)
            token = int(self._run(num_outputs=1)[-1].argmax())
        return token

    def _run(self, num_outputs: int) -> NDArray[np.float32]:
        """Compute the batch.

        Args:
            num_outputs: Rows with logits.

        Returns:
            Their logits, float32 (num_outputs, n_vocab); a view that the next run overwrites.
        """
        status = llama_cpp.llama_decode(self._context, self._batch.struct)
        if status != 0:
            raise StageFailed(f"llama_decode failed with status {status}: {last_complaint()}")
        pointer = llama_cpp.llama_get_logits(self._context)
        logits: NDArray[np.float32] = np.ctypeslib.as_array(pointer, shape=(num_outputs, self.n_vocab))
        return logits

    def _forget(self) -> None:
        is_data_cleared = False
        llama_cpp.llama_memory_clear(self._memory, is_data_cleared)


@contextmanager
def loaded(
    path: Path, device: Device, *, num_sessions: int, ctx_size: int, num_threads: int = 1
) -> Iterator[WholeModel]:
    """Load a whole model with all layers on a device, and free it at the end.

    Args:
        path: The model, a GGUF file.
        device: The device.
        num_sessions: Most sessions.
        ctx_size: Positions of each.
        num_threads: Threads of the processor.

    Raises:
        InvalidModel: If llama.cpp cannot load it.
        ModelDoesNotFit: If there is not enough memory for its KV cache and buffers.
    """
    init_backend()
    layers = read_file_layers(path)
    model_params = llama_cpp.llama_model_default_params()
    GpuPlacing((device,), (layers.own,)).apply(model_params, layers)
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    if model is None:
        raise InvalidModel(f"llama.cpp does not load {path.name}: {last_complaint()}")
    try:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_sessions * ctx_size
        params.n_batch, params.n_ubatch = _BATCH_ROWS, _KERNEL_ROWS
        params.n_seq_max = num_sessions
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = num_threads
        params.no_perf = True
        context = llama_cpp.llama_init_from_model(model, params)
        if context is None:
            raise ModelDoesNotFit(
                f"llama.cpp cannot make a context of {num_sessions} x {ctx_size} positions of {path.name}: "
                f"{last_complaint()}"
            )
        try:
            yield WholeModel(model, context)
        finally:
            llama_cpp.llama_free(context)
    finally:
        llama_cpp.llama_model_free(model)
