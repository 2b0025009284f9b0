"""A short run of `mesh bench fuzz --drafters`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.qualification.fuzz.drafter_fuzz import fuzz_drafters
from tests.qualification.fuzz.report import FuzzOptions
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
