"""What is asked, and the body that carries it. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.bench.stream_client import CHAT_PATH, COMPLETION_PATH

if TYPE_CHECKING:
    from mesh.bench.serve.endpoint import EndpointName

PATHS: Final[dict[EndpointName, str]] = {"chat": CHAT_PATH, "completions": COMPLETION_PATH}


@dataclass(frozen=True)
class Prompt:
    """One thing to ask.

    Attributes:
        id: To tell it from the others of its source.
        text: A user's message, or a raw prompt.
        messages: A whole chat in place of the text; only the chat endpoint takes one.
    """

    id: str
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Asking:
    """What all requests of a run have in common.

    Attributes:
        endpoint: Which.
        model: Name that requests give.
        max_tokens: Of each answer.
        temperature: Of sampling; None leaves it to the server.
        ignore_eos: Whether the server is asked to go on to the last token.
        extra_body: Further fields; they win over the others, and a null takes a field out.
    """

    endpoint: EndpointName
    model: str
    max_tokens: int
    temperature: float | None = None
    ignore_eos: bool = False
    extra_body: dict[str, Any] | None = None

    def body(self, prompt: Prompt) -> bytes:
        """A streamed request with usage, as JSON."""
        fields: dict[str, Any] = {"model": self.model}
        if self.endpoint == "completions":
            fields["prompt"] = prompt.text
        else:
            fields["messages"] = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
        fields |= {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            # A field that a server may not know is sent only if it is asked for.
            "ignore_eos": True if self.ignore_eos else None,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(self.extra_body or {}),
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
