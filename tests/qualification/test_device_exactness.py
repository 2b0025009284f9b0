"""Whether rows depend on their batch, measured; the processor, where they do not, stands in for a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.runtime.devices import list_devices
from stages.runtime.numerics import VERDICTS
from tests.qualification.device_exactness import SETTINGS, Exactness, RowsResult, measure_rows
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_rows_on_the_processor_do_not_depend_on_their_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (processor,) = (device for device in list_devices() if device.kind == "cpu")
    monkeypatch.setattr("stages.runtime.devices.layer_devices", lambda: (processor,))
    monkeypatch.setattr("llama_cpp.llama_supports_gpu_offload", lambda: True)
    before = dict(VERDICTS)
    model = TinyModel("llama").write(tmp_path / "tiny.gguf")
    rows = measure_rows(model, processor.name, widths=(2, 5, 17), depths=(4, 70))
    assert [(row.depth, row.num_rows) for row in rows] == [
        *((4, width) for width in (2, 5, 17, 1)),
        *((70, width) for width in (2, 5, 17, 1)),
    ]
    found = Exactness("as it is", processor.description, rows)
    assert found.is_exact
    assert found.summary == "all of 8 comparisons are bit-equal"
    assert before == VERDICTS, "a measurement is no verdict"


def test_a_difference_is_told_with_the_rows_that_had_it() -> None:
    rows = (
        RowsResult(4, 2, 0.0, is_bit_equal=True),
        RowsResult(4, 9, 1e-6, is_bit_equal=False),
        RowsResult(600, 9, 3e-5, is_bit_equal=False),
        RowsResult(600, 1, 2e-6, is_bit_equal=False),
    )
    found = Exactness("as it is", "a GPU", rows)
    assert not found.is_exact
    assert found.summary == "3 of 4 comparisons differ, with 1, 9 rows, by up to 3.0e-05 of the largest logit"
    failed = Exactness("as it is", "a GPU", (), "llama.cpp ends with exit code -6")
    assert not failed.is_exact
    assert failed.summary == "llama.cpp ends with exit code -6"


def test_every_backend_is_tried_as_it_is_first() -> None:
    assert all(next(iter(settings.items())) == ("as it is", {}) for settings in SETTINGS.values())
