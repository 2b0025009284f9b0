"""An assistant beside the last stage of a ring: the text is the model's own, whatever it drafts."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mesh.coordinator.options import CoordinatorOptions
from mesh.coordinator.tail_draft_plug import TailDraftPlug, TailDraftRing
from mesh.engine import GenerationRequest
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import StageFailed
from speculative.controller import ControllerOptions
from speculative.remote_drafts import RemoteDrafter, RemoteDraftProposer
from stages.layers import ranges_from_cuts
from stages.runtime.assistant import Assistant
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.sampling.sampler import SamplingParams
from stages.sampling.verifier import WindowVerifier
from stages.weights.virtual_stages import StageCache
from tests.qualification.own_models import OWN_MODELS
from tests.support.assistant_files import write_assistant
from tests.support.draft_oracle import DraftOracle, OracleMissing, build_draft_oracle
from tests.support.repairable_ring import RepairableRing, serving
from tests.support.ring_harness import collect, plugs_for, running_coordinator, running_stages
from tests.support.tiny_models import N_VOCAB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from mesh.coordinator.coordinator import Coordinator
    from spanmesh_proto import windows_pb2 as wire
    from speculative.proposer import Draft
    from tests.support.ring_harness import RunningStage

CTX_SIZE = 256
NUM_TOKENS = 40
NUM_DRAFTED = 4
OPTIONS = RuntimeOptions(num_slots=4, ctx_size=CTX_SIZE, exact=True, has_reader=True)
NOISE = np.random.default_rng(3)
PROMPTS = [tuple(int(token) for token in NOISE.integers(3, 300, size)) for size in (33, 12, 20, 57)]
SAMPLINGS = {
    "greedy": SamplingParams(),
    "cool": SamplingParams(0.2, seed=5),
    "drawn": SamplingParams(0.8, seed=5, repetition_penalty=1.1, repetition_window=16),
}
GRAMMAR = "root ::= [A-E]{40}"


class Noting(RemoteDraftProposer):
    """Proposer that notes the drafts that it takes, by their first positions."""

    def __init__(self) -> None:
        super().__init__(RemoteDrafter(NUM_DRAFTED))
        self.taken: dict[int, tuple[int, ...]] = {}

    def take_draft(self, draft: Draft) -> None:
        self.taken[draft.start] = draft.tokens
        super().take_draft(draft)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assistants")
    for kind in ("dense", "moe", "e"):
        OWN_MODELS[f"gemma4-{kind}"](2).write(folder / f"{kind}.gguf")
    write_assistant(folder / "assistant.gguf")
    return folder


def request(
    prompt: tuple[int, ...] = PROMPTS[0], sampling: SamplingParams = SAMPLINGS["greedy"]
) -> GenerationRequest:
    return GenerationRequest(prompt, NUM_TOKENS, sampling=sampling)


@asynccontextmanager
async def coordinating(
    stages: list[RunningStage],
    plug: TailDraftPlug | None,
    *,
    width: int = NUM_DRAFTED,
    opened: list[Noting] | None = None,
    **options: Any,
) -> AsyncIterator[Coordinator]:
    """A coordinator that proposes what the tail drafts; without a plug it proposes nothing.

    Proposers are added to `opened`, one for each request.
    """
    noted = [] if opened is None else opened

    def proposers(_request: GenerationRequest) -> list[Noting]:
        noted.append(Noting())
        return noted[-1:]

    plugs = plugs_for(has_windows=True)
    async with running_coordinator(
        stages,
        context_length=CTX_SIZE,
        num_slots=4,
        n_vocab=N_VOCAB,
        make_proposers=None if plug is None else proposers,
        controller=ControllerOptions(fixed_width=width, fixed_depth=3),
        plugs=plugs if plug is None else [*plugs, plug],
        **options,
    ) as coordinator:
        yield coordinator


@pytest.fixture
async def stages(folder: Path) -> AsyncIterator[list[RunningStage]]:
    async with running_stages(
        folder / "dense.gguf", (2, 4), OPTIONS, folder / "stages", assistant=folder / "assistant.gguf"
    ) as running:
        yield running


async def plain_text(stages: list[RunningStage], wanted: GenerationRequest, **options: Any) -> list[int]:
    async with coordinating(stages, None, **options) as coordinator:
        return (await collect(coordinator, wanted))[0]


def foretelling(
    monkeypatch: pytest.MonkeyPatch,
    prompt: Sequence[int],
    text: Sequence[int],
    is_right: Callable[[int], bool] = lambda place: place % 7 != 0,
) -> None:
    """Have the assistant foretell the text where it is to be right, and what is wrong elsewhere."""
    foretell = WindowVerifier.foretell

    def foretold(
        verifier: WindowVerifier, logits: NDArray[np.float32], tokens: Sequence[int], start: int
    ) -> int:
        drawn = foretell(verifier, logits, tokens, start)
        place = start + len(tokens) - len(prompt)
        if place >= len(text):
            return drawn
        return text[place] if is_right(place) else (text[place] + 1) % N_VOCAB

    monkeypatch.setattr(WindowVerifier, "foretell", foretold)


async def why_off(coordinator: Coordinator) -> str:
    """Why no drafts come, by the status, once the tail has told."""
    async with asyncio.timeout(10):
        while True:
            speculation = coordinator.status().speculation
            assert speculation is not None
            assert speculation.tail_drafts is not None
            if speculation.tail_drafts.off is not None:
                return speculation.tail_drafts.off
            await asyncio.sleep(0.01)


def agreeing(one: Noting, other: Noting, start: int) -> int:
    """How many drafts behind a position both have taken, which agree as far as both go."""
    common = [place for place in one.taken.keys() & other.taken.keys() if place >= start]
    for place in common:
        pairs = zip(one.taken[place], other.taken[place], strict=False)
        assert all(left == right for left, right in pairs), place
    return len(common)


@pytest.mark.parametrize("kind", ["dense", "moe", "e"])
async def test_the_text_is_the_one_without_drafts(kind: str, folder: Path) -> None:
    model = folder / f"{kind}.gguf"
    async with running_stages(
        model, (2, 4), OPTIONS, folder / "stages", assistant=folder / "assistant.gguf"
    ) as stages:
        requests = [request(prompt, sampling=SAMPLINGS["drawn"]) for prompt in PROMPTS]
        requests += [request(sampling=sampling) for sampling in SAMPLINGS.values()]
        async with coordinating(stages, None) as coordinator:
            plain = [(await collect(coordinator, each))[0] for each in requests]
        async with coordinating(stages, TailDraftPlug()) as coordinator:
            found = [(await collect(coordinator, each)) for each in requests]
            together = await asyncio.gather(*(collect(coordinator, each) for each in requests[:4]))
    assert [tokens for tokens, _ in found] == plain
    assert [tokens for tokens, _ in together] == plain[:4]
    assert all(last.stats.num_proposed > NUM_TOKENS for _, last in (*found, *together))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "kv_type"),
    [("dense", "f16"), ("dense", "q8_0"), ("dense", "q4_0"), ("moe", "f16"), ("e", "f16")],
)
async def test_drafts_of_four_sessions_are_llama_cpp_s_own(folder: Path, kind: str, kv_type: str) -> None:
    try:
        program = build_draft_oracle()
    except OracleMissing as missing:
        pytest.skip(str(missing))
    model = folder / f"{kind}.gguf"
    opened: list[Noting] = []
    async with (
        running_stages(
            model,
            (2, 4),
            replace(OPTIONS, kv_type=kv_type),
            folder / "stages",
            assistant=folder / "assistant.gguf",
        ) as stages,
        coordinating(stages, TailDraftPlug(), opened=opened) as coordinator,
    ):
        requests = [replace(request(prompt), max_tokens=120) for prompt in PROMPTS]
        found = await asyncio.gather(*(collect(coordinator, each) for each in requests))
    oracle = DraftOracle(program, model, folder / "assistant.gguf", "mtp")
    expected = oracle.rounds(PROMPTS, NUM_DRAFTED, 100, kv_type=kv_type)
    for prompt, (tokens, _), noted, rounds in zip(PROMPTS, found, opened, expected, strict=True):
        text = [*prompt, *tokens]
        known = [each for each in rounds if each.position + 1 in noted.taken]
        for each in known:
            drafted = noted.taken[each.position + 1]
            assert text[each.position] == each.last
            assert drafted == each.drafted[: len(drafted)]
        assert len(known) >= 40
        assert len({each.drafted for each in known}) >= 5


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
async def test_text_and_drafts_do_not_depend_on_company_in_quantised_caches(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kv_type: str
) -> None:
    options = replace(OPTIONS, kv_type=kv_type)
    requests = [request(prompt, sampling) for prompt in PROMPTS[:2] for sampling in SAMPLINGS.values()]
    alone: list[Noting] = []
    together: list[Noting] = []
    async with running_stages(
        folder / "dense.gguf", (2, 4), options, folder / "stages", assistant=folder / "assistant.gguf"
    ) as stages:
        plain = [await plain_text(stages, each) for each in requests]
        async with coordinating(stages, TailDraftPlug(), opened=alone) as coordinator:
            assert [(await collect(coordinator, each))[0] for each in requests] == plain
        async with coordinating(stages, TailDraftPlug(), opened=together) as coordinator:
            found = await asyncio.gather(*(collect(coordinator, each) for each in requests[:4]))
        foretelling(monkeypatch, requests[1].prompt, plain[1])
        async with coordinating(stages, TailDraftPlug()) as coordinator:
            tokens, last = await collect(coordinator, requests[1])
    assert [tokens for tokens, _ in found] == plain[:4]
    assert all(agreeing(*pair, start=0) > NUM_TOKENS // 4 for pair in zip(alone, together, strict=False))
    assert tokens == plain[1]
    assert last.stats.num_accepted > NUM_TOKENS // 3


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
async def test_choices_of_one_prompt_draft_from_its_copied_rows(
    stages: list[RunningStage], sampling: SamplingParams
) -> None:
    wanted = [request(sampling=replace(sampling, seed=sampling.seed + number)) for number in range(4)]
    plain = [await plain_text(stages, each) for each in wanted]
    alone: list[Noting] = []
    copied: list[Noting] = []
    for each in wanted:
        async with coordinating(stages, TailDraftPlug(), opened=alone) as coordinator:
            await collect(coordinator, each)
    async with coordinating(stages, TailDraftPlug(), opened=copied) as coordinator:
        found = [await collect(coordinator, wanted[0])]
        found += await asyncio.gather(*(collect(coordinator, each) for each in wanted[1:]))
    assert [tokens for tokens, _ in found] == plain
    assert all(last.stats.num_cached == len(PROMPTS[0]) - 1 for _, last in found[1:])
    assert all(agreeing(*pair, start=0) > NUM_TOKENS // 4 for pair in zip(alone, copied, strict=True))


async def test_the_second_turn_drafts_as_if_all_was_computed_anew(stages: list[RunningStage]) -> None:
    first = request(sampling=SAMPLINGS["cool"])
    reused: list[Noting] = []
    anew: list[Noting] = []
    async with coordinating(stages, TailDraftPlug(), opened=reused) as coordinator:
        tokens, _ = await collect(coordinator, first)
        second = replace(first, prompt=(*first.prompt, *tokens, *PROMPTS[1]))
        found, last = await collect(coordinator, second)
    assert last.stats.num_cached >= len(first.prompt) + NUM_TOKENS - NUM_DRAFTED
    assert found == await plain_text(stages, second)
    async with coordinating(stages, TailDraftPlug(), opened=anew) as coordinator:
        again, last = await collect(coordinator, second)
    assert last.stats.num_cached == 0
    assert again == found
    assert agreeing(reused[1], anew[0], start=0) > NUM_TOKENS // 4


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("width", [1, 2, NUM_DRAFTED])
async def test_drafts_that_are_right_save_windows(
    stages: list[RunningStage], monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams, width: int
) -> None:
    wanted = request(sampling=sampling)
    plain = await plain_text(stages, wanted)
    foretelling(monkeypatch, wanted.prompt, plain)
    async with coordinating(stages, TailDraftPlug(), width=width) as coordinator:
        tokens, last = await collect(coordinator, wanted)
    assert tokens == plain
    assert last.stats.num_accepted > NUM_TOKENS // 3
    report = last.stats.report
    assert report is not None
    assert set(report().by_proposer) == {"", "assistant"}
    assert 0.0 < (report().draft_ms_per_token or 0.0) < 1000.0


async def test_no_verdict_is_without_a_draft_where_that_on_its_way_is_wrong(
    stages: list[RunningStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = request()
    plain = await plain_text(stages, wanted)
    found: dict[bool, Noting] = {}
    for stop in (0, len(plain)):
        opened: list[Noting] = []
        with monkeypatch.context() as patch:
            foretelling(patch, wanted.prompt, plain, range(stop).__contains__)
            async with coordinating(stages, TailDraftPlug(), opened=opened) as coordinator:
                assert (await collect(coordinator, wanted))[0] == plain
        (found[stop > 0],) = opened
    # The last verdict ends the answer.
    assert len(found[False].taken) >= NUM_TOKENS - 2
    # A window that left while the tail drafted what is right asks for nothing.
    assert len(found[True].taken) <= NUM_TOKENS // NUM_DRAFTED


async def test_a_grammar_binds_drafts_too(
    stages: list[RunningStage], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(folder / "dense.gguf")
    texts = tokenizer.texts
    # Bytes and letters from A to E, and the end.
    allowed = {*range(68, 73), *range(259, 264), *tokenizer.end_tokens}
    wanted = replace(request(sampling=SAMPLINGS["drawn"]), end_tokens=tokenizer.end_tokens, grammar=GRAMMAR)
    plain = await plain_text(stages, wanted, token_texts=texts)
    drafted: list[int] = []
    take = RemoteDraftProposer.take_draft

    def taken(proposer: RemoteDraftProposer, draft: Draft) -> None:
        drafted.extend(draft.tokens)
        take(proposer, draft)

    monkeypatch.setattr(RemoteDraftProposer, "take_draft", taken)
    async with coordinating(stages, TailDraftPlug(), token_texts=texts) as coordinator:
        tokens, last = await collect(coordinator, wanted)
    assert tokens == plain
    assert last.stats.num_accepted > 0
    assert drafted
    assert set(drafted) <= allowed


async def test_an_assistant_that_fails_is_done_without(
    stages: list[RunningStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = request()
    plain = await plain_text(stages, wanted)
    draft, calls = Assistant.draft, itertools.count()

    def fails(*arguments: Any) -> list[tuple[int, ...]]:
        if next(calls) == 5:
            raise StageFailed("the assistant failed")
        return draft(*arguments)

    monkeypatch.setattr(Assistant, "draft", fails)
    async with coordinating(stages, TailDraftPlug()) as coordinator:
        tokens, last = await collect(coordinator, wanted)
        again, later = await collect(coordinator, wanted)
        assert await why_off(coordinator) == "the assistant failed"
    assert tokens == again == plain
    assert 0 < last.stats.num_proposed < NUM_TOKENS
    assert later.stats.num_proposed == 0
    assert next(calls) == 6


@pytest.mark.parametrize("is_there", [False, True])
async def test_a_tail_without_an_assistant_that_drafts_sends_none(folder: Path, *, is_there: bool) -> None:
    damaged = folder / "damaged.gguf"
    damaged.write_bytes((folder / "assistant.gguf").read_bytes()[:50_000])
    async with running_stages(
        folder / "dense.gguf", (2, 4), OPTIONS, folder / "stages", assistant=damaged if is_there else None
    ) as stages:
        plain = await plain_text(stages, request())
        async with coordinating(stages, TailDraftPlug()) as coordinator:
            tokens, last = await collect(coordinator, request())
            off = await why_off(coordinator)
    assert (damaged.name in off) == is_there
    assert is_there or off == "the last stage has no assistant"
    assert tokens == plain
    assert last.stats.num_proposed == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": [5, N_VOCAB], "confidences": [0.5, 0.5]}, "drafted token 320, outside the vocabulary"),
        ({"tokens": [2**32 - 1], "confidences": [0.5]}, "drafted token 4294967295, outside"),
        ({"tokens": [5] * 5, "confidences": [0.5] * 5}, "drafted 5 tokens, and was asked for 4"),
        ({"tokens": [5, 6], "confidences": [0.5]}, "2 tokens with 1 confidences"),
        ({"tokens": [5], "confidences": [float("nan")]}, "confidences outside 0 to 1"),
        ({"tokens": [5], "confidences": [1.5]}, "confidences outside 0 to 1"),
        ({"session": 2**63}, None),
        ({"window_id": 2**40}, None),
        ({"start": 2**31}, None),
        ({"start": 0}, None),
        ({"tokens": [], "confidences": []}, None),
    ],
)
async def test_drafts_that_cannot_be_change_no_text(
    stages: list[RunningStage],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    reason: str | None,
) -> None:
    wanted = request()
    plain = await plain_text(stages, wanted)
    received = TailDraftRing.received

    def changed(ring: TailDraftRing, bundle: wire.VerdictBundle) -> None:
        for draft in bundle.drafts:
            for name, value in change.items():
                draft.ClearField(name)
                if isinstance(value, list):
                    getattr(draft, name).extend(value)
                else:
                    setattr(draft, name, value)
        received(ring, bundle)

    monkeypatch.setattr(TailDraftRing, "received", changed)
    plug = TailDraftPlug()
    async with coordinating(stages, plug) as coordinator:
        tokens, last = await collect(coordinator, wanted)
        again, _ = await collect(coordinator, wanted)
        assert coordinator.status().ready
    assert tokens == again == plain
    assert last.stats.num_proposed == 0
    assert (plug.why_off is None) == (reason is None)
    assert reason is None or reason in (plug.why_off or "")


@pytest.mark.parametrize(
    ("index", "is_there_again"),
    [(0, True), (1, True), (2, True), (2, False)],
    ids=["first", "middle", "tail", "tail without its assistant"],
)
async def test_a_stage_is_lost_in_mid_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, index: int, *, is_there_again: bool
) -> None:
    wanted = request(sampling=SAMPLINGS["cool"])
    cache = StageCache(folder / "stages")
    paths = [cache.cut(folder / "dense.gguf", layers).path for layers in ranges_from_cuts((2, 4), 6)]
    options = CoordinatorOptions(
        CTX_SIZE, 4, 63, N_VOCAB, controller=ControllerOptions(fixed_width=NUM_DRAFTED, fixed_depth=3)
    )

    def ring() -> RepairableRing:
        return RepairableRing(
            make_runtime=lambda index: StageRuntime(paths[index], OPTIONS),
            assistant=folder / "assistant.gguf",
        )

    async with serving(ring(), options) as coordinator:
        plain, _ = await collect(coordinator, wanted)
    foretelling(monkeypatch, wanted.prompt, plain)
    whole, torn = Noting(), Noting()
    opened = iter((whole, torn))
    lost = ring()
    async with (
        serving(
            lost,
            options,
            plugs=[*plugs_for(has_windows=True), TailDraftPlug()],
            make_proposers=lambda _request: [next(opened)],
        ) as coordinator,
        asyncio.timeout(60),
    ):
        assert (await collect(coordinator, wanted))[0] == plain
        tokens: list[int] = []
        before = 0
        async for part in coordinator.generate(wanted):
            tokens += part.tokens
            if not before and len(tokens) > 12:
                before, place = part.stats.num_accepted, len(wanted.prompt) + len(tokens)
                lost.assistant = lost.assistant if is_there_again else None
                await lost.kill(index)
        assert lost.num_repairs == 1
    assert tokens == plain
    assert before > 0
    assert (part.stats.num_accepted > before + NUM_DRAFTED) == is_there_again
    # What is drafted behind the repair is what is drafted without one.
    assert (agreeing(whole, torn, start=place + NUM_DRAFTED) >= 3) == is_there_again
