"""What is proposed must not show in what is drawn: total variation against the model's own probabilities."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from mesh.coordinator.generation import Generation, WindowPlan
from mesh.engine import GenerationRequest
from speculative.proposer import Proposal
from stages.sampling.sampler import Sampler, SamplingParams
from stages.sampling.verifier import verify

N_VOCAB = 5
NUM_TOKENS = 3
NUM_DRAWS = 3000
PROMPT = (1, 3)


def target_row(history: Sequence[int]) -> NDArray[np.float32]:
    """Logits of a model that looks at two tokens."""
    return _row_after(*history[-2:])


@cache
def _row_after(last_but_one: int, last: int) -> NDArray[np.float32]:
    row = np.random.default_rng([7, last_but_one, last]).normal(scale=1.5, size=N_VOCAB).astype(np.float32)
    row.flags.writeable = False
    return row


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(logits.astype(np.float64) - float(logits.max()))
    weights /= weights.sum()
    return weights


def true_shares() -> dict[tuple[int, ...], float]:
    shares = {}
    for answer in product(range(N_VOCAB), repeat=NUM_TOKENS):
        share = 1.0
        for count, token in enumerate(answer):
            share *= float(softmax(target_row((*PROMPT, *answer[:count])))[token])
        shares[answer] = share
    return shares


def always_zero(_history: Sequence[int]) -> int:
    return 0


def likeliest(history: Sequence[int]) -> int:
    return int(np.argmax(target_row(history)))


def least_likely(history: Sequence[int]) -> int:
    return int(np.argmin(target_row(history)))


def draw(seed: int, guess: Callable[[Sequence[int]], int], *, width: int, depth: int) -> tuple[int, ...]:
    """One answer, with up to `depth` windows of `width` guesses in flight."""
    request = GenerationRequest(PROMPT, NUM_TOKENS, sampling=SamplingParams(1.0, seed=seed))
    generation = Generation(request, context_length=64, max_rows=8)
    sampler = Sampler(request.sampling)
    cached: list[int] = []
    answer: list[int] = []
    verdicts: deque[list[int]] = deque()

    def send(window: WindowPlan) -> None:
        cached[window.start :] = window.tokens
        rows = [
            target_row(cached[: place + 1]) for place in range(window.stop - window.num_verified, window.stop)
        ]
        verdicts.append(verify(rows, window.tokens, window.start, sampler.sample))

    def proposal() -> Proposal:
        known = [*PROMPT, *answer, *generation.ahead]
        for _ in range(max(0, min(width, generation.room))):
            known.append(guess(known))
        tokens = tuple(known[len(PROMPT) + len(answer) + len(generation.ahead) :])
        return Proposal(tokens, (0.5,) * len(tokens), "test")

    send(generation.prefill(8))
    while True:
        while generation.num_in_flight < depth and (ahead := proposal()).tokens:
            send(generation.next_window(ahead))
        step = generation.commit(verdicts.popleft())
        assert step is not None
        answer.extend(step.judgement.committed)
        if step.finish is not None:
            return tuple(answer)
        if step.voided:
            verdicts.clear()
        if not generation.num_in_flight:
            send(generation.next_window(proposal()))


@pytest.mark.parametrize("guess", [always_zero, likeliest, least_likely])
def test_total_variation(guess: Callable[[Sequence[int]], int]) -> None:
    shares = true_shares()
    counts = Counter(draw(seed, guess, width=1, depth=3) for seed in range(NUM_DRAWS))
    distance = sum(abs(counts[answer] / NUM_DRAWS - share) for answer, share in shares.items()) / 2
    # What as many fair draws differ by on average: half the sum of mean absolute deviations of binomials.
    fair = sum(np.sqrt(share * (1 - share) * 2 / (np.pi * NUM_DRAWS)) for share in shares.values()) / 2
    assert distance < 1.5 * fair
