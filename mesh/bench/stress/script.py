"""What one user says in one chat. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Turn:
    """One request of a chat.

    Attributes:
        text: The user's message.
        max_tokens: Of the answer.
        is_full: Whether the answer is to go on to the last token.
        is_cold: Whether the server is asked to compute the whole prompt, also what it still holds of it.
    """

    text: str
    max_tokens: int
    is_full: bool = True
    is_cold: bool = False


@dataclass(frozen=True)
class Script:
    """A chat whose messages do not depend on what is answered.

    Attributes:
        id: To tell it from the others.
        turns: At least one.
        temperature: Of sampling, 0 for greedy.
        seed: Of sampling.
    """

    id: str
    turns: tuple[Turn, ...]
    temperature: float = 0.0
    seed: int = 0

    def body(self, turn: int, answers: Sequence[str], fields: Mapping[str, Any] = {}) -> bytes:
        """A streamed request with usage and token ids, as JSON.

        Args:
            turn: Which, from 0.
            answers: What was answered to those before it.
            fields: Further ones.
        """
        messages: list[dict[str, str]] = []
        for said, answer in zip(self.turns[:turn], answers, strict=True):
            messages.append({"role": "user", "content": said.text})
            messages.append({"role": "assistant", "content": answer})
        now = self.turns[turn]
        messages.append({"role": "user", "content": now.text})
        return json.dumps(
            {
                "model": "default",
                "messages": messages,
                "max_tokens": now.max_tokens,
                "temperature": self.temperature,
                "seed": self.seed,
                "ignore_eos": now.is_full,
                "cache_prompt": not now.is_cold,
                "return_token_ids": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **fields,
            }
        ).encode()


def prompt_id(script: str, turn: int) -> str:
    """What a request is called."""
    return f"{script}, turn {turn + 1}"
