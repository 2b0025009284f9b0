"""The whole model in this process, by llama.cpp alone: what every mesh must agree with."""

import asyncio
import ctypes
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from mesh.engine import Committed, GenerationRequest, GenerationStats
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import ContextLengthExceeded, Overloaded
from stages.runtime.llama import init_backend
from stages.sampling.sampler import Sampler, TokenLogprobs
from tests.support.llama_grammar import LlamaGrammar

_CHUNK_ROWS = 32


class WholeModelEngine:
    """Implements `mesh.engine.Engine`: no stages, no speculation, one row at a time.

    Args:
        path: The model.
        context_length: Positions of a session.
        num_slots: Sessions at once.
        is_exact: Whether its settings are those of exact mode. Where only this engine's own texts are
            compared, the quicker ones do.
    """

    def __init__(
        self, path: Path, *, context_length: int = 512, num_slots: int = 4, is_exact: bool = True
    ) -> None:
        init_backend()
        self.context_length = context_length
        self.num_running = 0
        self.num_closed = 0
        self._free_slots = list(range(num_slots))
        self._thread = ThreadPoolExecutor(1)  # llama.cpp contexts belong to one thread at a time
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = not is_exact
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context_length * num_slots
        params.n_seq_max = num_slots
        params.n_batch = params.n_ubatch = _CHUNK_ROWS
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._texts = Tokenizer(path).texts
        self._batch = llama_cpp.llama_batch_init(_CHUNK_ROWS, 0, 1)

    def close(self) -> None:
        """Free the model."""
        self._thread.shutdown()
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Committed, None]:
        """Continue the prompt."""
        if len(request.prompt) >= self.context_length:
            raise ContextLengthExceeded(f"{len(request.prompt)} tokens do not fit {self.context_length}")
        if not self._free_slots:
            raise Overloaded("all slots are taken", retry_after_s=1)
        loop = asyncio.get_running_loop()
        slot = self._free_slots.pop()
        self.num_running += 1
        grammar = self._grammar(request)
        try:
            sampler = Sampler(request.sampling, len(request.prompt))
            said = list(request.prompt)
            started_s = time.perf_counter()
            first_s = 0.0
            fed: Sequence[int] = request.prompt
            position = 0
            scores: tuple[TokenLogprobs, ...] = ()
            if request.scores_prompt:
                for position, token in enumerate(request.prompt[1:], 1):
                    fed = request.prompt[position - 1 : position]
                    logits = await loop.run_in_executor(self._thread, self._decode, slot, position - 1, fed)
                    scores += self._logprobs(request, logits, token)
                fed, position = request.prompt[-1:], len(request.prompt) - 1
            for count in range(1, request.max_tokens + 1):
                logits = await loop.run_in_executor(self._thread, self._decode, slot, position, fed)
                position += len(fed)
                token = sampler.sample(logits, position, said, grammar)
                said.append(token)
                if grammar is not None:
                    grammar.accept(token)
                now_s = time.perf_counter()
                first_s = first_s or now_s
                stats = GenerationStats(
                    num_windows=count - 1,
                    prefill_ms=(first_s - started_s) * 1000,
                    decode_ms=(now_s - first_s) * 1000,
                )
                finish = self._finish(request, token, count)
                yield Committed((token,), finish, stats, self._logprobs(request, logits, token), scores)
                scores = ()
                if finish is not None:
                    return
                fed = (token,)
        finally:
            if grammar is not None:
                grammar.close()
            self._free_slots.append(slot)
            self.num_running -= 1
            self.num_closed += 1

    def _grammar(self, request: GenerationRequest) -> LlamaGrammar | None:
        if request.grammar is None:
            return None
        texts = self._texts
        return LlamaGrammar(self._vocab, request.grammar, texts.pieces, texts.end_tokens)

    @staticmethod
    def _logprobs(
        request: GenerationRequest, logits: NDArray[np.float32], token: int
    ) -> tuple[TokenLogprobs, ...]:
        """Log-softmax in float64, the whole vocabulary sorted."""
        if request.num_top_logprobs is None:
            return ()
        row = logits.astype(np.float64)
        row -= row.max()
        row -= np.log(np.exp(row).sum())
        ranked = np.argsort(-row, kind="stable")[: request.num_top_logprobs]
        return (TokenLogprobs(float(row[token]), tuple((int(each), float(row[each])) for each in ranked)),)

    @staticmethod
    def _finish(request: GenerationRequest, token: int, count: int):  # type: ignore[no-untyped-def]
        if token in request.end_tokens:
            return "stop"
        return "length" if count == request.max_tokens else None

    def _decode(self, slot: int, position: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        memory = llama_cpp.llama_get_memory(self._context)
        assert llama_cpp.llama_memory_seq_rm(memory, slot, position, -1)
        for start in range(0, len(tokens), _CHUNK_ROWS):
            chunk = tokens[start : start + _CHUNK_ROWS]
            self._batch.n_tokens = len(chunk)
            for row, token in enumerate(chunk):
                self._batch.token[row] = token
                self._batch.pos[row] = position + start + row
                self._batch.n_seq_id[row] = 1
                self._batch.seq_id[row][0] = slot
                self._batch.logits[row] = row == len(chunk) - 1
            assert llama_cpp.llama_decode(self._context, self._batch) == 0
        row_pointer = llama_cpp.llama_get_logits_ith(self._context, -1)
        row = ctypes.cast(row_pointer, ctypes.POINTER(ctypes.c_float * self._n_vocab)).contents
        return np.frombuffer(row, dtype=np.float32).copy()
