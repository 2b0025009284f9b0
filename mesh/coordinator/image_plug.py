"""Images of prompts: the plug that names their chunks to the stages, and sends their rows to the first one.

Rows are loaded as they are needed: those of the chunk that leaves next, and of the one behind it. They are
kept for a replay, of all sessions together up to a bound: beyond it those that were sent longest ago are
dropped, and loaded again if a stage is lost.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import structlog

from mesh.coordinator.plugs import Plug, SessionPlug
from spanmesh_proto.errors import MeshError, StageFailed
from stages.sampling.session_spec import chunk_to_wire
from stages.transport.channels import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from mesh.coordinator.generation import Generation, WindowPlan
    from mesh.coordinator.speculation import Speculator
    from mesh.engine import RowInput
    from spanmesh_proto import windows_pb2 as wire
    from spanmesh_proto.image_chunk import ImageChunk

_MOST_KEPT_BYTES: Final = 2**30
# Chunks whose rows are loaded while those before them are sent.
_NUM_AHEAD: Final = 1
log = structlog.get_logger()


class RowKey(NamedTuple):
    """Names the rows of a chunk among those of all sessions."""

    owner: int
    """Number of the session's part of the plug."""
    number: int
    """Which of its inputs."""


class KeptRows:
    """Rows of all sessions, float32 (rows, width).

    Args:
        most_bytes: Most bytes of rows that may be dropped, since they were sent.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._needed: dict[RowKey, NDArray[np.float32]] = {}
        # In the order of sending, the latest last.
        self._sent: OrderedDict[RowKey, NDArray[np.float32]] = OrderedDict()
        self._num_sent_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Size of all rows."""
        return self._num_sent_bytes + sum(rows.nbytes for rows in self._needed.values())

    def add(self, key: RowKey, rows: NDArray[np.float32]) -> None:
        """Keep rows that are about to be sent."""
        self._needed[key] = rows

    def get(self, key: RowKey) -> NDArray[np.float32] | None:
        """Rows, if they are kept; from now on they are not dropped."""
        rows = self._sent.pop(key, None)
        if rows is not None:
            self._num_sent_bytes -= rows.nbytes
            self._needed[key] = rows
        return self._needed.get(key)

    def sent(self, key: RowKey) -> None:
        """Note that all rows of a chunk were sent, and drop those beyond the bound."""
        rows = self._needed.pop(key, None)
        if rows is None:
            return
        self._sent[key] = rows
        self._num_sent_bytes += rows.nbytes
        while self._num_sent_bytes > self._most_bytes:
            _, dropped = self._sent.popitem(last=False)
            self._num_sent_bytes -= dropped.nbytes

    def drop(self, owner: int) -> None:
        """Drop all rows of a session."""
        self._needed = {key: rows for key, rows in self._needed.items() if key.owner != owner}
        for key in [key for key in self._sent if key.owner == owner]:
            self._num_sent_bytes -= self._sent.pop(key).nbytes


class ImageSession(SessionPlug):
    """Images of one session's prompt.

    Args:
        inputs: Their chunks, at least one.
        owner: A number of its own.
        kept: Rows of all sessions.
    """

    def __init__(self, inputs: Sequence[RowInput], owner: int, kept: KeptRows) -> None:
        self._inputs = inputs
        self._owner = owner
        self._kept = kept
        self._on_ready: Callable[[MeshError | None], None] = _nothing
        self._loading: dict[int, asyncio.Task[None]] = {}
        self._awaited: int | None = None

    def listen(self, on_ready: Callable[[MeshError | None], None]) -> None:
        """See `SessionPlug.listen`."""
        self._on_ready = on_ready

    def detach(self) -> None:
        """End what is loading, and drop all rows."""
        self._on_ready = _nothing
        for task in self._loading.values():
            task.cancel()
        self._loading.clear()
        self._kept.drop(self._owner)

    @property
    def num_named(self) -> int | None:
        """Number of rows before the first image of an encoder that has moved since the prompt was made."""
        return next((each.chunk.first_row for each in self._inputs if each.is_carried()), None)

    def opening(self, message: wire.Open) -> None:
        """Name the chunks to the stages."""
        message.images.extend(chunk_to_wire(each.chunk) for each in self._inputs)

    def awaits(self, start: int) -> bool:
        """Whether rows of the chunk at a row are still loading; those behind it begin to."""
        first = next((index for index, each in enumerate(self._inputs) if start < each.chunk.stop), None)
        self._awaited = None
        if first is None:
            return False
        for index in range(first, min(first + 1 + _NUM_AHEAD, len(self._inputs))):
            self._need(index)
        if start >= self._inputs[first].chunk.first_row and not self._has(first):
            self._awaited = first
        return self._awaited is not None

    def sending(self, window_id: int, plan: WindowPlan, message: wire.Window) -> None:
        """Add the rows of a window."""
        del window_id
        if not plan.brings_rows:
            return
        index, chunk = next(
            (index, each.chunk)
            for index, each in enumerate(self._inputs)
            if each.chunk.first_row <= plan.start < each.chunk.stop
        )
        rows = self._kept.get(RowKey(self._owner, index))
        if rows is None:
            raise StageFailed(f"rows of the image at {chunk.first_row} are missing")
        message.rows = rows[plan.start - chunk.first_row : plan.stop - chunk.first_row].tobytes()
        if plan.stop == chunk.stop:
            self._kept.sent(RowKey(self._owner, index))

    def _has(self, index: int) -> bool:
        return self._kept.get(RowKey(self._owner, index)) is not None

    def _need(self, index: int) -> None:
        if index not in self._loading and not self._has(index):
            self._loading[index] = asyncio.create_task(self._load(index))

    async def _load(self, index: int) -> None:
        """Load the rows of a chunk, and let the window go on that waits for them."""
        chunk = self._inputs[index].chunk
        error: MeshError | None = None
        try:
            rows = await self._inputs[index].load()
            self._kept.add(RowKey(self._owner, index), _checked(rows, chunk))
        except MeshError as raised:
            error = raised
        except Exception as raised:
            log.exception("image_failed", row=chunk.first_row)
            error = StageFailed(f"the image at row {chunk.first_row} could not be encoded: {raised!r}")
        self._loading.pop(index, None)
        if error is not None or self._awaited == index:
            self._on_ready(error)


class ImagePlug(Plug):
    """Images of all sessions.

    Args:
        most_kept_bytes: Most bytes of rows that are kept for replays; 1 GiB if None.
    """

    def __init__(self, most_kept_bytes: int | None = None) -> None:
        self._kept = KeptRows(_MOST_KEPT_BYTES if most_kept_bytes is None else most_kept_bytes)
        self._num_sessions = 0

    def in_session(self, generation: Generation, speculator: Speculator | None) -> ImageSession | None:
        """Images of a new session's prompt; None without any."""
        del speculator
        if not generation.request.inputs:
            return None
        self._num_sessions += 1
        return ImageSession(generation.request.inputs, self._num_sessions, self._kept)


def _checked(rows: NDArray[np.float32], chunk: ImageChunk) -> NDArray[np.float32]:
    """Rows of a chunk as they are sent, float32 (rows, width), contiguous.

    Raises:
        StageFailed: If they have another shape, or do not fit a message although they have to.
    """
    if rows.ndim != 2 or len(rows) != chunk.num_rows:
        raise StageFailed(
            f"the encoder gave rows of shape {rows.shape} for the {chunk.num_rows} rows of an image at "
            f"{chunk.first_row}"
        )
    if chunk.sees_all and rows.size * 4 > MAX_MESSAGE_BYTES // 2:
        raise StageFailed(
            f"the {len(rows)} rows of an image at {chunk.first_row} have to be computed at once, and their "
            f"{rows.size * 4} bytes exceed a message: give smaller images"
        )
    return np.ascontiguousarray(rows, "<f4")


def _nothing(_error: MeshError | None) -> None:
    """Does nothing."""
