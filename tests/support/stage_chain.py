"""Stages of one model in this process, one behind the other."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from stages.certification.certify import cut_stage
from stages.layers import LayerRange
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.source_model import read_source
from tests.support.tiny_vision import Part, positions_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from stages.runtime.row_positions import RowPositions

ANSWER: Final = (21, 22, 23)
"""Tokens behind a prompt."""


class Stages:
    """Stages of one model, driven as a ring does."""

    def __init__(self, model: Path, cuts: Sequence[int], options: RuntimeOptions) -> None:
        n_layers = read_source(model).n_layers
        self.runtimes = []
        for start, stop in itertools.pairwise((0, *cuts, n_layers)):
            path = model.with_name(f"{model.stem}-{start}-{stop}.gguf")
            if not path.exists():
                cut_stage(model, LayerRange(start, stop), path)
            self.runtimes.append(StageRuntime(path, options))

    def close(self) -> None:
        for runtime in self.runtimes:
            runtime.close()

    def begin(self, slot: int, num_kept: int, positions: RowPositions) -> None:
        for runtime in self.runtimes:
            runtime.memory.lay_out(slot, num_kept, positions)

    def compute(
        self,
        slot: int,
        start: int,
        ids: Sequence[int],
        rows: NDArray[np.float32] | None = None,
        *,
        num_outputs: int = 0,
        checkpoints: tuple[int, ...] = (),
    ) -> NDArray[np.float32]:
        given = rows
        for runtime in self.runtimes:
            wanted = num_outputs if runtime.info.is_tail else 0
            embedded = None if runtime.info.is_first or not runtime.takes_rows else given
            span = Span(slot, start, list(ids), rows, wanted, checkpoints, embedded)
            (rows,) = runtime.decode([span])
        assert rows is not None
        return rows

    def run(
        self,
        parts: Sequence[Part],
        *,
        slot: int = 0,
        start: int = 0,
        window: int = 63,
        answer: Sequence[int] = ANSWER,
        between: Iterator[None] | None = None,
    ) -> list[NDArray[np.float32]]:
        """Logits behind a prompt, and behind each token of an answer.

        Args:
            parts: The prompt, which ends with text.
            slot: Slot of the session.
            start: Rows that are held.
            window: Most rows of a window, but for those that see all.
            answer: Tokens behind the prompt.
            between: Goes on after each window.
        """
        self.begin(slot, start, positions_of(parts))
        row, found = 0, []
        for index, part in enumerate(parts):
            size = len(part.ids) if part.sees_all else window
            for first in range(0, len(part.ids), size):
                ids = part.ids[first : first + size]
                rows = None if part.rows is None else part.rows[first : first + size]
                is_last = index == len(parts) - 1 and first + size >= len(part.ids)
                if row + first >= start:
                    logits = self.compute(slot, row + first, ids, rows, num_outputs=int(is_last))
                    next(between or iter(()), None)
            row += len(part.ids)
        found.append(logits[-1])
        for token in answer:
            found.append(self.compute(slot, row, [token], num_outputs=1)[-1])
            row += 1
        return found
