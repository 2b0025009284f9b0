"""The gate: speculation that does not pay costs a few windows, speculation that pays is left alone."""

import pytest

from speculative.gate import Gate, GateOptions

PLAIN_MS = 10.0


def windows_drafted(gate: Gate, num_windows: int, *, num_committed: int, elapsed_ms: float) -> int:
    """How many of these windows may propose; those that may take and bring what is said."""
    drafted = 0
    for _ in range(num_windows):
        width = gate.decide(4).width
        if width:
            drafted += 1
            gate.record(width, num_committed, elapsed_ms)
        else:
            gate.record(0, 1, PLAIN_MS)
    return drafted


def test_it_measures_a_plain_window_first() -> None:
    gate = Gate()
    assert gate.decide(4).width == 0
    assert "measuring" in gate.decide(4).reason
    gate.record(0, 1, PLAIN_MS)
    assert gate.decide(4).width == 4
    assert "open" in gate.decide(4).reason


@pytest.mark.parametrize(("num_committed", "elapsed_ms"), [(2, 19.0), (5, 20.0), (1, 10.0)])
def test_it_stays_open_while_proposing_pays(num_committed: int, elapsed_ms: float) -> None:
    assert windows_drafted(Gate(), 200, num_committed=num_committed, elapsed_ms=elapsed_ms) == 199


@pytest.mark.parametrize(("num_committed", "elapsed_ms"), [(1, 20.0), (1, 12.0), (3, 45.0)])
def test_losses_are_bounded(num_committed: int, elapsed_ms: float) -> None:
    """A thousand windows lose what the account allows, one window's excess, and a few tries."""
    drafted = windows_drafted(Gate(), 1000, num_committed=num_committed, elapsed_ms=elapsed_ms)
    loss_each = elapsed_ms / PLAIN_MS - num_committed
    tries = 9  # pauses of 8, 16, … 256, 256, 256: at most this many fit a thousand windows
    assert drafted * loss_each <= 2.0 + loss_each + tries * (1.0 + loss_each)


def test_it_says_for_how_long_it_is_shut() -> None:
    gate = Gate()
    gate.record(0, 1, PLAIN_MS)
    gate.record(4, 1, 50.0)
    decision = gate.decide(4)
    assert decision.width == 0
    assert decision.reason == "proposing lost time: trying again in 8 windows"


def test_pauses_double_and_a_win_ends_them() -> None:
    gate = Gate(GateOptions(first_pause=2, max_pause=8))
    gate.record(0, 1, PLAIN_MS)
    pauses = []
    for _ in range(5):
        gate.record(4, 1, 50.0)
        pause = 0
        while not gate.decide(4).width:
            gate.record(0, 1, PLAIN_MS)
            pause += 1
        pauses.append(pause)
    assert pauses == [2, 4, 8, 8, 8]
    gate.record(4, 5, 20.0)
    gate.record(4, 1, 90.0)
    assert "in 2 windows" in gate.decide(4).reason


def test_a_good_start_pays_for_few_bad_windows() -> None:
    gate = Gate()
    assert windows_drafted(gate, 101, num_committed=5, elapsed_ms=20.0) == 100
    assert windows_drafted(gate, 30, num_committed=1, elapsed_ms=20.0) < 10


def test_a_new_session_inherits_doubts_but_no_credit() -> None:
    lost, won = Gate(), Gate()
    windows_drafted(lost, 500, num_committed=1, elapsed_ms=30.0)
    windows_drafted(won, 500, num_committed=5, elapsed_ms=20.0)
    fresh_loss = windows_drafted(Gate(), 100, num_committed=1, elapsed_ms=20.0)
    assert windows_drafted(Gate(prior=lost.account), 100, num_committed=1, elapsed_ms=20.0) < fresh_loss
    assert Gate(prior=won.account).decide(4).width == 4
    assert windows_drafted(Gate(prior=won.account), 100, num_committed=1, elapsed_ms=20.0) == fresh_loss
