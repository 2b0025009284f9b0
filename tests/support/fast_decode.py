"""Fast mode beside llama.cpp alone with the same settings, in a process that sets nothing up: see `main`.

A program of its own, because llama.cpp reads the switch of its tiled kernels once per process, and the tests'
process has them off.
"""

from __future__ import annotations

import ctypes
import json
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np

from mesh.util.logs import set_up_logs
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONTEXT = 256


class Alone:
    """The whole model, computed by llama.cpp with one thread, weights as it likes them best."""

    def __init__(self, path: str, num_rows: int) -> None:
        self._model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = CONTEXT
        params.n_batch = params.n_ubatch = num_rows
        params.n_threads = params.n_threads_batch = 1
        params.swa_full = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def decode(self, tokens: list[int]) -> NDArray[np.float32]:
        """Logits after the last of them; each call goes on where the last one ended."""
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        assert llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(array, len(tokens))) == 0
        row = ctypes.cast(
            llama_cpp.llama_get_logits_ith(self._context, -1), ctypes.POINTER(ctypes.c_float * self._n_vocab)
        ).contents
        return np.frombuffer(row, dtype=np.float32).copy()


class Staged:
    """The same in stages, as `mesh serve` computes without `--exact`."""

    def __init__(self, runtimes: list[StageRuntime]) -> None:
        self._runtimes = runtimes
        self._length = 0

    def decode(self, tokens: list[int]) -> NDArray[np.float32]:
        """As `Alone.decode`."""
        hidden: NDArray[np.float32] | None = None
        for runtime in self._runtimes:
            num_outputs = 1 if runtime.info.is_tail else 0
            (hidden,) = runtime.decode([Span(0, self._length, tokens, hidden, num_outputs)])
        self._length += len(tokens)
        assert hidden is not None
        row: NDArray[np.float32] = hidden[-1]
        return row


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Read a prompt in chunks, then say the likeliest token each time.

    Args:
        job: `whole`, `stages`, `prompt`, `chunk` in rows, `num_tokens`.

    Returns:
        `tokens` that were said; of each row of logits, the `differences` between the two; the first `logits`.
    """
    alone = Alone(job["whole"], 128)
    options = RuntimeOptions(num_slots=1, ctx_size=CONTEXT, exact=False, num_threads=1)
    with ExitStack() as stack:
        runtimes = [StageRuntime(Path(path), options) for path in job["stages"]]
        for runtime in runtimes:
            stack.enter_context(closing(runtime))
        staged = Staged(runtimes)
        prompt: list[int] = job["prompt"]
        tokens: list[int] = []
        first: list[float] = []
        differences: list[float] = []
        chunks = [prompt[at : at + job["chunk"]] for at in range(0, len(prompt), job["chunk"])]
        while len(tokens) < job["num_tokens"]:
            fed = chunks.pop(0) if chunks else [tokens[-1]]
            expected, logits = alone.decode(fed), staged.decode(fed)
            first = first or logits.tolist()
            differences.append(float(np.abs(expected - logits).max()))
            if not chunks:
                tokens.append(int(expected.argmax()))
    return {"tokens": tokens, "differences": differences, "logits": first}


if __name__ == "__main__":
    set_up_logs()
    json.dump(main(json.load(sys.stdin)), sys.stdout)
