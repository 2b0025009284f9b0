"""Short runs of `mesh bench fuzz --tokens`, and that it would notice."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from mesh.bench.fuzz.damage import damaged
from mesh.bench.fuzz.options import FuzzOptions
from mesh.bench.fuzz.tokens import fuzz_tokens

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_every_token_is_admitted_or_refused_with_a_reason(tmp_path: Path) -> None:
    report = fuzz_tokens(FuzzOptions(2000, 7, tmp_path, tmp_path))
    assert report.is_good
    assert set(report.outcomes) == {"InvalidJoinToken", "admitted"}
    assert report.num_cases == 2000


def test_an_unforeseen_exception_is_counted_and_its_token_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.bench.fuzz.tokens.decode", lambda _word: 1 // 0)
    report = fuzz_tokens(FuzzOptions(3, 7, tmp_path, tmp_path))
    assert not report.is_good
    assert report.num_crashes == 3
    assert len(report.kept) == 3


def test_damage_is_what_the_seed_says_and_always_ends() -> None:
    data = bytes(range(200))
    first = [damaged(data, Random(seed)) for seed in range(300)]
    assert first == [damaged(data, Random(seed)) for seed in range(300)]
    assert sum(wreck == data for wreck in first) < 10
    assert all(len(damaged(b"", Random(seed))) < 100 for seed in range(300))
