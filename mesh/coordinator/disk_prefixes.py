"""Prefixes on the stages' disks: names of blocks, fetches ahead of sessions, and the plug.

Names are chained digests, as in vLLM's prefix cache (Kwon et al. 2023). A name stands for the API key, for
what the rows of all stages depend on, and for all tokens up to the end of the block. Another key, model or
mode has other names, so no block of one is found by another.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog

from mesh.coordinator.plugs import Plug, RingPlug
from mesh.coordinator.prefix_cache import PrefixMatch
from mesh.status import BlocksStatus, KvDiskStatus
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.image_chunk import begin_of_chunk
from speculative.cost_model import moved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mesh.coordinator.plugs import NewRing
    from mesh.engine import GenerationRequest
    from mesh.status import MeshStatus
    from spanmesh_proto.image_chunk import ImageChunk

BLOCK_POSITIONS: Final = 256
"""Positions of a block: few, so that little of a prompt is left over; many, so that files have some size."""
# Raised when a name stands for something else.
_VERSION: Final = b"spanmesh blocks 1"
_EXACT_WIRE: Final = "f32"
# Of shorter texts nothing is kept.
_LEAST_BLOCKS: Final = 2
_FETCH_TIMEOUT_S: Final = 10.0
# After a fetch that timed out, disks are left alone for a while; and a block that a stage told but did not
# bring, most likely for want of memory.
_REST_MS: Final = 60_000.0
# Times of fewer positions say little of more.
_LEAST_MEASURED: Final = 128
# Of fetches that do not seem to pay, one in so many is made.
_TRIED_EVERY: Final = 8
log = structlog.get_logger()


class BlockNames:
    """Names for one sequence of tokens, computed as far as they are asked for.

    Args:
        root: See `names_root`.
        tokens: The tokens.
        block_positions: Positions of a block.
    """

    def __init__(self, root: bytes, tokens: Sequence[int], block_positions: int) -> None:
        self._tokens = tokens
        self._block_positions = block_positions
        # The first is that of no block.
        self._names = [root]

    @property
    def num_blocks(self) -> int:
        """Number of whole blocks."""
        return len(self._tokens) // self._block_positions

    def block(self, index: int) -> bytes:
        """Name of a whole block, 32 bytes."""
        size = self._block_positions
        while len(self._names) <= index + 1:
            start = (len(self._names) - 1) * size
            self._names.append(self._name(b"rows", self._names[-1], start, start + size))
        return self._names[index + 1]

    def start_of_state(self, stop: int) -> int:
        """First position of the block that ends at `stop` with a recurrent state."""
        return (stop - 1) // self._block_positions * self._block_positions

    def state(self, stop: int) -> bytes:
        """Name of the block that ends at `stop` with a recurrent state, 32 bytes."""
        start = self.start_of_state(stop)
        parent = self.block(start // self._block_positions - 1) if start else self._names[0]
        return self._name(b"state", parent, start, stop)

    def _name(self, kind: bytes, parent: bytes, start: int, stop: int) -> bytes:
        tokens = np.asarray(self._tokens[start:stop], "<i8").tobytes()
        return hashlib.sha256(kind + parent + tokens).digest()


@dataclass(frozen=True)
class DiskMatch:
    """First positions of a prompt that every stage has on disk."""

    names: tuple[bytes, ...]
    """Names of their blocks, in order."""
    num_positions: int
    """Number of the positions."""


class FetchPace:
    """Judgement whether a fetch is quicker than computing, from earlier ones of both.

    Args:
        weight: Weight of each new time in the moving means.
    """

    def __init__(self, weight: float = 1 / 4) -> None:
        self._weight = weight
        self._fetch_ms: float | None = None
        self._compute_ms: float | None = None
        self._num_refused = 0

    def learn_fetch(self, num_positions: int, elapsed_ms: float) -> None:
        """Record a fetch."""
        self._fetch_ms = moved(self._fetch_ms, elapsed_ms / num_positions, self._weight)

    def learn_compute(self, num_positions: int, elapsed_ms: float) -> None:
        """Record the computation of a prompt's positions."""
        self._compute_ms = moved(self._compute_ms, elapsed_ms / num_positions, self._weight)

    def pays(self, num_fetched: int, num_spared: int) -> bool:
        """Whether to fetch.

        Args:
            num_fetched: Positions to be fetched.
            num_spared: Positions that need not be computed then.
        """
        if self._fetch_ms is None or self._compute_ms is None:
            return True
        if self._fetch_ms * num_fetched < self._compute_ms * num_spared:
            self._num_refused = 0
            return True
        self._num_refused += 1
        # A disk that was slow may be quick again.
        return self._num_refused % _TRIED_EVERY == 0


@dataclass
class _StageBlocks:
    """Blocks of one stage."""

    identity: bytes = b""
    """Digest of what its rows depend on; empty until it has told its blocks."""
    names: set[bytes] = field(default_factory=set)
    """Names of all."""
    states: dict[bytes, int] = field(default_factory=dict)
    """Numbers of positions up to the state, of those that have one, by name."""

    def take(self, news: wire.BlockNews) -> None:
        if news.rows_identity:
            # The first of a stream: all that it has.
            self.identity = news.rows_identity
            self.names.clear()
            self.states.clear()
        for index, name in enumerate(news.added):
            self.names.add(name)
            if index < len(news.state_positions) and (positions := news.state_positions[index]):
                self.states[name] = positions
        for name in news.removed:
            self.names.discard(name)
            self.states.pop(name, None)


@dataclass
class _PendingFetch:
    """Answers of the stages to a fetch."""

    positions: dict[int, int]
    """Positions that each stage has read, as far as they have answered."""
    least: asyncio.Future[int]
    """The least of all, once it is known."""


@dataclass
class DiskHistory:
    """Times and counts of a coordinator's fetches, over all its rings."""

    fetch_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Ids for fetches."""
    pace: FetchPace = field(default_factory=FetchPace)
    """Judgement of what pays."""
    num_fetched: int = 0
    """Sessions that began with positions from disk."""
    num_fetched_positions: int = 0
    """Those positions."""
    num_failed: int = 0
    """Fetches that brought nothing, although the stages had told the blocks."""
    wires: set[str] = field(default_factory=set)
    """Formats of hidden states between stages of all rings."""

    def computed(self, num_positions: int, elapsed_ms: float) -> None:
        """Record how long the computation of a prompt's positions took, if they are many."""
        if num_positions >= _LEAST_MEASURED:
            self.pace.learn_compute(num_positions, elapsed_ms)


class DiskPrefixes(RingPlug):
    """Blocks on the disks of one ring's stages.

    It is off until every stage has told its blocks: without that no message is sent, and a request costs one
    comparison.

    Args:
        wires: Formats of hidden states between the stages: one less than there are stages.
        history: What earlier rings have taught.
        send: Sends a fetch to every stage.
        clock_ms: Monotonic clock, milliseconds.
        can_trim: Whether slots can begin with any of a prefix's positions; if not, prefixes end where a state
            is: of recurrent layers, or rows in sliding windows.
        block_positions: Positions of a block.
        is_first_ring: Whether the stages' slots hold nothing of another ring. Sessions take rows along into
            the next ring. If hidden states are rounded on its way, or were, these rows may be others than the
            ones that its stages would compute: then nothing is kept or used.
    """

    def __init__(
        self,
        wires: Sequence[str],
        history: DiskHistory,
        *,
        send: Callable[[wire.Fetch], None],
        clock_ms: Callable[[], float],
        can_trim: bool = True,
        block_positions: int = BLOCK_POSITIONS,
        is_first_ring: bool = True,
    ) -> None:
        self._wires = tuple(wires)
        self._is_allowed = is_first_ring or all(each == _EXACT_WIRE for each in (*wires, *history.wires))
        history.wires.update(wires)
        self._history = history
        self._send = send
        self._clock_ms = clock_ms
        self._can_trim = can_trim
        self._block_positions = block_positions
        self._stages = [_StageBlocks() for _ in range(len(wires) + 1)]
        self._pending: dict[int, _PendingFetch] = {}
        # Blocks that are not asked for again before these times.
        self._resting: dict[bytes, float] = {}
        self._rests_until_ms = -1.0
        self._is_closed = False

    @property
    def is_on(self) -> bool:
        """Whether every stage keeps blocks, and they are used."""
        return self._is_allowed and all(stage.identity for stage in self._stages)

    def replied(self, stage: int, reply: wire.ControlReply) -> None:
        """Take what a stage tells of its blocks, or its answer to a fetch."""
        if reply.HasField("block_news"):
            self._stages[stage].take(reply.block_news)
            for name in reply.block_news.added:
                self._resting.pop(name, None)
        else:
            self._on_fetched(stage, reply.fetched)

    def _on_fetched(self, stage: int, fetched: wire.Fetched) -> None:
        pending = self._pending.get(fetched.id)
        if pending is None or pending.least.done():
            return
        pending.positions[stage] = fetched.num_positions
        if not fetched.num_positions or len(pending.positions) == len(self._stages):
            pending.least.set_result(min(pending.positions.values()))

    def find(
        self,
        prompt: Sequence[int],
        client: str | None,
        num_cached: int,
        *,
        chunks: Sequence[ImageChunk] = (),
    ) -> DiskMatch | None:
        """First positions of a prompt that all stages have on disk; None if they are not worth a fetch.

        Args:
            prompt: Token ids; the last is left to compute.
            client: Client of the request.
            num_cached: Positions that the stages have in memory.
            chunks: See `PrefixCache.match`.
        """
        if not self.is_on or not self._stages[0].names or self._is_closed:
            return None
        if self._clock_ms() < self._rests_until_ms:
            return None
        names = BlockNames(self._root(client), prompt[:-1], self._block_positions)
        num_blocks = 0
        while num_blocks < names.num_blocks and self._can_be_fetched(names.block(num_blocks)):
            num_blocks += 1
        if self._can_trim:
            match: DiskMatch | None = self._whole(names, num_blocks)
        else:
            match = self._to_state(names, num_blocks, len(prompt), chunks)
        num_spared = 0 if match is None else begin_of_chunk(chunks, match.num_positions) - num_cached
        if match is None or num_spared < self._block_positions:
            return None
        return match if self._history.pace.pays(match.num_positions, num_spared) else None

    def _whole(self, names: BlockNames, num_blocks: int) -> DiskMatch:
        blocks = tuple(names.block(index) for index in range(num_blocks))
        return DiskMatch(blocks, num_blocks * self._block_positions)

    def _to_state(
        self, names: BlockNames, num_blocks: int, num_rows: int, chunks: Sequence[ImageChunk]
    ) -> DiskMatch | None:
        """The longest prefix that ends with a state."""
        for stop in sorted(set(self._stages[0].states.values()), reverse=True):
            num_before = names.start_of_state(stop) // self._block_positions
            is_within = stop >= num_rows or begin_of_chunk(chunks, stop) < stop
            if is_within or num_before > num_blocks:
                continue
            if self._can_be_fetched(names.state(stop)):
                blocks = (names.block(index) for index in range(num_before))
                return DiskMatch((*blocks, names.state(stop)), stop)
        return None

    async def fetch(self, match: DiskMatch) -> tuple[int, int]:
        """Have every stage read a prefix into memory.

        Returns:
            Id of the fetch and number of positions that all stages have; zeros if there are none.
        """
        fetch_id, started_ms = next(self._history.fetch_ids), self._clock_ms()
        try:
            num_positions = await self._fetched(fetch_id, match)
        except BaseException:
            self.drop(fetch_id)
            raise
        if num_positions < match.num_positions:
            self._rest(match, num_positions)
        # A recurrent state is of no use at another position.
        if not num_positions or (num_positions < match.num_positions and not self._can_trim):
            self.drop(fetch_id)
            self._history.num_failed += 1
            return 0, 0
        self._history.pace.learn_fetch(num_positions, self._clock_ms() - started_ms)
        return fetch_id, num_positions

    def _rest(self, match: DiskMatch, num_positions: int) -> None:
        """Ask for no block behind those that a fetch has brought for a while: they would be read for nothing.

        Unless other fetches were on their way, which take memory as well, or the disks are left alone anyway.
        """
        now_ms = self._clock_ms()
        if self._pending or now_ms < self._rests_until_ms:
            return
        first_missing = min(num_positions // self._block_positions, len(match.names) - 1)
        self._resting = {name: until_ms for name, until_ms in self._resting.items() if until_ms > now_ms}
        self._resting[match.names[first_missing]] = now_ms + _REST_MS
        log.info("blocks_not_brought", positions=num_positions, wanted=match.num_positions)

    async def _fetched(self, fetch_id: int, match: DiskMatch) -> int:
        least: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pending[fetch_id] = _PendingFetch({}, least)
        try:
            self._send(wire.Fetch(id=fetch_id, names=match.names))
            async with asyncio.timeout(_FETCH_TIMEOUT_S):
                return await least
        except TimeoutError:
            log.warning("disks_too_slow", positions=match.num_positions)
            self._rests_until_ms = self._clock_ms() + _REST_MS
            return 0
        finally:
            del self._pending[fetch_id]

    def drop(self, fetch_id: int) -> None:
        """Give back the memory of a fetch that is not used."""
        if not self._is_closed:
            self._send(wire.Fetch(id=fetch_id))

    def used(self, num_positions: int) -> None:
        """Record that a session begins with positions from disk."""
        self._history.num_fetched += 1
        self._history.num_fetched_positions += num_positions

    def keep(
        self, tokens: Sequence[int], client: str | None, *, return_points: Sequence[int], num_prompt: int
    ) -> wire.Keep | None:
        """Blocks that the stages are to keep of a slot at the end of its session; None for nothing.

        Args:
            tokens: Token ids whose positions every stage holds.
            client: Client of the session.
            return_points: See `Generation.return_points`.
            num_prompt: Tokens of the prompt: the next turn of a chat may go on from its end only.
        """
        size = self._block_positions
        if not self.is_on or len(tokens) < _LEAST_BLOCKS * size:
            return None
        names = BlockNames(self._root(client), tokens, size)
        blocks = [
            wire.Block(name=names.block(index), start=index * size, stop=(index + 1) * size)
            for index in range(names.num_blocks)
        ]
        if not self._can_trim:
            points = [point for point in return_points if size < point <= len(tokens)]
            ends = {max(points, default=0), max((each for each in points if each <= num_prompt), default=0)}
            blocks = [block for block in blocks if block.stop < max(ends)]
            blocks += [
                wire.Block(name=names.state(end), start=names.start_of_state(end), stop=end, has_state=True)
                for end in sorted(ends - {0})
            ]
        missing = [block for block in blocks if not self._is_held(block.name)]
        if not missing:
            return None
        # The stages' copies always end where the last state is.
        missing += [block for block in blocks if block.has_state and block not in missing]
        num_positions = max(block.stop for block in missing)
        ids = np.asarray(tokens[:num_positions], np.int64)
        return wire.Keep(
            num_positions=num_positions,
            tokens_sha256=hashlib.sha256(ids.tobytes()).digest(),
            blocks=missing,
        )

    def suspend(self) -> None:
        """End all fetches: the ring is lost, or left."""
        self._is_closed = True
        for pending in self._pending.values():
            if not pending.least.done():
                pending.least.set_result(0)

    def status(self, stats: Sequence[wire.StageStats | None]) -> KvDiskStatus | None:
        """Counts of the coordinator and of each stage; None if no stage keeps blocks.

        Args:
            stats: Latest counters of each stage.
        """
        if not any(stage.identity for stage in self._stages):
            return None
        return KvDiskStatus(
            on=self.is_on,
            fetched=self._history.num_fetched,
            fetched_tokens=self._history.num_fetched_positions,
            failed=self._history.num_failed,
            stages=tuple(
                None if each is None or not each.HasField("blocks") else _blocks_status(each.blocks)
                for each in stats
            ),
        )

    def _is_held(self, name: bytes) -> bool:
        return all(name in stage.names for stage in self._stages)

    def _can_be_fetched(self, name: bytes) -> bool:
        return self._is_held(name) and self._clock_ms() >= self._resting.get(name, -1.0)

    def _root(self, client: str | None) -> bytes:
        return names_root(client, [stage.identity for stage in self._stages], self._wires)


class DiskPlug(Plug):
    """Prefixes on disks of all rings.

    Args:
        has_windows: Whether some layers attend to a sliding window only. A prefix from disk lacks rows before
            the windows at its end, so its slot cannot go back further.
        block_positions: Positions of a block of KV rows.

    Attributes:
        prefixes: Those of the latest ring; None before the first.
    """

    def __init__(self, *, has_windows: bool = False, block_positions: int = BLOCK_POSITIONS) -> None:
        self.prefixes: DiskPrefixes | None = None
        self._has_windows = has_windows
        self._block_positions = block_positions
        # Whether slots can go back to any earlier position.
        self._can_trim = True
        self._history = DiskHistory()
        self._stats: Callable[[], Sequence[wire.StageStats | None]] = list

    def in_ring(self, new: NewRing) -> DiskPrefixes:
        """Blocks on the disks of a new ring's stages."""
        self._can_trim = new.options.can_trim
        self._stats = lambda: new.ring.latest_stats
        self.prefixes = DiskPrefixes(
            [stage.wire for stage in new.stages[:-1]],
            self._history,
            send=new.ring.fetch,
            clock_ms=new.clock_ms,
            can_trim=self._can_trim and not self._has_windows,
            block_positions=self._block_positions,
            is_first_ring=new.is_first,
        )
        return self.prefixes

    async def lengthened(self, match: PrefixMatch, request: GenerationRequest) -> PrefixMatch | None:
        """The cached prefix, or a longer one that the stages have read from their disks into memory."""
        disk, slot = self.prefixes, match.slot
        found = (
            None
            if disk is None
            else disk.find(request.prompt, request.client, match.num_cached, chunks=request.chunks)
        )
        if disk is None or found is None or self._rounds_otherwise(request, found.num_positions):
            return match
        fetch, num_positions = await disk.fetch(found)
        num_positions = request.begin_of_input(num_positions)
        if num_positions > match.num_cached:
            disk.used(num_positions)
            checkpoints = () if self._can_trim else (num_positions,)
            floor = num_positions if self._has_windows and self._can_trim else 0
            return PrefixMatch(slot, slot, num_positions, checkpoints, fetch, floor)
        if fetch:
            disk.drop(fetch)
        return None

    def _rounds_otherwise(self, request: GenerationRequest, num_positions: int) -> bool:
        """Whether stages refuse to go on from a prefix; see `SlotMemory.computes_alike`."""
        return self._has_windows and any(
            each.chunk.sees_all and each.chunk.first_row >= num_positions for each in request.inputs
        )

    def prefilled(self, num_positions: int, elapsed_ms: float) -> None:
        """Learn what computing costs, beside fetching."""
        self._history.computed(num_positions, elapsed_ms)

    def kept(
        self, request: GenerationRequest, computed: Sequence[int], return_points: Sequence[int]
    ) -> wire.Keep | None:
        """Blocks that the stages are to keep on disk."""
        if self.prefixes is None:
            return None
        return self.prefixes.keep(
            computed,
            request.client,
            # Slots that can be trimmed can be cut off there.
            return_points=(len(computed),) if self._can_trim else return_points,
            num_prompt=len(request.prompt),
        )

    def describe(self, status: MeshStatus) -> None:
        """Add counts of fetches and blocks; none if no stage keeps blocks."""
        status.kv_disk = None if self.prefixes is None else self.prefixes.status(self._stats())


def names_root(client: str | None, identities: Sequence[bytes], wires: Sequence[str]) -> bytes:
    """The digest with which the names of a client's blocks begin, 32 bytes.

    Args:
        client: Identity of the API key; None where the API is open.
        identities: Of each stage, the digest of what its rows depend on besides tokens and other stages.
        wires: Formats of hidden states between the stages, on which rows of later stages depend.
    """
    digest = hashlib.sha256(_VERSION)
    parts = [b"" if client is None else b"key " + client.encode(), *identities]
    for part in (*parts, *(each.encode() for each in wires)):
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()


def _blocks_status(blocks: wire.BlockStats) -> BlocksStatus:
    return BlocksStatus(
        files=blocks.num_files,
        bytes=blocks.num_bytes,
        most_bytes=blocks.most_bytes,
        written=blocks.num_written,
        left_out=blocks.num_left_out,
        damaged=blocks.num_damaged,
        restored=blocks.num_restored,
        restored_tokens=blocks.num_restored_positions,
    )
