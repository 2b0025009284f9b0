"""Turns of several sessions: what pays for all goes on, what does not is tried ever more rarely."""

from itertools import pairwise

import pytest

from speculative.payoff import Crowd, CrowdOptions, Turn

PLAIN_MS = 10.0


def tokens_speculated(crowd: Crowd, num_sessions: int, num_tokens: int, speculating_ms: float) -> int:
    """Of so many tokens of each session, those committed while speculating; what they take is given."""
    speculated = 0
    for _ in range(num_tokens * num_sessions):
        allowed = crowd.allows(num_sessions)
        crowd.add(1, speculating_ms if allowed else PLAIN_MS)
        speculated += allowed
    return speculated // num_sessions


def test_it_measures_plain_tokens_first() -> None:
    crowd = Crowd()
    assert not crowd.allows(4)
    assert crowd.plain_ms is None
    assert tokens_speculated(crowd, 4, 17, 5.0) == 0
    assert crowd.allows(4)
    assert crowd.plain_ms == pytest.approx(PLAIN_MS)


def test_what_pays_goes_on() -> None:
    crowd = Crowd()
    assert tokens_speculated(crowd, 4, 1000, 5.0) > 850
    assert crowd.gain == pytest.approx(2.0)


@pytest.mark.parametrize("num_sessions", [2, 4, 8])
@pytest.mark.parametrize("speculating_ms", [9.8, 12.0, 30.0])
def test_what_does_not_pay_costs_little(num_sessions: int, speculating_ms: float) -> None:
    crowd, options = Crowd(), CrowdOptions()
    speculated = tokens_speculated(crowd, num_sessions, 1000, speculating_ms)
    tries = 4  # pauses of 64, 128, 256, 512
    assert speculated <= tries * (options.settle + options.trial / num_sessions + 1)
    assert crowd.turn is not Turn.ON


def test_pauses_double_and_stays_do() -> None:
    for speculating_ms, turn in ((12.0, Turn.OFF), (5.0, Turn.ON)):
        crowd = Crowd()
        lengths, length, before = [], 0, crowd.turn
        for _ in range(4 * 900):
            allowed = crowd.allows(4)
            crowd.add(1, speculating_ms if allowed else PLAIN_MS)
            length += crowd.turn is turn
            if before is turn and crowd.turn is not turn:
                lengths.append(length)
                length = 0
            before = crowd.turn
        assert len(lengths) >= 2
        if turn is Turn.OFF:
            assert all(later > 1.5 * earlier for earlier, later in pairwise(lengths))


def test_what_no_longer_pays_ends() -> None:
    crowd = Crowd()
    tokens_speculated(crowd, 4, 200, 5.0)
    assert crowd.allows(4)
    assert tokens_speculated(crowd, 4, 400, 20.0) < 160


def test_each_number_of_sessions_has_its_own_verdict() -> None:
    crowd = Crowd()
    tokens_speculated(crowd, 2, 100, 5.0)
    tokens_speculated(crowd, 8, 100, 20.0)
    assert crowd.allows(2)
    assert not crowd.allows(8)
    assert not crowd.allows(7)  # about as many


def test_a_trial_that_others_join_is_none() -> None:
    crowd = Crowd()
    tokens_speculated(crowd, 4, 18, 5.0)
    assert crowd.allows(4)  # a trial
    crowd.allows(3)
    assert crowd.turn is Turn.BEFORE


def test_without_slack_nothing_is_tried() -> None:
    crowd = Crowd()
    for _ in range(1000):
        assert not crowd.allows(8)
        crowd.add(1, PLAIN_MS, row_ms=1.0)
    assert crowd.turn is Turn.OFF
    assert crowd.gain is None
