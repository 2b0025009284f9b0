"""`random-token`: prompts without any pattern, which no proposer should waste anything on."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final

from mesh.bench.spec.workload import Question, Workload, chat_question

if TYPE_CHECKING:
    from mesh.text.tokenizer import Tokenizer

_NUM_TOKENS: Final = 48


def random_tokens(tokenizer: Tokenizer, seed: int, count: int) -> Workload:
    """As a user's message.

    Args:
        tokenizer: Whose vocabulary to draw from, control tokens left out.
        seed: The same seed, the same prompts.
        count: How many.
    """
    questions = []
    for index, ids in enumerate(_draw(tokenizer, seed, count)):
        text = b"".join(tokenizer.piece(token) for token in ids).decode(errors="ignore")
        questions.append(chat_question(f"seed-{seed}-{index}", text))
    return Workload("random-token", tuple(questions))


def raw_random_tokens(tokenizer: Tokenizer, seed: int, count: int) -> Workload:
    """The very ids as a raw prompt."""
    drawn = _draw(tokenizer, seed, count)
    questions = tuple(
        Question(f"seed-{seed}-{index}", {"prompt": list(ids)}) for index, ids in enumerate(drawn)
    )
    return Workload("random-token-raw", questions, is_raw=True)


def _draw(tokenizer: Tokenizer, seed: int, count: int) -> list[tuple[int, ...]]:
    random = Random(seed)  # noqa: S311 - prompts, not secrets
    # Control tokens have no text, and would end the message.
    visible = [token for token in range(tokenizer.n_vocab) if tokenizer.piece(token)]
    return [tuple(random.choices(visible, k=_NUM_TOKENS)) for _ in range(count)]
