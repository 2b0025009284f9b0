"""From prompt to last token, the model a plain rule: whatever flies, the same text comes out."""

from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator.generation import Generation, WindowPlan
from mesh.engine import GenerationRequest, PrefillProgress
from spanmesh_proto.errors import ProtocolError
from speculative.acceptance import SpanClass
from speculative.proposer import Proposal


def rule(tokens: Sequence[int]) -> int:
    """A deterministic next token with repeats in it, so that some guesses are right."""
    return (tokens[-1] * 3 + len(tokens) // 4) % 7


def proposal(*tokens: int) -> Proposal:
    return Proposal(tokens, (0.5,) * len(tokens), "test")


class Tail:
    """Trims at `start`, computes, and draws: all that the stages do together."""

    def __init__(self) -> None:
        self._cached: list[int] = []

    def answer(self, window: WindowPlan) -> tuple[int, ...]:
        assert window.start <= len(self._cached)
        self._cached = [*self._cached[: window.start], *window.tokens]
        sampled = []
        for place in range(window.stop - window.num_verified, window.stop):
            sampled.append(rule(self._cached[: place + 1]))
            if place + 1 < window.stop and self._cached[place + 1] != sampled[-1]:
                break
        return tuple(sampled)


def run(
    request: GenerationRequest,
    offsets: Sequence[int],
    widths: Sequence[int],
    *,
    depth: int,
    max_rows: int,
    context_length: int,
) -> tuple[list[int], str]:
    """Answer a request. Guess `i` is wrong by `offsets[i]`, window `i` proposes `widths[i]`, both in turn."""
    generation = Generation(request, context_length=context_length, max_rows=max_rows)
    tail = Tail()
    verdicts: deque[tuple[int, ...]] = deque()
    answer: list[int] = []
    num_guessed = num_sent = 0

    def send(window: WindowPlan) -> None:
        assert 1 <= len(window.tokens) <= max_rows
        assert window.stop <= context_length
        verdicts.append(tail.answer(window))

    def guess() -> Proposal:
        nonlocal num_guessed, num_sent
        known = [*request.prompt, *answer, *generation.ahead]
        width = max(0, min(generation.room, widths[num_sent % len(widths)] if widths else 0))
        num_sent += 1
        for _ in range(width):
            known.append((rule(known) + offsets[num_guessed % len(offsets)]) % 7)
            num_guessed += 1
        return proposal(*known[len(known) - width :])

    while not generation.is_prefilled:
        send(generation.prefill(max_rows))
    for _ in range(1000):
        assert generation.num_in_flight == len(verdicts)
        while generation.num_in_flight < depth and (ahead := guess()).tokens:
            send(generation.next_window(ahead))
        step = generation.commit(verdicts.popleft())
        if step is None:
            continue
        answer.extend(step.judgement.committed)
        if step.finish is not None:
            assert not generation.num_in_flight
            return answer, step.finish
        if step.voided:
            # The tail answers them all the same; whoever ships windows drops it by its epoch.
            verdicts.clear()
        if not generation.num_in_flight:
            send(generation.next_window(guess()))
    raise AssertionError("it never ends")


@given(
    prompt=st.lists(st.integers(0, 6), min_size=1, max_size=20),
    max_tokens=st.integers(1, 40),
    end_tokens=st.frozensets(st.integers(0, 6), max_size=2),
    offsets=st.lists(st.sampled_from([0, 0, 0, 0, 1]), min_size=1, max_size=16),
    widths=st.lists(st.integers(0, 6), max_size=6),
    depth=st.integers(1, 6),
    max_rows=st.integers(2, 12),
    slack=st.integers(1, 60),
)
def test_speculation_never_changes_the_answer(
    prompt: list[int],
    max_tokens: int,
    end_tokens: frozenset[int],
    offsets: list[int],
    widths: list[int],
    depth: int,
    max_rows: int,
    slack: int,
) -> None:
    request = GenerationRequest(tuple(prompt), max_tokens, end_tokens)
    context_length = len(prompt) + slack
    plain = run(request, [0], [], depth=1, max_rows=max_rows, context_length=context_length)
    flown = run(request, offsets, widths, depth=depth, max_rows=max_rows, context_length=context_length)
    assert flown == plain
    answer, finish = plain
    assert len(answer) <= min(max_tokens, slack)
    assert (finish == "stop") == (answer[-1] in end_tokens)


def generation_with(*windows: Proposal) -> Generation:
    """One that has prompt 1 2 3 and answer 5, and `windows` in flight."""
    generation = Generation(GenerationRequest((1, 2, 3), max_tokens=10), context_length=50, max_rows=8)
    generation.prefill(8)
    generation.commit([5])
    for window in windows:
        generation.next_window(window)
    return generation


class TestFlight:
    def test_each_window_starts_where_the_one_before_stops(self) -> None:
        generation = generation_with(proposal(6, 7))
        assert len(generation.ahead) == 2
        behind = generation.next_window(proposal(8))
        assert (behind.start, behind.tokens, behind.num_verified) == (6, (8,), 1)
        assert generation.num_in_flight == 2
        assert list(generation.ahead) == [6, 7, 8]
        # Ten tokens: one is committed, three fly, the free prediction makes five.
        assert generation.room == 5

    def test_a_free_prediction_confirms_the_window_behind_it(self) -> None:
        generation = generation_with(proposal(6, 7), proposal(8, 9))
        step = generation.commit([6, 7, 8])
        assert step is not None
        assert (step.judgement.committed, step.voided) == ((6, 7, 8), ())
        assert generation.ahead == (9,)
        step = generation.commit([9, 4])
        assert step is not None
        assert step.judgement.committed == (9, 4)
        # Its first token counts as well: it was proposed, and it was right.
        assert (step.judgement.num_proposed, step.judgement.num_accepted) == (2, 2)
        assert step.judgement.span is SpanClass.FULL_ACCEPT
        assert generation.next_window().tokens == (4,)

    def test_a_free_prediction_voids_the_window_behind_it(self) -> None:
        generation = generation_with(proposal(6, 7), proposal(8, 9), proposal(1))
        step = generation.commit([6, 7, 4])
        assert step is not None
        assert step.is_unread_next
        assert [window.tokens for window in step.voided] == [(8, 9), (1,)]
        corrected = generation.next_window(proposal(2))
        assert (corrected.start, corrected.tokens) == (6, (4, 2))

    def test_a_rejection_voids_all_behind_it(self) -> None:
        generation = generation_with(proposal(6, 7), proposal(8))
        step = generation.commit([4])
        assert step is not None
        assert not step.is_unread_next
        assert [window.tokens for window in step.voided] == [(8,)]
        assert (generation.position, generation.next_window().start) == (5, 4)

    def test_the_prompt_s_last_row_confirms_too(self) -> None:
        generation = Generation(GenerationRequest((1, 2, 3), max_tokens=10), context_length=50, max_rows=2)
        generation.prefill(2)
        generation.prefill(2)
        assert generation.next_window(proposal(5, 6)).start == 3
        assert generation.commit([]) is None
        step = generation.commit([5])
        assert step is not None
        assert (step.voided, generation.ahead) == ((), (6,))

    def test_windows_that_do_not_fit_are_refused(self) -> None:
        generation = generation_with(proposal(6, 7))
        for wrong in (proposal(), proposal(*range(7))):
            with pytest.raises(ValueError, match="where 6 fit"):
                generation.next_window(wrong)


@pytest.mark.parametrize(
    ("sampled", "text"), [((), "a verdict of 0 ids"), ((4, 7), "does not continue"), ((6,), "ends early")]
)
def test_a_verdict_that_cannot_be_is_refused(sampled: tuple[int, ...], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        generation_with(proposal(6, 7)).commit(sampled)


def test_a_verdict_on_nothing_is_refused() -> None:
    with pytest.raises(ProtocolError, match="none is in flight"):
        generation_with().commit([1])
    chunked = Generation(GenerationRequest((1, 2, 3), max_tokens=10), context_length=50, max_rows=2)
    chunked.prefill(2)
    with pytest.raises(ProtocolError, match="sampled 1 rows"):
        chunked.commit([1])


@given(num_prompt=st.integers(1, 100), max_rows=st.integers(1, 64), wanted=st.integers(1, 200))
def test_every_token_of_a_scored_prompt_but_the_first_is_scored_once(
    num_prompt: int, max_rows: int, wanted: int
) -> None:
    prompt = tuple(range(1000, 1000 + num_prompt))
    request = GenerationRequest(prompt, 3, num_top_logprobs=0, uses_cache=False, scores_prompt=True)
    generation = Generation(request, context_length=256, max_rows=max_rows)
    for _ in range(2):
        scored: list[int] = []
        while not generation.is_prefilled:
            window = generation.prefill(wanted)
            assert len(window.tokens) <= max_rows
            if window.scored_next is None:
                assert (window.tokens, window.num_verified) == (prompt[-1:], 1)
            else:
                found = (*window.tokens[1:], window.scored_next)
                assert window.num_verified == len(found)
                assert generation.commit(found) is None
                scored += found
        assert tuple(scored) == prompt[1:]
        # Lost before the first token: all is scored again.
        generation.rewind()
    while not generation.is_prefilled:
        window = generation.prefill(wanted)
        if window.scored_next is not None:
            generation.commit((*window.tokens[1:], window.scored_next))
    assert generation.commit((7,)) is not None
    # Lost behind it: none is.
    generation.rewind()
    while not generation.is_prefilled:
        assert generation.prefill(wanted).scored_next is None


def test_scores_of_other_tokens_are_refused() -> None:
    request = GenerationRequest((1, 2, 3), 3, num_top_logprobs=0, uses_cache=False, scores_prompt=True)
    for sampled in ((), (2,), (2, 4), (2, 3, 4)):
        generation = Generation(request, context_length=256, max_rows=8)
        assert generation.prefill(8).scored_next == 3
        with pytest.raises(ProtocolError, match="chunk at 0"):
            generation.commit(sampled)


def test_what_was_read_of_a_prompt_is_what_verdicts_confirm() -> None:
    request = GenerationRequest(tuple(range(10)), max_tokens=4)
    generation = Generation(request, context_length=64, max_rows=4, num_cached=3)
    assert generation.prefill_progress == PrefillProgress(num_tokens=10, num_cached=3, num_read=3)
    generation.prefill(4)
    generation.prefill(4)
    assert generation.prefill_progress.num_read == 3
    assert generation.commit(()) is None
    assert generation.prefill_progress == PrefillProgress(10, 3, 7)
    assert not generation.prefill_progress.is_whole
    generation.commit((5,))
    assert generation.prefill_progress == PrefillProgress(10, 3, 10)
    assert generation.prefill_progress.is_whole
    # In another ring all is read again, the answer so far as well.
    generation.rewind()
    generation.skip(2)
    assert generation.prefill_progress == PrefillProgress(10, 2, 2)
