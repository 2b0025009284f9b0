"""A short run of `mesh bench fuzz --drafters`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.qualification.fuzz.drafter_fuzz import assistant_pairs, fuzz_drafters, try_damaged
from tests.qualification.fuzz.report import FuzzOptions, Tally
from tests.support.mimo2 import write_mimo2

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.model
def test_damaged_drafters_draft_or_are_refused_with_a_reason(smollm2_path: Path, tmp_path: Path) -> None:
    model = write_mimo2(smollm2_path, tmp_path / "mimo2.gguf")
    report = fuzz_drafters(FuzzOptions(60, 3, model, tmp_path))
    assert report.is_good, report
    assert report.outcomes["InvalidModel (reading)"] > 10
    assert report.outcomes["loaded"] > 0


def test_damaged_assistants_draft_beside_a_stage_or_are_refused_before(tmp_path: Path) -> None:
    pairs = assistant_pairs(tmp_path, seed=3)
    options = FuzzOptions(60, 3, pairs[0].target, tmp_path)
    tally = Tally("drafters", options, time.monotonic)
    try_damaged(pairs, options, tally, tmp_path)
    report = tally.report()
    assert report.is_good, report
    assert report.outcomes["InvalidModel (reading)"] > 30
    assert report.outcomes["InvalidModel (loading)"] > 0
    assert report.outcomes["loaded"] > 0
    assert not [step for step in report.outcomes if "beside a stage" in step]
