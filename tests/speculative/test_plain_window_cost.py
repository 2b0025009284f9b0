"""What a plain window takes, by position."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.cost_model import DecodeTimeModel

WIRE_MS = 20.0


def computed_ms(position: int) -> float:
    return 12.0 + 0.01 * position


def teach(times: DecodeTimeModel, positions: range, *, wire_ms: float = WIRE_MS) -> None:
    for position in positions:
        times.add(position, wire_ms + computed_ms(position), computed_ms(position))


def test_it_knows_nothing_at_first() -> None:
    assert DecodeTimeModel().ms(100) is None


def test_a_long_text_may_take_longer() -> None:
    times = DecodeTimeModel()
    for start in (50, 700, 80, 900, 60):
        teach(times, range(start, start + 100))
    for position in (60, 400, 900):
        assert times.ms(position) == pytest.approx(WIRE_MS + computed_ms(position), rel=0.03)


def test_one_short_answer_says_nothing_of_long_texts() -> None:
    """Noise over a few positions must not be drawn out into a slope."""
    times = DecodeTimeModel()
    for position in range(40, 60):
        times.add(position, 32.0 + (position % 3), 12.0 + (position % 3))
    assert times.ms(2000) == pytest.approx(33.0, rel=0.1)


def test_a_wire_that_changes_is_no_slope() -> None:
    times = DecodeTimeModel()
    for start in (50, 700):
        teach(times, range(start, start + 100))
    teach(times, range(60, 160), wire_ms=80.0)
    teach(times, range(60, 160), wire_ms=80.0)
    assert times.ms(800) == pytest.approx(80.0 + computed_ms(800), rel=0.05)


def test_hiccups_count_little() -> None:
    times = DecodeTimeModel()
    teach(times, range(50, 100))
    known_ms = times.ms(100)
    assert known_ms is not None
    times.add(100, 5000.0, 4900.0)
    assert times.ms(100) == pytest.approx(known_ms, rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.floats(0.1, 1e5), st.floats(0.0, 1.0)), min_size=1))
def test_it_never_speaks_of_nan(windows: list[tuple[int, float, float]]) -> None:
    times = DecodeTimeModel()
    for position, elapsed_ms, share in windows:
        times.add(position, elapsed_ms, share * elapsed_ms)
        known_ms = times.ms(position)
        assert known_ms is not None
        assert 0.0 < known_ms <= 10_000 * max(elapsed for _, elapsed, _ in windows)
