"""The bench that holds predictions against measurements: its judgement, and in the lab itself."""

from __future__ import annotations

import pytest

from tests.qualification.forecast_accuracy import DelayCheck, main, report
from tests.support.lab_fixtures import require_lab


def check(predicted_tokens_per_s: float, measured_tokens_per_s: float) -> DelayCheck:
    predicted = {
        "tokens_per_s": predicted_tokens_per_s,
        "compute_ms": 8.0,
        "wire_ms": 20.0,
        "ttft_ms": 90.0,
    }
    return DelayCheck(5.0, predicted, measured_tokens_per_s, 9.0, 0.1, 100.0, 3)


@pytest.mark.parametrize(
    ("predicted", "is_close"), [(24.7, False), (25.1, True), (31.0, True), (36.9, True), (37.3, False)]
)
def test_a_fifth_off_is_too_much(predicted: float, *, is_close: bool) -> None:
    assert check(predicted, 31.0).is_close is is_close


def test_the_table_says_what_the_difference_is_made_of() -> None:
    # 32.25 ms a token, of which 9 were computing and 20 the wire: the rest is shared by four.
    shown = report([check(31.0, 31.0), check(60.0, 31.0)]).splitlines()
    assert len(shown) == 4
    assert "| 1.00 | 8.0, was 9.0 ms | 20.0 ms |" in shown[2]
    assert "was 0.81 ms" in shown[2]
    assert "1.94 (!)" in shown[3]


@pytest.mark.lab
@pytest.mark.sweep
def test_predictions_hold_in_the_lab(capsys: pytest.CaptureFixture[str]) -> None:
    require_lab()
    with pytest.raises(SystemExit) as ended:
        main(["--exact", "--prompts", "2", "--tokens", "64"])
    shown = capsys.readouterr()
    assert ended.value.code == 0, shown
    assert shown.out.count("tokens/s") == 6
