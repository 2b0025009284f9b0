"""What the clients ask. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final

from mesh.bench.datasets import BUILT_IN, made_up_prompts
from mesh.bench.stress.scripts import Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

_MADE_UP_TOKENS: Final = (12, 30, 80)
_PENALTIES: Final[tuple[dict[str, float], ...]] = (
    {"frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"repetition_penalty": 1.15},
    {"repeat_penalty": 1.1, "repeat_last_n": 48},
)


@dataclass(frozen=True)
class Question:
    """A request.

    Attributes:
        id: To tell it from the others.
        turn: What is said, and how long the answer is.
        fields: How it is sampled.
    """

    id: str
    turn: Turn
    fields: dict[str, Any]

    @property
    def body(self) -> str:
        """A streamed chat with usage and token ids, as JSON."""
        return json.dumps(
            {
                "model": "default",
                "messages": [{"role": "user", "content": self.turn.text}],
                "max_tokens": self.turn.max_tokens,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self.fields,
            }
        )


def questions(count: int, answer_tokens: Sequence[int], seed: int) -> tuple[Question, ...]:
    """Every other one greedy, the others drawn at temperature 0.8 with a seed and penalties.

    Args:
        count: How many.
        answer_tokens: Lengths of answers, of which each gets one.
        seed: The same seed, the same questions.
    """
    random = Random(seed)  # noqa: S311 - questions, not secrets
    found = []
    for index in range(count):
        if index < len(BUILT_IN):
            text = BUILT_IN[index]
        else:
            text = made_up_prompts(1, random.choice(_MADE_UP_TOKENS), random.randrange(2**31))[0].text
        fields: dict[str, Any] = {"temperature": 0}
        if index % 2:
            fields = {"temperature": 0.8, "seed": random.randrange(2**31), **random.choice(_PENALTIES)}
        found.append(Question(f"question {index}", Turn(text, random.choice(answer_tokens)), fields))
    return tuple(found)


def short_question(seed: int) -> Question:
    """What somebody asks who comes in the middle of it all: a few words, for a few words."""
    return Question("newcomer", Turn(f"Say hello, {seed}.", 4), {"temperature": 0})
