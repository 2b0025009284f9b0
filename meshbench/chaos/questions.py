"""Questions of the clients of `mesh bench chaos`."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final

from meshbench.datasets import BUILT_IN, made_up_prompts
from meshbench.load_client.schedule import Request
from meshbench.stress.scripts import Turn

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
    """A request."""

    id: str
    """Distinguishes it from the others."""
    turn: Turn
    """Message, and length of the answer."""
    fields: dict[str, Any]
    """How it is sampled."""

    @property
    def request(self) -> Request:
        """A streamed chat with usage and token ids, whose prompt may be held."""
        fields = {"cache_prompt": True, "ignore_eos": True, "return_token_ids": True, **self.fields}
        return Request.chat(self.turn.text, self.turn.max_tokens, fields, name=self.id)


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
    """Short question that is sent right after a fault."""
    return Question("probe", Turn(f"Say hello, {seed}.", 4), {"temperature": 0})
