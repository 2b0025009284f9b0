"""The drafter that is tuned or measured, with its model, as numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from mesh.draft.drafter import read_drafter
from mesh.tuning import drafter_file
from mesh.tuning.recording import RecordingHeader, recorded_model
from mesh.tuning.vocabulary import retrimmed, token_counts
from stages.gguf import ValueType, read_header
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mesh.tuning.answers import RecordedAnswer
    from mesh.tuning.drafter_file import Eagle3Weights, TensorRows
    from stages.gguf import GgufHeader

PROMPTS: Final = "prompts"
"""Name of the metadata with the hashes of prompts that a drafter has learned from."""


class Source:
    """A model and one of its drafters.

    Args:
        target: The model's file.
        path: The drafter's.

    Raises:
        ModelError: If one cannot be read, if they do not belong together, or if such drafters cannot be
            trained.
    """

    def __init__(self, target: Path, path: Path) -> None:
        self.facts = read_model_facts(target)
        self.header = read_header(target)
        self.drafter = read_drafter(path, self.facts)
        self.weights = drafter_file.read_weights(self.drafter, self.header)

    @property
    def recorded(self) -> RecordingHeader:
        """What recordings for the drafter are of."""
        layers = tuple(layer + 1 for layer in self.drafter.layers)
        return RecordingHeader(recorded_model(self.facts.path), layers)

    @property
    def known_prompts(self) -> frozenset[int]:
        """Hashes of prompts that the drafter has learned from."""
        return known_prompts(self.drafter.header)

    @property
    def embedding(self) -> TensorRows:
        """Rows of the embedding that the drafter reads."""
        return drafter_file.embedding_rows(self.drafter, self.header)

    def with_vocabulary(self, learned: Sequence[RecordedAnswer], num_tokens: int | None) -> Eagle3Weights:
        """The drafter with the tokens of answers among those that it can draft.

        Args:
            learned: The answers.
            num_tokens: As `TuneJob.vocabulary`.
        """
        weights, head = self.weights, drafter_file.head_rows(self.header)
        if num_tokens == 0 or not drafter_file.has_head_of(weights, head, self.facts.n_embd):
            return weights
        counts = token_counts([answer.tokens for answer in learned], self.facts.n_vocab)
        token_ids = retrimmed(weights.token_ids, counts, num_tokens or len(weights.token_ids))
        if np.array_equal(token_ids, weights.token_ids):
            return weights
        return replace(weights, head=head.rows(token_ids), token_ids=token_ids)


def known_prompts(header: GgufHeader) -> frozenset[int]:
    """Hashes of prompts that a drafter has learned from, by the header of its file."""
    value = drafter_file.tuned_values(header).get(PROMPTS)
    hashes = None if value is None or value.type is ValueType.STRING else value.decode()
    return frozenset(int(each) for each in hashes) if isinstance(hashes, tuple) else frozenset()
