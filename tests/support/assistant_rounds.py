"""Rounds of an assistant's drafts beside the last stage of a cut model, with verdicts by a script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from stages.layers import ranges_from_cuts
from stages.runtime.assistant import Assistant, DraftStart
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import StageRuntime
from stages.slicing.source_model import read_source
from stages.weights.virtual_stages import StageCache
from tests.support.draft_oracle import Round

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from stages.runtime.stage_runtime import RuntimeOptions
    from tests.support.scripted_rounds import Script

# Fewer rows than attention computes in tiles.
_CHUNK: Final = 40
# llama.cpp's own: candidates among which it takes the probability of a token.
_CANDIDATES: Final = 10


class AssistedModel:
    """A model in stages, all of them here, and an assistant beside the last one.

    Args:
        model: The model.
        assistant: The assistant; None for none.
        cuts: First layers of the stages behind the first one.
        folder: For the stages' files.
        options: Of all stages; the last one has a reader beside them.
    """

    def __init__(
        self,
        model: Path,
        assistant: Path | None,
        cuts: Sequence[int],
        folder: Path,
        options: RuntimeOptions,
    ) -> None:
        self._n_layers = len(read_source(model).layers)
        cache = StageCache(folder)
        self.stages: list[StageRuntime] = []
        for layers in ranges_from_cuts(tuple(cuts), self._n_layers):
            self.stages.append(StageRuntime(cache.cut(model, layers).path, options))
        self.tail = self.stages[-1]
        self.assistant = None if assistant is None else Assistant(assistant, self.tail)
        self.tail.tap_features((self._n_layers,))

    def compute(
        self, slot: int, start: int, tokens: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Compute tokens; returns logits and head states of their rows."""
        logits, states = [], []
        for first in range(0, len(tokens), _CHUNK):
            some = list(tokens[first : first + _CHUNK])
            hidden = None
            for stage in self.stages:
                num_outputs = len(some) if stage.info.is_tail else 0
                span = Span(slot, start + first, some, hidden, num_outputs)
                (hidden,) = stage.decode([span], is_tapped=stage.info.is_tail)
            (rows,) = self.tail.features(slot)
            assert hidden is not None
            assert rows is not None
            logits.append(hidden)
            states.append(rows[: len(some)])
        return np.concatenate(logits), np.concatenate(states)

    def close(self) -> None:
        """Free all memory."""
        for stage in self.stages:
            stage.close()


def likeliest(p_min: float) -> Callable[[int, int, NDArray[np.float32]], int | None]:
    """Draws the likeliest token, if it is likely enough, as llama.cpp does."""

    def draw(_index: int, _count: int, logits: NDArray[np.float32]) -> int | None:
        best = int(np.argmax(logits))
        candidates = np.sort(logits)[-_CANDIDATES:]
        return best if 1 / np.exp(candidates - logits[best]).sum() >= p_min else None

    return draw


def assisted_rounds(
    model: AssistedModel, texts: Sequence[Sequence[int]], script: Script
) -> list[list[Round]]:
    """Rounds of sessions that draft together.

    Args:
        model: The model and its assistant.
        texts: Token ids of each session; the first draft follows the last of them.
        script: Drafts and verdicts.
    """
    assert model.assistant is not None
    n_vocab = model.tail.info.n_vocab
    newest = [text[-1] for text in texts]
    positions = [len(text) - 1 for text in texts]
    states = [model.compute(slot, 0, text[:-1])[1][-1] for slot, text in enumerate(texts)]
    rounds: list[list[Round]] = [[] for _ in texts]
    for number in range(script.num_rounds):
        starts = [
            DraftStart(slot, positions[slot], newest[slot], states[slot], script.num_drafted)
            for slot in range(len(texts))
        ]
        for slot, draft in enumerate(model.assistant.draft(starts, likeliest(script.p_min))):
            last, position = newest[slot], positions[slot]
            num_accepted = script.num_accepted(number, len(draft))
            rounds[slot].append(Round(position, last, draft, num_accepted))
            # The window is computed whole, as stages do; the next draft drops what was rejected of it.
            _, rows = model.compute(slot, position, (last, *draft))
            states[slot] = rows[num_accepted]
            newest[slot] = script.corrected(number, num_accepted, last, n_vocab)
            positions[slot] = position + 1 + num_accepted
    return rounds
