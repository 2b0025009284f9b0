"""From prompt to last token, the model a plain rule: whatever is proposed, the same text comes out."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator.generation import Generation, WindowPlan
from mesh.engine import GenerationRequest
from spanmesh_proto.errors import ProtocolError
from speculative.proposal import Proposal


def rule(tokens: Sequence[int]) -> int:
    """A deterministic next token with repeats in it, so that some guesses are right."""
    return (tokens[-1] * 3 + len(tokens) // 4) % 7


class Guesser:
    """Proposes what it was told to, right or wrong."""

    name = "guesser"

    def __init__(self, guesses: Sequence[int]) -> None:
        self.committed: list[int] = []
        self._guesses = list(guesses)

    def extend(self, tokens: Sequence[int]) -> None:
        self.committed.extend(tokens)

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        guess = [*self.committed, *after]
        start = len(guess)
        for offset in self._guesses[:max_tokens]:
            guess.append((rule(guess) + offset) % 7)
        tokens = tuple(guess[start:])
        return Proposal(tokens, (0.5,) * len(tokens), self.name)

    def listen(self, on_ready: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        pass


def tail(history: Sequence[int], window: WindowPlan) -> tuple[int, ...]:
    """What the tail would answer, given all tokens before the window."""
    tokens = [*history[: window.start], *window.tokens]
    first = len(tokens) - window.num_verified
    sampled = []
    for row in range(first, len(tokens)):
        sampled.append(rule(tokens[: row + 1]))
        if row + 1 < len(tokens) and tokens[row + 1] != sampled[-1]:
            break
    return tuple(sampled)


def run(
    request: GenerationRequest, guesses: Sequence[int] | None, *, max_rows: int, context_length: int
) -> tuple[list[int], str | None]:
    generation = Generation(
        request,
        context_length=context_length,
        max_rows=max_rows,
        max_proposed=8,
        proposer=None if guesses is None else Guesser(guesses),
    )
    answer: list[int] = []
    chunks = list(generation.prefill())
    assert [token for chunk in chunks for token in chunk.tokens] == list(request.prompt)
    assert [chunk.num_verified for chunk in chunks] == [0] * (len(chunks) - 1) + [1]
    window = chunks[-1]
    for _ in range(200):
        assert len(window.tokens) <= max_rows
        assert window.start + len(window.tokens) <= context_length
        step = generation.commit(window, tail([*request.prompt, *answer], window))
        answer.extend(step.judgement.committed)
        if step.finish is not None:
            return answer, step.finish
        window = generation.next_window(generation.max_width)
    raise AssertionError("it never ends")


@given(
    prompt=st.lists(st.integers(0, 6), min_size=1, max_size=20),
    max_tokens=st.integers(1, 40),
    end_tokens=st.frozensets(st.integers(0, 6), max_size=2),
    guesses=st.lists(st.sampled_from([0, 0, 0, 1]), max_size=10),
    max_rows=st.integers(2, 12),
    slack=st.integers(1, 60),
)
def test_speculation_never_changes_the_answer(
    prompt: list[int],
    max_tokens: int,
    end_tokens: frozenset[int],
    guesses: list[int],
    max_rows: int,
    slack: int,
) -> None:
    request = GenerationRequest(tuple(prompt), max_tokens, end_tokens)
    context_length = len(prompt) + slack
    plain = run(request, None, max_rows=max_rows, context_length=context_length)
    assert run(request, guesses, max_rows=max_rows, context_length=context_length) == plain
    answer, finish = plain
    assert len(answer) <= min(max_tokens, slack)
    assert (finish == "stop") == (answer[-1] in end_tokens)


def test_a_verdict_that_cannot_be_is_refused() -> None:
    request = GenerationRequest((1, 2, 3), max_tokens=10)
    generation = Generation(request, context_length=50, max_rows=8, max_proposed=4, proposer=Guesser([0, 0]))
    window = next(generation.prefill())
    with pytest.raises(ProtocolError, match="a verdict of 0 ids"):
        generation.commit(window, ())
    generation.commit(window, (5,))
    window = generation.next_window(8)
    assert len(window.tokens) == 3
    with pytest.raises(ProtocolError, match="does not continue"):
        generation.commit(window, ((window.tokens[1] + 1) % 7, 0))
