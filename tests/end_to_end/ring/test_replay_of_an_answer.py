"""An answer, recorded by the benchmark's client and replayed over a real ring, is accepted token by token."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mesh.serve.proposers import Proposers
from mesh.text.tokenizer import Tokenizer
from meshbench.load_client.answers import AnswerRecord
from meshbench.load_client.schedule import Request
from meshbench.speculation_results import OFF, REPLAY, Setting
from meshbench.speculation_runner import ReplayFile
from spanmesh_proto.errors import MeshError
from stages.runtime.stage_runtime import RuntimeOptions
from tests.support.api_harness import Api, running_api
from tests.support.requests import answer_here, timed_answer
from tests.support.ring_harness import running_coordinator, running_stages

pytestmark = pytest.mark.model

CTX_SIZE = 128
NUM_TOKENS = 24
# The model's answer ends at once, and again and again.
QUESTION = "What is 2 + 2?"
FIELDS = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer(smollm2_path)


@pytest.fixture
def replay(tmp_path: Path) -> ReplayFile:
    return ReplayFile(tmp_path / "replay.jsonl")


@pytest.fixture
async def api(
    smollm2_path: Path, stage_cache_dir: Path, tokenizer: Tokenizer, replay: ReplayFile
) -> AsyncIterator[Api]:
    # Exact, since in the fast mode a wide window may well choose another token.
    options = RuntimeOptions(num_slots=1, ctx_size=CTX_SIZE, exact=True)
    async with (
        running_stages(smollm2_path, (15,), options, stage_cache_dir) as stages,
        running_coordinator(
            stages,
            context_length=CTX_SIZE,
            num_slots=1,
            make_proposers=Proposers("auto", replay_path=replay.path),
        ) as engine,
        running_api(engine, tokenizer) as api,
    ):
        yield api


def _asked(setting: Setting, **fields: Any) -> Request:
    return Request.chat(QUESTION, NUM_TOKENS, {**FIELDS, **setting.fields, **fields})


async def _answer(api: Api, request: Request) -> AnswerRecord:
    return await asyncio.to_thread(answer_here, api.url, request)


def _counts(answer: AnswerRecord) -> tuple[int, int]:
    return answer.timings["draft_n"], answer.timings["draft_n_accepted"]


async def test_every_token_is_accepted_where_those_of_the_text_are_not(
    api: Api, tokenizer: Tokenizer, replay: ReplayFile
) -> None:
    off = await _answer(api, _asked(OFF))
    assert len(off.token_ids) == off.num_tokens == NUM_TOKENS
    unspoken = [token for token in off.token_ids if not tokenizer.piece(token)]
    assert len(unspoken) >= 4
    # Each token came when it was committed, whether or not it had text to show.
    assert len(off.arrivals_ms) >= NUM_TOKENS

    replay.record(_asked(OFF), off)
    again = await _answer(api, _asked(REPLAY))
    assert again.token_ids == off.token_ids
    # The first token comes with the prompt.
    assert _counts(again) == (NUM_TOKENS - 1, NUM_TOKENS - 1)

    ids = tuple(tokenizer.encode(off.text, add_special=False, parse_special=False))
    replay.record(
        _asked(OFF),
        dataclasses.replace(
            off, token_ids=ids, record=dataclasses.replace(off.record, num_output_tokens=len(ids))
        ),
    )
    astray = await _answer(api, _asked(REPLAY))
    assert astray.token_ids == off.token_ids
    assert _counts(astray)[1] < NUM_TOKENS - 1


def test_an_answer_without_all_its_tokens_is_not_recorded(replay: ReplayFile) -> None:
    answer = timed_answer("Four", 2, 1.0, token_ids=(7,))
    with pytest.raises(MeshError, match="2 tokens came with 1 token ids"):
        replay.record(_asked(OFF), answer)
    assert replay.path.read_text() == ""
