"""Sample-and-match over verified rows."""

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from spanmesh_proto.errors import InvalidRequest, InvalidWindow, StageFailed
from stages.grammar import session_grammar
from stages.grammar.automaton import Automaton, TokenMasks, TokenTexts, TokenTree
from stages.grammar.session_grammar import make_automaton
from stages.sampling.sampler import Sampler, SamplingParams
from stages.sampling.verifier import WindowVerifier, following, verify

GREEDY = Sampler(SamplingParams())
N_VOCAB = 10


def rows_for(*targets: int) -> NDArray[np.float32]:
    """Rows whose greedy choices are `targets`."""
    return np.eye(N_VOCAB, dtype=np.float32)[list(targets)]


@pytest.mark.parametrize(
    ("tokens", "targets", "answer"),
    [
        ([5], [6], [6]),  # plain decoding: a free prediction
        ([5, 6, 7, 8], [6, 7, 8, 9], [6, 7, 8, 9]),  # all accepted, one more for free
        ([5, 6, 7, 8], [6, 7, 9, 9], [6, 7, 9]),
        ([5, 6, 7, 8], [1, 7, 8, 9], [1]),  # rows behind a rejection say nothing, even where they match
        ([1, 2, 3, 5, 6], [6, 7], [6, 7]),  # only the last two rows: a prefill's end with one proposed token
        ([1, 2, 3, 5], [6], [6]),
        ([1, 2, 3, 5], [], []),
    ],
)
def test_ids_up_to_the_first_that_differs(tokens: list[int], targets: list[int], answer: list[int]) -> None:
    assert verify(rows_for(*targets), tokens, 40, GREEDY.sample) == answer


def test_more_rows_than_tokens_are_refused() -> None:
    with pytest.raises(InvalidWindow, match="window at 40: 2 rows to verify, but 1 token"):
        verify(rows_for(1, 2), [5], 40, GREEDY.sample)


def target_row(history: tuple[int, ...]) -> NDArray[np.float32]:
    """Logits of a model that is a function of the last two tokens."""
    return np.random.default_rng([3, *history[-2:]]).normal(scale=2.0, size=N_VOCAB).astype(np.float32)


@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    guesses=st.lists(st.lists(st.integers(0, N_VOCAB - 1), max_size=5), min_size=1, max_size=12),
    knows=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_the_text_is_the_same_with_any_proposer(
    seed: int, temperature: float, guesses: list[list[int]], knows: list[bool]
) -> None:
    """Whether it guesses at random or knows the future: every proposer leaves the text of plain decoding."""
    sampler = Sampler(SamplingParams(temperature, seed=seed))

    def plain(history: tuple[int, ...], count: int) -> tuple[int, ...]:
        for _ in range(count):
            history += (sampler.sample(target_row(history), len(history)),)
        return history

    history: tuple[int, ...] = (1, 2)
    for guess, knows_it in zip(guesses, knows, strict=False):
        start = len(history) - 1
        proposed = list(plain(history, len(guess))[len(history) :]) if knows_it else guess
        window = [history[-1], *proposed]
        rows = [target_row((*history, *proposed[:row])) for row in range(len(window))]
        drawn = verify(rows, window, start, sampler.sample)
        if knows_it:
            assert len(drawn) == len(window)
        history += tuple(drawn)
    assert history == plain((1, 2), len(history) - 2)


def test_scored_rows_give_the_tokens_behind_them() -> None:
    verifier = WindowVerifier(SamplingParams(0.9, seed=3), num_prompt=4, num_top_logprobs=1)
    scored = verifier.verify(rows_for(6, 7, 9), [5, 6, 7], 0, scored_next=8)
    assert scored.tokens == [6, 7, 8]
    assert [each.top[0][0] for each in scored.logprobs] == [6, 7, 9]
    likely, unlikely = scored.logprobs[0].logprob, scored.logprobs[2].logprob
    assert likely == pytest.approx(1 - np.log(np.e + 9))
    assert unlikely == pytest.approx(-np.log(np.e + 9))
    # Only the last rows are verified.
    assert following(rows_for(1), [5, 6, 7], 0, 2) == [2]


@pytest.mark.parametrize(
    ("rows", "next_token", "error"),
    [
        (rows_for(), 1, InvalidWindow),
        (rows_for(1, 2, 3), 1, InvalidWindow),
        (rows_for(1, 2), N_VOCAB, InvalidWindow),
        (rows_for(1, 2) * np.float32(np.nan), 1, StageFailed),
    ],
)
def test_rows_that_cannot_be_scored_are_refused(
    rows: NDArray[np.float32], next_token: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        following(rows, [5, 6], 40, next_token)


@given(
    sampling=st.sampled_from(
        [
            SamplingParams(1.0, seed=4),
            SamplingParams(0.8, seed=5, repetition_penalty=1.5, repetition_window=4),
        ]
    ),
    foretold=st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_what_is_foretold_is_drawn_as_the_text_and_changes_nothing(
    sampling: SamplingParams, foretold: list[int]
) -> None:
    def text(verifier: WindowVerifier, counts: list[int]) -> tuple[int, ...]:
        history: tuple[int, ...] = (1, 2)
        for count in counts:
            window = history if len(history) == 2 else history[-1:]
            start = len(history) - len(window)
            drawn = verifier.verify([target_row(history)], window, start).tokens
            history += tuple(drawn)
            ahead = history
            for _ in range(count):
                ahead += (verifier.foretell(target_row(ahead), ahead[len(history) - 1 :], len(history) - 1),)
            told.append((len(history), ahead))
        return history

    told: list[tuple[int, tuple[int, ...]]] = []
    plain = text(WindowVerifier(sampling, num_prompt=2), [0] * 6)
    told.clear()
    assert text(WindowVerifier(sampling, num_prompt=2), foretold) == plain
    # With the model's own logits what is foretold is what comes.
    assert all(ahead[: len(plain)] == plain[: len(ahead)] for _, ahead in told)


@pytest.mark.parametrize("num_drafted", [0, 4])
def test_drafts_under_a_grammar_have_work_of_their_own_and_no_more(
    monkeypatch: pytest.MonkeyPatch, num_drafted: int
) -> None:
    """What a draft has worked out is known when the answer comes there, so both are bounded."""
    most = 20_000
    monkeypatch.setattr(session_grammar, "MAX_ANSWER_WORK", most)
    tree = TokenTree.of(TokenTexts((b"", b"a", *[b""] * (N_VOCAB - 2)), frozenset({0})))
    opened: list[Automaton] = []

    def open_masks() -> TokenMasks:
        opened.append(make_automaton('root ::= ("a"{1,80} " "?){1,80}'))
        return TokenMasks(opened[0], tree)

    verifier = WindowVerifier(SamplingParams(), num_prompt=1, open_masks=open_masks)
    drafts: list[list[int]] = []

    def answer() -> None:
        for position in itertools.count():
            assert verifier.verify(rows_for(1), [1], position).tokens == [1]
            drafts.append(ahead := [1])
            with contextlib.suppress(InvalidRequest):
                while len(ahead) <= num_drafted:
                    ahead.append(verifier.foretell(rows_for(1)[0], ahead, position + 1))

    with pytest.raises(InvalidRequest, match="work limit"):
        answer()
    assert len(drafts) > 20
    assert len(drafts[0]) == 1 + num_drafted
    assert len(drafts[-1]) == 1
    assert opened[0].work < 2.5 * most
