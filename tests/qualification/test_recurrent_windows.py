"""Random sessions of models with recurrent layers; and what a bad checkpoint comes to."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from stages.runtime.slot_memory import StateCheckpoints
from tests.qualification import recurrent_windows
from tests.qualification.recurrent_windows import Findings, examine, recurrent_models
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TinyModel


@pytest.mark.parametrize("name", ["mamba2", "falcon-h1"])
def test_sessions_that_go_back_are_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    found = examine(TINY_FAMILIES[name].write(tmp_path / "model.gguf"), 21, 4).findings
    assert found.wrong == ()
    assert found.num_rounds == 4
    assert found.num_rejections > 10
    assert found.num_void > 10
    assert found.num_recomputed > 50
    assert found.num_compared > 10


def test_one_wrong_bit_of_a_checkpoint_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = StateCheckpoints.read

    def read_badly(self: StateCheckpoints, slot: int) -> NDArray[np.uint8]:
        copy = read(self, slot)
        copy[-1] ^= 1
        return copy

    monkeypatch.setattr(StateCheckpoints, "read", read_badly)
    wrong = examine(TINY_FAMILIES["mamba2"].write(tmp_path / "model.gguf"), 21, 4).findings.wrong
    assert any("than without going back" in each for each in wrong)
    assert any("other logits than plainly" in each for each in wrong)


def test_a_state_that_is_not_restored_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateCheckpoints, "restore", lambda *_arguments: True)
    wrong = examine(TINY_FAMILIES["mamba2"].write(tmp_path / "model.gguf"), 21, 4).findings.wrong
    assert any("UncuttableModel: this model's memory cannot be trimmed" in each for each in wrong)


def test_rows_at_once_that_differ_are_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TINY_FAMILIES["mamba2"].write(tmp_path / "model.gguf")
    monkeypatch.setattr(recurrent_windows, "_same_bits", lambda _left, _right: False)
    result = examine(model, 21, 4)
    assert "2 rows at once differ" in result.why_not_tried
    assert result.findings == Findings()


def test_models_without_recurrent_layers_are_passed_over(tmp_path: Path) -> None:
    TinyModel("llama").write(tmp_path / "a.gguf")
    recurrent = TINY_FAMILIES["mamba2"].write(tmp_path / "b.gguf")
    (tmp_path / "c.gguf").write_bytes(b"no")
    assert recurrent_models([tmp_path]) == [recurrent]


def test_the_command_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TINY_FAMILIES["mamba2"].write(tmp_path / "b.gguf")
    results = iter(
        [
            recurrent_windows.Result(Findings(num_rounds=2, num_windows=7)),
            recurrent_windows.Result(Findings(num_rounds=2, wrong=("cut at (1,), round 0: another text",))),
            recurrent_windows.Result(why_not_tried="2 rows at once differ"),
        ]
    )
    monkeypatch.setattr(recurrent_windows, "examine_apart", lambda *_arguments: next(results))
    ran: list[Any] = [CliRunner().invoke(recurrent_windows.main, [str(tmp_path)]) for _ in range(3)]
    assert [each.exit_code for each in ran] == [0, 1, 1]
    assert "2 rounds (0 continued), 7 windows" in ran[0].output
    assert "round 0: another text" in ran[1].output
    assert "0 models" in ran[2].output
