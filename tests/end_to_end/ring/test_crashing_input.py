"""Input that crashes stages: who is blamed, and who is not."""

import asyncio
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator.crash_suspects import CrashHistory, crash_suspect
from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import GenerationRequest
from spanmesh_proto.errors import StageFailed
from stages.runtime.spans import Span
from stages.sampling.sampler import Sampler, SamplingParams
from tests.support.fake_stage import FakeRuntime, plain_answer
from tests.support.repairable_ring import RepairableRing, serving
from tests.support.ring_harness import collect

OPTIONS = CoordinatorOptions(128, 4, FakeRuntime.max_rows, 64, repair_wait_s=30.0)
PROMPTS = [tuple(range(start, start + 10)) for start in (3, 20, 40)]
NUM_TOKENS = 30


def request(prompt: Sequence[int]) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), NUM_TOKENS)


def alone(prompt: Sequence[int]) -> list[int]:
    return plain_answer(prompt, NUM_TOKENS, Sampler(SamplingParams()).sample)


class Crashing:
    """The middle stage dies whenever it computes the token of a given text at a given place."""

    def __init__(self, text: Sequence[int], place: int) -> None:
        self.ring = RepairableRing(self)
        self.num_crashes = 0
        self._text, self._place = list(text), place
        self._loop = asyncio.get_running_loop()
        self._dying: set[asyncio.Task[None]] = set()

    def __call__(self, index: int, spans: Sequence[Span]) -> None:
        for span in spans:
            stop = span.start + len(span.tokens)
            if index == 1 and span.start <= self._place < stop and self._is_text(span, stop):
                is_dead = threading.Event()
                self._loop.call_soon_threadsafe(self._crash, is_dead)
                assert is_dead.wait(60)

    def _is_text(self, span: Span, stop: int) -> bool:
        return list(span.tokens) == self._text[span.start : stop]

    def _crash(self, is_dead: threading.Event) -> None:
        self.num_crashes += 1
        self._dying.add(asyncio.ensure_future(self.ring.kill(1, is_dead)))


@given(
    crashes=st.lists(st.dictionaries(st.integers(0, 2), st.integers(1, 2), max_size=3), max_size=12),
    most_crashes=st.integers(1, 3),
)
def test_only_who_was_alone_at_the_same_place_again_and_again_is_blamed(
    crashes: list[dict[int, int]], most_crashes: int
) -> None:
    """Each crash: sessions under way, and where they were."""
    histories = [CrashHistory() for _ in range(3)]
    past: dict[int, list[tuple[int, bool]]] = {session: [] for session in range(3)}
    for under_way in crashes:
        is_alone = len(under_way) == 1
        for session, position in under_way.items():
            histories[session].add(position, is_alone=is_alone)
            past[session].append((position, is_alone))
            latest_two = [place for place, _ in past[session][-2:]]
            assert histories[session].is_suspect == (latest_two == [position] * 2)
        guilty = [
            session
            for session, position in under_way.items()
            if past[session][-most_crashes:] == [(position, True)] * most_crashes
        ]
        blamed = crash_suspect([histories[session] for session in under_way], most_crashes)
        assert blamed is (histories[guilty[0]] if guilty else None)


@pytest.mark.parametrize("place", [4, 25])
async def test_a_request_that_crashes_stages_fails_alone(place: int) -> None:
    """In its prompt, or in its answer; three sessions run."""
    texts = [[*prompt, *alone(prompt)] for prompt in PROMPTS]
    crashing = Crashing(texts[1], place)
    async with asyncio.timeout(60), serving(crashing.ring, OPTIONS) as coordinator:
        answers = [asyncio.create_task(collect(coordinator, request(prompt))) for prompt in PROMPTS]
        with pytest.raises(StageFailed, match=r"a stage crashed again at token \d+ of this request"):
            await answers[1]
        for index in (0, 2):
            assert (await answers[index])[0] == texts[index][len(PROMPTS[index]) :]
    # Among others, among others again, alone, alone again; fewer where the others were done.
    assert 2 <= crashing.num_crashes <= 4


async def test_alone_it_fails_at_its_second_crash() -> None:
    prompt = PROMPTS[0]
    crashing = Crashing([*prompt, *alone(prompt)], 15)
    async with asyncio.timeout(60), serving(crashing.ring, OPTIONS) as coordinator:
        with pytest.raises(StageFailed, match="a stage crashed again at token 16 of this request"):
            await collect(coordinator, request(prompt))
        assert (await collect(coordinator, request(PROMPTS[1])))[0] == alone(PROMPTS[1])
    assert crashing.num_crashes == 2
