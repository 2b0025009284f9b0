"""llama.cpp's own grammar sampler: what ours must agree with."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class LlamaGrammar:
    """One answer's way through a grammar. Give it only what it allows: llama.cpp ends the process otherwise.

    It lets control tokens stand for their names, which never appear in an answer: these are left out.

    Args:
        vocab: llama.cpp's.
        text: GBNF.
        pieces: What each token adds to the text.
        end_tokens: Ids that end an answer.
    """

    def __init__(self, vocab: Any, text: str, pieces: Sequence[bytes], end_tokens: frozenset[int]) -> None:
        self._sampler = llama_cpp.llama_sampler_init_grammar(vocab, text.encode(), b"root")
        assert self._sampler, f"llama.cpp does not take {text!r}"
        count = len(pieces)
        self._data = (llama_cpp.llama_token_data * count)()
        self._rows = np.frombuffer(self._data, np.dtype([("id", "i4"), ("logit", "f4"), ("p", "f4")]))
        self._array = llama_cpp.llama_token_data_array(data=self._data, size=count, selected=-1, sorted=False)
        self._is_shown = np.array([bool(piece) for piece in pieces])
        self._is_shown[list(end_tokens)] = True

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come: bool, shape (n_vocab,)."""
        self._rows["id"] = np.arange(len(self._rows))
        self._rows["logit"] = 0
        self._array.size = len(self._rows)
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(self._array))
        may_come: NDArray[np.bool_] = np.isfinite(self._rows["logit"]) & self._is_shown
        return may_come

    def allows(self, token: int) -> bool:
        """Whether a token may come."""
        return bool(self.allowed()[token])

    def restrict(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The row with minus infinity for what may not."""
        return np.where(self.allowed(), logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """Go on with a token."""
        llama_cpp.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        """Free it."""
        llama_cpp.llama_sampler_free(self._sampler)
