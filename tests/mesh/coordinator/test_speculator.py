"""What one session asks of its proposers, and when it leaves them in peace."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from mesh.coordinator.generation import Generation
from mesh.coordinator.options import CoordinatorOptions
from mesh.coordinator.speculation import GuardedProposer, Speculator, Speculators
from mesh.engine import GenerationRequest
from speculative.acceptance import Judgement, SpanClass, StageMeasure, WindowOutcome
from speculative.controller import ControllerOptions, SharedMeasures
from speculative.lookup_proposers import NgramProposer, PredictionProposer
from speculative.payoff import PayoffRecord
from speculative.proposer import EMPTY, DrafterKind, Proposal, Proposer

PROMPT = (1, 2, 3)
PART_TOKENS = 4096
STAGES = (StageMeasure(1, 0.0, 4.0),) * 3


class Listener:
    """Proposes nothing, and remembers what it was asked for."""

    name = "listener"

    def __init__(self) -> None:
        self.asked: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        pass

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        self.asked.append(max_tokens)
        return EMPTY

    def listen(self, on_ready: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        pass


def prefilled() -> Generation:
    generation = Generation(GenerationRequest(PROMPT, max_tokens=64), context_length=128, max_rows=32)
    generation.prefill(32)
    generation.commit((5,))
    return generation


def speculator(*proposers: Proposer, shared: SharedMeasures) -> Speculator:
    return Speculator(
        [GuardedProposer(each, n_vocab=64, session=1) for each in proposers],
        ControllerOptions(),
        shared,
        end_tokens=(),
        num_sessions=lambda: 1,
        clock_ms=lambda: 1000.0,
    )


def plain(sent_ms: float) -> WindowOutcome:
    judgement = Judgement((1,), 0, 0, SpanClass.PLAIN)
    return WindowOutcome(judgement, EMPTY, 3, sent_ms, sent_ms + 50.0, 0, STAGES, 0, 0)


def lost(sent_ms: float) -> WindowOutcome:
    judgement = Judgement((1,), 1, 0, SpanClass.TAIL_REJECT)
    proposal = Proposal((7,), (0.9,), "listener")
    return WindowOutcome(judgement, proposal, 3, sent_ms, sent_ms + 200.0, 0, STAGES, 0, 0)


def test_it_asks_for_nothing_before_it_may() -> None:
    """A draft model that was never asked must not be told to catch up: that would have it read the prompt."""
    listener = Listener()
    resting = speculator(listener, shared=SharedMeasures())
    resting.begin(PROMPT, lambda _call: None)
    assert resting.next_proposal(prefilled()) == EMPTY
    assert listener.asked == []


def test_once_speculation_rests_the_proposer_is_told_so_once() -> None:
    listener, shared = Listener(), SharedMeasures()
    shared.add_plain(plain(0.0))
    shared.add_plain(plain(50.0))
    active = speculator(listener, shared=shared)
    active.begin(PROMPT, lambda _call: None)
    generation = prefilled()
    active.next_proposal(generation)
    assert len(listener.asked) == 1
    assert listener.asked[0] > 0
    active.learn([lost(1000.0), lost(1200.0)])
    active.next_proposal(generation)
    active.next_proposal(generation)
    assert listener.asked[1:] == [0]


def test_long_texts_are_read_in_parts_one_in_each_turn_of_the_loop() -> None:
    prompt = [index * index % 61 for index in range(30_000)]
    proposers = NgramProposer(), PredictionProposer(prompt)
    turns: list[Callable[[], None]] = []
    session = speculator(*proposers, shared=SharedMeasures())
    session.begin(prompt, turns.append)
    indices = [each._cursor._index for each in proposers]
    num_turns, num_read = 0, sum(index.stop for index in indices)
    assert num_read <= 3 * PART_TOKENS
    while turns:
        turns.pop()()
        now = sum(index.stop for index in indices)
        # Where one text ends, another one may begin.
        assert num_read < now <= num_read + 2 * PART_TOKENS
        num_turns, num_read = num_turns + 1, now
    assert (num_turns, num_read) == (12, 2 * len(prompt))


def test_a_session_that_has_ended_reads_no_further() -> None:
    turns: list[Callable[[], None]] = []
    proposer = NgramProposer()
    session = speculator(proposer, shared=SharedMeasures())
    session.begin(range(20_000), turns.append)
    session.close()
    num_read = proposer._cursor._index.stop
    turns.pop()()
    assert not turns
    assert proposer._cursor._index.stop == num_read < 20_000


class Drafter(Listener):
    name = DrafterKind.DSPARK.proposer

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False

    def take_features(self, start: int, rows: NDArray[np.float32]) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("others", [[], ["ngram"]])
# Of a drafter that is never sure nothing is sent, and what it computes slows each window by less than can be
# told from other windows.
@pytest.mark.parametrize(("outcome", "most_tries"), [(lost, 12), (plain, 7)])
def test_a_drafter_is_left_out_of_answers_once_it_slowed_three(
    others: list[str], outcome: Callable[[float], WindowOutcome], most_tries: int
) -> None:
    drafters: list[Drafter] = []

    def proposers(_request: GenerationRequest) -> list[Proposer]:
        drafters.append(Drafter())
        return [*(NgramProposer() for _ in others), drafters[-1]]

    options = CoordinatorOptions(128, 1, 32, 64)
    speculators = Speculators(proposers, options, num_sessions=lambda: 1, clock_ms=lambda: 1000.0)
    for sent_ms in (0.0, 50.0):
        speculators.shared.add_plain(plain(sent_ms))
    left_out = []
    for _ in range(40):
        session = speculators.make(1, GenerationRequest(PROMPT, 40))
        assert session is not None
        left_out.append(drafters[-1].is_closed)
        generation, asked = prefilled(), drafters[-1].asked
        for number in range(36):
            asked.clear()
            session.next_proposal(generation)
            session.learn([outcome(200.0 * number) if any(asked) else plain(200.0 * number)])
            session.committed((5,))
        if left_out[-1] and not others:
            assert "dspark lost time" in session.summary()["reason"]
        session.close()
        assert drafters[-1].is_closed
    assert left_out[:4] == [False, False, False, True]
    # It is tried again, ever more rarely.
    tries = [index for index, is_left_out in enumerate(left_out) if not is_left_out]
    assert 4 <= len(tries) <= most_tries
    assert tries[-1] > 10


@pytest.mark.parametrize(("width", "is_left_out"), [(3, False), (None, True)])
def test_a_drafter_of_a_fixed_width_is_never_left_out(width: int | None, *, is_left_out: bool) -> None:
    record = PayoffRecord(10.0, 40.0, 50.0, 512, 500, 9)
    assert record.rests_long
    drafter = Drafter()
    options = CoordinatorOptions(128, 1, 32, 64, controller=ControllerOptions(fixed_width=width))
    speculators = Speculators(
        lambda _request: [drafter], options, num_sessions=lambda: 1, clock_ms=lambda: 0.0
    )
    speculators.shared.add_plain(plain(0.0))
    speculators.shared.records[drafter.name] = record
    assert speculators.make(1, GenerationRequest(PROMPT, 40)) is not None
    assert drafter.is_closed == is_left_out
