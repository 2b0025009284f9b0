"""Acceptance on recorded answers: windows, intervals, gains, and what to draft."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.tuning.acceptance import (
    NUM_DRAFTED,
    AnswerDrafts,
    acceptance_of,
    expected_at,
    gain,
    is_degenerate,
    windows,
)
from mesh.tuning.jobs import Measured
from mesh.tuning.report import RingTimes, advise, as_markdown, sections_of

if TYPE_CHECKING:
    from mesh.tuning.conversation_file import Api


def drafts(prompt: str, *num_right: int, api: Api = "chat") -> AnswerDrafts:
    counts = np.array(num_right, np.int64)
    return AnswerDrafts(prompt, prompt, api, counts, len(counts) + 5, len(counts), is_degenerate=False)


def many(level: int, num_prompts: int = 30) -> list[AnswerDrafts]:
    noise = np.random.default_rng(3)
    return [
        drafts(str(number), *np.minimum(NUM_DRAFTED, noise.integers(0, 2, 80) + level))
        for number in range(num_prompts)
    ]


@given(st.lists(st.integers(0, NUM_DRAFTED), max_size=40))
def test_windows_cover_an_answer_once(num_right: list[int]) -> None:
    found = windows(np.array(num_right, np.int64))
    starts = np.cumsum([0, *(found + 1)])[:-1]
    assert [num_right[start] for start in starts] == found.tolist()
    assert not num_right or starts[-1] + found[-1] + 1 >= len(num_right)


def test_acceptance_is_counted_over_windows() -> None:
    # Windows of 2, 0, 1 and 4 accepted tokens.
    found = acceptance_of([drafts("a", 2, 9, 9, 0, 1, 9, 4)])
    assert found is not None
    assert (found.num_windows, found.num_prompts, found.num_tokens) == (4, 1, 12)
    assert [each.value for each in found.unconditional] == [0.75, 0.5, 0.25, 0.25]
    assert found.conditional == pytest.approx((0.75, 2 / 3, 0.5, 1.0))
    assert found.per_window.value == 1.75
    assert found.coverage == pytest.approx(7 / 12)
    assert not found.is_enough


def test_an_answer_that_repeats_itself_is_left_out_and_counted() -> None:
    assert is_degenerate(np.array([1, 2, 3, 4] * 5, np.int32))
    assert not is_degenerate(np.arange(40, dtype=np.int32))
    assert not is_degenerate(np.array([1, 2], np.int32))
    found = acceptance_of([drafts("a", 1, 0, 1), replace(drafts("b", 4, 4, 4), is_degenerate=True)])
    assert found is not None
    assert (found.num_prompts, found.num_degenerate) == (1, 1)
    assert found.per_window.value < 4
    assert acceptance_of([]) is None
    assert acceptance_of([replace(drafts("b", 4), is_degenerate=True)]) is None


def test_intervals_are_over_prompts() -> None:
    alike = acceptance_of([drafts(str(number), *[1, 0] * 20) for number in range(10)])
    assert alike is not None
    assert alike.per_window.low == alike.per_window.high == alike.per_window.value
    unlike = acceptance_of([drafts(str(number), *[number % 2] * 40) for number in range(10)])
    assert unlike is not None
    assert unlike.per_window.low < unlike.per_window.value < unlike.per_window.high
    # Several answers to one prompt are one draw.
    one = acceptance_of([drafts("same", *[number % 2] * 40) for number in range(10)])
    assert one is not None
    assert one.num_prompts == 1
    assert one.per_window.low == one.per_window.high


def test_gains_are_paired() -> None:
    before, after = many(0), many(1)
    found = gain(before, after)
    assert found is not None
    assert found.first.low > 0.3
    assert found.per_window.low > 0.8
    same = gain(before, before)
    assert same is not None
    assert (same.per_window.low, same.per_window.value, same.per_window.high) == (0, 0, 0)
    assert gain([], []) is None
    # Of what is measured hours apart, the oldest answers may be gone; they were easy ones.
    easy = [drafts(f"easy {number}", *[4] * 80) for number in range(9)]
    assert gain([*easy, *before], before) == same
    assert gain(before, [*before, *easy]) == same


def test_positions_beyond_the_counted_ones_go_on_falling() -> None:
    found = acceptance_of(many(1))
    assert found is not None
    expected = expected_at(found, 8)
    assert expected[:4] == tuple(each.value for each in found.unconditional)
    assert all(later <= earlier for earlier, later in pairwise(expected))
    assert len(expected) == 8


def test_more_is_drafted_where_the_network_is_slow() -> None:
    found = acceptance_of(many(1))
    assert found is not None
    times = RingTimes(((1, 20.0), (2, 24.0), (5, 36.0), (9, 52.0)), draft_ms=1.0, num_stages=2)
    near, far = advise(found, times, 0.1), advise(found, times, 20.0)
    assert far.best >= near.best >= 1
    assert far.speedup > near.speedup > 1
    assert far.rates[0].tokens_per_s == pytest.approx(1000 / (3 * 20 + 20))
    assert far.rates[3].tokens_per_s == pytest.approx(
        1000 * (1 + sum(expected_at(found, 3))) / (60 + 32 + 3), rel=1e-6
    )
    assert far.in_flight > 0


def test_nothing_is_drafted_where_it_does_not_pay() -> None:
    found = acceptance_of([drafts(str(number), *[0] * 20) for number in range(30)])
    assert found is not None
    times = RingTimes(((1, 20.0), (9, 180.0)), draft_ms=1.0, num_stages=1)
    advice = advise(found, times, 5.0)
    assert (advice.best, advice.speedup) == (0, 1.0)


def test_a_report_has_chat_and_raw_apart() -> None:
    raw = [replace(each, api="raw") for each in many(2)]
    before = Measured("old.gguf", (*many(0), *raw))
    after = Measured("new.gguf", (*many(1), *raw))
    times = RingTimes(((1, 20.0), (9, 60.0)), draft_ms=1.0, num_stages=2)
    sections = sections_of("sql", [before, after], [times, times], ["A note."])
    assert [section.api for section in sections] == ["chat", "raw"]
    text = as_markdown("Drafters", sections)
    chat, raw_text = text.split("## sql: raw")
    assert "## sql: chat" in chat
    assert "A note." in chat
    assert "| new.gguf |" in chat
    assert "new.gguf over old.gguf, paired: first token +0." in chat
    assert "first token +0.000 [+0.000, +0.000]" in raw_text
    assert "| 20 ms |" in chat
    assert "Too few" not in text
    few = as_markdown("Drafters", sections_of("sql", [Measured("x.gguf", tuple(many(0, 3)))], [None]))
    assert "Too few to tell: at least 20 prompts and 2,000 tokens" in few
    assert "Computed" not in few
    assert sections[0].as_dict()["rows"][1]["gain"]["per_window"]["low"] > 0
