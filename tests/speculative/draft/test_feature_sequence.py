"""Drafted text from features, under any schedule: rows consume what they should, and chains end in time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.draft.context import DraftOptions
from speculative.draft.session import MOST_FEATURES, DraftedToken, FeatureSequence, FeatureSpan

DRAFT_MAX = 4
OPTIONS = DraftOptions(draft_max=DRAFT_MAX, ctx_size=512)
# Prompt and answer: what will be committed.
TEXT = tuple((7 * place + place // 3) % 23 for place in range(400))
ROW = np.ndarray[tuple[int], np.dtype[np.float32]]


def feature(position: int, kind: float = 1.0) -> ROW:
    """The target's feature of a position."""
    return np.array([kind, position, TEXT[position] if position >= 0 else -1], np.float32)


class Machine:
    """A sequence, and a cache that knows what each of its rows was computed from."""

    def __init__(self, *, is_mtp: bool) -> None:
        zeros = feature(-1) if is_mtp else None
        self.sequence = FeatureSequence("eagle3", OPTIONS, lambda _token: False, zeros=zeros)
        self.first_row = 0 if is_mtp else 1
        # What each row consumed, by token index: a feature, or the state of the row before.
        self.cache: dict[int, tuple[int, ROW]] = {}
        self.span: FeatureSpan | None = None
        self.num_committed = 0
        self.in_flight: list[int] = []
        self.num_drafted = 0

    def commit(self, count: int) -> None:
        tokens = TEXT[self.num_committed : self.num_committed + count]
        self.num_committed += len(tokens)
        self.sequence.extend(tokens)
        agree = self.in_flight[: len(tokens)] == list(tokens)
        self.in_flight = self.in_flight[len(tokens) :] if agree else []

    def features(self, start: int, count: int) -> None:
        stop = min(start + count, self.num_committed - 1)
        if start < stop:
            self.sequence.take_features(start, np.stack([feature(place) for place in range(start, stop)]))

    def propose(self, max_tokens: int) -> None:
        proposal = self.sequence.propose(max_tokens, self.in_flight)
        assert len(proposal.depths) == len(proposal.tokens) == len(proposal.confidences)
        assert all(1 <= depth <= DRAFT_MAX for depth in proposal.depths)
        self.in_flight += proposal.tokens

    def begin(self, max_rows: int) -> None:
        span = self.sequence.next_span(max_rows)
        assert span is None or isinstance(span, FeatureSpan)
        self.span = span
        if span is None:
            return
        assert 1 <= len(span.tokens) <= max_rows
        assert list(span.tokens) == self.sequence.tokens[span.start : span.stop]
        assert span.start >= self.first_row
        kept = {} if span.is_anew else {row: what for row, what in self.cache.items() if row < span.start}
        assert sorted(kept) == list(range(span.start - len(kept), span.start)), "no gap in the cache"
        for index, token in enumerate(span.tokens):
            row = span.start + index
            if index < len(span.features):
                assert row < self.num_committed, "a real row is of a committed token"
                assert np.array_equal(span.features[index], feature(row - 1))
                source = span.features[index]
            else:
                assert span.state is not None
                assert index == len(span.tokens) - 1
                assert span.state.tolist() == self.state(row - 1).tolist()
                source = span.state
            kept[row] = (token, source)
        self.cache = kept

    def state(self, row: int) -> ROW:
        """Output state of a row, which tells all that the rows up to it consumed."""
        assert all(self.cache[each][0] == self.sequence.tokens[each] for each in self.cache if each <= row)
        seen = [(each, *self.cache[each][1].tolist()) for each in sorted(self.cache) if each <= row]
        return np.array([2.0, row, hash(tuple(seen)) % 9973], np.float32)

    def end(self, *, is_right: bool, is_aborted: bool) -> None:
        if self.span is None:
            return
        span, self.span = self.span, None
        if is_aborted:
            self.sequence.dropped()
            self.cache = {
                row: what for row, what in self.cache.items() if row < span.start and not span.is_anew
            }
            return
        if not span.has_output:
            self.sequence.computed()
            return
        # The text before the span may have changed meanwhile, and its own tokens be there again.
        tokens = self.sequence.tokens
        is_there = span.stop <= len(tokens) and all(
            token == tokens[row] for row, (token, _) in self.cache.items() if row < span.stop
        )
        state = self.state(span.stop - 1) if is_there else feature(0, 3.0)
        right = TEXT[span.stop] if span.stop < len(TEXT) else 0
        before = len(self.sequence.tokens)
        self.sequence.computed([DraftedToken(right if is_right else right + 1, 0.5)], state)
        self.num_drafted += len(self.sequence.tokens) - before


ACTIONS = st.one_of(
    st.tuples(st.just("commit"), st.integers(1, 4), st.just(0)),
    st.tuples(st.just("features"), st.integers(0, 59), st.integers(1, 20)),
    st.tuples(st.just("recent"), st.integers(1, 8), st.just(0)),
    st.tuples(st.just("propose"), st.integers(0, 6), st.just(0)),
    st.tuples(st.just("others"), st.integers(1, 3), st.just(0)),
    st.tuples(st.just("begin"), st.integers(1, 24), st.just(0)),
    st.tuples(st.just("end"), st.integers(0, 5), st.just(0)),
    # Most of what happens: a window comes back with its features, more is proposed, and rows are computed.
    st.tuples(st.just("window"), st.integers(1, 4), st.integers(0, 4)),
    st.tuples(st.just("compute"), st.integers(1, 5), st.integers(0, 5)),
    st.tuples(st.just("compute"), st.integers(1, 5), st.integers(0, 5)),
)


@given(st.booleans(), st.lists(ACTIONS, min_size=20, max_size=80))
def test_each_row_consumes_what_it_should(is_mtp: bool, actions: list[tuple[str, int, int]]) -> None:  # noqa: FBT001
    machine = Machine(is_mtp=is_mtp)
    machine.commit(8)
    machine.features(0, 7)
    machine.propose(2)
    for name, number, other in actions:
        match name:
            case "window":
                machine.features(machine.num_committed - 1, number)
                machine.commit(number)
                machine.features(machine.num_committed - 1 - number, number)
                machine.propose(other)
            case "compute":
                for _ in range(number):
                    if machine.span is None:
                        machine.begin(24)
                    machine.end(is_right=other > 1, is_aborted=other == 0)
            case "commit":
                machine.commit(number)
            case "features":
                machine.features(number, other)
            case "recent":
                machine.features(max(0, machine.num_committed - 1 - number), number)
            case "propose":
                machine.propose(number)
            case "others":
                start = machine.num_committed + len(machine.in_flight)
                machine.in_flight += [token + 1 for token in TEXT[start : start + number]]
            case "begin" if machine.span is None:
                machine.begin(number)
            case "end":
                machine.end(is_right=number > 1, is_aborted=number == 0)


def run(machine: Machine, *, is_right: bool = True) -> None:
    """Compute until there is nothing to do."""
    for _ in range(200):
        machine.begin(64)
        if machine.span is None:
            return
        machine.end(is_right=is_right, is_aborted=False)
    raise AssertionError("it never ends")


def test_a_draft_follows_the_features_and_ends_in_time() -> None:
    machine = Machine(is_mtp=False)
    machine.commit(10)
    machine.features(0, 9)
    machine.propose(8)
    run(machine)
    proposal = machine.sequence.propose(8, ())
    assert proposal.tokens == TEXT[10:14]
    assert proposal.depths == (1, 2, 3, 4)
    assert machine.sequence.propose(8, proposal.tokens).tokens == ()


def test_while_all_is_accepted_the_chain_goes_on_and_begins_again_at_its_end() -> None:
    machine = Machine(is_mtp=False)
    machine.commit(10)
    machine.features(0, 9)
    machine.propose(2)
    run(machine)
    machine.propose(2)
    assert machine.in_flight == list(TEXT[10:12])
    # The first window comes back, with features; the second is in flight.
    machine.propose(2)
    run(machine)
    machine.commit(3)
    machine.features(9, 3)
    machine.propose(4)
    run(machine)
    proposal = machine.sequence.propose(4, machine.in_flight)
    start = machine.num_committed + len(machine.in_flight)
    assert proposal.tokens == TEXT[start : start + len(proposal.tokens)]
    assert proposal.tokens


def test_nothing_is_drafted_without_features() -> None:
    machine = Machine(is_mtp=True)
    machine.commit(10)
    machine.propose(4)
    run(machine)
    # The first token of an MTP head has the feature zero, and the end is too far from it.
    assert machine.sequence.propose(4, ()).tokens == ()


def test_a_gap_is_waited_for_shortly_then_left_behind() -> None:
    machine = Machine(is_mtp=False)
    machine.commit(8)
    machine.features(0, 5)
    machine.propose(4)
    run(machine)
    machine.commit(24)
    machine.features(16, 8)
    machine.propose(4)
    run(machine)
    assert machine.sequence.first_row == 1
    machine.features(10, 21)
    machine.propose(4)
    run(machine)
    assert machine.sequence.first_row == 11
    assert machine.sequence.propose(4, ()).tokens == TEXT[32:36]


def test_earlier_features_that_come_late_are_taken_in() -> None:
    machine = Machine(is_mtp=False)
    machine.commit(12)
    machine.features(10, 1)
    machine.propose(4)
    run(machine)
    assert machine.sequence.first_row == 11
    machine.features(0, 11)
    machine.commit(1)
    machine.features(11, 1)
    machine.propose(4)
    run(machine)
    assert machine.sequence.first_row == 1


@pytest.mark.parametrize("num_shared", [5, 9, 11])
def test_the_next_session_with_the_same_beginning_reuses_rows_and_features(num_shared: int) -> None:
    machine = Machine(is_mtp=False)
    machine.commit(12)
    machine.features(0, 11)
    machine.propose(4)
    run(machine)
    former = machine.sequence
    assert former.num_reusable == 12
    following = Machine(is_mtp=False)
    following.cache = {row: what for row, what in machine.cache.items() if row < num_shared}
    following.commit(14)
    following.sequence.adopt(num_shared, former)
    # Stages compute only what is not cached.
    following.features(num_shared, 14)
    following.propose(4)
    run(following)
    assert following.sequence.first_row == 1
    assert following.sequence.propose(4, ()).tokens == TEXT[14:18]


@pytest.mark.parametrize(("ctx_size", "has_rows"), [(64, True), (39, False)])
def test_a_text_beyond_the_context_has_no_rows(ctx_size: int, *, has_rows: bool) -> None:
    sequence = FeatureSequence("eagle3", replace(OPTIONS, ctx_size=ctx_size), lambda _token: False)
    sequence.extend(TEXT[:40])
    sequence.take_features(0, np.stack([feature(position) for position in range(40)]))
    assert (sequence.num_wanted_rows > 0) is has_rows


def test_features_are_bounded() -> None:
    sequence = FeatureSequence("eagle3", OPTIONS, lambda _token: False)
    sequence.take_features(0, np.zeros((3 * MOST_FEATURES, 2), np.float32))
    assert len(sequence.features) == MOST_FEATURES
    assert min(sequence.features) == 2 * MOST_FEATURES
