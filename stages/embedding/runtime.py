"""Embedding runtime: the llama.cpp context of a whole embedding model, and its batches of texts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from spanmesh_proto.errors import InvalidModel, ModelDoesNotFit, ProtocolError, StageFailed
from spanmesh_proto.row_ids import stray_id
from stages.embedding.model_file import POOLINGS, BatchLimits
from stages.embedding.vectors import normalised
from stages.runtime.bindings import llama_cpp
from stages.runtime.devices import GpuPlacing
from stages.runtime.llama import init_backend, last_complaint
from stages.runtime.loaded_model import load_model
from stages.runtime.numerics import numerics_for, prepare_process
from stages.runtime.stage_runtime import Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from stages.runtime.stage_runtime import RuntimeOptions


class EmbeddingRuntime:
    """A loaded embedding model. Not thread-safe: for one thread at a time.

    Args:
        path: The GGUF file, the first one if there are several.
        options: `ctx_size` is the longest text, in tokens, and `num_slots` the most texts of a batch. There
            is no exact mode; a KV cache, where there is one, is of f16.
        progress: Called with the loaded share, 0 to 1.

    Raises:
        InvalidModel: If llama.cpp cannot load the file, or it makes no vectors of texts.
        ModelDoesNotFit: If there is not enough memory for its buffers.
        ClusterError: If a device does not exist.
        StageFailed: If llama.cpp cannot compute a text.

    Attributes:
        limits: Limits of a batch.
        width: Numbers of a vector.
        n_vocab: Number of token ids.
        compute_us: Time of the last batch, in microseconds.
    """

    def __init__(
        self, path: Path, options: RuntimeOptions, *, progress: Callable[[float], None] | None = None
    ) -> None:
        self.limits = BatchLimits(options.ctx_size, options.num_slots)
        self.compute_us = 0
        self._context: Any = None
        self._model: Any = None
        placing = GpuPlacing.find(options.gpu_layers)
        numerics = numerics_for(
            exact=False,
            num_threads=options.num_threads,
            has_gpu=placing.has_gpu,
            repacks=options.repacks,
        )
        prepare_process(numerics)
        init_backend()
        self._model = load_model(path, placing, progress, use_repacked_weights=numerics.use_repacked_weights)
        try:
            self._context = self._make_context(options.num_threads)
            self._check_pooling(path)
        except BaseException:
            self.close()
            raise
        self.width: int = llama_cpp.llama_model_n_embd_out(self._model)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        # None for models that read a text at once, without a cache.
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = Batch(self.limits.most_rows, None)
        try:
            # llama.cpp aborts where it cannot compute a model: better now, while it loads, than in a request.
            self._computed([[0]])
        except BaseException:
            self.close()
            raise

    def check(self, texts: Sequence[Sequence[int]]) -> None:
        """Check that `embed` accepts these texts.

        Raises:
            ProtocolError: Naming the invalid number, length or token id.
        """
        limits = self.limits
        if not 1 <= len(texts) <= limits.most_texts:
            raise ProtocolError(f"{len(texts)} texts in a batch; 1 to {limits.most_texts} fit")
        for tokens in texts:
            if not 1 <= len(tokens) <= limits.longest:
                raise ProtocolError(f"a text has {len(tokens)} tokens; 1 to {limits.longest} fit")
            if (stray := stray_id(tokens, self.n_vocab)) is not None:
                raise ProtocolError(f"a text has token {stray}; the vocabulary has {self.n_vocab}")
        num_rows = sum(map(len, texts))
        if num_rows > limits.most_rows:
            raise ProtocolError(f"a batch has {num_rows} tokens; {limits.most_rows} fit")

    def embed(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Compute the vectors of some texts in one pass.

        Args:
            texts: Token ids of each.

        Returns:
            float32 (texts, width), each row of Euclidean length 1.

        Raises:
            ProtocolError: If they do not fit; nothing is computed.
            StageFailed: If llama.cpp fails.
        """
        self.check(texts)
        rows = self._computed(texts)
        if not np.isfinite(rows).all():
            raise StageFailed("llama.cpp computed a vector that holds no numbers: the model file is damaged")
        return normalised(rows)

    def close(self) -> None:
        """Free all memory. The runtime is unusable afterwards."""
        if self._context is not None:
            llama_cpp.llama_free(self._context)
            self._context = None
        if self._model is not None:
            llama_cpp.llama_model_free(self._model)
            self._model = None

    def _computed(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        if self._memory is not None:
            # Marks all cells as free, without writing to them.
            llama_cpp.llama_memory_clear(self._memory, False)  # noqa: FBT003 - a C function
        self._batch.clear()
        for number, tokens in enumerate(texts):
            self._batch.add(number, 0, tokens, None, 0)
        started_ns = time.perf_counter_ns()
        # Without a cache this is llama_encode, which llama.cpp calls itself.
        status = llama_cpp.llama_decode(self._context, self._batch.struct)
        if status != 0:
            raise StageFailed(f"llama_decode failed with status {status}: {last_complaint()}")
        rows = np.stack([self._row(number) for number in range(len(texts))])
        self.compute_us = (time.perf_counter_ns() - started_ns) // 1000
        return rows

    def _row(self, number: int) -> NDArray[np.float32]:
        pointer = llama_cpp.llama_get_embeddings_seq(self._context, number)
        if not pointer:
            raise StageFailed(f"llama.cpp computed no vector for text {number} of the batch")
        # A copy: llama.cpp frees it with the next batch.
        row: NDArray[np.float32] = np.ctypeslib.as_array(pointer, shape=(self.width,)).copy()
        return row

    def _make_context(self, num_threads: int) -> Any:
        limits = self.limits
        params = llama_cpp.llama_context_default_params()
        params.embeddings = True
        # All texts of a batch in one pass: in a unified cache they may have different lengths.
        params.n_ctx = params.n_batch = params.n_ubatch = limits.most_rows
        params.n_seq_max = limits.most_texts
        params.kv_unified = True
        params.swa_full = True
        params.n_threads = params.n_threads_batch = num_threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO
        params.no_perf = True
        context = llama_cpp.llama_init_from_model(self._model, params)
        if context is None:
            raise ModelDoesNotFit(
                f"llama.cpp cannot make a context for texts of {limits.longest} tokens: {last_complaint()}; "
                "try a smaller --ctx-size"
            )
        return context

    def _check_pooling(self, path: Path) -> None:
        if llama_cpp.llama_pooling_type(self._context) not in POOLINGS:
            raise InvalidModel(f"{path.name} makes no vectors of texts: take an embedding model")
