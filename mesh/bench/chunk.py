"""One chunk of a streamed answer, as OpenAI's servers write them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

# Where a chat's delta carries what the model said, besides `content`.
_OTHER_SPEECH: Final = ("reasoning_content", "reasoning", "refusal", "tool_calls")


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a chunk brings.

    Attributes:
        text: The answer's next piece.
        token_ids: Its tokens, if the request asked for them.
        has_tokens: Whether the model said anything in it, be it text, ids, reasoning or a tool call. A chat's
            opening chunk has none: it names the role, and some servers send it before they compute anything.
        finish: Why the answer ends here, or None.
        usage: Token counts; most chunks have none.
        timings: The server's own account, as far as it gives one.
        error: Why the server breaks off, or None.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    has_tokens: bool = False
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def read_chunk(fields: dict[str, Any]) -> Chunk:
    """From a chunk's JSON, of the chat or the completion endpoint; several choices count as one."""
    if error := fields.get("error"):
        return Chunk(error=str(error.get("message", error) if isinstance(error, dict) else error))
    text, finish = "", None
    ids: list[int] = []
    speaks = False
    for choice in fields.get("choices") or ():
        delta = choice.get("delta") or {}
        text += choice.get("text") or delta.get("content") or ""
        ids += choice.get("token_ids") or ()
        speaks = speaks or any(delta.get(name) for name in _OTHER_SPEECH)
        finish = choice.get("finish_reason") or finish
    return Chunk(
        text=text,
        token_ids=tuple(ids),
        has_tokens=bool(text or ids or speaks),
        finish=finish,
        usage=_object(fields.get("usage")),
        timings=_object(fields.get("timings")),
    )


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
