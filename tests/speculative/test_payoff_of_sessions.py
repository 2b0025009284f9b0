"""Turns of several sessions: what pays for all goes on, what does not is tried ever more rarely."""

from itertools import pairwise

import pytest

from speculative.payoff import GroupPayoff, GroupPayoffOptions, GroupPhase

PLAIN_MS = 10.0


def tokens_speculated(
    group_payoff: GroupPayoff, num_sessions: int, num_tokens: int, speculating_ms: float
) -> int:
    """Of so many tokens of each session, those committed while speculating; what they take is given."""
    speculated = 0
    for _ in range(num_tokens * num_sessions):
        allowed = group_payoff.allows(num_sessions)
        group_payoff.add(1, speculating_ms if allowed else PLAIN_MS)
        speculated += allowed
    return speculated // num_sessions


def test_it_measures_plain_tokens_first() -> None:
    group_payoff = GroupPayoff()
    assert not group_payoff.allows(4)
    assert group_payoff.plain_ms is None
    assert tokens_speculated(group_payoff, 4, 17, 5.0) == 0
    assert group_payoff.allows(4)
    assert group_payoff.plain_ms == pytest.approx(PLAIN_MS)


def test_what_pays_goes_on() -> None:
    group_payoff = GroupPayoff()
    assert tokens_speculated(group_payoff, 4, 1000, 5.0) > 850
    assert group_payoff.gain == pytest.approx(2.0)


@pytest.mark.parametrize("num_sessions", [2, 4, 8])
@pytest.mark.parametrize("speculating_ms", [9.8, 12.0, 30.0])
def test_what_does_not_pay_costs_little(num_sessions: int, speculating_ms: float) -> None:
    group_payoff, options = GroupPayoff(), GroupPayoffOptions()
    speculated = tokens_speculated(group_payoff, num_sessions, 1000, speculating_ms)
    tries = 4  # pauses of 64, 128, 256, 512
    assert speculated <= tries * (options.settle + options.trial / num_sessions + 1)
    assert group_payoff.phase is not GroupPhase.ON


def test_pauses_double_and_stays_do() -> None:
    for speculating_ms, phase in ((12.0, GroupPhase.OFF), (5.0, GroupPhase.ON)):
        group_payoff = GroupPayoff()
        lengths, length, before = [], 0, group_payoff.phase
        for _ in range(4 * 900):
            allowed = group_payoff.allows(4)
            group_payoff.add(1, speculating_ms if allowed else PLAIN_MS)
            length += group_payoff.phase is phase
            if before is phase and group_payoff.phase is not phase:
                lengths.append(length)
                length = 0
            before = group_payoff.phase
        assert len(lengths) >= 2
        if phase is GroupPhase.OFF:
            assert all(later > 1.5 * earlier for earlier, later in pairwise(lengths))


def test_what_no_longer_pays_ends() -> None:
    group_payoff = GroupPayoff()
    tokens_speculated(group_payoff, 4, 200, 5.0)
    assert group_payoff.allows(4)
    assert tokens_speculated(group_payoff, 4, 400, 20.0) < 160


def test_each_number_of_sessions_has_its_own_verdict() -> None:
    group_payoff = GroupPayoff()
    tokens_speculated(group_payoff, 2, 100, 5.0)
    tokens_speculated(group_payoff, 8, 100, 20.0)
    assert group_payoff.allows(2)
    assert not group_payoff.allows(8)
    assert not group_payoff.allows(7)  # about as many


def test_a_trial_that_others_join_is_none() -> None:
    group_payoff = GroupPayoff()
    tokens_speculated(group_payoff, 4, 18, 5.0)
    assert group_payoff.allows(4)  # a trial
    group_payoff.allows(3)
    assert group_payoff.phase is GroupPhase.BEFORE


def test_without_slack_nothing_is_tried() -> None:
    group_payoff = GroupPayoff()
    for _ in range(1000):
        assert not group_payoff.allows(8)
        group_payoff.add(1, PLAIN_MS, row_ms=1.0)
    assert group_payoff.phase is GroupPhase.OFF
    assert group_payoff.gain is None
