"""What an answer and `mesh status` say about speculation, from windows that really flew."""

import json
from collections.abc import Callable, Sequence

import pytest

from mesh.api.answering import AnswerPart, timings, usage_of
from mesh.api.generation_job import GenerationJob
from mesh.cli.status import print_status
from mesh.engine import Committed, GenerationRequest, SpeculationLimits
from mesh.status import MeshStatus, TailDraftStatus, as_json
from speculative.controller import ControllerOptions
from speculative.lookup_proposers import PredictionProposer
from speculative.proposer import Proposer
from stages.sampling.sampler import Sampler, SamplingParams
from tests.support.fake_stage import FakeRuntime, fake_ring, plain_answer
from tests.support.proposers import Oracle
from tests.support.ring_harness import collect, running_coordinator, running_services

PROMPT = tuple(range(3, 23))
NUM_TOKENS = 20
FUTURE = (*PROMPT, *plain_answer(PROMPT, NUM_TOKENS, Sampler(SamplingParams()).sample))
# The fifth proposed token of the answer is wrong.
ERRS = [place == len(PROMPT) + 5 for place in range(len(FUTURE))]


async def answered(
    make_proposer: Callable[[], Proposer] | None,
    request: GenerationRequest,
    *,
    depth: int,
    make_proposers: Callable[[GenerationRequest], Sequence[Proposer]] | None = None,
) -> tuple[Committed, MeshStatus]:
    """The last message of an answer, and what the coordinator says afterwards."""
    async with (
        running_services(fake_ring()) as stages,
        running_coordinator(
            stages,
            context_length=128,
            num_slots=1,
            make_proposer=make_proposer,
            make_proposers=make_proposers,
            controller=ControllerOptions(fixed_width=3, fixed_depth=depth),
            max_rows=FakeRuntime.max_rows,
            n_vocab=64,
        ) as coordinator,
    ):
        tokens, last = await collect(coordinator, request)
        assert tokens == list(FUTURE[len(PROMPT) :])
        return last, coordinator.status()


async def test_counts_of_windows_in_flight() -> None:
    request = GenerationRequest(PROMPT, NUM_TOKENS)
    last, status = await answered(lambda: Oracle(FUTURE, ERRS), request, depth=3)
    part = AnswerPart((), last.finish, NUM_TOKENS, last.stats)
    times = timings(GenerationJob(request, ()), part)
    speculation = times["speculation"]
    assert json.loads(json.dumps(speculation)) == speculation
    oracle = speculation["proposers"]["oracle"]
    assert oracle["drafted"] == times["draft_n"] == sum(oracle["drafted_per_position"])
    assert oracle["accepted"] == times["draft_n_accepted"] == sum(oracle["accepted_per_position"])
    assert oracle["drafts"] == sum(oracle["spans"].values())
    # Windows of three from the prompt's end on: the second one holds the wrong token, in its last place.
    assert oracle["accepted_per_position"][2] == oracle["drafted_per_position"][2] - 1
    assert speculation["stale_windows"] >= 1
    assert speculation["stale_rows"] == 3 * speculation["stale_windows"]
    assert speculation["stale_rows_computed"] <= speculation["stale_rows"]
    assert speculation["cancels"] == 1
    assert speculation["reason"]
    window = speculation["mean_window_ms"]
    assert window["round_trip"] == pytest.approx(
        window["verify"] + window["queue"] + window["network"], abs=0.01
    )
    usage = usage_of([GenerationJob(request, ())], [part])
    assert (usage.num_accepted, usage.num_rejected) == (0, 0)
    assert status.speculation is not None
    assert as_json(status.speculation.proposers) == speculation["proposers"]


@pytest.mark.parametrize("is_known", [False, True])
async def test_only_tokens_of_the_request_s_prediction_count_as_such(*, is_known: bool) -> None:
    """Of several proposers, some say what the request expects, some what they found themselves."""
    answer = list(FUTURE[len(PROMPT) :])
    wrong = [(token + 1) % 64 for token in answer[8:]]
    request = GenerationRequest(PROMPT, NUM_TOKENS, prediction=(*answer[:8], *wrong) if is_known else ())

    def make(_request: GenerationRequest) -> list[Proposer]:
        known = [PredictionProposer(request.prediction)] if is_known else []
        return [*known, Oracle(FUTURE, ERRS)]

    last, _ = await answered(None, request, depth=1, make_proposers=make)
    part = AnswerPart((), last.finish, NUM_TOKENS, last.stats)
    usage = usage_of([GenerationJob(request, ())] * 2, [part] * 2)
    times = timings(GenerationJob(request, ()), part)
    proposers = times["speculation"]["proposers"]
    counts = (usage.num_accepted, usage.num_rejected)
    if is_known:
        own = proposers["prediction"]
        assert counts == (2 * own["accepted"], 2 * (own["drafted"] - own["accepted"]))
        assert 2 * times["draft_n"] > sum(counts) > 0
    else:
        assert counts == (0, 0)
        assert times["draft_n"] > 0


async def test_a_first_token_that_is_wrong_counts_as_rejected() -> None:
    """The free prediction before a window judges its first token: no verdict ever comes, yet it counts."""
    errs = [place == len(PROMPT) + 3 for place in range(len(FUTURE))]
    last, _ = await answered(lambda: Oracle(FUTURE, errs), GenerationRequest(PROMPT, NUM_TOKENS), depth=3)
    assert last.stats.report is not None
    oracle = last.stats.report().by_proposer["oracle"]
    assert oracle.proposed_per_position[0] - oracle.accepted_per_position[0] == 1


@pytest.mark.parametrize("limits", [SpeculationLimits("off"), SpeculationLimits(max_width=0)])
async def test_a_request_can_do_without(limits: SpeculationLimits) -> None:
    request = GenerationRequest(PROMPT, NUM_TOKENS, speculation=limits)
    last, status = await answered(lambda: Oracle(FUTURE), request, depth=3)
    assert last.stats.report is None
    assert (last.stats.num_windows, last.stats.num_proposed) == (NUM_TOKENS - 1, 0)
    assert status.speculation is not None
    assert status.speculation.proposers == {}


async def test_a_request_can_keep_windows_in_step() -> None:
    request = GenerationRequest(PROMPT, NUM_TOKENS, speculation=SpeculationLimits(max_width=2, depth=1))
    last, _ = await answered(lambda: Oracle(FUTURE, ERRS), request, depth=3)
    assert last.stats.report is not None
    report = last.stats.report()
    assert report.num_voided_windows == 0
    assert len(report.by_proposer["oracle"].proposed_per_position) == 2


async def test_the_status_table_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    request = GenerationRequest(PROMPT, NUM_TOKENS)
    last, status = await answered(lambda: Oracle(FUTURE, ERRS), request, depth=3)
    assert status.speculation is not None
    status.speculation.mode = "auto"
    status.speculation.tail_drafts = TailDraftStatus(drafts=2, tokens=7, off="no memory")
    print_status(status)
    printed = capsys.readouterr().out
    assert f"speculation: auto, {last.stats.num_accepted} of {last.stats.num_proposed} proposed" in printed
    assert "oracle:" in printed
    assert "drafts: 2 of 7 tokens beside the last stage; off: no memory\n" in printed
    assert "ms on the network" in printed
