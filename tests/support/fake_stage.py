"""Stages without a model: a row's logits are a hash of every row before it, whatever the window's width.

They hold cells as llama.cpp's KV cache does: a position and a value each. A row sees all cells up to its own
position, so one stale cell that is left behind changes everything that follows. Each stage hashes what the
stage before it gave, so that holds at every stage.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import InvalidWindow, UncuttableModel
from stages.layers import LayerRange
from stages.runtime.kv_state import KvRows
from stages.runtime.loaded_model import StageInfo
from stages.runtime.row_positions import TOKENS_ONLY, RowPositions
from stages.runtime.spans import Span, run_around

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from numpy.typing import NDArray

# float32 holds integers up to here.
_MAX_HASH = 1 << 24
_ECHO = 3
# Rows of logits begin somewhere in these numbers: drawing them anew for each row takes longer than all else.
_NUM_BEGINNINGS = 1 << 20
_MOST_VOCABULARY = 1 << 18


@functools.cache
def _numbers() -> NDArray[np.float32]:
    return np.random.default_rng(7).standard_normal(_NUM_BEGINNINGS + _MOST_VOCABULARY, np.float32)


@functools.lru_cache(1 << 16)
def _mixed(*numbers: int) -> int:
    data = struct.pack(f"<{len(numbers)}Q", *(number % (1 << 64) for number in numbers))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


@dataclass(frozen=True)
class Cell:
    position: int
    value: int

    @functools.cached_property
    def weight(self) -> int:
        """Its part in the hashes of rows that see it; the same cell twice counts twice."""
        return _mixed(self.position, self.value)


class FakeMemory:
    """Stands in for `stages.runtime.slot_memory.SlotMemory`.

    Args:
        num_slots: Sequences that it holds at once.
        ctx_size: Positions of each.
        is_poisoned: Whether every slot starts full of cells that no session made.

    Attributes:
        cells: Of each slot.
        forgotten_trims: Trims, counted from 0 among those that had something to forget, that do nothing.
        num_trims: Trims so far that had something to forget.
    """

    def __init__(self, num_slots: int, ctx_size: int, *, is_poisoned: bool) -> None:
        poison = [Cell(position, 77) for position in range(ctx_size)] if is_poisoned else []
        self.cells = [list(poison) for _ in range(num_slots)]
        self.forgotten_trims: frozenset[int] = frozenset()
        self.num_trims = 0
        self._lengths = [len(poison)] * num_slots
        self._positions: list[RowPositions | None] = [TOKENS_ONLY] * num_slots

    def images(self, slot: int) -> RowPositions:
        return self._positions[slot] or TOKENS_ONLY

    def num_alike(self, slot: int, positions: RowPositions) -> int:
        held = self._positions[slot]
        return self._lengths[slot] if held is None else held.num_alike(positions)

    def computes_alike(self, slot: int, num_rows: int, positions: RowPositions) -> bool:
        del slot, num_rows, positions
        return True

    def lay_out(self, slot: int, num_positions: int, positions: RowPositions) -> None:
        if self._positions[slot] is None:
            self._positions[slot] = positions
        self.trim(slot, num_positions)
        self._positions[slot] = positions

    def is_edge(self, slot: int, num_positions: int) -> bool:
        return num_positions == self._lengths[slot] or self.images(slot).within(num_positions) is None

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def can_go_back(self, slot: int, num_positions: int) -> bool:
        return 0 <= num_positions <= self._lengths[slot] and self.is_edge(slot, num_positions)

    def return_points(self, slot: int) -> tuple[int, ...]:
        return tuple(sorted({0, self._lengths[slot]}))

    def latest_return(self, slot: int, least: int, most: int) -> int | None:
        points = (each for each in range(most, least - 1, -1) if self.can_go_back(slot, each))
        return next(points, None)

    def check(self, span: Span) -> None:
        if positions := self.images(span.slot):
            positions.check(span.start, span.tokens)
        if not self.can_go_back(span.slot, min(span.start, self._lengths[span.slot])):
            raise InvalidWindow(f"a window starts at position {span.start}, within an image")
        if span.start > self._lengths[span.slot]:
            raise InvalidWindow(
                f"a window starts at position {span.start}, but slot {span.slot} ends at "
                f"{self._lengths[span.slot]}"
            )

    def prepare(self, span: Span) -> None:
        self.trim(span.slot, span.start)

    def add(self, slot: int, start: int, values: Sequence[int]) -> None:
        """Add cells of rows that are computed."""
        self.cells[slot].extend(Cell(start + row, value) for row, value in enumerate(values))
        self._lengths[slot] = start + len(values)

    def trim(self, slot: int, start: int) -> None:
        if self._lengths[slot] <= start:
            return
        if not self.is_edge(slot, start):
            raise UncuttableModel(f"slot {slot} cannot go back to position {start}, within an image")
        if self.num_trims not in self.forgotten_trims:
            self.cells[slot] = [cell for cell in self.cells[slot] if cell.position < start]
        self.num_trims += 1
        self._lengths[slot] = start

    def copy(self, source: int, slot: int, num_positions: int, positions: RowPositions = TOKENS_ONLY) -> None:
        if num_positions > self._lengths[source]:
            raise InvalidWindow(f"slot {source} holds {self._lengths[source]} positions, not {num_positions}")
        self.cells[slot] = list(self.cells[source])
        self._lengths[slot] = self._lengths[source]
        self._positions[slot] = self._positions[source] or positions
        self.trim(slot, num_positions)

    def num_kv_bytes(self, slot: int) -> int:
        return len(self.kv_rows(slot).to_bytes())

    def kv_rows(self, slot: int) -> KvRows:
        """One layer of keys, whose rows are the values, as llama.cpp would save them."""
        cells = sorted(self.cells[slot], key=lambda cell: cell.position)
        saved = struct.pack("<IiII", 7, slot, 1, len(cells))
        saved += b"".join(struct.pack("<iIi", cell.position, 1, slot) for cell in cells)
        saved += struct.pack("<IIiQ", 0, 1, 0, 8)
        saved += b"".join(struct.pack("<q", cell.value) for cell in cells)
        return KvRows.from_bytes(saved)

    def put_kv_rows(self, slot: int, rows: KvRows) -> None:
        if rows.start > self._lengths[slot]:
            raise InvalidWindow(f"rows from {rows.start} on for a slot that ends at {self._lengths[slot]}")
        self.trim(slot, rows.start)
        self._positions[slot] = None
        values = np.frombuffer(rows.to_bytes(), "<i8", offset=16 + 12 * len(rows) + 20)
        self.add(slot, rows.start, values.tolist())

    def put_saved(
        self, slot: int, saved: NDArray[np.uint8], num_positions: int, state: NDArray[np.uint8] | None = None
    ) -> None:
        """As llama.cpp does it, all that the slot held goes first."""
        assert state is None
        self.cells[slot] = []
        self._lengths[slot] = 0
        self.put_kv_rows(slot, KvRows.from_bytes(saved))
        assert self._lengths[slot] == num_positions


class FakeRuntime:
    """Stands in for `stages.runtime.stage_runtime.StageRuntime`.

    Args:
        index: Its place in the pipeline.
        num_stages: Of the pipeline.
        n_vocab: Token ids are below this.
        num_slots: Sequences that it holds at once.
        ctx_size: Positions of each.
        on_decode: Called before each batch, in the worker's thread.
        is_poisoned: Whether every slot starts full of cells that no session made.

    Attributes:
        memory: What its slots hold.
    """

    max_rows = 16
    most_rows = 48
    input_width = 1
    hands_on_rows = False
    computes_runs = False

    def __init__(
        self,
        index: int,
        num_stages: int,
        *,
        n_vocab: int = 64,
        num_slots: int = 4,
        ctx_size: int = 128,
        on_decode: Callable[[Sequence[Span]], None] = lambda _spans: None,
        is_poisoned: bool = False,
    ) -> None:
        self.info = StageInfo(
            layers=LayerRange(index, index + 1),
            n_layers=num_stages,
            n_embd=1,
            n_vocab=n_vocab,
            n_ctx_train=ctx_size,
            num_bytes=0,
        )
        self.takes_rows = index == 0
        self.decode_cpu_us = 0
        self.num_slots = num_slots
        self.num_threads = 1
        self.ctx_size = ctx_size
        self.on_decode = on_decode
        self.memory = FakeMemory(num_slots, ctx_size, is_poisoned=is_poisoned)
        self._feature_layers: tuple[int, ...] = ()
        self._features: dict[int, tuple[NDArray[np.float32], ...]] = {}

    def run_around(self, slot: int, rows_of: Mapping[int, int]) -> range:
        return run_around(slot, rows_of, self.max_rows)

    def check(self, span: Span) -> None:
        self.memory.check(span)
        is_whole = self.memory.images(span.slot).is_whole(span.start)
        most = self.most_rows if is_whole else self.max_rows
        if span.start + len(span.tokens) > self.ctx_size or len(span.tokens) > most:
            raise InvalidWindow(f"{len(span.tokens)} rows at {span.start} do not fit")
        if (
            span.is_rows
            and self.info.is_first
            and (span.hidden is None or len(span.hidden) != len(span.tokens))
        ):
            raise InvalidWindow("rows that are no tokens are missing")
        if not span.is_rows and not all(0 <= token < self.info.n_vocab for token in span.tokens):
            raise InvalidWindow("a token is outside the vocabulary")

    def tap_features(self, layers: Collection[int]) -> tuple[int, ...]:
        own, n_layers = self.info.layers, self.info.n_layers
        self._feature_layers = tuple(
            layer
            for layer in sorted(layers)
            if own.start <= layer < min(own.stop, n_layers - 1) or layer == n_layers == own.stop
        )
        return self._feature_layers

    def features(self, slot: int) -> tuple[NDArray[np.float32], ...]:
        return self._features.get(slot, ())

    def decode(self, spans: Sequence[Span], *, is_tapped: bool = False) -> list[NDArray[np.float32]]:
        self.on_decode(spans)
        outputs = [self._compute(span) for span in spans]
        self._features = {span.slot: self._features_of(span) for span in spans} if is_tapped else {}
        return outputs

    def _features_of(self, span: Span) -> tuple[NDArray[np.float32], ...]:
        """Rows that tell layer, position and what the slot holds up to there."""
        cells = self.memory.cells[span.slot]
        positions = range(span.start, span.start + len(span.tokens))
        return tuple(
            np.array([[1000.0 * layer + self._hash(cells, row) % 1000] for row in positions], np.float32)
            for layer in self._feature_layers
        )

    def close(self) -> None:
        pass

    def _compute(self, span: Span) -> NDArray[np.float32]:
        self.memory.prepare(span)
        values = span.tokens if span.hidden is None else [int(value) for value in span.hidden[:, 0]]
        self.memory.add(span.slot, span.start, values)
        cells = self.memory.cells[span.slot]
        # Rows of an image see it all, or those before them.
        is_whole = self.memory.images(span.slot).is_whole(span.start)
        last = span.start + len(span.tokens) - 1
        hashes = [
            self._hash(cells, last if is_whole else span.start + row) for row in range(len(span.tokens))
        ]
        if not self.info.is_tail:
            return np.array(hashes, np.float32).reshape(-1, 1)
        first = len(span.tokens) - span.num_outputs
        rows = [self._logits(hashes[row], span.tokens[row]) for row in range(first, len(span.tokens))]
        return np.array(rows, np.float32).reshape(-1, self.info.n_vocab)

    @staticmethod
    def _hash(cells: Sequence[Cell], position: int) -> int:
        return _mixed(sum(cell.weight for cell in cells if cell.position <= position)) % _MAX_HASH

    def _logits(self, value: int, token: int) -> NDArray[np.float32]:
        start = value % _NUM_BEGINNINGS
        logits = _numbers()[start : start + self.info.n_vocab].copy()
        # Often what follows a token is what followed it before: text that an n-gram proposer can guess.
        logits[(token * 5 + 1) % self.info.n_vocab] += _ECHO
        return logits


def window_message(span: Span, session: int, id: int, **asks: Any) -> wire.Window:
    """The window of some rows as it comes to a stage."""
    return wire.Window(
        session=session,
        id=id,
        start=span.start,
        tokens=span.tokens,
        verify_rows=span.num_outputs,
        checkpoints=span.checkpoints,
        **asks,
    )


def fake_ring(num_stages: int = 3, **options: bool) -> list[FakeRuntime]:
    """The stages of one pipeline."""
    return [FakeRuntime(index, num_stages, **options) for index in range(num_stages)]  # type: ignore[arg-type]


def plain_answer(
    prompt: Sequence[int], num_tokens: int, choose: Callable[[NDArray[np.float32], int], int]
) -> list[int]:
    """What follows the prompt, one token at a time, without a coordinator or a network."""
    stages = fake_ring()
    answer: list[int] = []
    start, tokens = 0, list(prompt)
    while len(answer) < num_tokens:
        for begin in range(0, len(tokens), FakeRuntime.max_rows):
            chunk = tokens[begin : begin + FakeRuntime.max_rows]
            rows = None
            for stage in stages:
                span = Span(0, start + begin, chunk, rows, num_outputs=1)
                rows = stage.decode([span])[0]
        start += len(tokens)
        assert rows is not None
        answer.append(choose(rows[-1], start))
        tokens = answer[-1:]
    return answer
