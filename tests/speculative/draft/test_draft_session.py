"""A draft model's book-keeping, against a model that is a function of the text before it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.draft.context import DraftOptions
from speculative.draft.session import DraftedToken, DraftSequence
from speculative.proposer import EMPTY

END = 9
OPTIONS = DraftOptions(draft_max=4, draft_min=1, ctx_size=64)


def says(text: list[int]) -> DraftedToken:
    """The draft model: some token below 5, with a probability that depends on it."""
    token = (len(text) * 7 + sum(text[-3:])) % 5
    return DraftedToken(token, 0.5 + token / 10)


@dataclass
class Machine:
    """A line, and a KV cache that remembers what was put into it."""

    options: DraftOptions = OPTIONS
    cache: list[int] = field(default_factory=list)
    num_computed: int = 0

    def __post_init__(self) -> None:
        self.sequence = DraftSequence("draft", self.options, lambda token: token == END)

    def run(self, *, max_rows: int = 8, most: int = 1000) -> int:
        """Compute until nothing is wanted; how often that made a proposal longer."""
        told = 0
        for _ in range(most):
            wanted = self.sequence.num_wanted_rows
            span = self.sequence.next_span(max_rows)
            assert (span is None) == (wanted == 0)
            if span is None:
                return told
            assert 1 <= len(span.tokens) <= min(max_rows, wanted)
            assert span.start <= len(self.cache)
            self.cache[span.start :] = span.tokens
            self.num_computed += len(span.tokens)
            told += self.sequence.computed([says(self.cache)] if span.has_output else [])
        return told


def continued(text: list[int], count: int) -> list[int]:
    text = list(text)
    for _ in range(count):
        text.append(says(text).id)
    return text[-count:]


def test_it_says_what_the_model_says_and_how_sure_it_is() -> None:
    machine = Machine()
    machine.sequence.extend([1, 2, 3])
    assert machine.sequence.propose(4, ()) == EMPTY
    machine.run()
    proposal = machine.sequence.propose(3, ())
    assert list(proposal.tokens) == continued([1, 2, 3], 3)
    assert proposal.confidences == tuple(0.5 + token / 10 for token in proposal.tokens)
    assert proposal.proposer == "draft"


def test_before_anybody_asks_the_prompt_is_read_and_no_more() -> None:
    machine = Machine()
    machine.sequence.extend([1, 2, 3])
    assert not machine.sequence.is_urgent
    machine.run()
    assert machine.cache == machine.sequence.tokens == [1, 2, 3]
    machine.sequence.extend([4, 5, 6])
    machine.run()
    assert machine.num_computed == 3
    machine.sequence.propose(1, ())
    assert machine.sequence.is_urgent
    machine.run(most=1)
    assert machine.num_computed == 6


def test_asking_for_nothing_only_follows() -> None:
    machine = Machine()
    machine.sequence.extend([1, 2, 3])
    assert machine.sequence.propose(0, [7, 8]) == EMPTY
    machine.run()
    assert machine.cache == [1, 2, 3, 7, 8]
    assert len(machine.sequence.tokens) == 5


def test_what_others_proposed_is_not_said_again() -> None:
    machine = Machine()
    machine.sequence.extend([1, 2, 3])
    machine.sequence.propose(4, [5, 6, 7])
    machine.run()
    machine.sequence.extend([5])
    assert machine.sequence.propose(4, ()) == EMPTY
    machine.run()
    assert list(machine.sequence.propose(4, ()).tokens) == continued([1, 2, 3, 5], 4)


def test_it_drafts_on_beyond_what_is_in_flight() -> None:
    machine = Machine()
    machine.sequence.extend([1, 2, 3])
    machine.sequence.propose(4, ())
    machine.run()
    first = machine.sequence.propose(4, ()).tokens
    machine.sequence.propose(4, first)
    machine.run()
    assert list(machine.sequence.propose(4, first).tokens) == continued([1, 2, 3, *first], 4)
    assert machine.num_computed == 3 + 4 + 3


def test_accepted_tokens_cost_nothing() -> None:
    machine = Machine()
    machine.sequence.extend([1, 2, 3])
    machine.sequence.propose(4, ())
    machine.run()
    drafted = machine.sequence.propose(4, ()).tokens
    num_computed = machine.num_computed
    machine.sequence.extend(drafted[:2])
    assert machine.sequence.propose(2, ()).tokens == drafted[2:]
    assert machine.num_computed == num_computed


def test_a_rejection_trims_to_what_is_still_true() -> None:
    machine = Machine()
    machine.sequence.extend([1, 2, 3])
    machine.sequence.propose(4, ())
    machine.run()
    drafted = machine.sequence.propose(4, ()).tokens
    machine.sequence.extend([drafted[0], 8])
    assert machine.sequence.num_cached == 4
    num_computed = machine.num_computed
    assert machine.sequence.propose(1, ()) == EMPTY
    machine.run(most=1)
    assert machine.num_computed == num_computed + 1
    assert list(machine.sequence.propose(1, ()).tokens) == continued([1, 2, 3, drafted[0], 8], 1)


def test_a_rejection_in_the_middle_of_computing() -> None:
    machine = Machine()
    machine.sequence.extend([1, 2, 3])
    machine.sequence.propose(4, ())
    machine.run(most=1)
    span = machine.sequence.next_span(8)
    assert span is not None
    assert not machine.sequence.is_running_in_vain
    machine.sequence.extend([8])
    assert machine.sequence.is_running_in_vain
    assert machine.sequence.computed([DraftedToken(4, 1.0)]) is False
    assert machine.sequence.tokens == [1, 2, 3, 8]
    assert machine.sequence.num_cached == 3


def test_the_free_prediction_of_a_window_overtakes_the_draft() -> None:
    machine = Machine()
    machine.sequence.extend([1, 2, 3])
    machine.sequence.propose(4, ())
    span = machine.sequence.next_span(8)
    assert span is not None
    machine.sequence.extend([8])
    assert not machine.sequence.is_running_in_vain, "its rows are needed, only what they say is not"
    machine.sequence.computed([DraftedToken(4, 1.0)])
    assert machine.sequence.num_cached == 3
    assert machine.sequence.tokens == [1, 2, 3, 8]


def test_a_computation_given_up_leaves_nothing_behind() -> None:
    machine = Machine()
    machine.sequence.extend([1, 2, 3])
    machine.sequence.propose(4, ())
    machine.sequence.next_span(2)
    machine.sequence.dropped()
    assert machine.sequence.num_cached == 0
    machine.run()
    assert list(machine.sequence.propose(4, ()).tokens) == continued([1, 2, 3], 4)


def test_a_line_stops_where_the_draft_is_not_sure() -> None:
    machine = Machine(replace(OPTIONS, p_min=0.65))
    machine.sequence.extend([1, 2, 3])
    machine.sequence.propose(4, ())
    machine.run()
    proposal = machine.sequence.propose(4, ())
    assert all(confidence >= 0.65 for confidence in proposal.confidences)
    text = [1, 2, 3, *proposal.tokens]
    assert len(proposal.tokens) < 4
    assert says(text).probability < 0.65
    machine.sequence.extend([*proposal.tokens, 2])
    machine.run()
    assert machine.sequence.tokens[: len(text) + 1] == [*text, 2]
    assert machine.sequence.num_cached > len(text), "it goes on behind the target's own token"


def test_nothing_is_drafted_behind_an_end_token() -> None:
    sequence = DraftSequence("draft", OPTIONS, lambda token: token == END)
    sequence.extend([1])
    sequence.propose(4, ())
    assert sequence.next_span(8) is not None
    assert sequence.computed([DraftedToken(END, 1.0)])
    assert sequence.next_span(8) is None
    assert sequence.propose(4, ()).tokens == (END,)
    sequence.propose(4, [END])
    assert sequence.next_span(8) is not None, "a client may ignore end tokens"


@pytest.mark.parametrize(
    ("block", "drafted", "is_told"),
    [
        ([4, 5, 6], (4, 5), True),
        ([4, END, 6], (4, END), True),
        ([4], (), False),
        ([], (), False),
    ],
)
def test_an_output_may_draft_a_block(block: list[int], drafted: tuple[int, ...], is_told: bool) -> None:  # noqa: FBT001
    sequence = DraftSequence("draft", replace(OPTIONS, draft_min=2), lambda token: token == END)
    sequence.extend([1])
    sequence.propose(2, ())
    assert sequence.next_span(8) is not None
    assert sequence.computed([DraftedToken(token, 1.0) for token in block]) is is_told
    assert sequence.propose(2, ()).tokens == drafted


def test_a_block_ends_at_an_unsure_token() -> None:
    sequence = DraftSequence("draft", replace(OPTIONS, p_min=0.5), lambda token: token == END)
    sequence.extend([1])
    sequence.propose(4, ())
    assert sequence.next_span(8) is not None
    assert sequence.computed([DraftedToken(4, 0.9), DraftedToken(5, 0.1), DraftedToken(6, 0.9)])
    assert sequence.propose(4, ()).tokens == (4,)
    assert sequence.next_span(8) is None


def test_too_few_tokens_are_not_offered() -> None:
    machine = Machine(replace(OPTIONS, draft_min=3))
    machine.sequence.extend([1, 2, 3])
    machine.sequence.propose(4, ())
    machine.run(most=2)
    assert machine.sequence.propose(4, ()) == EMPTY
    assert len(machine.sequence.propose(2, ()).tokens) == 2, "whoever asks for fewer gets fewer"
    machine.sequence.propose(4, ())
    assert machine.run(most=1) == 1
    assert len(machine.sequence.propose(4, ()).tokens) == 3


def test_it_tells_of_each_token_that_was_missed_and_of_no_other() -> None:
    machine = Machine()
    machine.sequence.extend([1, 2, 3])
    machine.sequence.propose(2, ())
    assert machine.run() == 2
    assert len(machine.sequence.tokens) == 3 + 4
    machine.sequence.propose(2, ())
    assert machine.run() == 0


def test_the_context_ends() -> None:
    machine = Machine(replace(OPTIONS, ctx_size=5))
    machine.sequence.extend([1, 2, 3])
    machine.sequence.propose(4, ())
    machine.run()
    assert len(machine.sequence.propose(4, ()).tokens) == 3, "the token behind the last position is known too"
    assert machine.sequence.num_cached == 5
    machine.sequence.extend([1, 1, 1, 1])
    machine.sequence.propose(4, ())
    assert machine.run() == 0
    assert len(machine.cache) <= 5


def test_a_prompt_beyond_the_context_is_not_computed_for_nothing() -> None:
    machine = Machine(replace(OPTIONS, ctx_size=5))
    machine.sequence.extend([1, 2, 3, 4, 5, 6])
    assert machine.sequence.num_wanted_rows == 0
    machine.sequence.propose(4, ())
    machine.run()
    assert machine.num_computed == 0


def test_rows_of_another_session_are_taken_over() -> None:
    machine = Machine(cache=[1, 2])
    machine.sequence.extend([1, 2, 3])
    machine.sequence.propose(1, ())
    machine.sequence.adopt(2)
    machine.run(most=1)
    assert machine.num_computed == 1
    assert list(machine.sequence.propose(1, ()).tokens) == continued([1, 2, 3], 1)


def test_a_result_that_nobody_asked_for() -> None:
    with pytest.raises(RuntimeError, match="without a span"):
        Machine().sequence.computed()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["accept", "reject", "propose", "fly", "strange", "run", "interrupt"]),
            st.integers(0, 6),
        ),
        max_size=40,
    )
)
def test_whatever_happens_it_says_what_the_model_says(steps: list[tuple[str, int]]) -> None:
    machine = Machine(replace(OPTIONS, ctx_size=512))
    sequence = machine.sequence
    committed = [1, 2, 3]
    sequence.extend(committed)
    flying: list[int] = []
    for step, number in steps:
        match step:
            case "accept" if flying:
                count = min(number, len(flying))
                sequence.extend(flying[:count])
                committed += flying[:count]
                flying = flying[count:]
            case "reject":
                sequence.extend([5 + number])
                committed.append(5 + number)
                flying = []
            case "propose":
                sequence.propose(number, flying)
            case "fly":
                flying += sequence.propose(number, flying).tokens
            case "strange":
                flying += [number] * number
                sequence.propose(1, flying)
            case "run":
                machine.run(max_rows=3, most=number)
            case "interrupt":
                if (span := sequence.next_span(2)) is not None:
                    sequence.extend([number])
                    committed.append(number)
                    flying = []
                    machine.cache[span.start :] = span.tokens
                    sequence.computed([says(machine.cache)] if span.has_output else [])
        assert sequence.tokens[: len(committed)] == committed
        assert machine.cache[: sequence.num_cached] == sequence.tokens[: sequence.num_cached]
    sequence.propose(4, flying)
    machine.run()
    text = committed + flying
    proposal = sequence.propose(4, flying)
    assert list(proposal.tokens) == continued(text, 4)
    assert proposal.confidences == tuple(0.5 + token / 10 for token in proposal.tokens)
