"""Block files: each is used as it was written or not at all, and all together stay within a limit."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from stages.serving import block_store
from stages.serving.block_store import (
    BlockLabel,
    BlockStore,
    DamagedBlock,
    RowsBlock,
    StoredBlock,
    decode_block,
    encode_block,
    file_bytes,
)

IDENTITY: Final = bytes(range(32))
OTHER: Final = bytes(range(1, 33))
NAMES: Final = [bytes([number]) * 32 for number in range(1, 9)]


def block_of(start: int = 0, count: int = 4, num_rows_bytes: int = 40, num_state_bytes: int = 0) -> RowsBlock:
    random = np.random.default_rng(start + 7 * num_rows_bytes)
    return RowsBlock(
        start,
        start + count,
        random.integers(0, 2**32, count, np.uint32),
        random.bytes(32),
        random.integers(0, 256, num_rows_bytes, np.uint8),
        random.integers(0, 256, num_state_bytes, np.uint8),
    )


def content_of(label: BlockLabel, block: RowsBlock) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(b"".join(encode_block(label, block)), np.uint8).copy()


def same(one: RowsBlock, other: RowsBlock) -> bool:
    return (one.start, one.stop, one.prefix_sha256) == (other.start, other.stop, other.prefix_sha256) and all(
        np.array_equal(getattr(one, part), getattr(other, part)) for part in ("tokens", "rows", "state")
    )


blocks = st.builds(
    block_of, st.integers(0, 500), st.integers(1, 9), st.integers(0, 60), st.sampled_from([0, 0, 17])
)


@given(block=blocks)
def test_a_block_is_what_was_written(block: RowsBlock) -> None:
    label = BlockLabel(IDENTITY, NAMES[0])
    content = content_of(label, block)
    assert content.size == file_bytes(block)
    assert same(decode_block(label, content), block)


@given(block=blocks, data=st.data())
def test_a_changed_byte_or_length_is_noticed(block: RowsBlock, data: st.DataObject) -> None:
    label = BlockLabel(IDENTITY, NAMES[0])
    content = content_of(label, block)
    at = data.draw(st.integers(0, content.size - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "grow", "double"]))
    if how == "flip":
        content[at] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        content = content[:at]
    elif how == "grow":
        content = np.concatenate([content, np.zeros(at + 1, np.uint8)])
    else:
        content = np.concatenate([content, content])
    with pytest.raises(DamagedBlock):
        decode_block(label, content)


def test_a_block_of_another_stage_or_name_is_refused() -> None:
    content = content_of(BlockLabel(IDENTITY, NAMES[0]), block_of())
    for label in (BlockLabel(OTHER, NAMES[0]), BlockLabel(IDENTITY, NAMES[1])):
        with pytest.raises(DamagedBlock, match="another block"):
            decode_block(label, content)


def file_of(root: Path, name: bytes, identity: bytes = IDENTITY) -> Path:
    (path,) = (root / identity.hex()).glob(f"{name.hex()}.*")
    return path


def test_files_are_this_user_s_and_are_there_for_the_next_process(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    store = BlockStore(root, IDENTITY, 10_000)
    assert store.open() == {}
    plain, stateful = block_of(), block_of(4, num_state_bytes=9)
    found = {name: store.write(name, block, 1) for name, block in zip(NAMES, (plain, stateful), strict=False)}
    assert found == {NAMES[0]: StoredBlock(file_bytes(plain)), NAMES[1]: StoredBlock(file_bytes(stateful), 8)}
    assert [path.stat().st_mode & 0o777 for path in (root, root / IDENTITY.hex())] == [0o700, 0o700]
    assert {path.stat().st_mode & 0o777 for path in root.rglob("*") if path.is_file()} == {0o600}
    again = BlockStore(root, IDENTITY, 10_000)
    held = again.open()
    assert held == found
    read = again.read(NAMES[1], held[NAMES[1]])
    assert read is not None
    assert same(read, stateful)
    assert BlockStore(root, OTHER, 10_000).open() == {}, "another stage's"


@pytest.mark.parametrize(
    "damage", ["flipped", "cut", "empty", "foreign", "link", "renamed", "endless", "pipe"]
)
def test_a_damaged_file_is_refused_and_removed(damage: str, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    store = BlockStore(root, IDENTITY, 100_000)
    store.open()
    stored = store.write(NAMES[0], block_of(), 1)
    kept = store.write(NAMES[1], block_of(4), 1)
    assert stored is not None
    assert kept is not None
    path = file_of(root, NAMES[0])
    content = path.read_bytes()
    match damage:
        case "flipped":
            path.write_bytes(content[:150] + bytes([content[150] ^ 1]) + content[151:])
        case "cut":
            path.write_bytes(content[:-1])
        case "empty":
            path.write_bytes(b"")
        case "foreign":
            other = BlockStore(root, OTHER, 100_000)
            other.open()
            assert other.write(NAMES[0], block_of(), 1) is not None
            path.write_bytes(file_of(root, NAMES[0], OTHER).read_bytes())
        case "link":
            (tmp_path / "elsewhere").write_bytes(content)
            path.unlink()
            path.symlink_to(tmp_path / "elsewhere")
        case "renamed":
            path.write_bytes(file_of(root, NAMES[1]).read_bytes())
        case "endless":
            os.truncate(path, 2**42)
        case "pipe":
            path.unlink()
            os.mkfifo(path)
    with pytest.raises(DamagedBlock):
        store.read(NAMES[0], stored)
    assert not path.is_symlink()
    assert not path.exists()
    assert store.read(NAMES[0], stored) is None, "it is gone"
    assert store.read(NAMES[1], kept) is not None


def test_what_is_no_block_is_left_alone_and_a_folder_may_vanish(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    store = BlockStore(root, IDENTITY, 10_000)
    store.open()
    for name in ("notes.txt", "A" * 64 + ".rows", "0" * 64 + ".0.state"):
        (root / IDENTITY.hex() / name).write_text("mine")
    left_over = root / IDENTITY.hex() / ".0123.part"
    left_over.write_bytes(bytes(100))
    assert store.open() == {}
    assert not left_over.exists(), "of a killed process"
    assert len(list((root / IDENTITY.hex()).iterdir())) == 3
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    root.rmdir()
    assert store.write(NAMES[0], block_of(), 1) is not None


def test_a_disk_that_refuses_is_no_error(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    store = BlockStore(root, IDENTITY, 10_000)
    store.open()
    assert store.write(NAMES[0], block_of(num_rows_bytes=10_000), 1) is None, "more than the limit"
    (root / "ledger").unlink()
    (root / "ledger").mkdir()
    assert store.write(NAMES[0], block_of(), 1) is None


def test_a_process_that_is_stopped_with_the_lock_costs_what_would_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_store, "_LOCK_PATIENCE_S", 0.05)
    store = BlockStore(tmp_path, IDENTITY, 100_000)
    store.open()
    kept, damaged = (store.write(name, block_of(), 1) for name in NAMES[:2])
    assert kept is not None
    assert damaged is not None
    (path,) = (tmp_path / IDENTITY.hex()).glob(f"{NAMES[1].hex()}*")
    path.write_bytes(b"\xff" * path.stat().st_size)
    with (tmp_path / "ledger").open() as ledger:
        # Locks are those of open files: that of another one, as of another process, is in the way.
        fcntl.flock(ledger, fcntl.LOCK_EX)
        again = BlockStore(tmp_path, IDENTITY, 100_000)
        assert again.open().keys() == set(NAMES[:2])
        assert again.write(NAMES[2], block_of(), 1) is None
        found = again.read(NAMES[0], kept)
        assert found is not None
        assert same(found, block_of())
        with pytest.raises(DamagedBlock):
            again.read(NAMES[1], damaged)
    assert again.write(NAMES[2], block_of(), 1) is not None


@pytest.mark.parametrize("damage", ["lost", "garbage", "lower", "longer"])
def test_the_limit_holds_with_a_damaged_ledger(damage: str, tmp_path: Path) -> None:
    store = BlockStore(tmp_path, IDENTITY, 2_000)
    store.open()
    for number, name in enumerate(NAMES[:4]):
        assert store.write(name, block_of(num_rows_bytes=200), number) is not None
    ledger = tmp_path / "ledger"
    match damage:
        case "lost":
            ledger.unlink()
        case "garbage":
            ledger.write_bytes(b"\xff" * 30)
        case "lower":
            ledger.write_bytes(b"0" * 20 + ledger.read_bytes()[20:])
        case "longer":
            ledger.write_bytes(b"0" + ledger.read_bytes())
    stored = store.write(NAMES[7], block_of(num_rows_bytes=200), 7)
    assert stored is not None
    store.remove(NAMES[7], stored)
    for number, name in enumerate(NAMES[4:]):
        assert store.write(name, block_of(num_rows_bytes=200), 10 + number) is not None
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 2_000


def test_what_cannot_be_removed_does_not_end_the_writing(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, IDENTITY, 2_000)
    store.open()
    (tmp_path / IDENTITY.hex() / f"{bytes(32).hex()}.rows").mkdir()
    for number, name in enumerate(NAMES):
        assert store.write(name, block_of(num_rows_bytes=200), number) is not None


class StoreMachine(RuleBasedStateMachine):
    """Two stages of one host write, read and use blocks; some files vanish by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.now_ns = 10**9

    @initialize(most_bytes=st.integers(300, 2000))
    def begin(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.root = Path(self.folder.name) / "kv"
        self.stores = [BlockStore(self.root, identity, most_bytes) for identity in (IDENTITY, OTHER)]
        self.held: list[dict[bytes, StoredBlock]] = [dict(store.open()) for store in self.stores]
        # When each file was used last.
        self.used: dict[tuple[int, bytes], int] = {}

    @rule(which=st.integers(0, 1), name=st.sampled_from(NAMES), size=st.integers(0, 300))
    def write(self, which: int, name: bytes, size: int) -> None:
        self.now_ns += 1000
        gone: list[bytes] = []
        block = block_of(num_rows_bytes=size)
        before = {key: used for key, used in self.used.items() if key != (which, name)}
        stored = self.stores[which].write(name, block, self.now_ns, on_removed=gone.append)
        assert (stored is not None) == (file_bytes(block) <= self.most_bytes)
        for one in gone:
            del self.held[which][one]
        self.forget_vanished(1 - which)
        evicted = {key for key in before if key[1] not in self.held[key[0]]}
        left = before.keys() - evicted
        assert max((before[key] for key in evicted), default=0) < min(
            (before[key] for key in left), default=2**63
        ), "not what was used longest ago"
        self.used = {key: self.used[key] for key in left}
        if stored is not None:
            self.held[which][name] = stored
            self.used[which, name] = self.now_ns

    def forget_vanished(self, which: int) -> None:
        """What the other stage's write has removed is seen when it is looked for."""
        folder = self.root / self.stores[which].rows_identity.hex()
        self.held[which] = {
            name: stored
            for name, stored in self.held[which].items()
            if (folder / f"{name.hex()}.rows").exists()
        }

    @rule(which=st.integers(0, 1), name=st.sampled_from(NAMES))
    def read(self, which: int, name: bytes) -> None:
        stored = self.held[which].get(name)
        if stored is not None:
            self.now_ns += 1000
            assert self.stores[which].read(name, stored) is not None
            self.stores[which].use(name, stored, self.now_ns)
            self.used[which, name] = self.now_ns

    @rule(which=st.integers(0, 1), name=st.sampled_from(NAMES))
    def vanish(self, which: int, name: bytes) -> None:
        if name in self.held[which]:
            file_of(self.root, name, self.stores[which].rows_identity).unlink()
            del self.held[which][name]
            del self.used[which, name]

    @rule(which=st.integers(0, 1))
    def start_again(self, which: int) -> None:
        identity = self.stores[which].rows_identity
        self.stores[which] = BlockStore(self.root, identity, self.most_bytes)
        assert self.stores[which].open() == self.held[which]

    @invariant()
    def all_files_are_within_the_limit(self) -> None:
        if hasattr(self, "root"):
            sizes = [path.stat().st_size for path in self.root.glob("*/*")]
            assert sum(sizes) <= self.most_bytes
            assert len(sizes) == sum(map(len, self.held))

    def teardown(self) -> None:
        self.folder.cleanup()


def test_what_was_used_longest_ago_is_removed_and_the_limit_holds_for_all_stages() -> None:
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=30, stateful_step_count=25, deadline=None)
    )


def test_the_limit_is_that_of_the_process_that_writes(tmp_path: Path) -> None:
    large, small = (BlockStore(tmp_path, IDENTITY, most_bytes) for most_bytes in (10_000, 1_000))
    large.open()
    for number, name in enumerate(NAMES):
        assert large.write(name, block_of(num_rows_bytes=300), number) is not None
    held = small.open()
    assert 0 < sum(stored.num_bytes for stored in held.values()) <= 1_000
