"""How the tail draws a token from a row of logits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """One session's sampler settings.

    Attributes:
        temperature: 0 is greedy.
        top_k: Keep this many most likely tokens; 0 keeps all.
        top_p: Keep the smallest set whose probability reaches this; 1 keeps all.
        min_p: Drop tokens less likely than this share of the most likely one; 0 drops none.
        seed: Key of the noise, 64 bits. The same seed, prompt and model give the same text, whatever
            was proposed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
