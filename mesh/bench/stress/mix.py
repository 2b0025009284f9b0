"""Chats of mixed length. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from mesh.bench.serve.made_up import made_up_prompts
from mesh.bench.stress.script import Script, Turn

# A template's own tokens around each message, and words that turn out to be two tokens.
_TOKENS_AROUND: Final = 32
_WORD_TOKENS: Final = 1.25
_FULL_SHARE: Final = 0.7


@dataclass(frozen=True)
class Mix:
    """What lengths there are; each is as likely as the others.

    Attributes:
        prompt_tokens: Of a message, about.
        answer_tokens: The most of an answer.
    """

    prompt_tokens: tuple[int, ...]
    answer_tokens: tuple[int, ...]


WIDE: Final = Mix((8, 24, 64, 64, 160, 160, 400, 900), (8, 24, 48, 64))
QUICK: Final = Mix((6, 16, 40, 90), (6, 12, 20))


def mixed_scripts(
    count: int, mix: Mix, *, ctx_size: int, seed: int, is_even: bool = False
) -> tuple[Script, ...]:
    """Chats of one to three turns; greedy and sampled; some to their last token, some to their own end.

    A first turn is computed from its first token on, later ones may begin with what the stages still hold:
    as with users who come with something new and then go on with it.

    Args:
        count: How many.
        mix: Lengths.
        ctx_size: Positions of a session; no chat goes beyond.
        seed: The same seed, the same chats.
        is_even: Whether all answers go on to their last token, and all prompts are computed from their first:
            then any server has the same work.
    """
    random = Random(seed)  # noqa: S311 - a load, not a secret
    scripts = []
    for index in range(count):
        # One in three is a chat of several turns, one in six of three.
        wanted = 1 + (index % 3 == 1) + (index % 6 == 4)
        turns: list[Turn] = []
        room = float(ctx_size)
        for number in range(wanted):
            num_tokens = random.choice(mix.prompt_tokens)
            max_tokens = random.choice(mix.answer_tokens)
            room -= num_tokens * _WORD_TOKENS + max_tokens + _TOKENS_AROUND
            if turns and room < 0:
                break
            (prompt,) = made_up_prompts(1, num_tokens, random.randrange(2**31))
            is_full = random.random() < _FULL_SHARE or is_even
            turns.append(Turn(prompt.text, max_tokens, is_full=is_full, is_cold=number == 0 or is_even))
        temperature = 0.8 if index % 4 == 3 else 0.0
        scripts.append(Script(f"chat {index}", tuple(turns), temperature, seed=random.randrange(2**31)))
    return tuple(scripts)
