"""Disk of one stage: blocks of KV rows, written behind its sessions and fetched ahead of them.

The thread that computes only copies rows out of llama.cpp and puts them in. Files are read, checked and
written by threads of their own, and what they are behind with is bounded: more is left out. Whatever is
missing, damaged or too large costs the computation of a prompt, nothing else.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import structlog

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import MeshError
from stages.runtime.process_memory import free_memory_bytes
from stages.serving.block_store import DamagedBlock
from stages.serving.plugs import StagePlug
from stages.serving.prefix_blocks import BlockPlace, PrefixReader, copy_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
    from concurrent.futures import Executor

    from stages.sampling.session_spec import SessionSpec
    from stages.serving.block_store import BlockStore, RowsBlock, StoredBlock
    from stages.serving.plugs import Reply, StageAccess
    from stages.serving.prefix_blocks import FetchedPrefix, SlotCopy

# Bytes of one slot's rows that are copied or fetched. llama.cpp returns and takes them together only, in the
# thread that computes: at memory speed, that is about as long as a chunk of a prompt of that length takes.
_MOST_PREFIX_BYTES: Final = 2**30
# Of the host's free memory: a copy is there twice for a moment.
_SHARE_OF_FREE_MEMORY: Final = 1 / 4
_MOST_WAITING_BYTES: Final = 2**28
_MOST_WAITING: Final = 8
# An `Open` follows a fetch at once, behind the windows that are under way.
_FETCHED_KEPT_S: Final = 30.0
# llama.cpp returns the rows of some models in no form that is known, which shows only after a copy. Another
# reason passes: that it has yet to copy rows from slot to slot.
_SHORTEST_REST_S: Final = 1.0
_LONGEST_REST_S: Final = 64.0
# When a stage ends, it waits for writes for so long.
_CLOSE_S: Final = 1.5
_NAMES_A_MESSAGE: Final = 4096

log = structlog.get_logger()

Result = TypeVar("Result")


@dataclass
class _Fetch:
    """A prefix on its way into memory, or there."""

    num_bytes: int
    """Size of its files."""
    is_dropped: bool = False
    """Whether it is not wanted any more."""
    prefix: FetchedPrefix | None = None
    """The prefix, once it is there."""
    expiry: asyncio.TimerHandle | None = None
    """Drops it in time."""


class KvDisk(StagePlug):
    """Blocks of one stage on disk, in the event loop that made it. Before `open` there are none.

    Args:
        open_store: Opens the block files once the stage serves; None leaves that to `open`.
        clock_ns: Wall clock, nanoseconds since the epoch.
        free_memory_bytes: Returns the free memory of the host, bytes.

    Attributes:
        is_open: Whether there are files.
        opening: The opening of the files; None before it begins.
    """

    def __init__(
        self,
        open_store: Callable[[], Awaitable[BlockStore]] | None = None,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
        free_memory_bytes: Callable[[], int] = free_memory_bytes,
    ) -> None:
        self._open_store = open_store
        self._clock_ns = clock_ns
        self._free_memory_bytes = free_memory_bytes
        self._loop = asyncio.get_running_loop()
        self._stage: StageAccess
        self._store: BlockStore
        self._writer: Executor | None = None
        self._reader: Executor | None = None
        self.is_open = self._is_stopped = False
        self.opening: asyncio.Task[None] | None = None
        self._blocks: dict[bytes, StoredBlock] = {}
        self._num_bytes = 0
        # Names that are about to be written.
        self._coming: set[bytes] = set()
        self._num_waiting_bytes = 0
        self._rest_s = _SHORTEST_REST_S
        self._rests_until_s = -1.0
        self._writes: set[asyncio.Task[None]] = set()
        self._reads: set[asyncio.Task[None]] = set()
        self._fetches: dict[int, _Fetch] = {}
        # Filled by the threads.
        self._damaged: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._gone: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._stats = wire.BlockStats()

    def attach(self, stage: StageAccess) -> None:
        """Copy rows of this stage."""
        self._stage = stage

    def serving(self) -> None:
        """Begin to open the files."""
        if self._open_store is not None:
            self.opening = self._loop.create_task(self._open_later(self._open_store))

    async def open(
        self, store: BlockStore, *, writer: Executor | None = None, reader: Executor | None = None
    ) -> None:
        """Keep blocks in files from now on, until `stop`.

        Args:
            store: The block files.
            writer: Executor with one thread, for writing; a new one unless given.
            reader: Executor with one thread, for reading; likewise.

        Raises:
            OSError: If the folders cannot be made or read.
        """
        self._store = store
        self._writer = writer or ThreadPoolExecutor(1, "kv-writer")
        self._reader = reader or ThreadPoolExecutor(1, "kv-reader")
        try:
            blocks = await self._in(self._writer, store.open)
        except BaseException:
            self._shut_down()
            raise
        if self._is_stopped:
            self._shut_down()
            return
        self._blocks, self.is_open = blocks, True
        self._num_bytes = sum(stored.num_bytes for stored in blocks.values())
        self._stats.most_bytes = store.most_bytes
        log.info("disk_opened", blocks=len(blocks), bytes=self._num_bytes)
        for news in self.news():
            self._tell_news(news)

    def news(self) -> Iterator[wire.BlockNews]:
        """All blocks, for a coordinator that has just connected."""
        if not self.is_open:
            return
        names = list(self._blocks)
        yield self._added(names[:_NAMES_A_MESSAGE], self._store.rows_identity)
        for first in range(_NAMES_A_MESSAGE, len(names), _NAMES_A_MESSAGE):
            yield self._added(names[first : first + _NAMES_A_MESSAGE])

    def stats(self) -> wire.BlockStats:
        """Counters since the start."""
        stats = wire.BlockStats(num_files=len(self._blocks), num_bytes=self._num_bytes)
        stats.MergeFrom(self._stats)
        return stats

    def keep(self, slot: int, order: wire.Keep) -> None:
        """Keep blocks of a slot as it is now.

        The copy is queued before this returns, so that no later session of the slot comes before it.

        Args:
            slot: The slot.
            order: Its tokens, and the blocks.
        """
        named = [place for block in order.blocks if (place := BlockPlace.from_wire(block)) is not None]
        places = [
            place for place in named if place.name not in self._blocks and place.name not in self._coming
        ]
        if not places or not self.is_open:
            return
        is_behind = len(self._writes) >= _MOST_WAITING or self._num_waiting_bytes > _MOST_WAITING_BYTES
        if is_behind or self._loop.time() < self._rests_until_s:
            self._stats.num_left_out += len(places)
            return
        # Of those that are there, too: it depends on them how rows are saved.
        states = [place.stop for place in named if place.has_state]
        copying = self._stage.in_worker(lambda: self._copy_of(slot, order, states))
        self._coming.update(place.name for place in places)
        _track(self._writes, self._write_behind(copying, places))

    def requested(self, request: wire.ControlRequest, reply: Reply) -> None:
        """Tell a coordinator what there is, and fetch for it."""
        match request.WhichOneof("kind"):
            case "hello":
                for news in self.news():
                    reply(wire.ControlReply(block_news=news))
            case "fetch":
                self.fetch(request.fetch, lambda fetched: reply(wire.ControlReply(fetched=fetched)))

    def opened(self, spec: SessionSpec) -> FetchedPrefix | None:
        """The prefix that was fetched for a session."""
        return self.take(spec.fetch, len(spec.cached)) if spec.fetch else None

    def closed(self, slot: int, message: wire.Close) -> None:
        """Keep blocks of the slot, as the session's coordinator wants them."""
        if message.HasField("keep"):
            self.keep(slot, message.keep)

    def closed_all(self) -> None:
        """Drop all that was fetched: its coordinator is gone."""
        for fetch_id in list(self._fetches):
            self._drop(fetch_id)

    def count(self, stats: wire.StageStats) -> None:
        """Add counters of blocks."""
        if self.is_open:
            stats.blocks.CopyFrom(self.stats())

    def fetch(self, message: wire.Fetch, on_fetched: Callable[[wire.Fetched], None]) -> None:
        """Read blocks into memory, for `take`; without names, drop those of an earlier call.

        Args:
            message: Id and names.
            on_fetched: Called with the number of positions that are there.
        """
        if not message.names:
            self._drop(message.id)
            if not self.is_open:
                on_fetched(wire.Fetched(id=message.id))
            return
        left_bytes = self._most_prefix_bytes() - sum(fetch.num_bytes for fetch in self._fetches.values())
        blocks: list[tuple[bytes, StoredBlock]] = []
        for name in message.names:
            stored = self._blocks.get(name)
            if stored is None or stored.num_bytes > left_bytes:
                break
            left_bytes -= stored.num_bytes
            blocks.append((name, stored))
        if not blocks or message.id in self._fetches:
            on_fetched(wire.Fetched(id=message.id))
            return
        fetch = _Fetch(sum(stored.num_bytes for _name, stored in blocks))
        self._fetches[message.id] = fetch
        _track(self._reads, self._read_ahead(message.id, fetch, blocks, on_fetched))

    def take(self, id: int, num_positions: int) -> FetchedPrefix | None:
        """A fetched prefix, for the session that begins with it; None if it is not there any more.

        Args:
            id: Id of the fetch.
            num_positions: Positions with which the session begins.
        """
        fetch = self._fetches.get(id)
        self._drop(id)
        if fetch is None or fetch.prefix is None:
            return None
        self._stats.num_restored += 1
        self._stats.num_restored_positions += num_positions
        return fetch.prefix

    async def stop(self) -> None:
        """Finish what is being written, within a moment, and end."""
        self._is_stopped = True
        if self.opening is not None:
            self.opening.cancel()
            await asyncio.wait([self.opening])
        self.closed_all()
        if self._writes:
            await asyncio.wait(self._writes, timeout=_CLOSE_S)
        for task in (*self._writes, *self._reads):
            task.cancel()
        await asyncio.gather(*self._writes, *self._reads, return_exceptions=True)
        self._shut_down()

    async def _open_later(self, open_store: Callable[[], Awaitable[BlockStore]]) -> None:
        try:
            await self.open(await open_store())
        except (MeshError, OSError) as error:
            # Without it prompts are computed.
            log.warning("disk_not_opened", stage=self._stage.place.stage_index, reason=str(error))

    def _shut_down(self) -> None:
        for executor in (self._writer, self._reader):
            if executor is not None:
                executor.shutdown(wait=False, cancel_futures=True)

    def _copy_of(self, slot: int, order: wire.Keep, state_positions: Sequence[int]) -> SlotCopy | None:
        """In the computing thread: copy the rows that are to be kept."""
        return copy_of(
            self._stage.slots,
            slot,
            order.num_positions,
            tokens_sha256=order.tokens_sha256,
            state_positions=state_positions,
            # Found out now: copies before this one may have taken the memory.
            most_bytes=self._most_prefix_bytes(),
        )

    def _most_prefix_bytes(self) -> int:
        return min(_MOST_PREFIX_BYTES, int(self._free_memory_bytes() * _SHARE_OF_FREE_MEMORY))

    async def _in(self, executor: Executor | None, work: Callable[[], Result]) -> Result:
        return await self._loop.run_in_executor(executor, work)

    async def _write_behind(
        self, copying: asyncio.Future[SlotCopy | None], places: Sequence[BlockPlace]
    ) -> None:
        added: list[bytes] = []
        num_bytes = 0
        try:
            copied = await copying
            if copied is None:
                return
            self._rest_s = _SHORTEST_REST_S
            num_bytes = copied.num_bytes
            self._num_waiting_bytes += num_bytes
            blocks, used_ns = copied.blocks(places), self._clock_ns()
            while (written := await self._in(self._writer, lambda: self._write(blocks, used_ns))) is not None:
                name, stored = written
                if stored is not None:
                    self._num_bytes += stored.num_bytes
                    self._blocks[name] = stored
                    added.append(name)
        except MeshError as error:
            log.warning("rows_not_copied", reason=error.message)
            self._rests_until_s = self._loop.time() + self._rest_s
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
        except Exception:
            # Whatever fails here, no session does.
            log.exception("blocks_not_written")
        finally:
            self._num_waiting_bytes -= num_bytes
            self._coming.difference_update(place.name for place in places)
            self._stats.num_written += len(added)
            self._stats.num_left_out += len(places) - len(added)
            self._tell(added)

    def _write(
        self, blocks: Iterator[tuple[BlockPlace, RowsBlock]], used_ns: int
    ) -> tuple[bytes, StoredBlock | None] | None:
        """In the writing thread: write the next block; None after the last."""
        place, block = next(blocks, (None, None))
        if place is None or block is None:
            return None
        stored = self._store.write(place.name, block, used_ns - place.start, on_removed=self._gone.put)
        return place.name, stored

    async def _read_ahead(
        self,
        id: int,
        fetch: _Fetch,
        blocks: Sequence[tuple[bytes, StoredBlock]],
        on_fetched: Callable[[wire.Fetched], None],
    ) -> None:
        try:
            read = functools.partial(self._read, fetch, blocks, self._clock_ns())
            fetch.prefix = await self._in(self._reader, read)
        except Exception:
            # Whatever fails here, no session does.
            log.exception("blocks_not_read")
        self._tell(())
        if fetch.prefix is None or fetch.is_dropped:
            # The next coordinator may have given the id to another one.
            if self._fetches.get(id) is fetch:
                self._drop(id)
            on_fetched(wire.Fetched(id=id))
            return
        fetch.expiry = self._loop.call_later(_FETCHED_KEPT_S, self._drop, id)
        on_fetched(wire.Fetched(id=id, num_positions=len(fetch.prefix.tokens)))

    def _read(
        self, fetch: _Fetch, blocks: Sequence[tuple[bytes, StoredBlock]], used_ns: int
    ) -> FetchedPrefix | None:
        """In the reading thread: the prefix up to the first block that is gone or damaged."""
        reader = PrefixReader()
        used: list[tuple[bytes, StoredBlock, int]] = []
        for name, stored in blocks:
            if fetch.is_dropped:
                return None
            start = reader.num_positions
            try:
                block = self._store.read(name, stored)
                if block is None:
                    self._gone.put(name)
                    break
                reader.add(block)
            except DamagedBlock as error:
                log.warning("block_not_used", reason=str(error))
                self._store.remove(name, stored)
                self._damaged.put(name)
                break
            used.append((name, stored, start))
        for name, stored, start in used:
            self._store.use(name, stored, used_ns - start)
        try:
            return reader.prefix()
        except DamagedBlock as error:
            log.warning("blocks_do_not_fit", reason=str(error))
            return None

    def _tell(self, added: Sequence[bytes]) -> None:
        """Tell what was added, and what the threads found to be gone."""
        removed = []
        for found, is_damaged in ((self._damaged, True), (self._gone, False)):
            while not found.empty():
                name = found.get()
                if (stored := self._blocks.pop(name, None)) is not None:
                    self._num_bytes -= stored.num_bytes
                    self._stats.num_damaged += is_damaged
                    removed.append(name)
        added = [name for name in added if name in self._blocks]
        if added or removed:
            news = self._added(added)
            news.removed.extend(removed)
            self._tell_news(news)

    def _tell_news(self, news: wire.BlockNews) -> None:
        self._stage.tell(wire.ControlReply(block_news=news))

    def _added(self, names: Sequence[bytes], rows_identity: bytes = b"") -> wire.BlockNews:
        positions = [self._blocks[name].state_positions for name in names]
        return wire.BlockNews(
            rows_identity=rows_identity, added=names, state_positions=positions if any(positions) else ()
        )

    def _drop(self, id: int) -> None:
        fetch = self._fetches.pop(id, None)
        if fetch is not None:
            fetch.is_dropped = True
            if fetch.expiry is not None:
                fetch.expiry.cancel()


def _track(tasks: set[asyncio.Task[None]], work: Coroutine[None, None, None]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
