"""Prompts with images for stages without a model: rows are numbers, and ids stand for them."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mesh.engine import RowInput
from spanmesh_proto.image_chunk import ImageChunk
from spanmesh_proto.row_ids import FIRST_ROW_ID
from stages.runtime.row_positions import RowPositions
from stages.runtime.spans import Span
from tests.support.fake_stage import FakeRuntime, fake_ring

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True)
class FakeImage:
    """An image, or a slice of one."""

    content: int
    """What it shows."""
    lines: int
    columns: int
    kind: str
    """`plain`, `lined` with positions in parts, or `whole` with rows that see each other."""

    @property
    def num_rows(self) -> int:
        """Its rows."""
        return self.lines * self.columns

    @property
    def rows(self) -> NDArray[np.float32]:
        """They, float32 (rows, 1)."""
        numbers = np.random.default_rng(self.content).integers(0, 1000, (self.num_rows, 1))
        return numbers.astype(np.float32)

    @property
    def ids(self) -> tuple[int, ...]:
        """Their ids."""
        digest = hashlib.shake_256(repr(self).encode()).digest(4 * self.num_rows)
        return tuple((np.frombuffer(digest, "<u4") | np.uint32(FIRST_ROW_ID)).tolist())

    def chunk(self, first_row: int) -> ImageChunk:
        """Where it is in a prompt."""
        columns = self.columns if self.kind == "lined" else 0
        return ImageChunk(first_row, self.num_rows, columns, self.kind == "whole")


Part = tuple[int, ...] | FakeImage


class Loads:
    """Loads of images, each of which takes a turn of the event loop or more."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.num_rows = 0
        self._delay_s = delay_s

    def input(self, image: FakeImage, first_row: int) -> RowInput:
        async def load() -> NDArray[np.float32]:
            await asyncio.sleep(self._delay_s)
            self.num_rows += image.num_rows
            return image.rows

        return RowInput(image.chunk(first_row), load)


def prompt_of(parts: Sequence[Part]) -> tuple[int, ...]:
    """Ids of a prompt."""
    return tuple(each for part in parts for each in (part.ids if isinstance(part, FakeImage) else part))


def inputs_of(parts: Sequence[Part], loads: Loads) -> tuple[RowInput, ...]:
    """Images of a prompt."""
    inputs, row = [], 0
    for part in parts:
        if isinstance(part, FakeImage):
            inputs.append(loads.input(part, row))
        row += part.num_rows if isinstance(part, FakeImage) else len(part)
    return tuple(inputs)


def image_answer(
    parts: Sequence[Part], num_tokens: int, choose: Callable[[NDArray[np.float32], int], int]
) -> list[int]:
    """What follows a prompt, one token at a time, without a coordinator or a network."""
    stages = fake_ring()
    positions = RowPositions(tuple(each.chunk for each in inputs_of(parts, Loads())))
    for stage in stages:
        stage.memory.lay_out(0, 0, positions)
    row = 0
    logits: NDArray[np.float32] | None = None

    def compute(ids: Sequence[int], rows: NDArray[np.float32] | None) -> NDArray[np.float32]:
        for stage in stages:
            (rows,) = stage.decode([Span(0, row, list(ids), rows, num_outputs=1)])
        assert rows is not None
        return rows

    for part in parts:
        is_image = isinstance(part, FakeImage)
        ids = part.ids if isinstance(part, FakeImage) else part
        size = len(ids) if isinstance(part, FakeImage) and part.kind == "whole" else FakeRuntime.max_rows
        for first in range(0, len(ids), max(1, size)):
            given = part.rows[first : first + size] if isinstance(part, FakeImage) and is_image else None
            logits = compute(ids[first : first + size], given)
            row += len(ids[first : first + size])
    assert logits is not None
    answer = [choose(logits[-1], row)]
    while len(answer) < num_tokens:
        logits = compute(answer[-1:], None)
        row += 1
        answer.append(choose(logits[-1], row))
    return answer
