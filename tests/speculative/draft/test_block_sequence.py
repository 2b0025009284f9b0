"""Text drafted in blocks, under any schedule: what is read, where blocks begin, and what they propose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from speculative.draft.block_sequence import BlockSequence, BlockSpan
from speculative.draft.context import DraftOptions
from speculative.draft.session import DraftedToken

MOST_DRAFTED = 6
OPTIONS = DraftOptions(draft_max=8, ctx_size=512)
# Prompt and answer: what will be committed.
TEXT = tuple((7 * place + place // 3) % 23 for place in range(400))
END = 99


def feature(position: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The target's feature of a position."""
    return np.array([position, TEXT[position]], np.float32)


def sequence_of(options: DraftOptions = OPTIONS) -> BlockSequence:
    return BlockSequence("dflash", options, lambda token: token == END, most_drafted=MOST_DRAFTED)


class Machine:
    """A sequence, its cache, and what the newest block says."""

    def __init__(self, options: DraftOptions = OPTIONS) -> None:
        self.sequence = sequence_of(options)
        # Tokens whose rows the cache holds; each reads the feature before its token.
        self.cache: set[int] = set()
        self.span: BlockSpan | None = None
        self.num_committed = 0
        self.num_features = 0
        self.in_flight: list[int] = []
        # Length of the text in flight, as the sequence was told last.
        self.told_stop = 0
        self.block: tuple[int, tuple[int, ...]] | None = None
        self.num_blocks = 0

    @property
    def anchor(self) -> int:
        """Newest token before which all features are there."""
        return min(self.num_features, self.num_committed - 1)

    def commit(self, count: int) -> None:
        tokens = TEXT[self.num_committed : self.num_committed + count]
        self.num_committed += len(tokens)
        self.sequence.extend(tokens)
        agree = self.in_flight[: len(tokens)] == list(tokens)
        self.in_flight = self.in_flight[len(tokens) :] if agree else []

    def features(self, count: int) -> None:
        """The next features come, in order, of committed positions before the newest one."""
        stop = min(self.num_features + count, self.num_committed - 1)
        if self.num_features < stop:
            rows = np.stack([feature(place) for place in range(self.num_features, stop)])
            self.sequence.take_features(self.num_features, rows)
            self.num_features = stop

    def expected(self, max_tokens: int) -> tuple[int, ...]:
        """What the newest block says behind the text in flight."""
        if self.block is None or self.block[0] != self.anchor:
            return ()
        anchor, said = self.block
        known = [*TEXT[anchor + 1 : self.num_committed], *self.in_flight]
        return said[len(known) :][:max_tokens] if list(said[: len(known)]) == known else ()

    def propose(self, max_tokens: int) -> None:
        proposal = self.sequence.propose(max_tokens, self.in_flight)
        assert proposal.tokens == self.expected(max(0, max_tokens))
        self.told_stop = self.num_committed + len(self.in_flight)
        begin = self.told_stop - self.anchor
        assert proposal.depths == tuple(range(begin, begin + len(proposal.tokens)))
        self.in_flight += proposal.tokens

    def begin(self, max_rows: int) -> None:
        span = self.sequence.next_span(max_rows)
        assert span is None or isinstance(span, BlockSpan)
        self.span = span
        if span is None:
            return
        assert 1 <= len(span.tokens) == len(span.features) <= max_rows
        assert span.state is None
        assert span.tokens == TEXT[span.start : span.stop]
        assert span.stop <= self.num_committed
        for row, values in enumerate(span.features, span.start):
            assert values.tolist() == feature(row - 1).tolist()
        self.cache = set() if span.is_anew else {row for row in self.cache if row < span.start}
        self.cache |= set(range(span.start, span.stop))
        assert sorted(self.cache) == list(range(1, span.stop)), "all features before it, without a gap"
        assert span.has_output == (span.num_drafted > 0)
        if span.has_output:
            assert span.stop - 1 == self.anchor
            assert span.num_drafted <= MOST_DRAFTED
            assert self.anchor + span.num_drafted >= max(self.num_committed, self.told_stop)

    def end(self, num_right: int, *, is_aborted: bool = False) -> None:
        if self.span is None:
            return
        span, self.span = self.span, None
        if is_aborted:
            self.sequence.dropped()
            self.cache = {row for row in self.cache if row < span.start and not span.is_anew}
            return
        said = tuple(
            TEXT[place] if index < num_right else TEXT[place] + 1
            for index, place in enumerate(range(span.stop, span.stop + span.num_drafted))
        )
        if span.has_output:
            self.block = span.stop - 1, said
            self.num_blocks += 1
        self.sequence.computed([DraftedToken(token, 0.5) for token in said])

    def run(self, num_right: int = MOST_DRAFTED) -> None:
        """Compute until there is nothing to do."""
        for _ in range(100):
            self.begin(64)
            if self.span is None:
                return
            self.end(num_right)
        raise AssertionError("it never ends")


ACTIONS = st.one_of(
    st.tuples(st.just("commit"), st.integers(1, 4), st.just(0)),
    st.tuples(st.just("features"), st.integers(1, 20), st.just(0)),
    st.tuples(st.just("propose"), st.integers(0, 6), st.just(0)),
    st.tuples(st.just("others"), st.integers(1, 3), st.integers(0, 1)),
    st.tuples(st.just("begin"), st.integers(1, 24), st.just(0)),
    st.tuples(st.just("end"), st.integers(0, 6), st.just(0)),
    # Most of what happens: a window comes back with its features, more is proposed, and a block is computed.
    st.tuples(st.just("window"), st.integers(1, 4), st.integers(0, 4)),
    st.tuples(st.just("compute"), st.integers(1, 5), st.integers(0, 6)),
    st.tuples(st.just("compute"), st.integers(1, 5), st.integers(0, 6)),
)


@given(st.lists(ACTIONS, min_size=20, max_size=80))
def test_blocks_say_what_is_proposed(actions: list[tuple[str, int, int]]) -> None:
    machine = Machine()
    machine.commit(8)
    machine.features(7)
    machine.propose(2)
    for name, number, other in actions:
        match name:
            case "window":
                machine.commit(number)
                machine.features(400)
                machine.propose(other)
            case "compute":
                for _ in range(number):
                    if machine.span is None:
                        machine.begin(24)
                    machine.end(other, is_aborted=other == 0)
            case "commit":
                machine.commit(number)
            case "features":
                machine.features(number)
            case "propose":
                machine.propose(number)
            case "others":
                start = machine.num_committed + len(machine.in_flight)
                machine.in_flight += [token + other for token in TEXT[start : start + number]]
            case "begin" if machine.span is None:
                machine.begin(number)
            case "end":
                machine.end(number, is_aborted=number == 0)
    machine.end(MOST_DRAFTED)
    machine.commit(1)
    machine.features(400)
    machine.in_flight = []
    machine.propose(4)
    machine.run()
    machine.propose(4)
    stop = machine.num_committed + min(4, MOST_DRAFTED)
    assert tuple(machine.in_flight) == TEXT[machine.num_committed : stop]


def test_a_block_is_as_long_as_asked_and_is_drafted_anew_after_each_verdict() -> None:
    machine = Machine()
    machine.commit(10)
    machine.features(9)
    machine.propose(3)
    machine.begin(64)
    assert machine.span is not None
    assert (machine.span.start, machine.span.stop, machine.span.num_drafted) == (1, 10, 3)
    machine.end(3)
    machine.run()
    assert machine.num_blocks == 1
    # Two of the three are sent, and come back accepted, with one more; the third is not left over.
    assert machine.sequence.propose(3, ()).tokens == TEXT[10:13]
    machine.in_flight = list(TEXT[10:12])
    machine.commit(3)
    machine.features(3)
    machine.propose(3)
    assert machine.in_flight == []
    machine.begin(64)
    assert machine.span is not None
    assert (machine.span.start, machine.span.stop, machine.span.num_drafted) == (10, 13, 3)


def test_a_block_goes_on_behind_tokens_in_flight_that_it_says_itself() -> None:
    machine = Machine()
    machine.commit(10)
    machine.features(9)
    machine.in_flight = list(TEXT[10:12])
    machine.propose(2)
    machine.run()
    machine.propose(2)
    assert tuple(machine.in_flight) == TEXT[10:14]
    # One more is not worth a block.
    assert machine.sequence.propose(1, machine.in_flight).tokens == ()
    machine.run()
    assert machine.num_blocks == 1
    # A longer one from the same anchor, as far as a block goes, and no further one behind it.
    machine.propose(8)
    machine.run()
    machine.propose(8)
    assert tuple(machine.in_flight) == TEXT[10 : 10 + MOST_DRAFTED]
    machine.propose(8)
    machine.run()
    assert machine.num_blocks == 2


def test_a_block_that_says_otherwise_proposes_nothing() -> None:
    machine = Machine()
    machine.commit(10)
    machine.features(9)
    machine.in_flight = [TEXT[10], TEXT[11] + 5]
    machine.propose(3)
    machine.run()
    machine.propose(3)
    assert len(machine.in_flight) == 2
    # It would say the same again.
    machine.run()
    assert machine.num_blocks == 1
    # The verdict says so, too, but without a feature: the same block goes on where it was right.
    machine.commit(2)
    machine.in_flight = []
    machine.propose(3)
    assert tuple(machine.in_flight) == TEXT[12:15]
    assert machine.num_blocks == 1


def test_late_features_begin_a_block_earlier() -> None:
    machine = Machine()
    machine.commit(12)
    machine.features(9)
    machine.propose(2)
    machine.begin(64)
    assert machine.span is not None
    assert (machine.span.stop - 1, machine.span.num_drafted) == (9, 4)
    machine.end(4)
    machine.propose(2)
    assert tuple(machine.in_flight) == TEXT[12:14]
    # Too late for any block.
    machine.commit(8)
    machine.in_flight = []
    machine.propose(2)
    machine.run()
    assert machine.num_blocks == 1


def test_nothing_is_drafted_without_features_or_without_a_question() -> None:
    machine = Machine()
    machine.commit(10)
    machine.propose(4)
    machine.run()
    assert machine.num_blocks == 0
    machine.features(9)
    machine.propose(0)
    machine.run()
    assert machine.num_blocks == 0
    # Of a long prompt features are read before the first question.
    machine.commit(60)
    machine.features(59)
    machine.begin(64)
    assert machine.span is not None
    assert not machine.span.has_output


def test_a_block_ends_with_the_context() -> None:
    machine = Machine(replace(OPTIONS, ctx_size=14))
    machine.commit(10)
    machine.features(9)
    machine.propose(6)
    machine.begin(64)
    assert machine.span is not None
    assert machine.span.num_drafted == 4
    machine.end(4)
    machine.commit(5)
    machine.features(5)
    machine.propose(6)
    machine.run()
    assert machine.num_blocks == 1


def test_tokens_behind_an_unlikely_one_or_an_end_are_not_proposed() -> None:
    for said, wanted in (
        ([(1, 0.9), (2, 0.2), (3, 0.9)], (1,)),
        ([(1, 0.9), (END, 0.9), (3, 0.9)], (1, END)),
    ):
        sequence = sequence_of(replace(OPTIONS, p_min=0.3))
        sequence.extend(TEXT[:10])
        sequence.take_features(0, np.stack([feature(place) for place in range(9)]))
        sequence.propose(3, ())
        assert sequence.next_span(64) is not None
        assert sequence.computed([DraftedToken(*each) for each in said])
        assert sequence.propose(3, ()).tokens == wanted
        assert sequence.next_span(64) is None


def test_the_next_session_with_the_same_beginning_reuses_rows_and_features() -> None:
    machine = Machine()
    machine.commit(12)
    machine.features(11)
    machine.propose(4)
    machine.run()
    assert machine.sequence.num_reusable == 12
    following = sequence_of()
    following.extend(TEXT[:14])
    following.adopt(9, machine.sequence)
    following.take_features(9, np.stack([feature(place) for place in range(9, 13)]))
    following.propose(4, ())
    span = following.next_span(64)
    assert isinstance(span, BlockSpan)
    assert (span.start, span.stop, span.is_anew) == (9, 14, False)


def test_a_gap_is_waited_for_shortly_then_left_behind() -> None:
    machine = Machine()
    machine.commit(40)
    sequence = machine.sequence
    sequence.take_features(0, np.stack([feature(place) for place in range(5)]))
    sequence.propose(4, ())
    assert sequence.next_span(64) is None, "the last feature is too far from the end"
    sequence.take_features(20, np.stack([feature(place) for place in range(20, 39)]))
    span = sequence.next_span(64)
    assert isinstance(span, BlockSpan)
    assert (span.start, span.stop, span.is_anew, span.num_drafted) == (21, 40, True, 4)
