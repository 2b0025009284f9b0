"""Rules of tuning in the background: idleness, the gate of candidates, and when a drafter has fallen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.tuning.acceptance import AnswerDrafts
from mesh.tuning.background import IdleClock, ServedAcceptance, judged

if TYPE_CHECKING:
    from collections.abc import Sequence


def answers(rates: Sequence[float], **given: Any) -> list[AnswerDrafts]:
    """An answer to each of twelve prompts, whose windows have so many tokens right in turn."""
    found = []
    for number in range(12):
        noise = np.random.default_rng(number)
        right = np.array([noise.random() < rates[number % len(rates)] for _ in range(60)], np.int64)
        found.append(AnswerDrafts(f"{number}", f"{number}", "chat", right, 60, 60, is_degenerate=False))
    return [replace(each, **given) for each in found]


def test_requests_begin_and_end_idleness() -> None:
    clock = IdleClock()
    # Before a ring there is nothing that could be idle.
    assert clock.idle_s(70.0) == 0.0
    clock.came(70.0)
    assert clock.idle_s(75.0) == 5.0
    clock.began("one", 80.0)
    clock.began("two", 81.0)
    # Again, after a repair.
    clock.began("one", 90.0)
    assert clock.idle_s(500.0) == 0.0
    clock.ended("one", 500.0)
    assert clock.idle_s(600.0) == 0.0
    clock.ended("two", 600.0)
    clock.ended("two", 640.0)
    assert clock.idle_s(660.0) == 60.0


@given(st.lists(st.tuples(st.sampled_from(["came", "began", "ended"]), st.sampled_from("abc"))))
def test_nothing_is_idle_while_a_session_runs(events: list[tuple[str, str]]) -> None:
    clock = IdleClock()
    clock.came(0.0)
    running: set[str] = set()
    for now_s, (event, session) in enumerate(events, 1):
        if event == "came":
            clock.came(now_s)
        else:
            getattr(clock, event)(session, now_s)
            (running.add if event == "began" else running.discard)(session)
        assert (clock.idle_s(now_s + 9.0) == 0.0) == bool(running)
        assert clock.idle_s(now_s + 9.0) <= now_s + 9.0


def test_a_candidate_that_is_surely_better_is_chosen() -> None:
    verdict = judged(answers([0.2]), answers([0.6]))
    assert verdict.refusal is None
    assert verdict.gain is not None
    assert verdict.gain.per_window.low > 0.2


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (answers([0.5]), answers([0.5]), "its gain is not sure: +0.000 [+0.000, +0.000]"),
        (answers([0.6]), answers([0.2]), "its gain is not sure: -0."),
        # Some prompts win and others lose.
        (answers([0.4]), answers([0.1, 0.9]), "its gain is not sure: "),
        (answers([0.2])[:7], answers([0.6])[:7], "7 held-out prompts are too few to tell, need 8"),
        # Five answers were erased before the candidate was measured.
        (answers([0.2]), answers([0.6])[5:], "7 held-out prompts are too few to tell, need 8"),
        (answers([0.2], is_degenerate=True), answers([0.6], is_degenerate=True), "0 held-out prompts are"),
        ([], [], "0 held-out prompts are too few"),
        (
            [*answers([0.2]), *answers([0.5], api="raw", prompt_id="raw")],
            [*answers([0.8]), *answers([0.4], api="raw", prompt_id="raw")],
            "it is right less often in raw: -0.",
        ),
    ],
)
def test_another_candidate_is_refused(
    before: list[AnswerDrafts], after: list[AnswerDrafts], says: str
) -> None:
    assert (judged(before, after).refusal or "").startswith(says)


def test_a_small_loss_in_a_kind_is_no_reason() -> None:
    more, less = (answers([rate], api="raw", prompt_id="raw") for rate in (0.5, 0.5))
    less[0] = replace(less[0], num_right=less[0].num_right * (np.arange(60) > 4))
    assert judged([*answers([0.2]), *more], [*answers([0.8]), *less]).refusal is None


def served(acceptance: ServedAcceptance, number: int, num_right: int, num_windows: int = 100) -> None:
    for index in range(num_windows):
        acceptance.add(number, is_accepted=index < num_right)


def test_a_drafter_has_fallen_once_enough_windows_say_so() -> None:
    acceptance = ServedAcceptance(100)
    served(acceptance, 0, 50)
    assert acceptance.rate(0) == 0.5
    served(acceptance, 1, 0, 99)
    assert acceptance.rate(1) is None
    assert not acceptance.has_fallen(1, 0.5)
    served(acceptance, 1, 0, 1)
    assert acceptance.has_fallen(1, 0.5)
    assert not acceptance.has_fallen(1, None)
    # The latest ones count: 45 of 100 are nine tenths of 50.
    served(acceptance, 1, 45)
    assert not acceptance.has_fallen(1, acceptance.rate(0))
    served(acceptance, 1, 44)
    assert acceptance.has_fallen(1, acceptance.rate(0))
    assert acceptance.rate(2) is None
