"""Predictions, history and n-grams in flight over stages without a model: fewer windows, the same text."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from mesh.engine import GenerationRequest, GenerationStats
from mesh.serve.proposers import Proposers
from speculative.controller import ControllerOptions
from stages.sampling.sampler import Sampler, SamplingParams
from tests.support.fake_stage import FakeRuntime, plain_answer
from tests.support.ring_harness import collect, running_coordinator
from tests.support.searches import search
from tests.support.shared_ring import SharedRing, shared_ring

N_VOCAB = 64
NUM_TOKENS = 48
PROMPT = tuple(range(3, 23))
SAMPLING = SamplingParams(temperature=1.0, seed=7)
ANSWER = tuple(plain_answer(PROMPT, NUM_TOKENS, Sampler(SAMPLING).sample))


ring = shared_ring


def ask(
    ring: SharedRing, requests: Sequence[GenerationRequest], *, width: int, depth: int
) -> list[tuple[tuple[int, ...], GenerationStats]]:
    """One request after the other, by one server that keeps a history."""

    async def run() -> list[tuple[tuple[int, ...], GenerationStats]]:
        async with running_coordinator(
            ring.stages,
            context_length=FakeRuntime(0, 1).ctx_size,
            num_slots=4,
            make_proposers=Proposers("auto", keeps_history=True),
            controller=ControllerOptions(fixed_width=width, fixed_depth=depth),
            max_rows=FakeRuntime.max_rows,
            n_vocab=N_VOCAB,
        ) as coordinator:
            answers = [await collect(coordinator, request) for request in requests]
            return [(tuple(tokens), last.stats) for tokens, last in answers]

    return ring.runner.run(run())


def request(prediction: Sequence[int] = (), key: str | None = None) -> GenerationRequest:
    return GenerationRequest(
        PROMPT, NUM_TOKENS, sampling=SAMPLING, prediction=tuple(prediction), history_key=key
    )


@search(few=10, many=25)
@given(
    prediction=st.one_of(
        st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=60),
        st.permutations(ANSWER),
        st.tuples(st.integers(0, NUM_TOKENS), st.integers(0, NUM_TOKENS)).map(
            lambda cut: (*ANSWER[: cut[0]], 5, *ANSWER[cut[1] :])
        ),
    ),
    width=st.integers(1, 8),
    depth=st.integers(1, 6),
)
def test_no_prediction_and_no_history_changes_the_text(
    ring: SharedRing, prediction: Sequence[int], width: int, depth: int
) -> None:
    asked = [request(prediction, "ann"), request(key="ann"), request(prediction, "ann")]
    for text, _ in ask(ring, asked, width=width, depth=depth):
        assert text == ANSWER


def test_a_right_prediction_saves_windows(ring: SharedRing) -> None:
    (_, cold), (_, predicted) = ask(ring, [request(), request(ANSWER)], width=8, depth=1)
    assert predicted.num_windows <= NUM_TOKENS / 8
    assert predicted.num_accepted == predicted.num_proposed
    assert cold.num_windows > 2 * predicted.num_windows


def test_an_edited_prediction_saves_most_of_them(ring: SharedRing) -> None:
    """One token replaced, some left out, some put in."""
    edited = (*ANSWER[:10], 1, *ANSWER[11:20], *ANSWER[24:34], 1, 1, *ANSWER[34:])
    (_, stats) = ask(ring, [request(edited)], width=8, depth=1)[0]
    assert stats.num_windows <= NUM_TOKENS / 3
    assert stats.num_accepted > NUM_TOKENS / 2


def test_an_answer_given_before_is_given_again_in_few_windows(ring: SharedRing) -> None:
    asked = [request(key="ann"), request(key="ann"), request(key="bob"), request()]
    first, again, stranger, nobody = (stats for _, stats in ask(ring, asked, width=8, depth=1))
    assert again.num_windows <= NUM_TOKENS / 8
    assert stranger.num_windows == nobody.num_windows == first.num_windows > 2 * again.num_windows
