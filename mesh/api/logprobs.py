"""Logprobs in OpenAI's two shapes.

A token that is no whole UTF-8 text is written with escapes, as OpenAI does; its bytes stand beside it. A
control token has a name and no bytes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mesh.api.answer_tokens import AnswerToken
    from mesh.text.tokenizer import Tokenizer

# JSON has no infinity; OpenAI's word for "very unlikely".
_IMPOSSIBLE: Final = -9999.0


def chat_logprobs(tokens: Iterable[AnswerToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    content = [
        {
            **_chat_entry(token.id, token.logprobs.logprob, tokenizer),
            "top_logprobs": [_chat_entry(id, logprob, tokenizer) for id, logprob in token.logprobs.top],  # noqa: A001
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[AnswerToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """`choices[].logprobs` of a completion: the drawn token stands among the likeliest in any case."""
    top_logprobs = []
    for token in tokens:
        likeliest: dict[str, float] = {}
        for id, logprob in (*token.logprobs.top, (token.id, token.logprobs.logprob)):  # noqa: A001
            likeliest.setdefault(_legacy_name(id, tokenizer), _finite(logprob))
        top_logprobs.append(likeliest)
    return {
        "tokens": [_legacy_name(token.id, tokenizer) for token in tokens],
        "token_logprobs": [_finite(token.logprobs.logprob) for token in tokens],
        "top_logprobs": top_logprobs,
        "text_offset": [token.offset for token in tokens],
    }


def _chat_entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    piece = tokenizer.piece(token)
    name = piece.decode("utf-8", "backslashreplace") if piece else tokenizer.name(token)
    return {"token": name, "logprob": _finite(logprob), "bytes": list(piece) or None}


def _legacy_name(token: int, tokenizer: Tokenizer) -> str:
    piece = tokenizer.piece(token)
    if not piece:
        return tokenizer.name(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE
