"""Parser of llama.cpp's saved sequence state: KV rows in their order.

llama.cpp saves a whole sequence (`llama_state_seq_get_data`). A replica needs only the new rows, so the
saved bytes are parsed here: cut to a range of rows they are valid state for llama.cpp again, and so are two
adjacent ranges joined.

Format (from llama.cpp's source in llama-cpp-python 0.3.36, `llama_kv_cache::state_write`), all little-endian:
u32 magic, i32 sequence, then for each cache of the model:

    u32 streams; for each: u32 cells, and if there are any
        for each cell: i32 position, u32 1, in models that look at more than positions i32 x, i32 y and
            i32 token, i32 sequence
        u32 whether values are transposed, u32 layers
        for each layer's keys: i32 type, u64 bytes of a row, the rows
        for each layer's values, if there are any: the same;
            transposed: i32 type, u32 bytes of an element, u32 elements of a row, for each of them all cells

The format is checked to the last byte: anything else, and positions that do not follow one another, is
refused. So are sliding windows that have begun to slide, whose first rows are not saved. Recurrent state has
no positions; it follows the caches, and is cut off before.

A row has the next position, but for pictures in models with positions in several parts (M-RoPE): all rows of
one have a common position, and differ in x and y; the row behind it has the one after the largest of all
these. Ordered by position, y and x, cells are in the order of rows; which row is the first, they do not tell.

Stages with the same layers need not have the same layout. Sequences on a GPU share one stream, whose cells
come in any order, and have one each on a processor. Values are transposed where there is no flash attention.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto.errors import UncuttableModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

_U32: Final = struct.Struct("<I")
_HEAD_BYTES: Final = 8
_ROWS_HEAD: Final = struct.Struct("<iQ")
_TRANSPOSED_HEAD: Final = struct.Struct("<iII")
# Without and with x, y and token.
_PLAIN_CELL_BYTES: Final = 12
_CELL_BYTES: Final = (_PLAIN_CELL_BYTES, 24)
# Bytes of an element of the types that values may be transposed in, by `enum ggml_type`: F32, F16, BF16.
_ELEMENT_BYTES: Final = {0: 4, 1: 2, 30: 2}


@dataclass(frozen=True)
class _Part:
    """Keys or values of one layer."""

    head: bytes
    """Its types and sizes, as saved."""
    values: NDArray[np.uint8]
    """uint8; (cells, bytes of a row), transposed (elements, cells, bytes of an element)."""

    @property
    def cell_axis(self) -> int:
        return self.values.ndim - 2

    def cut(self, start: int, stop: int) -> _Part:
        if self.cell_axis == 0:
            return replace(self, values=self.values[start:stop])
        return replace(self, values=self.values[:, start:stop])

    def followed_by(self, other: _Part) -> _Part:
        return replace(self, values=np.concatenate([self.values, other.values], axis=self.cell_axis))

    def reordered(self, order: NDArray[np.intp]) -> _Part:
        return replace(self, values=np.take(self.values, order, axis=self.cell_axis))

    @property
    def can_be_transposed(self) -> bool:
        return self.cell_axis == 1 or _ROWS_HEAD.unpack(self.head)[0] in _ELEMENT_BYTES

    def transposed(self) -> _Part:
        if self.cell_axis == 1:
            kind, element_bytes, num_elements = _TRANSPOSED_HEAD.unpack(self.head)
            rows = self.values.transpose(1, 0, 2).reshape(self.values.shape[1], -1)
            return _Part(_ROWS_HEAD.pack(kind, element_bytes * num_elements), rows)
        kind, row_bytes = _ROWS_HEAD.unpack(self.head)
        element_bytes = _ELEMENT_BYTES[kind]
        num_elements = row_bytes // element_bytes
        elements = self.values.reshape(len(self.values), num_elements, element_bytes)
        return _Part(_TRANSPOSED_HEAD.pack(kind, element_bytes, num_elements), elements.transpose(1, 0, 2))


@dataclass(frozen=True)
class _Cache:
    """One cache of the sequence."""

    num_streams: int
    """Streams of the cache; the sequence has cells in one of them."""
    stream: int
    """Index of that one."""
    cells: NDArray[np.uint8]
    """uint8 (cells, bytes of a cell's record)."""
    is_transposed: bool
    """Whether values are transposed."""
    num_layers: int
    """Layers with keys."""
    parts: tuple[_Part, ...]
    """Keys of all layers, then values."""

    @property
    def layout(self) -> tuple[object, ...]:
        """Properties common to all ranges of one model."""
        heads = tuple(part.head for part in self.parts)
        return self.num_streams, self.cells.shape[1], self.is_transposed, self.num_layers, heads

    def cut(self, start: int, stop: int) -> _Cache:
        parts = tuple(part.cut(start, stop) for part in self.parts)
        return replace(self, cells=self.cells[start:stop], parts=parts)

    def followed_by(self, other: _Cache) -> _Cache:
        if self.layout != other.layout:
            raise _unknown("two ranges have different types or sizes")
        parts = tuple(one.followed_by(two) for one, two in zip(self.parts, other.parts, strict=True))
        return replace(self, cells=np.concatenate([self.cells, other.cells]), parts=parts)

    def reordered(self, order: NDArray[np.intp]) -> _Cache:
        parts = tuple(part.reordered(order) for part in self.parts)
        return replace(self, cells=self.cells[order], parts=parts)

    def transposed(self) -> _Cache:
        keys, values = self.parts[: self.num_layers], self.parts[self.num_layers :]
        if not all(part.can_be_transposed for part in values):
            return self
        parts = (*keys, *(part.transposed() for part in values))
        return replace(self, is_transposed=not self.is_transposed, parts=parts)

    def to_bytes(self) -> list[bytes]:
        zero = _U32.pack(0)
        pieces = [_U32.pack(self.num_streams), zero * self.stream, _U32.pack(len(self.cells))]
        pieces += [self.cells.tobytes(), _U32.pack(self.is_transposed), _U32.pack(self.num_layers)]
        for part in self.parts:
            pieces += [part.head, part.values.tobytes()]
        return [*pieces, zero * (self.num_streams - self.stream - 1)]


@dataclass(frozen=True)
class KvRows:
    """Consecutive rows of one sequence, at least one."""

    start: int
    """The first row."""
    stop: int
    """Last row plus one."""
    _head: bytes
    _caches: tuple[_Cache, ...]

    @classmethod
    def from_bytes(
        cls, saved: bytes | bytearray | memoryview | NDArray[np.uint8], start: int | None = None
    ) -> KvRows:
        """Parse saved state of a sequence, without copying.

        Args:
            saved: All bytes, from llama.cpp or `to_bytes`.
            start: The first row, for cells whose positions do not tell it; None if it is the first position.

        Raises:
            UncuttableModel: If it is not the state of consecutive rows.
        """
        data = np.frombuffer(saved, np.uint8)
        for cell_bytes in _CELL_BYTES:
            for has_values in (True, False):
                try:
                    return cls._read(data, cell_bytes, start, has_values=has_values)
                except (struct.error, ValueError):
                    continue
        raise _unknown("the saved state of a sequence has another format")

    @classmethod
    def without_caches(cls, start: int, stop: int, saved: bytes | NDArray[np.uint8]) -> KvRows | None:
        """Rows of a model without attention, of which nothing but a head is saved.

        Args:
            start: The first row.
            stop: Last row plus one.
            saved: All bytes; None is returned if there are more.
        """
        return cls(start, stop, bytes(saved), ()) if len(saved) == _HEAD_BYTES else None

    @classmethod
    def _read(
        cls, data: NDArray[np.uint8], cell_bytes: int, start: int | None, *, has_values: bool
    ) -> KvRows:
        reader = _Reader(data)
        head = reader.take(_HEAD_BYTES).tobytes()
        caches = [_in_order(reader.cache(cell_bytes, has_values=has_values))]
        while not reader.is_at_end:
            caches.append(_in_order(reader.cache(cell_bytes, has_values=has_values)))
        first, count = int(_numbers(caches[0])[0, 0]), len(caches[0].cells)
        if any(_numbers(cache)[0, 0] != first or len(cache.cells) != count for cache in caches):
            raise ValueError("two caches have different rows")
        if start is None or cell_bytes == _PLAIN_CELL_BYTES:
            start = first
        return cls(start, start + count, head, tuple(caches))

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def num_bytes(self) -> int:
        """Size of keys and values."""
        return sum(part.values.size for cache in self._caches for part in cache.parts)

    def cut(self, start: int, stop: int) -> KvRows:
        """The rows from `start` to before `stop`.

        Raises:
            ValueError: If they are empty, or not all here.
        """
        if not self.start <= start < stop <= self.stop:
            raise ValueError(f"rows {start} to {stop} of {self.start} to {self.stop}")
        first, last = start - self.start, stop - self.start
        return KvRows(start, stop, self._head, tuple(cache.cut(first, last) for cache in self._caches))

    def followed_by(self, other: KvRows) -> KvRows:
        """These rows and the adjacent ones after them.

        Raises:
            UncuttableModel: If the other ones are not adjacent, or not of this model.
        """
        _check_adjacent(self, other)
        pairs = zip(self._caches, other._caches, strict=True)
        caches = tuple(one.followed_by(two) for one, two in pairs)
        return KvRows(self.start, other.stop, self._head, caches)

    def in_streams(self, num_streams: int, stream: int) -> KvRows:
        """The same in caches of so many streams, with the sequence in one of them."""
        caches = (replace(cache, num_streams=num_streams, stream=stream) for cache in self._caches)
        return replace(self, _caches=tuple(caches))

    def transposed(self) -> KvRows:
        """The same with values transposed, or as rows if they are; unchanged for types that never are."""
        return replace(self, _caches=tuple(cache.transposed() for cache in self._caches))

    def laid_out_as(self, other: KvRows) -> KvRows:
        """The same with values transposed if those of the other rows are."""
        of_both = zip(self._caches, other._caches, strict=False)
        return self.transposed() if any(a.is_transposed != b.is_transposed for a, b in of_both) else self

    def to_bytes(self) -> bytes:
        """In llama.cpp's format."""
        return b"".join([self._head, *(piece for cache in self._caches for piece in cache.to_bytes())])

    def joined(self, others: Sequence[KvRows]) -> NDArray[np.uint8]:
        """These rows and those of adjacent ranges in llama.cpp's format, uint8 (bytes).

        Every row is copied once.

        Args:
            others: Ranges that follow, in order.

        Raises:
            UncuttableModel: If they are not adjacent, or not of this model.
        """
        ranges = [self, *others]
        for one, two in itertools.pairwise(ranges):
            _check_adjacent(one, two)
        pieces = [_Joined.of_bytes(self._head)]
        for index in range(len(self._caches)):
            pieces += _joined_cache([each._caches[index] for each in ranges])  # noqa: SLF001 - of this class
        joined = np.empty(sum(piece.num_bytes for piece in pieces), np.uint8)
        at = 0
        for piece in pieces:
            piece.write(joined[at : at + piece.num_bytes])
            at += piece.num_bytes
        return joined


@dataclass(frozen=True)
class _Joined:
    """Part of joined ranges: arrays that follow one another along an axis."""

    arrays: tuple[NDArray[np.uint8], ...]
    axis: int = 0

    @classmethod
    def of_bytes(cls, piece: bytes) -> _Joined:
        return cls((np.frombuffer(piece, np.uint8),))

    @property
    def num_bytes(self) -> int:
        return sum(array.size for array in self.arrays)

    def write(self, target: NDArray[np.uint8]) -> None:
        shape = list(self.arrays[0].shape)
        shape[self.axis] = sum(array.shape[self.axis] for array in self.arrays)
        np.concatenate(self.arrays, axis=self.axis, out=target.reshape(shape))


class _Reader:
    """Raises struct.error or ValueError for missing or invalid bytes."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data
        self._offset = 0

    @property
    def is_at_end(self) -> bool:
        return self._offset == self._data.size

    def cache(self, cell_bytes: int, *, has_values: bool) -> _Cache:
        num_streams = self._number()
        filled = None
        for stream in range(num_streams):
            if (num_cells := self._number()) == 0:
                continue
            if filled is not None:
                raise ValueError("a sequence in two streams")
            cells = self.take(num_cells * cell_bytes).reshape(num_cells, cell_bytes)
            if not (cells[:, 4:8] == (1, 0, 0, 0)).all():
                raise ValueError("a cell of several sequences")
            is_transposed, num_layers = bool(self._number()), self._number()
            keys = [self._rows(num_cells) for _ in range(num_layers)]
            values = [
                self._transposed(num_cells) if is_transposed else self._rows(num_cells)
                for _ in range(num_layers if has_values else 0)
            ]
            filled = _Cache(num_streams, stream, cells, is_transposed, num_layers, (*keys, *values))
        if filled is None:
            raise ValueError("a cache without the sequence")
        return filled

    def _number(self) -> int:
        number: int = _U32.unpack(self.take(4).tobytes())[0]
        return number

    def _rows(self, num_cells: int) -> _Part:
        head = self.take(_ROWS_HEAD.size).tobytes()
        _, row_bytes = _ROWS_HEAD.unpack(head)
        return _Part(head, self.take(num_cells * row_bytes).reshape(num_cells, row_bytes))

    def _transposed(self, num_cells: int) -> _Part:
        head = self.take(_TRANSPOSED_HEAD.size).tobytes()
        _, element_bytes, num_elements = _TRANSPOSED_HEAD.unpack(head)
        values = self.take(num_elements * num_cells * element_bytes)
        return _Part(head, values.reshape(num_elements, num_cells, element_bytes))

    def take(self, count: int) -> NDArray[np.uint8]:
        if count > self._data.size - self._offset:
            raise ValueError("bytes are missing")
        self._offset += count
        return self._data[self._offset - count : self._offset]


def _check_adjacent(one: KvRows, other: KvRows) -> None:
    if other.start != one.stop or len(other._caches) != len(one._caches):  # noqa: SLF001 - of this module
        raise _unknown(f"rows from {other.start} do not follow those before {one.stop}")


def _joined_cache(caches: Sequence[_Cache]) -> Iterator[_Joined]:
    first = caches[0]
    if any(cache.layout != first.layout for cache in caches):
        raise _unknown("two ranges have different types or sizes")
    zero = _U32.pack(0)
    num_cells = sum(len(cache.cells) for cache in caches)
    yield _Joined.of_bytes(_U32.pack(first.num_streams) + zero * first.stream + _U32.pack(num_cells))
    yield _Joined(tuple(cache.cells for cache in caches))
    yield _Joined.of_bytes(_U32.pack(first.is_transposed) + _U32.pack(first.num_layers))
    for index, part in enumerate(first.parts):
        yield _Joined.of_bytes(part.head)
        yield _Joined(tuple(cache.parts[index].values for cache in caches), part.cell_axis)
    if rest := zero * (first.num_streams - first.stream - 1):
        yield _Joined.of_bytes(rest)


def no_state() -> NDArray[np.uint8]:
    """A state of a sequence whose rows are all that it has, uint8 (bytes): a head alone."""
    return np.zeros(_HEAD_BYTES, np.uint8)


def _numbers(cache: _Cache) -> NDArray[np.int32]:
    """Records of its cells, int32 (cells, numbers of a record)."""
    return np.ascontiguousarray(cache.cells).view("<i4")


def _in_order(cache: _Cache) -> _Cache:
    """The cache with its cells in the order of rows.

    Raises:
        ValueError: If one does not follow another.
    """
    numbers = _numbers(cache).T
    place = numbers[:1] if cache.cells.shape[1] == _PLAIN_CELL_BYTES else numbers[[0, 3, 2]]
    order = np.lexsort(place[::-1])
    before, behind = place[:, order[:-1]], place[:, order[1:]]
    is_beside = (behind[0] == before[0]) & (behind[1:] != before[1:]).any(axis=0)
    if not (is_beside | (behind[0] == before.max(axis=0) + 1)).all():
        raise ValueError("a row is missing, or there twice")
    return cache if np.array_equal(order, np.arange(len(order))) else cache.reordered(order)


def without_head(saved: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """State that llama.cpp saves of a sequence, without its head."""
    return saved[_HEAD_BYTES:]


def _unknown(why: str) -> UncuttableModel:
    return UncuttableModel(f"llama.cpp's KV cache cannot be split by rows: {why}")
