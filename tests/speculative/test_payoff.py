"""The account: speculation that does not pay costs a few tokens, speculation that pays is left alone."""

from dataclasses import replace

import pytest

from speculative.payoff import DraftingRecord, PayoffOptions, PayoffRecord, SessionPayoff

PLAIN_MS = 10.0


def tokens_speculated(
    payoff: SessionPayoff, num_tokens: int, *, num_committed: int, elapsed_ms: float
) -> int:
    """Tokens committed while speculating was allowed; windows bring and take what is said."""
    speculated = done = 0
    while done < num_tokens:
        if payoff.is_open:
            payoff.add(num_committed, elapsed_ms, PLAIN_MS)
            speculated += num_committed
            done += num_committed
        else:
            payoff.add_plain(1)
            done += 1
    return speculated


@pytest.mark.parametrize(("num_committed", "elapsed_ms"), [(2, 19.0), (5, 20.0), (1, 9.5)])
def test_it_stays_open_while_speculating_pays(num_committed: int, elapsed_ms: float) -> None:
    payoff = SessionPayoff()
    assert tokens_speculated(payoff, 200, num_committed=num_committed, elapsed_ms=elapsed_ms) >= 200
    assert payoff.balance >= 0.0


@pytest.mark.parametrize(("num_committed", "elapsed_ms"), [(1, 20.0), (1, 12.0), (3, 35.0)])
def test_losses_are_bounded(num_committed: int, elapsed_ms: float) -> None:
    """A thousand tokens lose what the account allows, a window's excess, and a few tries."""
    payoff, options = SessionPayoff(), PayoffOptions()
    speculated = tokens_speculated(payoff, 1000, num_committed=num_committed, elapsed_ms=elapsed_ms)
    loss_each = options.premium * elapsed_ms / PLAIN_MS - num_committed
    tries = 5  # pauses of 48, 96, 192, 384, 512: no more fit
    assert speculated / num_committed * loss_each <= (
        options.max_loss + loss_each + tries * (options.retry_loss + loss_each)
    )


def test_pauses_double_and_winning_back_ends_them() -> None:
    payoff = SessionPayoff(PayoffOptions(first_pause=2, max_pause=8))
    pauses = []
    for _ in range(4):
        while payoff.is_open:
            payoff.add(1, 30.0, PLAIN_MS)
        pauses.append(payoff.wait)
        payoff.add_plain(payoff.wait)
    assert pauses == [2, 4, 8, 8]
    for _ in range(4):
        payoff.add(3, 10.0, PLAIN_MS)
    while payoff.is_open:
        payoff.add(1, 30.0, PLAIN_MS)
    assert payoff.wait == 2


def test_a_good_start_pays_for_few_bad_windows() -> None:
    payoff = SessionPayoff()
    tokens_speculated(payoff, 500, num_committed=5, elapsed_ms=20.0)
    assert tokens_speculated(payoff, 30, num_committed=1, elapsed_ms=20.0) < 10


def test_a_hiccup_is_no_reason_to_stop_for_long() -> None:
    payoff = SessionPayoff()
    tokens_speculated(payoff, 100, num_committed=5, elapsed_ms=20.0)
    payoff.add(1, 60_000.0, PLAIN_MS)
    assert payoff.is_open


def test_one_in_doubt_has_less_to_lose() -> None:
    doubtful, fresh = SessionPayoff(record=PayoffRecord(90.0, 100.0, PLAIN_MS, 48, 0)), SessionPayoff()
    for payoff in (doubtful, fresh):
        payoff.add(0, 5.0, PLAIN_MS)
    assert not doubtful.is_open
    assert fresh.is_open


def test_a_gain_before_pays_for_a_bad_start() -> None:
    trusted, fresh = SessionPayoff(record=PayoffRecord(90.0, 60.0, PLAIN_MS, 48, 0)), SessionPayoff()
    for payoff in (trusted, fresh):
        payoff.add(0, 15.0, PLAIN_MS)
    assert trusted.is_open
    assert not fresh.is_open


def test_a_pause_outlasts_its_session() -> None:
    first = SessionPayoff()
    while first.num_tokens < 32:
        if first.is_open:
            first.add(1, 30.0, PLAIN_MS)
        else:
            first.add_plain(1)
    record = first.record
    assert record is not None
    second = SessionPayoff(record=record)
    assert second.wait == min(record.wait, 96) > 0
    second.add_plain(second.wait)
    assert second.is_open


def test_few_tokens_tell_nothing_until_those_of_several_sessions_are_enough() -> None:
    record, num_sessions = None, 0
    while record is None or record.won_share is None:
        payoff = SessionPayoff(record=record)
        assert (payoff.balance, payoff.wait) == (0.0, 0)
        while payoff.is_open:
            payoff.add(2, 30.0, PLAIN_MS)
        record = payoff.record
        assert record is not None
        num_sessions += 1
    assert num_sessions > 2
    # Two tokens in the time of three.
    assert record.won_share == pytest.approx(-1 / 3)
    following = SessionPayoff(record=record)
    assert following.wait > 0
    assert following.balance < 0


def test_stops_of_several_sessions_tell_though_each_commits_little() -> None:
    record = None
    for number in range(6):
        payoff = SessionPayoff(record=record)
        assert payoff.is_open == (number < 3)
        if payoff.is_open:
            payoff.add(1, 20.0, PLAIN_MS)
        record = payoff.record
    assert record is not None
    assert record.num_tokens < 4
    # One that wins is trusted again.
    winner = SessionPayoff(record=record)
    winner.add_plain(winner.wait)
    for _ in range(10):
        winner.add(3, 20.0, PLAIN_MS)
    assert winner.record is not None
    assert winner.record.num_stops == 0


def test_short_losses_do_not_outweigh_a_long_gain() -> None:
    """Of two sessions, one ends its speculation after a few tokens, and the other wins until its end."""
    record = None
    for tokens_in_30_ms in (2, 4, 2, 4):
        payoff = SessionPayoff(record=record)
        for _ in range(20):
            if payoff.is_open:
                payoff.add(tokens_in_30_ms, 30.0, PLAIN_MS)
            else:
                payoff.add_plain(3)
        record = payoff.record
    assert record is not None
    assert record.won_share is not None
    assert record.won_share > 0.2
    assert SessionPayoff(record=record).is_open


def test_heavy_losses_are_remembered_though_they_commit_little() -> None:
    record = None
    for _ in range(30):
        payoff = SessionPayoff(record=record)
        for _ in range(6):
            if payoff.is_open:
                payoff.add(1, 100.0, PLAIN_MS)
            else:
                payoff.add_plain(1)
        record = payoff.record
    assert record is not None
    assert record.won_share == pytest.approx(-0.9)
    assert not SessionPayoff(record=record).is_open


def test_a_record_forgets() -> None:
    record = None
    for tokens_in_30_ms in (6, 6, 6, 3, 3, 3):
        payoff = SessionPayoff(record=record)
        for _ in range(20):
            payoff.add(tokens_in_30_ms, 30.0, PLAIN_MS)
        record = payoff.record
    assert record is not None
    assert record.num_plain_tokens <= 64
    assert record.won_share == pytest.approx(0.0, abs=0.15)


def test_what_was_learned_on_another_wire_does_not_hold() -> None:
    record = PayoffRecord(90.0, 100.0, PLAIN_MS, 48, 48)
    assert all(record.holds_at(plain_ms) for plain_ms in (8.0, 10.0, 12.0))
    assert not any(record.holds_at(plain_ms) for plain_ms in (2.5, 40.0))


def test_luck_is_neither_gain_nor_loss() -> None:
    """What counts for the balance is what was to be expected; the figures tell what was won."""
    lucky, expected, unlucky = SessionPayoff(), SessionPayoff(), SessionPayoff()
    lucky.add(2, 50.0, 40.0, luck=0.6)
    expected.add(1, 50.0, 40.0, luck=-0.4)
    unlucky.add(1, 50.0, 40.0)
    assert lucky.balance == pytest.approx(expected.balance)
    assert unlucky.balance < expected.balance
    assert (lucky.num_tokens, expected.num_tokens) == (2, 1)


def test_a_window_without_proposals_counts_as_far_as_it_is_slower() -> None:
    payoff = SessionPayoff()
    for _ in range(50):
        payoff.add(1, 40.5, 40.0, is_silent=True)
    assert (payoff.balance, payoff.is_open) == (0.0, True)
    payoff.add(1, 44.0, 40.0, is_silent=True)
    assert payoff.balance == pytest.approx(-0.08)
    for _ in range(10):
        payoff.add(1, 44.0, 40.0, is_silent=True)
    assert not payoff.is_open


def after_answers(record: DraftingRecord, *drafted: int) -> DraftingRecord:
    """The record after answers of 40 tokens, so many of them drafted."""
    for num_drafted in drafted:
        record = record.after(40, num_drafted)
    return record


def test_a_drafter_that_brings_hardly_any_token_is_left_out_for_ever_longer() -> None:
    record = after_answers(DraftingRecord(), 0, 1)
    assert record.wait == 0
    waits = []
    record = after_answers(record, 0)
    for _ in range(5):
        waits.append(record.wait)
        # It is tried again with one answer.
        record = after_answers(replace(record, wait=0), 0)
    assert waits == [256, 512, 1024, 2048, 2048]


@pytest.mark.parametrize("drafted", [(2, 2, 2), (0, 0, 8), (12, 0, 0, 0)])
def test_a_drafter_that_brings_some_is_not(drafted: tuple[int, ...]) -> None:
    record = after_answers(DraftingRecord(), *drafted, *(1,) * 20)
    assert record.wait == 0
    assert record.num_tokens <= 128


def test_one_that_is_right_again_is_as_good_as_new() -> None:
    record = after_answers(DraftingRecord(), 0, 0, 0)
    record = after_answers(replace(record, wait=0), 0)
    assert record.wait == 512
    record = after_answers(replace(record, wait=0), 20)
    assert record.wait == 0
    assert after_answers(record, *(0,) * 9).wait == 256


def test_what_is_not_drafted_for_changes_nothing() -> None:
    record = after_answers(DraftingRecord(), 0, 0)
    assert record.after(0, 0) == record
    payoff = SessionPayoff(record=PayoffRecord(0.0, 0.0, PLAIN_MS, 48, 0, 0, record))
    payoff.add(40, 400.0, PLAIN_MS)
    assert payoff.record is not None
    assert payoff.record.drafting == record
    assert not payoff.record.rests_long
    payoff.add_drafting(40, 0)
    assert payoff.record.rests_long
    # Answers without drafters shorten the wait.
    assert payoff.record.waited(200).rests_long
    assert not payoff.record.waited(240).rests_long
