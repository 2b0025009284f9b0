"""Programs for pictures, in a short form: what they compare and count. Times are for a quiet machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.qualification.pictures import hostile, losses, speculation
from tests.qualification.pictures.latency import Round
from tests.qualification.pictures.latency import lines as latency_lines
from tests.qualification.pictures.speed import Round as SpeedRound
from tests.qualification.pictures.speed import lines as speed_lines
from tests.support.lab_fixtures import require_lab

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from meshbench.report_tools import Line


def missed(lines: Sequence[Line]) -> list[str]:
    return [line.title for line in lines if line.verdict in {"missed", "not measured"}]


@pytest.mark.model
@pytest.mark.cluster
@pytest.mark.sweep
def test_no_row_of_a_picture_is_proposed(tmp_path: Path) -> None:
    findings = speculation.measure(tmp_path, 3, seed=2)
    assert not missed(speculation.lines(findings)), findings


@pytest.mark.model
@pytest.mark.cluster
@pytest.mark.sweep
def test_a_reason_for_each_hostile_picture(tmp_path: Path) -> None:
    findings = hostile.measure(tmp_path, 124, 1, 3, ())
    assert [title for title in missed(hostile.lines(findings)) if "p99" not in title] == []


@pytest.mark.lab
@pytest.mark.sweep
@pytest.mark.timeout(1200)
def test_no_loss_changes_an_answer(tmp_path: Path) -> None:
    require_lab()
    findings = losses.measure(tmp_path, 1)
    assert not findings.bad
    assert len(findings.all) > 20


def test_bounds_are_held_against_all_rounds() -> None:
    even = Round(beside_ms=(20.0,) * 200, alone_ms=(12.0,) * 200, first_token_s=3.0)
    late = Round(beside_ms=(20.0,) * 190 + (90.0,) * 10, alone_ms=(12.0,) * 200, first_token_s=3.0)
    assert missed(latency_lines([even] * 10)) == []
    assert missed(latency_lines([late] * 10)) == [
        "p99 between tokens of others beside a picture, over without"
    ]
    good, slow = SpeedRound((1000.0, 20.0), (1000.0, 30.0)), SpeedRound((1300.0, 400.0), (1000.0, 30.0))
    assert missed(speed_lines([good] * 10)) == []
    assert len(missed(speed_lines([slow] * 10))) == 2
