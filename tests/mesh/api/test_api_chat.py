"""The real openai client, the real app, a real model: chat completions."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mesh.text.tokenizer import Tokenizer
from tests.support.api_harness import MODEL, Api, running_api
from tests.support.whole_model_engine import WholeModelEngine

pytestmark = pytest.mark.model

QUESTION: Any = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[WholeModelEngine]:
    engine = WholeModelEngine(smollm2_path, context_length=256, is_exact=False)
    yield engine
    engine.close()


@pytest.fixture
async def api(engine: WholeModelEngine, tokenizer: Tokenizer) -> AsyncIterator[Api]:
    async with running_api(engine, tokenizer) as api:
        yield api
    assert engine.num_running == 0


async def _ask(api: Api, **fields: Any) -> Any:
    fields = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24, **fields}
    return await api.openai.chat.completions.create(**fields)


async def _text_of_stream(api: Api, **fields: Any) -> str:
    stream = await _ask(api, stream=True, **fields)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def test_an_answer_with_everything_around_it(api: Api, tokenizer: Tokenizer) -> None:
    answer = await _ask(api)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.created > 1_700_000_000
    assert answer.system_fingerprint.startswith("spanmesh-")
    assert answer._request_id.startswith("req-")
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert len(tokenizer.encode(choice.message.content, add_special=False, parse_special=False)) == 24
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert answer.timings["prompt_n"] == answer.usage.prompt_tokens
    assert answer.timings["predicted_n"] == 24
    assert answer.timings["predicted_per_second"] == pytest.approx(
        23_000 / answer.timings["predicted_ms"], rel=1e-3
    )


async def test_a_stream_says_the_same(api: Api) -> None:
    whole = await _ask(api)
    chunks = [chunk async for chunk in await _ask(api, stream=True, stream_options={"include_usage": True})]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    with_choices, last = chunks[:-1], chunks[-1]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in with_choices) == (
        whole.choices[0].message.content
    )
    assert [chunk.choices[0].finish_reason for chunk in with_choices[:-1]] == [None] * (len(chunks) - 2)
    assert with_choices[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in with_choices)
    assert last.choices == []
    assert last.usage == whole.usage
    assert last.timings["predicted_n"] == 24


async def test_without_include_usage_the_last_chunk_has_timings_and_no_usage(api: Api) -> None:
    chunks = [chunk async for chunk in await _ask(api, stream=True)]
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert chunks[-1].timings["predicted_n"] == 24


async def test_the_model_may_end_the_answer(api: Api) -> None:
    answer = await _ask(api, messages=[{"role": "user", "content": "Say hi."}], max_tokens=200)
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in answer.choices[0].message.content
    assert answer.usage.completion_tokens < 200


async def test_ignore_eos_goes_on_to_the_limit(api: Api) -> None:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 100}
    answer = await _ask(api, **fields, extra_body={"ignore_eos": True})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 100)


async def test_a_stop_string_that_spans_tokens_ends_the_answer_before_it(
    api: Api, tokenizer: Tokenizer
) -> None:
    full = (await _ask(api)).choices[0].message.content
    pieces = [
        tokenizer.piece(token).decode()
        for token in tokenizer.encode(full, add_special=False, parse_special=False)
    ]
    stop = pieces[8][-1:] + pieces[9] + pieces[10][:2]  # begins and ends inside tokens
    before = full[: full.index(stop)]
    answer = await _ask(api, stop=stop)
    assert answer.choices[0].message.content == before
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens <= 11
    assert await _text_of_stream(api, stop=["never in there", stop]) == before


async def test_a_stop_frees_the_engine(api: Api, engine: WholeModelEngine) -> None:
    closed = engine.num_closed
    await _ask(api, stop=" ", max_tokens=200)
    assert (engine.num_running, engine.num_closed) == (0, closed + 1)


async def test_the_same_seed_gives_the_same_text(api: Api) -> None:
    first = await _text_of_stream(api, temperature=1.0, seed=7)
    again = (await _ask(api, temperature=1.0, seed=7)).choices[0].message.content
    other = (await _ask(api, temperature=1.0, seed=-8)).choices[0].message.content
    assert first == again != other


async def test_without_a_seed_each_answer_is_another(api: Api) -> None:
    texts = {(await _ask(api, temperature=1.5)).choices[0].message.content for _ in range(3)}
    assert len(texts) > 1


async def test_top_p_0_and_top_k_1_are_greedy(api: Api) -> None:
    greedy = await _text_of_stream(api)
    assert await _text_of_stream(api, temperature=1, top_p=0) == greedy
    assert await _text_of_stream(api, temperature=1, extra_body={"top_k": 1}) == greedy
    assert await _text_of_stream(api, temperature=1, extra_body={"min_p": 1}) == greedy


async def test_max_completion_tokens_goes_before_max_tokens(api: Api) -> None:
    answer = await _ask(api, max_tokens=9, max_completion_tokens=5)
    assert answer.usage.completion_tokens == 5


async def test_default_names_the_served_model(api: Api) -> None:
    assert (await _ask(api, model="default")).model == MODEL


async def test_content_may_come_in_text_parts(api: Api) -> None:
    parts = [{"type": "text", "text": "Name three"}, {"type": "text", "text": "colours."}]
    joined = await _ask(api, messages=[{"role": "user", "content": "Name three\ncolours."}])
    in_parts = await _ask(api, messages=[{"role": "user", "content": parts}])
    assert in_parts.choices[0].message.content == joined.choices[0].message.content


async def test_developer_is_another_word_for_system(api: Api) -> None:
    system = await _ask(api, messages=[{"role": "system", "content": "Answer in French."}, *QUESTION])
    developer = await _ask(api, messages=[{"role": "developer", "content": "Answer in French."}, *QUESTION])
    assert developer.usage == system.usage
    assert developer.choices[0].message.content == system.choices[0].message.content


async def test_an_over_long_prompt_is_refused_with_the_numbers(api: Api) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await _ask(api, messages=[{"role": "user", "content": "word " * 300}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert "prompt is too long: 331 tokens > 255 maximum" in caught.value.message
    assert "maximum context length is 256 tokens. However, " in caught.value.message


async def test_a_limit_beyond_the_room_left_is_cut_to_it(api: Api) -> None:
    answer = await _ask(api, max_tokens=255, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 256
    assert answer.choices[0].finish_reason == "length"


async def test_requests_run_side_by_side(api: Api) -> None:
    questions = [[{"role": "user", "content": f"Count to {number}."}] for number in (3, 5, 9)]
    alone = [await _text_of_stream(api, messages=question) for question in questions]
    together = await asyncio.gather(*(_text_of_stream(api, messages=question) for question in questions))
    assert together == alone
