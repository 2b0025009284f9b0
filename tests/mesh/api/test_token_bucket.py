"""A share per minute, whatever is drawn when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.api.rate_limit import TokenBucket

# A minute's share, and seconds that pass before each draw with what it takes.
DRAWS = st.lists(st.tuples(st.floats(0, 90), st.integers(1, 300)), min_size=1, max_size=40)


@given(per_minute=st.integers(1, 200), draws=DRAWS)
def test_over_any_time_no_more_is_let_through_than_the_share(
    per_minute: int, draws: list[tuple[float, int]]
) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    now_s, admitted = 0.0, 0.0
    for pause_s, amount in draws:
        now_s += pause_s
        if bucket.wait_s(amount, now_s) == 0:
            # A full bucket, and what has come since; only the last one may run into debt.
            assert admitted <= per_minute * (1 + now_s / 60) + 1e-6
            bucket.draw(amount, now_s)
            admitted += amount
        assert bucket.level(now_s) <= per_minute


@given(per_minute=st.integers(1, 200), draws=DRAWS)
def test_whoever_waits_as_told_is_let_through(per_minute: int, draws: list[tuple[float, int]]) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    now_s = 0.0
    for pause_s, amount in draws:
        now_s += pause_s
        now_s += bucket.wait_s(amount, now_s)
        assert bucket.wait_s(amount, now_s) < 1e-6
        bucket.draw(amount, now_s)


def test_more_than_a_share_needs_a_full_bucket_and_is_paid_off() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.draw(1, 0.0)
    assert bucket.wait_s(200, 0.0) == pytest.approx(1)
    bucket.draw(200, 1.0)
    assert bucket.level(1.0) == -140
    assert bucket.wait_s(1, 1.0) == pytest.approx(141)
    assert bucket.full_in_s(1.0) == pytest.approx(200)


def test_what_is_put_back_never_overfills() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.draw(10, 0.0)
    bucket.draw(-50, 0.0)
    assert bucket.level(0.0) == 60
    assert bucket.level(1e9) == 60


def test_a_clock_that_steps_back_fills_nothing() -> None:
    bucket = TokenBucket(60, 100.0)
    bucket.draw(60, 100.0)
    bucket.draw(1, 50.0)
    assert bucket.level(100.0) == -1
