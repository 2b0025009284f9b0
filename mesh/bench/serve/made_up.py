"""Prompts made of common words, for a load of a given length. Pure."""

from __future__ import annotations

from random import Random
from typing import Final

from mesh.bench.serve.prompt import Prompt

# Each is one token, with the space before it, in the vocabularies of the models that this was tried with.
_TEXT: Final = """
    able about above across after again against air all almost along also always among and animal another
    answer any area around ask away back ball bank base because bed before began being below best better
    between big bird black blue board boat body book both box boy bring brown build business but call came
    can car care carry center certain change check child children city class clear close cold color come
    common complete cost could country course cover cut dark day decide deep different direction dog done
    door down draw drive dry during each early earth east easy eat end enough even every example eye face
    """
_WORDS: Final = tuple(_TEXT.split())


def made_up_prompts(count: int, num_tokens: int, seed: int) -> tuple[Prompt, ...]:
    """Random words, as many as tokens are wanted.

    A server's own vocabulary is not known here, so the length is close, not exact, and a chat template comes
    on top: the report says what the server counted. Prompts differ from their first words on, so that a cache
    of prefixes has nothing to gain.

    Args:
        count: How many.
        num_tokens: Of each, about.
        seed: The same seed, the same prompts.
    """
    random = Random(seed)  # noqa: S311 - prompts, not secrets
    return tuple(
        Prompt(f"made-up-{seed}-{index}", " ".join(random.choices(_WORDS, k=num_tokens)))
        for index in range(count)
    )
