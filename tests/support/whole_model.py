"""The whole model in one process, decoding greedily in exact mode: what every staged answer must equal.

Written against llama.cpp's C interface alone, with llama-cpp-python's own chat formatter, so that nothing of
what is tested takes part. Run as a program: a job on standard input, answers on standard output. A program of
its own, because llama.cpp reads the switch for its tiled matrix product once per process.
"""

import ctypes
import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

_CONTEXT = 1024
_BATCH = 32


@dataclass(frozen=True)
class WholeAnswer:
    text: str
    num_tokens: int
    finish: str


class WholeModel:
    """A GGUF and one sequence of it, computed with one thread."""

    def __init__(self, path: str) -> None:
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = False
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = _CONTEXT
        params.n_batch = params.n_ubatch = _BATCH
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._formatter = Jinja2ChatFormatter(
            template=self._metadata("tokenizer.chat_template"),
            eos_token=self._text_of(llama_cpp.llama_vocab_eos(self._vocab)),
            bos_token=self._text_of(llama_cpp.llama_vocab_bos(self._vocab)),
        )

    def answer(self, prompt: str, max_tokens: int) -> WholeAnswer:
        """Greedy continuation of one user message."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)  # noqa: FBT003
        rendered = self._formatter(messages=[{"role": "user", "content": prompt}]).prompt
        tokens = self._tokenize(rendered)
        for start in range(0, len(tokens), _BATCH):
            self._decode(tokens[start : start + _BATCH])
        answered: list[int] = []
        while True:
            token = self._best()
            answered.append(token)
            if llama_cpp.llama_vocab_is_eog(self._vocab, token):
                return WholeAnswer(self._text(answered[:-1]), len(answered), "stop")
            if len(answered) == max_tokens:
                return WholeAnswer(self._text(answered), len(answered), "length")
            self._decode([token])

    def _decode(self, tokens: list[int]) -> None:
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        batch = llama_cpp.llama_batch_get_one(array, len(tokens))
        status = llama_cpp.llama_decode(self._context, batch)
        assert status == 0

    def _best(self) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self._n_vocab,)).argmax())

    def _tokenize(self, text: str) -> list[int]:
        raw = text.encode()
        tokens = (llama_cpp.llama_token * len(raw))()
        # The template writes the special tokens itself.
        count = llama_cpp.llama_tokenize(self._vocab, raw, len(raw), tokens, len(raw), False, True)  # noqa: FBT003
        return list(tokens[:count])

    def _text(self, tokens: list[int]) -> str:
        return b"".join(self._piece(token, special=False) for token in tokens).decode(errors="replace")

    def _piece(self, token: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(256)
        length = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
        return buffer.raw[:length]

    def _text_of(self, token: int) -> str:
        return self._piece(token, special=True).decode()

    def _metadata(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(1 << 16)
        length = llama_cpp.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer))
        return buffer.raw[:length].decode()


if __name__ == "__main__":
    os.environ["GGML_CPU_TILED_MM"] = "0"  # before its first matrix product
    job: dict[str, Any] = json.load(sys.stdin)
    model = WholeModel(job["model"])
    answers = [model.answer(prompt, job["max_tokens"]) for prompt in job["prompts"]]
    json.dump([asdict(answer) for answer in answers], sys.stdout)
