"""Grammars through real servers around a fake model: rejected rows leave no trace, whatever flies or dies."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import GenerationRequest
from spanmesh_proto.errors import InvalidRequest, RequestError
from speculative.controller import ControllerOptions
from speculative.lookup_proposers import NgramProposer
from speculative.proposer import Proposer
from stages.grammar.automaton import DEAD, TokenTexts
from stages.grammar.session_grammar import GrammarRecord, make_automaton
from stages.sampling.sampler import Sampler, SamplingParams
from tests.support.fake_stage import FakeRuntime, fake_ring, plain_answer
from tests.support.proposers import Oracle, Parrot
from tests.support.repairable_ring import NUM_STAGES, Deaths, RepairableRing, serving
from tests.support.ring_harness import RunningStage, collect, running_coordinator, running_services
from tests.support.searches import search
from tests.support.shared_ring import SharedRing, shared_ring

N_VOCAB = 64
PROMPT = (3, 16, 17, 3, 16)
END = 0
# An end, a control token, single letters, pairs of them, and half a character.
PIECES = [b"", b"", b"\xc3", b"\xa9", *(letter.encode() for letter in "abcdef0123456789(),é")]
PIECES += [(one + other).encode() for one, other in itertools.product("ab(),", "ab01)(,é")]
TEXTS = TokenTexts(tuple(PIECES[:N_VOCAB]), frozenset({END}))
LISTS = 'root ::= (item ",")*\nitem ::= "(" (item | [a-f]{1,3} | "é")? ")" | [0-9]{2,3}'
COUNTED = 'root ::= ([ab]{3,5} ("(" [^()]{0,7} ")" | "0"))*'
WORDS = 'root ::= ("ab" | "ba" | "a(" [01]+ ")")+'
GRAMMARS = (LISTS, COUNTED, WORDS)

ring = shared_ring


def test_the_vocabulary_is_full() -> None:
    assert len(TEXTS.pieces) == N_VOCAB


class Naive:
    """A grammar that is read from its beginning at each question."""

    def __init__(self, grammar: str, answer: Sequence[int]) -> None:
        self._automaton = make_automaton(grammar)
        self._state = self._automaton.after(
            self._automaton.start, b"".join(TEXTS.pieces[token] for token in answer)
        )
        assert self._state != DEAD

    def allows(self, token: int) -> bool:
        if token == END:
            return self._automaton.may_end(self._state)
        piece = TEXTS.pieces[token]
        return bool(piece) and self._automaton.after(self._state, piece) != DEAD

    def restrict(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        mask = [self.allows(token) for token in range(N_VOCAB)]
        return np.where(mask, logits, np.float32(-np.inf))


def expected(request: GenerationRequest) -> list[int]:
    """One token at a time."""
    sampler = Sampler(request.sampling, len(request.prompt))
    said = list(request.prompt)

    def choose(logits: NDArray[np.float32], position: int) -> int:
        constraint = Naive(request.grammar or "", said[len(request.prompt) :])
        said.append(sampler.sample(logits, position, said, constraint))
        return said[-1]

    return plain_answer(request.prompt, request.max_tokens, choose)


def proposers(
    prompt: Sequence[int], text: Sequence[int], errs: list[bool]
) -> dict[str, Callable[[], Proposer]]:
    return {
        "oracle": lambda: Oracle([*prompt, *text], errs),
        "ngram": NgramProposer,
        "parrot": Parrot,
    }


async def answers(
    stages: list[RunningStage],
    requests: Sequence[GenerationRequest],
    make_proposer: Callable[[], Proposer] | None,
    controller: ControllerOptions,
) -> list[list[int]]:
    async with running_coordinator(
        stages,
        context_length=128,
        num_slots=4,
        make_proposer=make_proposer,
        controller=controller,
        max_rows=FakeRuntime.max_rows,
        n_vocab=N_VOCAB,
        token_texts=TEXTS,
    ) as coordinator:
        found = await asyncio.gather(*(collect(coordinator, request) for request in requests))
    return [tokens for tokens, _ in found]


SAMPLINGS = st.sampled_from(
    [
        SamplingParams(),
        SamplingParams(1.0, seed=4),
        SamplingParams(0.7, top_k=5, top_p=0.9, seed=5),
        SamplingParams(
            0.9, min_p=0.2, seed=6, frequency_penalty=1.0, repetition_penalty=1.2, logit_bias=((8, 9.0),)
        ),
    ]
)
PROPOSERS = st.sampled_from(["off", "oracle", "ngram", "parrot"])
ERRS = st.lists(st.sampled_from([False, False, True]), min_size=1, max_size=12)


@search(few=20, many=50)
@given(
    prompts=st.lists(st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=40), min_size=1, max_size=3),
    num_tokens=st.integers(1, 32),
    proposer=PROPOSERS,
    errs=ERRS,
    width=st.none() | st.integers(1, 8),
    depth=st.none() | st.integers(1, 8),
    delays_ms=st.lists(st.sampled_from([0.0, 0.0, 0.5]), min_size=1, max_size=7),
    sampling=SAMPLINGS,
    grammar=st.sampled_from(GRAMMARS),
)
def test_one_text_whatever_flies(
    ring: SharedRing,
    *,
    prompts: list[list[int]],
    num_tokens: int,
    proposer: str,
    errs: list[bool],
    width: int | None,
    depth: int | None,
    delays_ms: list[float],
    sampling: SamplingParams,
    grammar: str,
) -> None:
    delays = itertools.cycle(delays_ms)
    for runtime in ring.runtimes:
        runtime.on_decode = lambda _spans: time.sleep(next(delays) / 1000)
    if proposer == "oracle":
        prompts = prompts[:1]
    requests = [
        GenerationRequest(tuple(prompt), num_tokens, sampling=sampling, grammar=grammar) for prompt in prompts
    ]
    wanted = [expected(request) for request in requests]
    make = proposers(prompts[0], wanted[0], errs).get(proposer)
    controller = ControllerOptions(fixed_width=width, fixed_depth=depth)
    assert ring.runner.run(answers(ring.stages, requests, make, controller)) == wanted
    for tokens in wanted:
        automaton = make_automaton(grammar)
        text = b"".join(TEXTS.pieces[token] for token in tokens)
        assert automaton.after(automaton.start, text) != DEAD


@search(few=6, many=15)
@given(
    prompts=st.lists(st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=40), min_size=1, max_size=3),
    deaths=st.dictionaries(st.integers(1, 90), st.integers(-1, NUM_STAGES - 1), min_size=1, max_size=3),
    proposer=PROPOSERS,
    errs=ERRS,
    width=st.none() | st.integers(1, 6),
    depth=st.none() | st.integers(1, 6),
    sampling=SAMPLINGS,
    grammar=st.sampled_from(GRAMMARS),
)
def test_one_text_whenever_stages_die(
    *,
    prompts: list[list[int]],
    deaths: dict[int, int],
    proposer: str,
    errs: list[bool],
    width: int | None,
    depth: int | None,
    sampling: SamplingParams,
    grammar: str,
) -> None:
    """The tail too: one that is new hears the vocabulary, and reads the answer so far again."""
    if proposer == "oracle":
        prompts = prompts[:1]
    requests = [GenerationRequest(tuple(each), 24, sampling=sampling, grammar=grammar) for each in prompts]
    wanted = [expected(request) for request in requests]
    make = proposers(prompts[0], wanted[0], errs).get(proposer)
    options = CoordinatorOptions(
        128,
        4,
        FakeRuntime.max_rows,
        N_VOCAB,
        repair_wait_s=30.0,
        most_crashes=99,
        controller=ControllerOptions(fixed_width=width, fixed_depth=depth),
        token_texts=lambda: TEXTS,
    )

    async def ask() -> list[list[int]]:
        dies = Deaths(deaths)
        broken = dies.ring = RepairableRing(dies)
        make_proposers = None if make is None else lambda _request: [make()]
        async with (
            asyncio.timeout(60),
            serving(broken, options, make_proposers=make_proposers) as coordinator,
        ):
            found = await asyncio.gather(*(collect(coordinator, request) for request in requests))
            await asyncio.gather(*dies.dying)
        return [tokens for tokens, _ in found]

    assert asyncio.run(ask()) == wanted


@pytest.mark.parametrize("depth", [1, 4])
async def test_a_trace_of_rejected_rows_would_show(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """With states that are not cut where a window starts, another text or an error comes out."""
    request = GenerationRequest(PROMPT, 24, sampling=SamplingParams(1.0, seed=3), grammar=LISTS)
    text = expected(request)
    errs = [False, True, False, False, True]
    controller = ControllerOptions(fixed_width=3, fixed_depth=depth)

    async def answer() -> list[int]:
        async with running_services(fake_ring()) as stages:
            (got,) = await answers(stages, [request], lambda: Forgetful([*PROMPT, *text], errs), controller)
        return got

    assert await answer() == text
    write = GrammarRecord.write

    def append(record: GrammarRecord, start: int, tokens: Sequence[int]) -> None:
        write(record, start if start < len(PROMPT) else len(PROMPT) + len(record._answer), tokens)

    monkeypatch.setattr(GrammarRecord, "write", append)
    try:
        found: list[int] | None = await answer()
    except RequestError:
        found = None
    assert found != text


class Forgetful(Oracle):
    """Goes on proposing its own text where another one has been committed."""

    def extend(self, tokens: Sequence[int]) -> None:
        self.heard = self._text[: len(self.heard) + len(tokens)]


async def test_an_answer_ends_only_where_its_grammar_does() -> None:
    request = GenerationRequest(PROMPT, 40, frozenset({END}), grammar='root ::= "(" [ab]{4} "),"')
    async with (
        running_services(fake_ring()) as stages,
        running_coordinator(
            stages,
            context_length=128,
            num_slots=1,
            max_rows=FakeRuntime.max_rows,
            n_vocab=N_VOCAB,
            make_proposer=Parrot,
            token_texts=TEXTS,
        ) as coordinator,
    ):
        tokens, last = await collect(coordinator, request)
        assert tokens[-1] == END
        assert last.finish == "stop"
        text = b"".join(TEXTS.pieces[token] for token in tokens).decode()
        assert len(text) == 7
        assert set(text[1:5]) <= set("ab")
        # One that says nothing may end at once.
        tokens, _ = await collect(
            coordinator, GenerationRequest(PROMPT, 40, frozenset({END}), grammar='root ::= ""')
        )
        assert tokens == [END]


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root ::= "x"', "it allows no token of this model at position 5"),
        ('root ::= "ab" "x"', "it allows no token of this model at position"),
        ("root ::= a", "`a`, which is not defined"),
        ('root ::= ""? root', "left-recursive"),
    ],
)
async def test_a_grammar_that_cannot_be_kept_to_fails_its_own_session(grammar: str, reason: str) -> None:
    """As when nobody has looked at it before: that session fails, and no other."""
    async with (
        running_services(fake_ring()) as stages,
        running_coordinator(
            stages,
            context_length=128,
            num_slots=2,
            max_rows=FakeRuntime.max_rows,
            n_vocab=N_VOCAB,
            token_texts=TEXTS,
        ) as coordinator,
    ):
        other = asyncio.create_task(collect(coordinator, GenerationRequest(PROMPT, 20, grammar=LISTS)))
        with pytest.raises(RequestError, match=reason):
            await collect(coordinator, GenerationRequest(PROMPT, 20, grammar=grammar))
        assert len((await other)[0]) == 20


async def test_without_a_vocabulary_there_are_no_grammars() -> None:
    async with (
        running_services(fake_ring()) as stages,
        running_coordinator(
            stages, context_length=128, num_slots=1, max_rows=FakeRuntime.max_rows, n_vocab=N_VOCAB
        ) as coordinator,
    ):
        with pytest.raises(InvalidRequest, match="not supported by these stages"):
            await collect(coordinator, GenerationRequest(PROMPT, 5, grammar=LISTS))
