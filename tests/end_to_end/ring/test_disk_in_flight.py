"""Sessions that begin with what stages kept on disk, through real servers around a fake model: one text.

The fake model hashes every cell that a row can see: one stale or missing position changes all that follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.cli.status import kv_disk_text
from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import GenerationRequest
from mesh.metrics.prometheus import Sheet, add_kv_disk
from speculative.controller import ControllerOptions
from stages.serving.block_store import BlockStore
from tests.support.disks import block_files, damage, disk_of, give_disk
from tests.support.fake_stage import FakeRuntime, fake_ring, plain_answer
from tests.support.proposers import Parrot
from tests.support.repairable_ring import RepairableRing
from tests.support.repairable_ring import serving as repaired
from tests.support.ring_harness import (
    RunningStage,
    collect,
    disk_prefixes,
    plugs_for,
    running_coordinator,
    running_services,
)
from tests.support.searches import search
from tests.support.status_parts import kv_disk_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from mesh.coordinator.coordinator import Coordinator

SIZE: Final = 8
N_VOCAB: Final = 64
NUM_STAGES: Final = 3
PROMPT: Final = tuple(range(3, 43))
ANN: Final = GenerationRequest(PROMPT, 12, client="ann")
OTHERS: Final = [GenerationRequest((50 + number, *PROMPT[1:]), 4, client="bob") for number in range(4)]
ROOT: Final = Path(__file__).parents[3]
OPTIONS: Final = CoordinatorOptions(128, 4, FakeRuntime.max_rows, N_VOCAB)


def alone(request: GenerationRequest) -> list[int]:
    """The answer of a model that never heard anybody else."""
    return plain_answer(request.prompt, request.max_tokens, lambda logits, _position: int(logits.argmax()))


def next_turn(request: GenerationRequest, *more: int) -> GenerationRequest:
    return GenerationRequest((*request.prompt, *alone(request), *(more or (5, 6))), 12, client=request.client)


def whole_blocks(num_positions: int) -> int:
    return num_positions // SIZE * SIZE


# The token that was drawn last is computed by nobody.
KEPT: Final = whole_blocks(len(PROMPT) + ANN.max_tokens - 1)


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.001)


async def known(coordinator: Coordinator, num_blocks: int) -> None:
    """The coordinator knows of so many blocks at every stage."""
    await until(lambda: all(len(stage.names) == num_blocks for stage in disk_prefixes(coordinator)._stages))


@contextlib.asynccontextmanager
async def mesh(
    root: Path | None, runtimes: Sequence[FakeRuntime] | None = None
) -> AsyncIterator[tuple[Coordinator, list[RunningStage]]]:
    """A mesh from its start to its end; its stages know nothing but what is on disk."""
    async with (
        running_services(runtimes or fake_ring(is_poisoned=True), disk_root=root) as stages,
        running_coordinator(
            stages,
            context_length=128,
            num_slots=4,
            make_proposer=Parrot,
            controller=ControllerOptions(fixed_width=3, fixed_depth=3),
            max_rows=FakeRuntime.max_rows,
            n_vocab=N_VOCAB,
            block_positions=SIZE,
        ) as coordinator,
    ):
        if root is not None:
            await until(lambda: disk_prefixes(coordinator).is_on)
        yield coordinator, stages


async def ask(coordinator: Coordinator, request: GenerationRequest) -> int:
    """Ask, compare the text, and return the number of cached tokens."""
    tokens, last = await collect(coordinator, request)
    assert tokens == alone(request)
    return last.stats.num_cached


async def remember(root: Path) -> None:
    """A mesh that answers `ANN`, and is stopped when all is on disk."""
    async with mesh(root) as (coordinator, _stages):
        await ask(coordinator, ANN)
        await known(coordinator, KEPT // SIZE)


async def test_a_chat_goes_on_after_all_processes_have_ended(tmp_path: Path) -> None:
    await remember(tmp_path)
    assert len(block_files([tmp_path])) == NUM_STAGES * KEPT // SIZE
    runtimes = fake_ring(is_poisoned=True)
    rows = [0] * NUM_STAGES
    for index, runtime in enumerate(runtimes):

        def count(spans: Sequence[Any], index: int = index) -> None:
            rows[index] += sum(len(span.tokens) for span in spans)

        runtime.on_decode = count
    turn = next_turn(ANN)
    async with mesh(tmp_path, runtimes) as (coordinator, _stages):
        first = GenerationRequest(turn.prompt, 1, client="ann")
        assert await ask(coordinator, first) == KEPT
        assert rows == [len(turn.prompt) - KEPT] * NUM_STAGES
        assert await ask(coordinator, turn) > KEPT, "from the slot"
        disk = kv_disk_of(coordinator)
        assert (disk.fetched, disk.fetched_tokens, disk.failed) == (1, KEPT, 0)


async def test_what_a_slot_lost_comes_back_from_disk(tmp_path: Path) -> None:
    async with mesh(tmp_path) as (coordinator, _stages):
        assert await ask(coordinator, ANN) == 0
        for other in OTHERS:
            assert await ask(coordinator, other) == 0
        num_others = sum((len(other.prompt) + other.max_tokens - 1) // SIZE for other in OTHERS)
        await known(coordinator, KEPT // SIZE + num_others)
        assert await ask(coordinator, next_turn(ANN)) == KEPT


@pytest.mark.parametrize("lost", [None, 0, 1, 2])
async def test_what_a_repair_or_a_move_forgot_comes_back_from_disk(lost: int | None, tmp_path: Path) -> None:
    ring = RepairableRing(disk_root=tmp_path)
    async with (
        repaired(ring, OPTIONS, plugs=plugs_for(block_positions=SIZE)) as coordinator,
        asyncio.timeout(60),
    ):
        await until(lambda: disk_prefixes(coordinator).is_on)
        await ask(coordinator, ANN)
        await known(coordinator, KEPT // SIZE)
        if lost is None:
            coordinator.pause("stages move")
            await ring.repair()
        else:
            await ring.kill(lost)
            await until(lambda: ring.num_repairs and coordinator.is_ready)
        await until(lambda: disk_prefixes(coordinator).is_on)
        await known(coordinator, KEPT // SIZE)
        assert await ask(coordinator, next_turn(ANN)) == KEPT


async def test_rows_that_came_along_from_another_ring_are_never_kept(tmp_path: Path) -> None:
    """Nor what is computed from them in later turns: on disk they would pass for rows of this ring."""
    ring = RepairableRing(disk_root=tmp_path)
    async with (
        repaired(ring, OPTIONS, plugs=plugs_for(block_positions=SIZE)) as coordinator,
        asyncio.timeout(60),
    ):
        await until(lambda: disk_prefixes(coordinator).is_on)
        parts = coordinator.generate(ANN)
        tokens = list((await anext(parts)).tokens)
        coordinator.pause("stages move")
        await ring.repair()
        await until(lambda: disk_prefixes(coordinator).is_on)
        tokens += [token async for part in parts for token in part.tokens]
        assert tokens == alone(ANN)
        turn = ANN
        for more in (5, 6):
            num_before = len(turn.prompt) + turn.max_tokens - 1
            turn = next_turn(turn, more)
            assert await ask(coordinator, turn) == num_before, "from the slot"
        branch = GenerationRequest((*PROMPT[:24], *range(43, 60)), 4, client="ann")
        assert await ask(coordinator, branch) == 24, "copied"
        # What was computed in this ring from its first token on is kept.
        await ask(coordinator, OTHERS[0])
        num_blocks = (len(PROMPT) + OTHERS[0].max_tokens - 1) // SIZE
        await until(
            lambda: all(len(stage.names) >= num_blocks for stage in disk_prefixes(coordinator)._stages)
        )
        assert len(block_files([tmp_path])) == NUM_STAGES * num_blocks


async def test_what_had_to_be_computed_anew_in_the_same_ring_is_kept(tmp_path: Path) -> None:
    async with mesh(tmp_path) as (coordinator, stages):
        await ask(coordinator, ANN)
        await known(coordinator, KEPT // SIZE)
        engine = stages[1].service._engine
        await engine.in_worker(lambda: engine.slots.trim(0, 20))
        turn = next_turn(ANN)
        tokens, last = await collect(coordinator, turn)
        assert tokens == alone(turn)
        assert last.stats.num_replays == 1
        await known(coordinator, (len(turn.prompt) + turn.max_tokens - 1) // SIZE)


async def test_a_key_finds_its_own_prefixes_only_and_may_decline(tmp_path: Path) -> None:
    await remember(tmp_path)
    for client, uses_cache, num_cached in (
        ("bob", True, 0),
        (None, True, 0),
        ("ann", False, 0),
        ("ann", True, whole_blocks(len(PROMPT) - 1)),
    ):
        request = GenerationRequest(PROMPT, 1, client=client, uses_cache=uses_cache)
        async with mesh(tmp_path) as (coordinator, _stages):
            assert await ask(coordinator, request) == num_cached


async def test_who_declines_the_cache_leaves_nothing_there(tmp_path: Path) -> None:
    async with mesh(tmp_path) as (coordinator, _stages):
        await ask(coordinator, GenerationRequest(PROMPT, 12, uses_cache=False))
        await ask(coordinator, GenerationRequest(PROMPT[:SIZE], 2, client="ann"))
    assert block_files([tmp_path]) == [], "too short is not kept either"


@pytest.mark.parametrize(
    ("how", "which"), [("flip", 0), ("flip", 3), ("cut", 7), ("grow", 10), ("swap", 14), ("remove", 17)]
)
async def test_a_damaged_block_is_computed(how: str, which: int, tmp_path: Path) -> None:
    """Which of a stage's blocks it is that ends the prefix is found by trying."""
    await remember(tmp_path)
    files = block_files([tmp_path])
    damage(files[which], how, 211)
    async with mesh(tmp_path) as (coordinator, stages):
        num_cached = await ask(coordinator, next_turn(ANN))
        assert num_cached < KEPT
        assert not num_cached % SIZE
        stats = [stage.service.stats().blocks for stage in stages]
        assert sum(each.num_damaged for each in stats) == (how != "remove")
        # What was computed anew is kept again.
        turn = next_turn(ANN)
        await known(coordinator, (len(turn.prompt) + turn.max_tokens - 1) // SIZE)
    async with mesh(tmp_path) as (coordinator, _stages):
        assert await ask(coordinator, next_turn(ANN)) == whole_blocks(len(next_turn(ANN).prompt) - 1)


async def test_what_does_not_fit_a_stage_s_memory_is_fetched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await remember(tmp_path)
    num_bytes = max(path.stat().st_size for path in block_files([tmp_path]))
    monkeypatch.setattr("stages.serving.kv_disk._MOST_PREFIX_BYTES", 3 * num_bytes)
    request = GenerationRequest(next_turn(ANN).prompt, 1, client="ann")
    async with mesh(tmp_path) as (coordinator, stages):
        asked: list[int] = []
        disk = disk_of(stages[0].service)
        fetch = disk.fetch

        def count(message: Any, on_fetched: Callable[[Any], None]) -> None:
            asked.append(len(message.names))
            fetch(message, on_fetched)

        disk.fetch = count  # type: ignore[method-assign]
        for _ in range(2):
            assert await ask(coordinator, request) == 3 * SIZE
            # Its slot goes to others.
            for other in OTHERS:
                await ask(coordinator, GenerationRequest(other.prompt, 4, uses_cache=False))
        assert asked == [KEPT // SIZE, 3]


async def test_what_one_stage_lacks_none_uses(tmp_path: Path) -> None:
    await remember(tmp_path)
    (folder, *_others) = sorted({path.parent for path in block_files([tmp_path])})
    for path in block_files([tmp_path]):
        if path.parent == folder:
            path.unlink()
    async with mesh(tmp_path) as (coordinator, _stages):
        assert await ask(coordinator, next_turn(ANN)) == 0
        assert kv_disk_of(coordinator).failed == 0, "it is known without asking"


@pytest.mark.parametrize("stage", range(NUM_STAGES))
async def test_rows_that_are_gone_when_the_session_begins_cost_time_only(stage: int, tmp_path: Path) -> None:
    await remember(tmp_path)
    async with mesh(tmp_path) as (coordinator, stages):
        disk = disk_of(stages[stage].service)
        disk.take = lambda id, num_positions: None  # type: ignore[method-assign]  # noqa: A006
        tokens, last = await collect(coordinator, next_turn(ANN))
        assert tokens == alone(next_turn(ANN))
        assert last.stats.num_replays == 1
        assert coordinator.status().prefix_mismatches == 1


async def test_a_client_that_hangs_up_while_disks_read_leaves_nothing_behind(tmp_path: Path) -> None:
    await remember(tmp_path)
    async with mesh(tmp_path) as (coordinator, stages):
        disk_of(stages[2].service).fetch = lambda message, on_fetched: None  # type: ignore[method-assign]
        asking = asyncio.create_task(collect(coordinator, next_turn(ANN)))
        disks = [disk_of(stage.service) for stage in stages[:2]]
        await until(lambda: all(disk._fetches for disk in disks))
        asking.cancel()
        await asyncio.wait({asking})
        await until(lambda: not any(disk._fetches for disk in disks))
        assert not coordinator.num_requests
        assert await ask(coordinator, OTHERS[0]) == 0


async def test_a_ring_that_breaks_while_disks_read_is_no_error(tmp_path: Path) -> None:
    await remember(tmp_path)
    ring = RepairableRing(disk_root=tmp_path)
    async with (
        repaired(ring, OPTIONS, plugs=plugs_for(block_positions=SIZE)) as coordinator,
        asyncio.timeout(60),
    ):
        await until(lambda: disk_prefixes(coordinator).is_on)
        disk = disk_of(ring.running[1].service)
        disk.fetch = lambda message, on_fetched: None  # type: ignore[method-assign]
        asking = asyncio.create_task(collect(coordinator, next_turn(ANN)))
        await until(lambda: disk_prefixes(coordinator)._pending)
        await ring.kill(1)
        tokens, last = await asking
        assert tokens == alone(next_turn(ANN))
        assert last.stats.num_cached == 0


def recording(sent: list[Any], put: Callable[[Any], None]) -> Callable[[Any], None]:
    def put_and_record(message: Any) -> None:
        sent.append(message)
        put(message)

    return put_and_record


async def test_without_disks_nothing_is_said_of_them() -> None:
    async with mesh(None) as (coordinator, stages):
        sent: list[Any] = []
        for control in coordinator._ring._controls:
            control._requests.put_nowait = recording(sent, control._requests.put_nowait)  # type: ignore[assignment,method-assign]
        await ask(coordinator, ANN)
        await ask(coordinator, next_turn(ANN))
        kinds = {message.WhichOneof("kind") for message in sent}
        assert "close" in kinds
        assert not kinds & {"fetch"}
        assert not any(message.close.HasField("keep") for message in sent)
        assert coordinator.status().kv_disk is None
        assert not any(stage.service.stats().HasField("blocks") for stage in stages)


async def test_one_stage_without_a_disk_switches_all_off(tmp_path: Path) -> None:
    async with mesh(None) as (coordinator, stages):
        await give_disk(stages[0].service, tmp_path, 0)
        await until(lambda: coordinator.status().kv_disk is not None)
        assert await ask(coordinator, ANN) == 0
        assert not kv_disk_of(coordinator).on
        for index in (1, 2):
            await give_disk(stages[index].service, tmp_path, index)
        await until(lambda: disk_prefixes(coordinator).is_on)
        await ask(coordinator, next_turn(ANN))
        await until(lambda: block_files([tmp_path]))


async def test_the_figures_reach_status_and_metrics(tmp_path: Path) -> None:
    await remember(tmp_path)
    damage(block_files([tmp_path])[0], "flip", 300)
    async with mesh(tmp_path) as (coordinator, _stages):
        await ask(coordinator, next_turn(ANN))
        # Asked again, since the status has what came last.
        await coordinator.stage_stats()
        disk = kv_disk_of(coordinator)
        assert disk.on
        assert sum(stage.damaged for stage in disk.stages if stage is not None) == 1
        text = kv_disk_text(disk)
        assert "1 files damaged" in text
        assert re.match(r"\d+ files, [0-9.]+ .*B; \d+ tokens of \d requests restored", text)
        sheet = Sheet("m")
        add_kv_disk(sheet, disk)
        found = {sample.name for family in sheet.collect() for sample in family.samples}
    documents = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    documented = set(re.findall(r"\bmesh_kv_disk_[a-z_]+\b", documents))
    assert documented
    assert documented <= found


TALKS: Final = st.lists(
    st.tuples(
        st.integers(0, 5),  # which text it goes on from
        st.integers(0, 90),  # how much of it
        st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=9),
        st.sampled_from(["ann", "ann", "bob"]),
        st.sampled_from(["ask", "ask", "ask", "restart", "damage"]),
    ),
    min_size=3,
    max_size=9,
)


@search(few=3, many=60)
@given(talk=TALKS, at=st.integers(0, 10_000), how=st.sampled_from(["flip", "cut", "grow", "swap", "remove"]))
def test_one_text_whatever_is_on_disk(talk: list[Any], at: int, how: str) -> None:
    """Chats of two keys, restarts and damages in any order; nobody begins with what another key said."""

    async def run(root: Path) -> None:
        texts: list[tuple[int, ...]] = [PROMPT]
        said: dict[str, list[tuple[int, ...]]] = {"ann": [], "bob": []}
        pending = list(talk)
        while pending:
            async with mesh(root) as (coordinator, _stages):
                while pending:
                    earlier, num_shared, more, client, what = pending.pop(0)
                    if what == "restart":
                        break
                    if what == "damage":
                        if files := block_files([root]):
                            damage(files[at % len(files)], how, at)
                        continue
                    prompt = (*texts[earlier % len(texts)][:num_shared], *more)
                    request = GenerationRequest(prompt, 12, client=client)
                    num_cached = await ask(coordinator, request)
                    assert num_cached <= max((num_common(prompt, text) for text in said[client]), default=0)
                    texts.append((*prompt, *alone(request)))
                    said[client].append(texts[-1])

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


async def test_what_a_stage_is_behind_with_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing never holds up a session: what does not fit the queue is not kept."""
    monkeypatch.setattr("stages.serving.kv_disk._MOST_WAITING", 1)
    write, goes_on = BlockStore.write, threading.Event()

    def held(store: BlockStore, *arguments: Any, **options: Any) -> Any:
        goes_on.wait(60)
        return write(store, *arguments, **options)

    monkeypatch.setattr(BlockStore, "write", held)
    async with mesh(tmp_path) as (coordinator, stages):
        for request in (ANN, *OTHERS):
            await ask(coordinator, request)
        await until(lambda: all(stage.service.stats().blocks.num_left_out for stage in stages))
        goes_on.set()
        await known(coordinator, KEPT // SIZE)
