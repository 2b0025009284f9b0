"""The disk of a stage: what it keeps, reads and tells; and real rows that come back to the bit."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import InvalidWindow, PrefixMismatch, StageFailed, UncuttableModel
from stages.certification.certify import cut_stage
from stages.graph_boundary import GraphBoundary
from stages.layers import LayerRange
from stages.runtime.loaded_model import StageInfo
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.serving.block_store import BlockStore
from stages.serving.kv_disk import KvDisk
from stages.serving.prefix_blocks import BlockPlace, PrefixReader, copy_of
from stages.serving.rows_identity import RowsSetting, _build, content_sha256, rows_identity
from stages.serving.slots import KvSlots
from tests.support.disks import InlineExecutor, block_files, damage
from tests.support.fake_stage import FakeRuntime
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from stages.serving.prefix_blocks import SlotCopy

IDENTITY: Final = bytes(range(32))
SIZE: Final = 8
TEXT: Final = [int(token) for token in np.random.default_rng(3).integers(3, 60, 100)]
LONG_TEXT: Final = [int(token) for token in np.random.default_rng(3).integers(3, 300, 100)]


def name_of(stop: int, text: Sequence[int] = TEXT) -> bytes:
    return hashlib.sha256(f"{stop} {text[:stop]}".encode()).digest()


def keep_of(num_positions: int, text: Sequence[int] = TEXT, first: int = 0) -> wire.Keep:
    ids = np.asarray(text[:num_positions], np.int64)
    return wire.Keep(
        num_positions=num_positions,
        tokens_sha256=hashlib.sha256(ids.tobytes()).digest(),
        blocks=[
            wire.Block(name=name_of(start + SIZE, text), start=start, stop=start + SIZE)
            for start in range(first, num_positions, SIZE)
        ],
    )


def fetch_of(fetch_id: int, num_positions: int, text: Sequence[int] = TEXT) -> wire.Fetch:
    return wire.Fetch(
        id=fetch_id, names=[name_of(stop, text) for stop in range(SIZE, num_positions + 1, SIZE)]
    )


class Bench:
    """A disk beside a fake stage's slots; what it reads and writes is done at once.

    Attributes:
        slots: The slots.
        disk: The disk.
        news: All that it told.
        free_bytes: Free memory.
        error: Fails copies.
        on_copy: Called before a copy is made.
    """

    def __init__(self, root: Path, most_bytes: int = 2**20) -> None:
        self.slots = slots_of(FakeRuntime(0, 3, is_poisoned=True))
        self.news: list[wire.BlockNews] = []
        self.answers: list[tuple[int, int]] = []
        self.free_bytes = 2**30
        self.error: Exception | None = None
        self.num_copies = 0
        self.on_copy: Callable[[], None] = lambda: None
        self.disk = KvDisk(clock_ns=lambda: 10**9, free_memory_bytes=lambda: self.free_bytes)
        self.disk.attach(self)  # type: ignore[arg-type]  # it has all that a disk uses of a stage
        self._store = BlockStore(root, IDENTITY, most_bytes)

    async def open(self) -> None:
        """Open the disk, and forget what it told of that."""
        await self.disk.open(self._store, writer=InlineExecutor(), reader=InlineExecutor())
        self.news.clear()

    def tell(self, reply: wire.ControlReply) -> None:
        self.news.append(reply.block_news)

    def in_worker(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        self.num_copies += 1
        self.on_copy()
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.error is not None:
            done.set_exception(self.error)
        else:
            done.set_result(work())
        return done

    def fill(self, slot: int, text: Sequence[int]) -> None:
        self.slots.begin(slot, slot, (), 0, 4)
        compute(self.slots, slot, 0, text)

    async def settled(self) -> None:
        async with asyncio.timeout(10):
            while self.disk._writes or self.disk._reads:  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def keep(self, slot: int, order: wire.Keep) -> None:
        self.disk.keep(slot, order)
        await self.settled()

    async def fetch(self, message: wire.Fetch) -> int:
        self.disk.fetch(message, lambda fetched: self.answers.append((fetched.id, fetched.num_positions)))
        await self.settled()
        fetch_id, num_positions = self.answers[-1]
        assert fetch_id == message.id
        return num_positions


def copied_of(
    slots: KvSlots, num_positions: int, order: wire.Keep, state_positions: Collection[int]
) -> SlotCopy | None:
    return copy_of(
        slots,
        1,
        num_positions,
        tokens_sha256=order.tokens_sha256,
        state_positions=state_positions,
        most_bytes=2**30,
    )


def slots_of(runtime: Any) -> KvSlots:
    return KvSlots(runtime, 1000)


def compute(slots: KvSlots, slot: int, start: int, text: Sequence[int], **more: Any) -> Any:
    """Compute rows as a worker does; returns those of the last batch."""
    runtime: Any = slots.runtime
    output = None
    for first in range(start, len(text), runtime.max_rows):
        span = Span(slot, first, text[first : first + runtime.max_rows], **more)
        (output,) = runtime.decode([span])
        slots.computed(span, 0)
    return output


def file_of(root: Path, stop: int) -> Path:
    (path,) = (path for path in block_files([root]) if path.stem == name_of(stop).hex())
    return path


@pytest.fixture
async def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    await bench.open()
    return bench


async def test_what_is_kept_is_told_and_can_be_fetched(bench: Bench) -> None:
    bench.fill(1, TEXT[:40])
    await bench.keep(1, keep_of(32))
    assert [list(news.added) for news in bench.news] == [[name_of(stop) for stop in (8, 16, 24, 32)]]
    assert not any(news.rows_identity or news.state_positions for news in bench.news)
    assert await bench.fetch(fetch_of(5, 32)) == 32
    prefix = bench.disk.take(5, 32)
    assert prefix is not None
    assert bench.disk.take(5, 32) is None, "once"
    other = slots_of(FakeRuntime(0, 3, is_poisoned=True))
    other.begin(2, 2, TEXT[:30], 0, 4, brought=prefix)
    assert other.tokens.tokens(2).tolist() == TEXT[:30]
    assert np.array_equal(compute(other, 2, 30, TEXT[:40]), compute(bench.slots, 1, 30, TEXT[:40]))
    stats = bench.disk.stats()
    assert (stats.num_files, stats.num_written, stats.num_restored, stats.num_restored_positions) == (
        4,
        4,
        1,
        32,
    )
    assert stats.num_bytes == sum(path.stat().st_size for path in block_files([bench.disk._store._root]))
    assert stats.most_bytes == 2**20


async def test_a_new_process_tells_what_is_there(bench: Bench, tmp_path: Path) -> None:
    bench.fill(1, TEXT[:40])
    await bench.keep(1, keep_of(40))
    again = Bench(tmp_path)
    await again.open()
    (news,) = again.disk.news()
    assert news.rows_identity == IDENTITY
    assert set(news.added) == {name_of(stop) for stop in range(8, 41, 8)}
    assert await again.fetch(fetch_of(1, 40)) == 40


async def test_many_blocks_are_told_in_several_messages(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.serving.kv_disk._NAMES_A_MESSAGE", 2)
    bench.fill(1, TEXT[:40])
    await bench.keep(1, keep_of(40))
    told = list(bench.disk.news())
    assert [len(news.added) for news in told] == [2, 2, 1]
    assert [news.rows_identity for news in told] == [IDENTITY, b"", b""]


async def test_a_stage_whose_rows_cannot_be_copied_is_left_alone_for_a_while(bench: Bench) -> None:
    bench.fill(1, TEXT[:40])
    bench.error = StageFailed("llama.cpp saves them otherwise")
    rests_s = []
    for _ in range(9):
        await bench.keep(1, keep_of(40))
        await bench.keep(1, keep_of(40))
        rests_s.append(round(bench.disk._rests_until_s - asyncio.get_running_loop().time()))
        bench.disk._rests_until_s = -1.0
    assert bench.num_copies == 9
    assert rests_s == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    assert bench.disk.stats().num_left_out == 2 * 9 * 5
    bench.error = None
    await bench.keep(1, keep_of(40))
    assert bench.disk.stats().num_written == 5
    assert bench.disk._rest_s == 1


async def test_only_what_the_slot_holds_is_kept(bench: Bench, tmp_path: Path) -> None:
    bench.disk._rest_s = 0.0
    bench.fill(1, TEXT[:40])
    for slot, order in (
        (1, keep_of(48)),
        (1, keep_of(40, TEXT[::-1])),
        (2, keep_of(8)),
        (1, wire.Keep(num_positions=8, tokens_sha256=keep_of(8).tokens_sha256)),
        (1, wire.Keep()),
    ):
        await bench.keep(slot, order)
    bench.free_bytes = 4
    await bench.keep(1, keep_of(40))
    bench.free_bytes = 2**30
    bench.error = StageFailed("llama.cpp fails")
    await bench.keep(1, keep_of(40))
    bench.error = MemoryError()
    await bench.keep(1, keep_of(40))
    assert block_files([tmp_path]) == []
    assert not bench.news
    assert not bench.disk._coming
    assert bench.disk.stats().num_left_out == 6 + 5 + 1 + 5 + 5 + 5
    bench.error = None
    await bench.keep(1, keep_of(40))
    assert len(block_files([tmp_path])) == 5


async def test_what_is_there_is_not_copied_again(bench: Bench) -> None:
    bench.fill(1, TEXT[:40])
    bench.disk.keep(1, keep_of(32))
    bench.disk.keep(1, keep_of(32))
    await bench.settled()
    await bench.keep(1, keep_of(32))
    assert bench.num_copies == 1
    await bench.keep(1, keep_of(40))
    assert bench.num_copies == 2
    assert bench.disk.stats().num_written == 5


async def test_a_fetch_ends_where_a_block_is_missing_or_damaged(bench: Bench, tmp_path: Path) -> None:
    bench.fill(1, TEXT[:40])
    await bench.keep(1, keep_of(40))
    assert await bench.fetch(wire.Fetch(id=1, names=[bytes(32), name_of(8)])) == 0
    assert await bench.fetch(wire.Fetch(id=2, names=[name_of(8), name_of(24)])) == 8, "one is left out"
    assert list(bench.news[-1].removed) == [name_of(24)], "it does not follow the one before"
    await bench.keep(1, keep_of(40))
    path = file_of(tmp_path, 32)
    damage(path, "flip", 222)
    assert await bench.fetch(fetch_of(3, 40)) == 24
    assert list(bench.news[-1].removed) == [name_of(32)]
    assert not path.exists()
    file_of(tmp_path, 8).unlink()
    assert await bench.fetch(fetch_of(4, 40)) == 0
    assert bench.disk.stats().num_damaged == 2


async def test_memory_of_fetches_is_bounded_and_given_back(bench: Bench) -> None:
    bench.fill(1, TEXT[:40])
    await bench.keep(1, keep_of(40))
    size = next(iter(bench.disk._blocks.values())).num_bytes
    bench.free_bytes = 4 * 3 * size
    assert await bench.fetch(fetch_of(1, 40)) == 24
    assert await bench.fetch(fetch_of(2, 40)) == 0
    bench.disk.fetch(wire.Fetch(id=1), lambda _fetched: None)
    assert await bench.fetch(fetch_of(2, 40)) == 24
    assert await bench.fetch(fetch_of(2, 40)) == 0, "its id is taken"
    bench.disk.closed_all()
    assert bench.disk.take(2, 24) is None
    assert await bench.fetch(fetch_of(3, 40)) == 24
    await bench.disk.stop()
    assert not bench.disk._fetches


async def test_a_copy_is_bounded_by_the_memory_that_is_free_when_it_is_made(bench: Bench) -> None:
    """Sessions that end together queue their copies together: the first must not count as free memory."""

    def taken() -> None:
        bench.free_bytes = 4

    bench.on_copy = taken
    bench.fill(1, TEXT[:40])
    await bench.keep(1, keep_of(40))
    assert (bench.num_copies, bench.disk.stats().num_written) == (1, 0)


class HeldExecutor(Executor):
    """Does what is submitted when it is told to.

    Attributes:
        held: What was submitted.
    """

    def __init__(self) -> None:
        self.held: list[Callable[[], None]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.held.append(lambda: future.set_result(fn(*args, **kwargs)))
        return future


async def test_the_next_coordinator_may_use_the_ids_of_the_one_before(bench: Bench) -> None:
    bench.fill(1, TEXT[:40])
    await bench.keep(1, keep_of(40))
    bench.disk._reader = reader = HeldExecutor()
    answers: list[int] = []
    for number in range(2):
        bench.disk.fetch(fetch_of(1, 40), lambda fetched: answers.append(fetched.num_positions))
        async with asyncio.timeout(10):
            while len(reader.held) == number:  # noqa: ASYNC110
                await asyncio.sleep(0)
        if not number:
            bench.disk.closed_all()
    for read in reader.held:
        read()
        async with asyncio.timeout(10):
            num_answers = len(answers)
            while len(answers) == num_answers:  # noqa: ASYNC110
                await asyncio.sleep(0)
    assert answers == [0, 40]
    assert bench.disk.take(1, 40) is not None


async def test_a_fetch_that_no_session_uses_is_dropped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.serving.kv_disk._FETCHED_KEPT_S", 0.0)
    bench.fill(1, TEXT[:40])
    await bench.keep(1, keep_of(40))
    assert await bench.fetch(fetch_of(1, 40)) == 40
    async with asyncio.timeout(10):
        while bench.disk._fetches:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert bench.disk.take(1, 40) is None


async def test_evicted_blocks_are_told(tmp_path: Path) -> None:
    bench = Bench(tmp_path, most_bytes=1500)
    await bench.open()
    bench.fill(1, TEXT[:40])
    await bench.keep(1, keep_of(24))
    bench.fill(1, TEXT[50:90])
    await bench.keep(1, keep_of(16, TEXT[50:90]))
    held = {name for news in bench.news for name in news.added}
    held -= {name for news in bench.news for name in news.removed}
    assert held == {bytes.fromhex(path.stem) for path in block_files([tmp_path])}
    assert any(news.removed for news in bench.news)
    assert bench.disk.stats().num_bytes <= 1500


def test_rows_that_llama_cpp_refuses_leave_an_empty_slot() -> None:
    slots = slots_of(FakeRuntime(0, 3))
    compute(slots, 1, 0, TEXT[:20])
    runtime: Any = slots.runtime

    def refuse(*_arguments: object) -> None:
        raise StageFailed("they are of another model")

    runtime.memory.put_saved = refuse
    prefix = PrefixReader()
    copied = copied_of(slots, 16, keep_of(16), ())
    assert copied is not None
    for _place, block in copied.blocks([BlockPlace(bytes(32), 0, 16)]):
        prefix.add(block)
    with pytest.raises(PrefixMismatch, match=r"does not take 16 positions from disk.*of another model"):
        slots.begin(2, 2, TEXT[:16], 0, 4, brought=prefix.prefix())
    assert slots.tokens.length(2) == 0
    assert runtime.memory.length(2) == 0


OPTIONS: Final = RuntimeOptions(num_slots=4, num_threads=2, exact=True)
SETTING: Final = RowsSetting((0, 2, 4), OPTIONS, ())
# Options of computing, each with another value.
CHANGES: Final[dict[str, Any]] = {
    "exact": False,
    "kv_type": "q8_0",
    "gpu_layers": (("CUDA0", 1),),
    "repacks": False,
    "num_threads": 1,
    "num_slots": 5,
    "ctx_size": 4096,
    "cpu_moe_layers": 1,
    "num_checkpoints": 3,
    "observe_layers": (1,),
    "observe_as": GraphBoundary(64),
    "has_reader": True,
    "most_at_once": 80,
}


@pytest.mark.parametrize(
    "change",
    [
        {"layers": (0, 3, 4)},
        {"layers": (0, 2, 5)},
        *({"options": replace(OPTIONS, **{name: value})} for name, value in CHANGES.items()),
        {"devices": ("a card",)},
    ],
)
def test_whatever_rows_depend_on_is_in_their_identity(change: dict[str, Any]) -> None:
    identity = rows_identity(SETTING, "ab")
    assert len(identity) == 32
    assert rows_identity(SETTING, "ab") == identity
    assert rows_identity(SETTING, "ac") != identity
    assert rows_identity(replace(SETTING, **change), "ab") != identity


def test_every_option_of_computing_is_tried() -> None:
    """A new one changes the identity of rows unless `RowsSetting.of` says that they do not depend on it."""
    assert CHANGES.keys() == RuntimeOptions.__dataclass_fields__.keys()


class _Loaded:
    """As much of a loaded stage as its setting is made of."""

    info = StageInfo(LayerRange(0, 2), 4, n_embd=64, n_vocab=8, n_ctx_train=4096, num_bytes=0)
    devices: tuple[str, ...] = ()

    def __init__(self, *, may_scale_rotations: bool) -> None:
        self.may_scale_rotations = may_scale_rotations


@pytest.mark.parametrize(
    ("base", "name", "may_scale_rotations"),
    [
        (OPTIONS, "num_checkpoints", True),
        (OPTIONS, "ctx_size", False),
        (replace(OPTIONS, exact=False), "num_threads", True),
    ],
)
def test_rows_outlive_changes_on_which_they_do_not_depend(
    base: RuntimeOptions, name: str, *, may_scale_rotations: bool
) -> None:
    loaded: Any = _Loaded(may_scale_rotations=may_scale_rotations)
    changed = replace(base, **{name: CHANGES[name]})
    assert RowsSetting.of(loaded, changed) == RowsSetting.of(loaded, base)


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - {"num_checkpoints"}))
def test_rows_do_not_outlive_others(name: str) -> None:
    loaded: Any = _Loaded(may_scale_rotations=True)
    changed = replace(OPTIONS, **{name: CHANGES[name]})
    assert RowsSetting.of(loaded, changed) != RowsSetting.of(loaded, OPTIONS)


def test_the_build_is_in_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = rows_identity(SETTING, "ab")
    monkeypatch.setattr("stages.serving.rows_identity._build", lambda: {"llama_cpp": "another"})
    assert rows_identity(SETTING, "ab") != identity


def test_the_processor_s_model_is_in_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Linux tells it: `platform` knows the machine's kind at best, which hosts of all models share."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    monkeypatch.setattr("platform.processor", lambda: "x86_64")
    expected = next(iter(models), "") or "x86_64"
    assert _build.__wrapped__()["processor"] == expected


def test_a_model_s_files_are_known_by_their_bytes(tmp_path: Path) -> None:
    one, other, index = tmp_path / "one", tmp_path / "other", tmp_path / "index" / "x.json"
    one.write_bytes(b"first")
    other.write_bytes(b"second")
    both = content_sha256((one, other), index)
    assert content_sha256((one, other), index) == both
    other.write_bytes(b"seconds")
    changed = content_sha256((one, other), index)
    assert changed != both
    other.write_bytes(b"second")
    assert content_sha256((one, other), tmp_path / "another.json") == both


@pytest.mark.model
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gemma4", "falcon-h1", "mamba2"),
        *(
            pytest.param(name, marks=pytest.mark.sweep)
            for name in ("qwen3", "deepseek2", "gpt-oss", "qwen3next")
        ),
    ],
)
def test_real_rows_come_back_to_the_bit(name: str, tmp_path: Path) -> None:
    """From one process's slot over the disk into another's, in exact mode; with a state if it has one."""
    path = stage_of(name, tmp_path)
    options = RuntimeOptions(num_slots=3, ctx_size=128, exact=True, num_checkpoints=2)
    text, stop, end = LONG_TEXT, 48, 50
    with closing(StageRuntime(path, options)) as runtime, closing(StageRuntime(path, options)) as copy:
        identity = rows_identity(RowsSetting.of(runtime, options), "ab")
        assert rows_identity(RowsSetting.of(copy, options), "ab") == identity
        slots, other = slots_of(runtime), slots_of(copy)
        compute(slots, 1, 0, text[:end])
        compute(slots, 1, end, text[:60], checkpoints=(end,))
        has_state = runtime.info.has_windows or not runtime.info.can_trim
        assert has_state == (name in {"gpt-oss", "gemma4", "falcon-h1", "mamba2", "qwen3next"})
        places = [BlockPlace(name_of(each, text), each - 16, each) for each in (16, 32, 48)]
        if has_state:
            places.append(BlockPlace(name_of(end, text), 48, end, has_state=True))
            stop = end
        copied = copied_of(slots, stop, keep_of(stop, text), (end,))
        assert copied is not None
        store = BlockStore(tmp_path / "kv", identity, 2**30)
        store.open()
        for place, block in copied.blocks(places):
            assert store.write(place.name, block, 1) is not None
        held, reader = BlockStore(tmp_path / "kv", identity, 2**30).open(), PrefixReader()
        for place in places:
            found = store.read(place.name, held[place.name])
            assert found is not None
            reader.add(found)
        # Another text lies in the slot, and others beside it.
        compute(other, 0, 0, text[40:70])
        compute(other, 2, 0, text[30:90])
        other.begin(2, 2, text[:stop], 0, 4, brought=reader.prefix())
        for first, last in ((stop, stop + 1), (stop + 1, stop + 8)):
            (expected,) = _after(path, options, text, first, last)
            (hidden,) = copy.decode([Span(2, first, text[first:last])])
            assert np.array_equal(hidden, expected)
        if runtime.info.has_windows:
            with pytest.raises(UncuttableModel, match="cannot go back to position 49: before 50 it lacks"):
                other.trim(2, 49)
            with pytest.raises(InvalidWindow, match="a window starts at position 49"):
                copy.decode([Span(2, 49, text[49:52])])
            copy.memory.copy(2, 1, stop)
            with pytest.raises(UncuttableModel):
                copy.memory.trim(1, 20)
        if has_state:
            other.trim(2, stop)
            (expected,) = _after(path, options, text, stop, stop + 3)
            (hidden,) = copy.decode([Span(2, stop, text[stop : stop + 3])])
            assert np.array_equal(hidden, expected), "it can go back to where it began"
        if runtime.info.has_windows:
            copy.memory.trim(2, 0)
            copy.decode([Span(2, 0, text[:20])])
            copy.memory.trim(2, 10)
            assert copy.memory.length(2) == 10, "of what was computed since, nothing is missing"


def _after(path: Path, options: RuntimeOptions, text: Sequence[int], first: int, last: int) -> Any:
    """Rows of a stage that has computed all before them."""
    with closing(StageRuntime(path, options)) as runtime:
        runtime.decode([Span(0, 0, text[:first])])
        return runtime.decode([Span(0, first, text[first:last])])


def stage_of(name: str, folder: Path) -> Path:
    """The first layers of a tiny model, cut off."""
    path, stage = folder / f"{name}.gguf", folder / f"{name}-stage.gguf"
    if name in TINY_FAMILIES:
        TINY_FAMILIES[name].write(path)
        cut = TINY_FAMILIES[name].cuts[0]
    else:
        TinyModel(name, head_size=32, n_layers=3 + len(name) % 2).write(path)
        cut = len(name) % 3 + 1
    cut_stage(path, LayerRange(0, cut), stage)
    return stage
