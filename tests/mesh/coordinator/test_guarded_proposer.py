"""Proposers that break their word: switched off with one warning, and the answer goes on unharmed."""

from collections.abc import Callable, Sequence

import pytest
from structlog.testing import capture_logs

from mesh.coordinator.speculation import GuardedProposer
from mesh.engine import GenerationRequest
from spanmesh_proto.row_ids import FIRST_ROW_ID
from speculative.controller import ControllerOptions
from speculative.lookup_proposers import NgramProposer
from speculative.proposer import EMPTY, Proposal
from stages.sampling.sampler import Sampler, SamplingParams
from tests.support.fake_stage import FakeRuntime, fake_ring, plain_answer
from tests.support.proposers import Oracle
from tests.support.ring_harness import collect, running_coordinator, running_services

N_VOCAB = 64
PROMPT = tuple(range(3, 23))
NUM_TOKENS = 20
FUTURE = (*PROMPT, *plain_answer(PROMPT, NUM_TOKENS, Sampler(SamplingParams()).sample))


class Faulty(Oracle):
    """Good for two calls."""

    def __init__(self, fault: Callable[[], object]) -> None:
        super().__init__(FUTURE)
        self._fault = fault
        self.num_calls = 0

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        self.num_calls += 1
        good = super().propose(max_tokens, after)
        return good if self.num_calls <= 2 else self._fault()  # type: ignore[return-value]


def fail() -> None:
    raise RuntimeError("out of ideas")


def saying(*tokens: object, confidences: tuple[float, ...] | None = None) -> Callable[[], object]:
    sure = (0.5,) * len(tokens) if confidences is None else confidences
    return lambda: Proposal(tokens, sure, "faulty")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (fail, "out of ideas"),
        (saying(5, N_VOCAB), "token 64, which is outside the vocabulary of 64"),
        (saying(-1), "token -1, which is outside"),
        (saying(2.5), "TypeError"),
        (saying(None), "TypeError"),
        (saying(1, 2, confidences=(0.5,)), "2 tokens with 1 confidences"),
        (saying(1, confidences=("sure",)), "ValueError"),  # type: ignore[arg-type]
        (lambda: None, "AttributeError"),
    ],
    ids=["raises", "too large", "negative", "fraction", "nothing", "unsure", "words", "no proposal"],
)
@pytest.mark.parametrize("depth", [1, 4])
async def test_the_answer_goes_on(depth: int, fault: Callable[[], object], reason: str) -> None:
    proposer = Faulty(fault)
    with capture_logs() as logs:
        async with (
            running_services(fake_ring()) as stages,
            running_coordinator(
                stages,
                context_length=128,
                num_slots=1,
                make_proposer=lambda: proposer,
                controller=ControllerOptions(fixed_width=3, fixed_depth=depth),
                max_rows=FakeRuntime.max_rows,
                n_vocab=N_VOCAB,
            ) as coordinator,
        ):
            tokens, last = await collect(coordinator, GenerationRequest(PROMPT, NUM_TOKENS))
    assert tokens == list(FUTURE[len(PROMPT) :])
    assert last.stats.num_accepted > 0
    warnings = [log for log in logs if log["event"] == "proposer_switched_off"]
    assert len(warnings) == 1
    assert (warnings[0]["proposer"], proposer.num_calls) == ("oracle", 3)
    assert reason in warnings[0]["reason"]
    assert proposer.is_closed


def test_a_proposal_ends_before_rows_that_are_no_tokens() -> None:
    """What repeats a prompt with a picture goes on proposing."""
    proposer = NgramProposer()
    with capture_logs() as logs:
        guarded = GuardedProposer(proposer, n_vocab=N_VOCAB, session=1)
        guarded.extend([1, 7, 8, 9, FIRST_ROW_ID + 5, 2**32 - 1, 10, 11, 12, 7, 8])
        found = guarded.propose(6)
        assert proposer.propose(6).tokens[:2] == (9, FIRST_ROW_ID + 5)
        assert (found.tokens, len(found.confidences)) == ((9,), 1)
        guarded.extend([9])
        assert guarded.propose(6).tokens == ()
        guarded.extend([10, 11])
        assert guarded.propose(1).tokens == (12,)
    assert logs == []


async def test_a_proposer_that_cannot_be_made_is_done_without() -> None:
    def make() -> Oracle:
        raise MemoryError("no room for a draft")

    with capture_logs() as logs:
        async with (
            running_services(fake_ring()) as stages,
            running_coordinator(
                stages,
                context_length=128,
                num_slots=1,
                make_proposer=make,
                max_rows=FakeRuntime.max_rows,
                n_vocab=N_VOCAB,
            ) as coordinator,
        ):
            tokens, last = await collect(coordinator, GenerationRequest(PROMPT, NUM_TOKENS))
    assert tokens == list(FUTURE[len(PROMPT) :])
    assert last.stats.num_proposed == 0
    assert [log["reason"] for log in logs if log["event"] == "speculation_switched_off"] == [
        "MemoryError('no room for a draft')"
    ]


def test_more_than_was_asked_for_is_cut() -> None:
    class Generous(Oracle):
        def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
            return super().propose(max_tokens + 5, after)

    guarded = GuardedProposer(Generous(FUTURE), n_vocab=N_VOCAB, session=1)
    assert guarded.propose(2).tokens == FUTURE[:2]
    assert guarded.propose(0).tokens == ()


def test_depths_of_a_drafter_pass() -> None:
    proposal = Proposal((1, 2), (0.5, 0.25), "mtp", (1, 2))

    class Fixed(Oracle):
        def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
            return proposal

    assert GuardedProposer(Fixed(FUTURE), n_vocab=N_VOCAB, session=1).propose(2) == proposal


def test_every_door_is_guarded() -> None:
    class Broken(Oracle):
        def extend(self, tokens: Sequence[int]) -> None:
            raise OSError("extend")

        def listen(self, on_ready: Callable[[], None]) -> None:
            raise OSError("listen")

        def close(self) -> None:
            raise OSError("close")

    uses: list[Callable[[GuardedProposer], None]] = [
        lambda guarded: guarded.extend([1]),
        lambda guarded: guarded.listen(fail),
        lambda guarded: guarded.close(),
    ]
    for use in uses:
        guarded = GuardedProposer(Broken(FUTURE), n_vocab=N_VOCAB, session=1)
        with capture_logs() as logs:
            use(guarded)
            assert guarded.propose(3) == EMPTY
        assert [log["event"] for log in logs] == ["proposer_switched_off"]
