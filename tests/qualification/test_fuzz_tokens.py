"""Short runs of `mesh bench fuzz --tokens`, and that it would notice."""

from __future__ import annotations

import itertools
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.qualification.fuzz.mutations import damaged
from tests.qualification.fuzz.report import FuzzOptions, Tally, as_text
from tests.qualification.fuzz.token_fuzz import fuzz_tokens

if TYPE_CHECKING:
    from pathlib import Path


def test_every_token_is_admitted_or_refused_with_a_reason(tmp_path: Path) -> None:
    report = fuzz_tokens(FuzzOptions(2000, 7, tmp_path, tmp_path))
    assert report.is_good
    assert set(report.outcomes) == {"InvalidJoinToken", "admitted"}
    assert report.num_cases == 2000


def test_an_unforeseen_exception_is_counted_and_its_token_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.qualification.fuzz.token_fuzz.decode", lambda _word: 1 // 0)
    report = fuzz_tokens(FuzzOptions(3, 7, tmp_path, tmp_path))
    assert not report.is_good
    assert report.num_crashes == 3
    assert len(report.kept) == 3


def test_a_token_that_keeps_the_processor_busy_is_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.qualification.fuzz.token_fuzz._SLOW_S", 0.0)
    report = fuzz_tokens(FuzzOptions(3, 7, tmp_path, tmp_path))
    assert not report.is_good
    assert report.num_hangs == 3


def test_damage_is_what_the_seed_says_and_always_ends() -> None:
    data = bytes(range(200))
    first = [damaged(data, Random(seed)) for seed in range(300)]
    assert first == [damaged(data, Random(seed)) for seed in range(300)]
    assert sum(wreck == data for wreck in first) < 10
    assert all(len(damaged(b"", Random(seed))) < 100 for seed in range(300))


@pytest.mark.parametrize(
    ("sizes_mib", "says", "is_good"),
    [
        ([50.0] * 10 + [100.0] * 30, "100.0 MiB after the warm-up, 100.0 at the end, +0.0", True),
        ([100.0 + number for number in range(40)], "+15.0 where 8.0 is allowed: GROWS", False),
        ([100.0] * 3, "3 samples, too few to tell", True),
        ([], "each input had a process of its own", True),
    ],
)
def test_memory_is_told_before_and_after_and_judged(
    tmp_path: Path, sizes_mib: list[float], says: str, *, is_good: bool
) -> None:
    ticks = itertools.count()
    tally = Tally("tokens", FuzzOptions(1, 1, tmp_path, tmp_path), lambda: float(next(ticks)))
    tally.count("admitted")
    for size_mib in sizes_mib:
        tally.sample_memory(size_mib * 2**20)
    assert says in as_text(tally.report())
    assert tally.report().is_good is is_good
