"""What a coordinator makes of its stages' disks: what all hold, for whom, and when it is worth a fetch."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator.disk_prefixes import DiskHistory, DiskMatch, DiskPrefixes, FetchPace
from mesh.status import BlocksStatus
from spanmesh_proto import windows_pb2 as wire

SIZE: Final = 4
TEXT: Final = tuple(range(1, 31))
IDENTITIES: Final = [bytes([number]) * 32 for number in (1, 2)]


@dataclass
class Stages:
    """Two stages that remember what they are told, and a clock.

    Attributes:
        disk: What tells them.
    """

    can_trim: bool = True
    sent: list[wire.Fetch] = field(default_factory=list)
    """Fetches."""
    now_ms: float = 0.0
    """The clock."""

    def __post_init__(self) -> None:
        self.history = DiskHistory()
        self.disk = DiskPrefixes(
            ["f32"],
            self.history,
            send=self.sent.append,
            clock_ms=lambda: self.now_ms,
            can_trim=self.can_trim,
            block_positions=SIZE,
        )

    def tell(self, stage: int, *added: bytes, removed: tuple[bytes, ...] = (), **more: object) -> None:
        news = wire.BlockNews(added=added, removed=removed, **more)  # type: ignore[arg-type]
        self.disk.replied(stage, wire.ControlReply(block_news=news))

    def tell_all(self) -> None:
        for stage, identity in enumerate(IDENTITIES):
            self.tell(stage, rows_identity=identity)

    def keep(
        self, tokens: tuple[int, ...] = TEXT, client: str | None = "ann", points: tuple[int, ...] = ()
    ) -> wire.Keep | None:
        return self.disk.keep(tokens, client, return_points=points, num_prompt=10)

    def store(self, tokens: tuple[int, ...] = TEXT, points: tuple[int, ...] = (), *stages: int) -> None:
        """Both stages keep what they are told to, or some."""
        keep = self.keep(tokens, points=points)
        assert keep is not None
        names = [block.name for block in keep.blocks]
        positions = [block.stop if block.has_state else 0 for block in keep.blocks]
        for stage in stages or (0, 1):
            self.tell(stage, *names, state_positions=positions)

    def answer(self, stage: int, num_positions: int) -> None:
        fetched = wire.Fetched(id=self.sent[-1].id, num_positions=num_positions)
        self.disk.replied(stage, wire.ControlReply(fetched=fetched))


def positions(match: DiskMatch | None) -> int:
    return 0 if match is None else match.num_positions


def test_nothing_happens_until_every_stage_has_told_its_blocks() -> None:
    stages = Stages()
    assert stages.keep() is None
    assert stages.disk.status([]) is None
    stages.tell(0, rows_identity=IDENTITIES[0])
    assert not stages.disk.is_on
    assert stages.keep() is None
    assert stages.disk.find(TEXT, "ann", 0) is None
    stages.tell(1, rows_identity=IDENTITIES[1])
    assert stages.disk.is_on
    assert stages.keep() is not None
    assert not stages.sent


def test_what_is_kept_are_whole_blocks_of_the_text() -> None:
    stages = Stages()
    stages.tell_all()
    keep = stages.keep()
    assert keep is not None
    assert [(block.start, block.stop, block.has_state) for block in keep.blocks] == [
        (start, start + SIZE, False) for start in range(0, 28, SIZE)
    ]
    assert keep.num_positions == 28
    assert keep.tokens_sha256 == hashlib.sha256(np.asarray(TEXT[:28], np.int64).tobytes()).digest()
    assert stages.keep(TEXT[:7]) is None, "too short"
    stages.store()
    assert stages.keep() is None, "all stages have it"
    longer = stages.keep((*TEXT, 31, 32))
    assert longer is not None
    assert [block.start for block in longer.blocks] == [28]
    assert stages.keep(client="bob") is not None


@pytest.mark.parametrize(
    ("prompt", "client", "num_cached", "num_found"),
    [
        (TEXT, "ann", 0, 28),
        ((*TEXT, 77, 78), "ann", 0, 28),
        (TEXT[:28], "ann", 0, 24),  # the last token is left to compute
        (TEXT[:29], "ann", 0, 28),
        ((*TEXT[:14], 99, *TEXT[15:]), "ann", 0, 12),
        ((99, *TEXT[1:]), "ann", 0, 0),
        (TEXT, "bob", 0, 0),
        (TEXT, None, 0, 0),
        (TEXT, "ann", 24, 28),
        (TEXT, "ann", 25, 0),  # less than a block more than in memory
        (TEXT[:3], "ann", 0, 0),
    ],
)
def test_what_all_stages_hold_is_found(
    prompt: tuple[int, ...], client: str | None, num_cached: int, num_found: int
) -> None:
    stages = Stages()
    stages.tell_all()
    stages.store()
    assert positions(stages.disk.find(prompt, client, num_cached)) == num_found


@given(gone=st.sets(st.integers(0, 6)), stage=st.integers(0, 1))
def test_a_block_that_one_stage_lacks_ends_the_prefix(gone: set[int], stage: int) -> None:
    stages = Stages()
    stages.tell_all()
    stages.store()
    match = stages.disk.find(TEXT, "ann", 0)
    assert match is not None
    stages.tell(stage, removed=tuple(match.names[index] for index in gone))
    assert positions(stages.disk.find(TEXT, "ann", 0)) == min(gone, default=7) * SIZE
    keep = stages.keep()
    assert {block.start // SIZE for block in keep.blocks} == gone if keep is not None else not gone


def test_a_stage_that_begins_anew_has_what_it_then_tells() -> None:
    stages = Stages()
    stages.tell_all()
    stages.store()
    stages.tell(1, rows_identity=IDENTITIES[1])
    assert stages.disk.find(TEXT, "ann", 0) is None
    stages.store()
    assert positions(stages.disk.find(TEXT, "ann", 0)) == 28
    # Other programs, another processor: rows of both stages are others.
    names = [block.name for block in keep.blocks] if (keep := stages.keep(client="bob")) else []
    stages.tell(1, *names, rows_identity=bytes(32))
    assert stages.disk.find(TEXT, "ann", 0) is None


def test_a_prefix_ends_where_a_recurrent_state_is() -> None:
    stages = Stages(can_trim=False)
    stages.tell_all()
    assert stages.keep(points=()) is None, "no state, no use"
    keep = stages.keep(points=(2, 9, 21, 26))
    assert keep is not None
    found = [(block.start, block.stop, block.has_state) for block in keep.blocks]
    assert found[:6] == [(start, start + SIZE, False) for start in range(0, 24, SIZE)]
    # Behind the answer, and behind the prompt, which had 10 tokens.
    assert found[6:] == [(8, 9, True), (24, 26, True)]
    assert keep.num_positions == 26
    stages.store(TEXT, (2, 9, 21, 26))
    assert stages.keep(points=(2, 9, 21, 26)) is None
    for prompt, num_cached, num_found in (
        (TEXT, 0, 26),
        (TEXT[:27], 0, 26),
        (TEXT[:26], 0, 9),
        ((*TEXT[:20], 99, 98, 97, 96, 95, 94, 93, 92), 0, 9),
        (TEXT[:9], 0, 0),
        (TEXT, 23, 0),
    ):
        assert positions(stages.disk.find(prompt, "ann", num_cached)) == num_found
    match = stages.disk.find(TEXT, "ann", 0)
    assert match is not None
    assert len(match.names) == 7
    stages.tell(0, removed=(match.names[2],))
    assert positions(stages.disk.find(TEXT, "ann", 0)) == 9
    stages.tell(0, removed=(match.names[1],))
    assert stages.disk.find(TEXT, "ann", 0) is None


@pytest.mark.parametrize(
    ("rings", "is_on"),
    [
        (["q8"], True),
        (["f32", "f32"], True),
        (["f32", "f16"], False),
        (["f16", "f32"], False),
        (["f16", "f16"], False),
    ],
)
def test_rows_that_a_session_took_along_over_rounded_links_are_not_kept(
    rings: list[str],
    is_on: bool,  # noqa: FBT001
) -> None:
    history = DiskHistory()
    for number, wire_type in enumerate(rings):
        disk = DiskPrefixes(
            [wire_type],
            history,
            send=lambda _fetch: None,
            clock_ms=lambda: 0.0,
            block_positions=SIZE,
            is_first_ring=not number,
        )
    for stage, identity in enumerate(IDENTITIES):
        disk.replied(stage, wire.ControlReply(block_news=wire.BlockNews(rows_identity=identity)))
    assert disk.is_on is is_on
    assert (disk.keep(TEXT, None, return_points=(), num_prompt=9) is not None) is is_on


async def fetched(stages: Stages, *answers: tuple[int, int]) -> tuple[int, int]:
    match = stages.disk.find(TEXT, "ann", 0)
    assert match is not None
    fetching = asyncio.create_task(stages.disk.fetch(match))
    await asyncio.sleep(0)
    assert list(stages.sent[-1].names) == list(match.names)
    for answer in answers:
        stages.answer(*answer)
    return await fetching


async def test_a_fetch_brings_what_all_stages_could_read() -> None:
    stages = Stages()
    stages.tell_all()
    stages.store()
    assert await fetched(stages, (1, 28), (0, 20)) == (1, 20)
    stages.now_ms += 60_000
    assert await fetched(stages, (0, 28), (1, 28)) == (2, 28)
    assert len(stages.sent) == 2
    assert await fetched(stages, (0, 0)) == (0, 0), "the others need not be waited for"
    assert (stages.sent[-1].id, list(stages.sent[-1].names)) == (3, []), "what they read is given back"
    stages.answer(1, 28)
    assert stages.history.num_failed == 1


async def test_part_of_a_prefix_with_a_recurrent_state_is_of_no_use() -> None:
    stages = Stages(can_trim=False)
    stages.tell_all()
    stages.store(TEXT, (26,))
    assert await fetched(stages, (0, 26), (1, 24)) == (0, 0)
    assert not stages.sent[-1].names
    stages.now_ms += 60_000
    assert await fetched(stages, (0, 26), (1, 26)) == (2, 26)


async def test_a_block_that_a_stage_has_no_room_for_is_not_asked_for_again_at_once() -> None:
    stages = Stages()
    stages.tell_all()
    stages.store()
    assert await fetched(stages, (0, 28), (1, 20)) == (1, 20)
    longer = (*TEXT, 31, 32, 33)
    for prompt in (TEXT, longer):
        assert positions(stages.disk.find(prompt, "ann", 0)) == 20
        assert stages.disk.find(prompt, "ann", 20) is None, "as many are in memory"
    stages.now_ms += 59_999
    assert positions(stages.disk.find(TEXT, "ann", 0)) == 20
    # It is on all disks all the same.
    assert stages.keep() is None
    stages.now_ms += 1
    assert positions(stages.disk.find(TEXT, "ann", 0)) == 28


@pytest.mark.parametrize(
    ("num_brought", "num_found"),
    # Not even the first block, or one before the shorter prefix's end; one behind it; the state alone.
    [(0, 0), (4, 0), (8, 9), (20, 9), (24, 9)],
)
async def test_a_prefix_with_a_state_that_does_not_fit_gives_way_to_a_shorter_one(
    num_brought: int, num_found: int
) -> None:
    stages = Stages(can_trim=False)
    stages.tell_all()
    stages.store(TEXT, (9, 26))
    assert positions(stages.disk.find(TEXT, "ann", 0)) == 26
    assert await fetched(stages, (0, 26), (1, num_brought)) == (0, 0)
    num_sent = len(stages.sent)
    assert positions(stages.disk.find(TEXT, "ann", 0)) == num_found
    assert len(stages.sent) == num_sent
    stages.now_ms += 60_000
    assert positions(stages.disk.find(TEXT, "ann", 0)) == 26


async def test_a_block_that_was_written_anew_is_asked_for_at_once() -> None:
    stages = Stages()
    stages.tell_all()
    stages.store()
    match = stages.disk.find(TEXT, "ann", 0)
    assert match is not None
    assert await fetched(stages, (0, 28), (1, 12)) == (1, 12)
    # It was damaged.
    stages.tell(1, removed=(match.names[3],))
    assert positions(stages.disk.find(TEXT, "ann", 0)) == 12
    stages.tell(1, match.names[3])
    assert positions(stages.disk.find(TEXT, "ann", 0)) == 28


async def test_fetches_beside_one_another_say_nothing_of_what_one_alone_would_bring() -> None:
    """They share the memory that stages have for them."""
    stages = Stages()
    stages.tell_all()
    stages.store()
    match = stages.disk.find(TEXT, "ann", 0)
    assert match is not None
    fetches = [asyncio.create_task(stages.disk.fetch(match)) for _ in range(2)]
    await asyncio.sleep(0)
    for fetch, num_positions in zip(list(stages.sent), (12, 28), strict=True):
        for stage in (0, 1):
            answer = wire.Fetched(id=fetch.id, num_positions=num_positions)
            stages.disk.replied(stage, wire.ControlReply(fetched=answer))
        await asyncio.sleep(0)
    assert [await each for each in fetches] == [(1, 12), (2, 28)]
    assert positions(stages.disk.find(TEXT, "ann", 0)) == 28


async def test_a_request_that_is_given_up_gives_its_memory_back() -> None:
    stages = Stages()
    stages.tell_all()
    stages.store()
    match = stages.disk.find(TEXT, "ann", 0)
    assert match is not None
    fetching = asyncio.create_task(stages.disk.fetch(match))
    await asyncio.sleep(0)
    fetching.cancel()
    await asyncio.wait({fetching})
    assert [len(fetch.names) for fetch in stages.sent] == [7, 0]
    assert not stages.history.num_failed


async def test_a_lost_ring_ends_its_fetches() -> None:
    stages = Stages()
    stages.tell_all()
    stages.store()
    match = stages.disk.find(TEXT, "ann", 0)
    assert match is not None
    fetching = asyncio.create_task(stages.disk.fetch(match))
    await asyncio.sleep(0)
    stages.disk.suspend()
    assert await fetching == (0, 0)
    assert stages.disk.find(TEXT, "ann", 0) is None
    assert len(stages.sent) == 1, "nobody is left to tell"


async def test_a_disk_that_does_not_answer_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.coordinator.disk_prefixes._FETCH_TIMEOUT_S", 0.01)
    stages = Stages()
    stages.tell_all()
    stages.store()
    assert await fetched(stages, (0, 28)) == (0, 0)
    assert stages.disk.find(TEXT, "ann", 0) is None
    stages.now_ms += 60_000
    assert positions(stages.disk.find(TEXT, "ann", 0)) == 28


def test_a_fetch_is_made_where_it_is_quicker_and_tried_again_where_it_was_not() -> None:
    pace = FetchPace()
    assert pace.pays(1000, 1), "nothing is known"
    pace.learn_compute(100, 1000.0)
    assert pace.pays(1000, 1)
    pace.learn_fetch(100, 100.0)
    assert pace.pays(1000, 101)
    assert not pace.pays(1000, 99)
    pace.learn_fetch(100, 100_000.0)
    assert [pace.pays(100, 100) for _ in range(16)].count(True) == 2
    for _ in range(40):
        pace.learn_fetch(100, 1.0)
    assert pace.pays(100, 100)


def test_the_status_tells_what_is_on_each_disk() -> None:
    stages = Stages()
    stages.tell(0, rows_identity=IDENTITIES[0])
    blocks = wire.BlockStats(
        num_files=3, num_bytes=40, most_bytes=100, num_damaged=1, num_restored_positions=9
    )
    status = stages.disk.status([wire.StageStats(blocks=blocks), None])
    assert status is not None
    assert not status.on
    first, second = status.stages
    assert first == BlocksStatus(files=3, bytes=40, most_bytes=100, damaged=1, restored_tokens=9)
    assert second is None
    stages.disk.used(8)
    status = stages.disk.status([None, wire.StageStats()])
    assert status is not None
    assert (status.fetched, status.fetched_tokens) == (1, 8)
    assert status.stages == (None, None)
