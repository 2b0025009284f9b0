"""Ways to run a stage's graph, timed; the processor stands in for a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from stages.runtime.devices import list_devices
from tests.qualification.device_stops import WITH_OUTPUT, StopTiming, Way, cheapest, measure, table
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

WAYS: tuple[Way, ...] = get_args(Way)


def timing(way: Way, window_ms: float, num_rows: int = 1, splits: str = "2") -> StopTiming:
    return StopTiming("first", 4, way, num_rows, window_ms, splits)


def test_every_way_of_both_stages_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (processor,) = (device for device in list_devices() if device.kind == "cpu")
    monkeypatch.setattr("stages.runtime.devices.layer_devices", lambda: (processor,))
    monkeypatch.setattr("llama_cpp.llama_supports_gpu_offload", lambda: True)
    model = TinyModel("llama").write(tmp_path / "tiny.gguf")
    found = measure(model, processor.name, tmp_path, num_rows=(1, 4), num_rounds=1)
    assert {(each.stage, each.num_on_device, each.way, each.num_rows) for each in found} == {
        (stage, count, way, rows)
        for stage in ("first", "middle")
        for count in (2, 1)
        for way in WAYS
        for rows in (1, 4)
    }
    assert all(each.window_ms > 0 and each.splits for each in found)
    assert len(table(found).splitlines()) == 2 + 8


def test_the_cheapest_way_is_one_that_gives_hidden_states() -> None:
    found = [
        *(timing(way, 5.0 if way in WITH_OUTPUT else 1.0) for way in WAYS),
        timing("runs on", 4.0),
        timing("ends", 3.0, num_rows=8),
        timing("runs on", 7.0, num_rows=8, splits="3"),
    ]
    assert cheapest(found) == {("first", 4, 1): "runs on", ("first", 4, 8): "ends"}
    first, second = table(found).splitlines()[2:]
    assert first.endswith("| 2 | runs on |")
    assert second.endswith("| 2 or 3 | ends |")
