"""Copying parts of files: any part to any place, holes and what was there before included."""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages import files
from stages.files import copy_range, next_data
from stages.weights.hashing import piece_sha256, zeros_sha256

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SIZE = 300_000
BLOCK = 4096


def sparse_file(path: Path, random: Random, num_extents: int) -> bytes:
    """A file of some stretches of random bytes, holes elsewhere."""
    content = bytearray(SIZE)
    with path.open("w+b") as file:
        file.truncate(SIZE)
        for _ in range(num_extents):
            start = random.randrange(SIZE // BLOCK) * BLOCK + random.choice((0, 0, 17))
            data = random.randbytes(random.randrange(1, 40_000))[: SIZE - start]
            file.seek(start)
            file.write(data)
            content[start : start + len(data)] = data
    return bytes(content)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(seed=st.integers(0, 2**32), by_kernel=st.booleans())
def test_the_same_bytes_arrive_whatever_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, *, by_kernel: bool
) -> None:
    random = Random(seed)
    content = sparse_file(tmp_path / "source", random, random.randrange(4))
    before = sparse_file(tmp_path / "target", random, random.randrange(4))
    start, at = random.randrange(SIZE), random.randrange(SIZE)
    count = random.randrange(SIZE - at + 1)
    seen: list[int] = []
    source = os.open(tmp_path / "source", os.O_RDONLY)
    target = os.open(tmp_path / "target", os.O_RDWR)
    with monkeypatch.context() as patch:
        if not by_kernel:
            patch.delattr(os, "copy_file_range")
        patch.setattr(files, "STEP_BYTES", 10_000)
        copied = copy_range(source, start, target, at, count, on_bytes=seen.append)
    os.close(source)
    os.close(target)
    expected = content[start : start + count]
    assert copied == len(expected) == sum(seen)
    after = (tmp_path / "target").read_bytes()
    assert after == before[:at] + expected + before[at + len(expected) :]


def test_holes_stay_holes(tmp_path: Path) -> None:
    with (tmp_path / "source").open("w+b") as source, (tmp_path / "target").open("w+b") as target:
        for file in (source, target):
            file.truncate(2**30)
        os.pwrite(source.fileno(), b"x" * 10_000, 2**29)
        assert copy_range(source.fileno(), 0, target.fileno(), 0, 2**30) == 2**30
        assert os.fstat(target.fileno()).st_blocks * 512 < 2**20
        assert next_data(target.fileno(), 0, 2**30)[0] // BLOCK == 2**29 // BLOCK
        assert os.pread(target.fileno(), 10_001, 2**29) == b"x" * 10_000 + b"\0"


def test_hashes_of_holes_are_those_of_zeros(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(10_000)
        whole_hole = piece_sha256(file.fileno(), 100, 5_000)
        os.pwrite(file.fileno(), bytes(5_000), 0)
        assert piece_sha256(file.fileno(), 100, 5_000) == whole_hole == zeros_sha256(5_000)
        assert piece_sha256(file.fileno(), 9_000, 1_001) is None
        os.pwrite(file.fileno(), b"\1", 300)
        assert piece_sha256(file.fileno(), 100, 5_000) != whole_hole
