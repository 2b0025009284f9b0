"""Drafts over three stages in exact mode: token for token those of llama.cpp on the whole model.

Rounds are in step: the drafter drafts a window's tokens behind the newest committed one, from features of all
tokens before it, and the window is judged before the next draft. A coordinator waits for nothing: its window
leaves with what is drafted so far. Here it waits, for features with each verdict and for drafts with each
proposal, so that rounds do not depend on time.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict, deque
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from mesh.coordinator.feature_plug import FeaturePlug
from mesh.coordinator.ring import Ring
from mesh.coordinator.session import Session
from mesh.draft.drafter import loadable_file
from speculative.proposer import DrafterKind
from stages.layers import ranges_from_cuts
from stages.runtime.stage_runtime import RuntimeOptions
from stages.sampling.sampler import SamplingParams
from stages.transport.hidden_codec import HiddenType
from tests.end_to_end.ring.test_feature_drafters import CHAT, CTX_SIZE, Setting, target_and_drafter
from tests.support.draft_oracle import DraftOracle, OracleMissing, Round, build_draft_oracle
from tests.support.ring_harness import collect, feature_streams, running_stages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from pathlib import Path

    from mesh.coordinator.coordinator import Coordinator
    from mesh.coordinator.feature_plug import ReceivedFeatures
    from mesh.coordinator.stage_streams import BatchTimes
    from mesh.draft.drafter import Drafter
    from mesh.engine import GenerationRequest
    from spanmesh_proto import windows_pb2 as wire
    from speculative.draft.worker import DraftProposer
    from speculative.proposer import Proposal
    from tests.support.ring_harness import RunningStage

pytestmark = [pytest.mark.model, pytest.mark.sweep]

CUTS = (10, 20)
WIDTH = 3
NUM_TOKENS = 60
LEAST_ROUNDS = 10
PATIENCE_S = 10.0
QUESTIONS = (
    "What is a tree?",
    "Count from one to twenty.",
    "Write a function that sorts a list in Python.",
    "Name the planets.",
    "Why is the sky blue?",
    "Tell me a story about a fox.",
    "How do I bake bread?",
    "What did Newton find out?",
    "List five animals that live in the sea.",
)
# Short ones: together they are fewer rows than attention computes in tiles.
FOUR_QUESTIONS = tuple(QUESTIONS[index] for index in (0, 1, 3, 4))


class InStep:
    """Rounds of sessions, whose coordinator has features and drafts before it sends a window.

    Args:
        num_layers: Layers whose features make a row.
        num_at_tail: Those of the tail, whose features verdicts carry for the rows that were sampled.

    Attributes:
        is_together: Whether verdicts wait until all sessions have one.
    """

    def __init__(self, num_layers: int, num_at_tail: int) -> None:
        self._num_layers = num_layers
        self._num_at_tail = num_at_tail
        self.is_together = False
        self._rounds: dict[GenerationRequest, dict[int, list[Round]]] = {}
        self._windows: dict[tuple[int, int], wire.Window] = {}
        # Sessions whose prompt was sent, and windows behind it.
        self._prefilled: set[int] = set()
        self._decoding: set[tuple[int, int]] = set()
        self._num_received: dict[tuple[int, int], int] = defaultdict(int)
        self._first_ids: dict[Session, int] = {}
        self._held: dict[Session, deque[tuple[wire.Verdict, BatchTimes]]] = defaultdict(deque)
        self._send, self._take, self._on_verdict = Ring.send, FeaturePlug.take, Session.on_verdict

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Stand between sessions and their ring."""

        def send(ring: Ring, windows: Sequence[wire.Window]) -> None:
            for window in windows:
                self._note_sent(window)
            self._send(ring, windows)

        def take(plug: FeaturePlug, features: ReceivedFeatures) -> None:
            num_rows = sum(len(rows) for _, rows in features.rows)
            self._num_received[features.session, features.window_id] += num_rows
            self._take(plug, features)
            for session in list(self._held):
                if session.id == features.session:
                    self._arrived(session)

        def on_verdict(session: Session, verdict: wire.Verdict, times: BatchTimes) -> None:
            self._held[session].append((verdict, times))
            self._arrived(session)

        patch.setattr(Ring, "send", send)
        patch.setattr(FeaturePlug, "take", take)
        patch.setattr(Session, "on_verdict", on_verdict)

    def take_rounds(self, request: GenerationRequest) -> list[list[Round]]:
        """Rounds of a request so far in each ring, once; rings without any are left out."""
        return list(self._rounds.pop(request, {}).values())

    def pass_on(self) -> None:
        """Pass on the verdicts whose features are there."""
        for session in list(self._held):
            self._pass_on(session)

    def _arrived(self, session: Session) -> None:
        if not self.is_together:
            self._pass_on(session)
        elif all(each.is_over or self._is_due(each) for each in self._held):
            self.pass_on()

    def _is_due(self, session: Session) -> bool:
        held = self._held[session]
        return bool(held) and self._has_features(session, held[0][0])

    def _note_sent(self, window: wire.Window) -> None:
        key = window.session, window.id
        self._windows[key] = window
        if window.session in self._prefilled:
            self._decoding.add(key)
        elif window.verify_rows:
            self._prefilled.add(window.session)

    def _pass_on(self, session: Session) -> None:
        held = self._held[session]
        # Verdicts of an earlier ring are void.
        while held and held[0][0].session != session.id:
            held.popleft()
        while self._is_due(session):
            verdict, times = held.popleft()
            key = verdict.session, verdict.window_id
            if key in self._decoding:
                window, num_again = self._windows[key], self._windows[key].recomputed_rows
                last, *drafted = window.tokens[num_again:]
                rounds = self._rounds.setdefault(session.request, {}).setdefault(session.id, [])
                position = window.start + num_again
                rounds.append(Round(position, last, tuple(drafted), len(verdict.tokens) - 1))
            self._on_verdict(session, verdict, times)

    def _has_features(self, session: Session, verdict: wire.Verdict) -> bool:
        """Whether features of all rows that count are there, or in the verdict."""
        key = verdict.session, verdict.window_id
        window = self._windows[key]
        is_replay = session.id != self._first_ids.setdefault(session, session.id)
        # In a replay stages send no features of rows that they hold from before.
        if not window.wants_features or (is_replay and not window.verify_rows):
            return True
        # The tail sends no features of rejected rows.
        num_sampled, num_rows = len(verdict.tokens), len(window.tokens)
        num_expected = num_rows * (self._num_layers - self._num_at_tail)
        num_expected += (num_rows - window.verify_rows) * self._num_at_tail
        if not (num_sampled and verdict.HasField("features")):
            num_expected += num_sampled * self._num_at_tail
        return self._num_received[key] >= num_expected


class SteppedSetting(Setting):
    """A target with drafter, in step, and llama.cpp's own drafts of the two."""

    def __init__(
        self,
        target: Path,
        drafter: Drafter,
        cache: Path,
        program: Path,
        cuts: tuple[int, ...] = CUTS,
        *,
        width: int = WIDTH,
        kv_type: str = "f16",
    ) -> None:
        super().__init__(target, drafter, cache, kv_type=kv_type)
        self._cuts = cuts
        self._kv_type = kv_type
        self.width = width
        # The reference reads features as they are.
        self.needs = replace(self.needs, hidden_type=HiddenType.F32)
        has_own_file = drafter.path != target
        self.oracle = DraftOracle(
            program,
            target,
            loadable_file(drafter, target, cache) if has_own_file else None,
            "dflash" if drafter.kind is DrafterKind.DFLASH2 else drafter.kind.value,
        )
        # Random weights are hardly ever right.
        self.is_trained = drafter.most_drafted == 1
        self.in_step = self.new_in_step()
        self.patience_s = PATIENCE_S

    def new_in_step(self) -> InStep:
        tail = ranges_from_cuts(self._cuts, self.needs.n_layers)[-1]
        return InStep(len(self.needs.layers), sum(layer >= tail.start for layer in self.needs.layers))

    def open(self, request: GenerationRequest) -> DraftProposer:
        """A proposer whose proposals are complete, unless that takes too long."""
        proposer = super().open(request)
        propose = proposer.propose

        def wait(max_tokens: int, after: Sequence[int] = ()) -> Proposal:
            proposal = propose(max_tokens, after)
            # Those of other sessions are drafted together with it.
            self.in_step.pass_on()
            until_s = time.monotonic() + self.patience_s
            while not self._is_complete(proposal, max_tokens) and time.monotonic() < until_s:
                time.sleep(0.0005)
                proposal = propose(max_tokens, after)
            return proposal

        proposer.propose = wait  # type: ignore[method-assign]
        return proposer

    def _is_complete(self, proposal: Proposal, max_tokens: int) -> bool:
        tokens = proposal.tokens
        return len(tokens) >= max_tokens or (bool(tokens) and tokens[-1] in self.tokenizer.end_tokens)

    def question(self, text: str) -> GenerationRequest:
        return replace(self.request(text, SamplingParams()), max_tokens=NUM_TOKENS)

    def take_rounds(self, request: GenerationRequest) -> list[list[Round]]:
        """Rounds of a request so far in each ring, once: those with room for all that is drafted."""
        stop = len(request.prompt) + request.max_tokens
        return [
            [each for each in rounds if each.position + 1 + self.width < stop]
            for rounds in self.in_step.take_rounds(request)
        ]

    async def answer(
        self, coordinator: Coordinator, request: GenerationRequest
    ) -> tuple[list[int], list[Round]]:
        """Answer and rounds in a ring that stays whole."""
        tokens, _ = await collect(coordinator, request)
        (rounds,) = self.take_rounds(request)
        return tokens, rounds

    def reference(self, texts: Sequence[Sequence[int]], num_rounds: int) -> list[list[Round]]:
        """llama.cpp's rounds behind each text. Our drafts end before an end token."""
        return [
            [self._until_end(each) for each in rounds]
            for rounds in self.oracle.rounds(texts, self.width, num_rounds, kv_type=self._kv_type)
        ]

    def _until_end(self, round: Round) -> Round:
        is_before_end = (token not in self.tokenizer.end_tokens for token in round.drafted)
        stop = sum(itertools.takewhile(bool, is_before_end))
        return replace(round, drafted=round.drafted[:stop], num_accepted=min(round.num_accepted, stop))

    def check(self, texts: Sequence[Sequence[int]], ours: Sequence[list[Round]]) -> None:
        """Compare rounds with llama.cpp's.

        Args:
            texts: Prompts and answers, at least up to the token that the first draft follows.
            ours: Consecutive rounds behind each.
        """
        beginnings = [text[: rounds[0].position + 1] for text, rounds in zip(texts, ours, strict=True)]
        theirs = self.reference(beginnings, max(map(len, ours)))
        for our, their in zip(ours, theirs, strict=True):
            assert our == their[: len(our)]


@pytest.fixture(scope="module", params=["eagle3", "mtp", "dflash", "dspark", "dflash2"])
def loaded(
    request: pytest.FixtureRequest, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SteppedSetting]:
    try:
        program = build_draft_oracle()
    except OracleMissing as missing:
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("drafters")
    target, drafter = target_and_drafter(request.param, smollm2_path, folder)
    with pytest.MonkeyPatch.context() as patch:
        # The drafter has a process of its own, which inherits it.
        patch.setenv("GGML_CPU_TILED_MM", "0")
        setting = SteppedSetting(target, drafter, folder, program)
    yield setting
    setting.model.close()


@pytest.fixture
def line(loaded: SteppedSetting, monkeypatch: pytest.MonkeyPatch) -> SteppedSetting:
    loaded.in_step, loaded.patience_s = loaded.new_in_step(), PATIENCE_S
    loaded.in_step.watch(monkeypatch)
    return loaded


@pytest.fixture
async def stages(loaded: SteppedSetting, stage_cache_dir: Path) -> AsyncIterator[list[RunningStage]]:
    options = RuntimeOptions(num_slots=4, ctx_size=CTX_SIZE, exact=True)
    async with running_stages(loaded.target, CUTS, options, stage_cache_dir) as running:
        yield running


async def test_drafts_are_those_of_llama_cpp(line: SteppedSetting, stages: list[RunningStage]) -> None:
    texts, ours = [], []
    async with line.coordinator(stages, width=WIDTH, depth=1) as coordinator:
        for question in QUESTIONS:
            request = line.question(question)
            tokens, rounds = await line.answer(coordinator, request)
            texts.append((*request.prompt, *tokens))
            ours.append(rounds)
    assert min(map(len, ours)) >= LEAST_ROUNDS
    if line.is_trained:
        assert sum(each.num_accepted for rounds in ours for each in rounds) > LEAST_ROUNDS
    line.check(texts, ours)


async def test_drafts_behind_a_cached_prefix_are_those_of_llama_cpp(
    line: SteppedSetting, stages: list[RunningStage]
) -> None:
    """The second turn computes the new message only, and has the drafter's rows of the first one."""
    texts, ours = [], []
    async with line.coordinator(stages, width=WIDTH, depth=1) as coordinator:
        for question, following in itertools.pairwise(QUESTIONS[:5]):
            first = line.question(question)
            tokens, _ = await line.answer(coordinator, first)
            more = line.tokenizer.encode(
                "<|im_end|>\n" + CHAT.format(following), add_special=False, parse_special=True
            )
            second = replace(first, prompt=(*first.prompt, *tokens, *more))
            again, last = await collect(coordinator, second)
            assert last.stats.num_cached >= len(first.prompt) + len(tokens) - 1
            texts.append((*second.prompt, *again))
            ours += line.take_rounds(second)
    assert sum(map(len, ours)) >= 4 * LEAST_ROUNDS
    line.check(texts, ours)


async def test_drafts_behind_a_repair_are_those_of_llama_cpp(
    line: SteppedSetting, stage_cache_dir: Path
) -> None:
    """Each stage is lost in turn, in the midst of an answer.

    A replay is a prompt: it computes the last committed token anew and draws the next one. Features of all
    tokens before those came earlier or come with it, and the drafter's rows are still there. If the next
    token is the one that was drafted in the lost window, that draft goes on; llama.cpp would draft anew. So
    the second round behind a repair is the first one that must be equal.
    """
    stage_options = RuntimeOptions(num_slots=4, ctx_size=CTX_SIZE, exact=True)
    texts, ours = [], []
    async with (
        asyncio.timeout(200),
        line.repairable(
            CUTS,
            stage_options,
            stage_cache_dir,
            lambda request: [line.open(request)],
            width=line.width,
            depth=1,
        ) as (ring, coordinator),
    ):
        for index, question in enumerate(QUESTIONS[: len(CUTS) + 1]):
            await connected(coordinator)
            request = line.question(question)
            text, dying = list(request.prompt), None
            async for part in coordinator.generate(request):
                text += part.tokens
                if dying is None and len(text) > len(request.prompt) + NUM_TOKENS // 3:
                    dying = asyncio.create_task(ring.kill(index))
            assert dying is not None
            await dying
            before, behind = line.take_rounds(request)
            texts += [text, text]
            ours += [before, behind[1:]]
    assert ring.num_repairs == len(ours) // 2
    assert min(map(len, ours[1::2])) >= LEAST_ROUNDS
    line.check(texts, ours)


async def test_drafts_of_several_sessions_at_once_are_those_of_each_alone(
    line: SteppedSetting, stages: list[RunningStage]
) -> None:
    # Each begins without what was cached before.
    requests = [replace(line.question(question), uses_cache=False) for question in FOUR_QUESTIONS]
    async with line.coordinator(stages, width=WIDTH, depth=1) as coordinator:
        alone = [await line.answer(coordinator, request) for request in requests]
        together = await asyncio.gather(*(line.answer(coordinator, request) for request in requests))
    assert together == alone
    line.check(
        [(*request.prompt, *tokens) for request, (tokens, _) in zip(requests, together, strict=True)],
        [rounds for _, rounds in together],
    )


async def connected(coordinator: Coordinator) -> None:
    """Wait until features come."""
    while (streams := feature_streams(coordinator)) is None or streams.why_off is not None:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
