"""The command that damages files of --kv-disk: its damages and its judgement, and a short run of it."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.qualification.kv_disk import Damages, Turn, damage, damage_lines, main, turn_lines

if TYPE_CHECKING:
    from pathlib import Path


def test_a_damaged_file_is_another_one(tmp_path: Path) -> None:
    random, path, other = Random(3), tmp_path / "file", tmp_path / "other"
    other.write_bytes(bytes(300))
    kinds = set()
    for _ in range(200):
        path.write_bytes(bytes(300))
        kinds.add(damage(path, other, random))
        assert path.read_bytes() != bytes(300)
    assert len(kinds) == 7


@pytest.mark.parametrize(
    ("found", "verdicts"),
    [
        (Damages(10, 10, 10, 9, 2**20), ["met", "met", "", "met"]),
        (Damages(10, 9, 10, 9, 2**20), ["missed", "met", "", "met"]),
        (Damages(10, 10, 9, 9, 2**30), ["met", "missed", "", "missed"]),
    ],
)
def test_a_damage_that_is_not_noticed_is_a_miss(found: Damages, verdicts: list[str]) -> None:
    assert [line.verdict for line in damage_lines(found)] == verdicts


def test_the_shares_have_bounds() -> None:
    lines = turn_lines(Turn(8000, 7600, 150.0, 1000.0), Turn(8000, 7424, 301.0, 1000.0))
    assert [(line.measured, line.verdict) for line in lines] == [(0.15, "met"), (0.301, "missed")]
    assert "7424 of 8000 tokens cached" in lines[1].note


@pytest.mark.cluster
@pytest.mark.sweep
def test_a_short_run(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times are judged by the command alone: here a chat is too short for them."""
    with pytest.raises(SystemExit) as ended:
        main(["--model", str(smollm2_path), "--damages", "8", "--tokens", "0", "--json"])
    shown = capsys.readouterr()
    assert ended.value.code == 0, shown
    lines = json.loads(shown.out)["lines"]
    assert [line["verdict"] for line in lines] == ["met", "met", "", "met"]
