"""The real openai client, the real app, a real model: completions and models."""

from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mesh.text.tokenizer import Tokenizer
from tests.support.api_harness import MODEL, Api, running_api
from tests.support.whole_model_engine import WholeModelEngine

pytestmark = pytest.mark.model

PROMPT = "The capital of France is"
OTHER = "One, two, three,"


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


async def _complete(api: Api, prompt: Any, **fields: Any) -> Any:
    fields = {"model": MODEL, "temperature": 0, **fields}
    return await api.openai.completions.create(prompt=prompt, **fields)


async def test_continues_the_text(api: Api) -> None:
    answer = await _complete(api, PROMPT, max_tokens=8)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert "Paris" in answer.choices[0].text
    assert answer.usage.completion_tokens == 8


async def test_sixteen_tokens_unless_told(api: Api) -> None:
    assert (await _complete(api, PROMPT)).usage.completion_tokens == 16


async def test_the_four_shapes_of_a_prompt_agree(api: Api, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT, add_special=True, parse_special=True)
    texts = [(await _complete(api, prompt)).choices[0].text for prompt in (PROMPT, [PROMPT], ids, [ids])]
    assert len(set(texts)) == 1


async def test_several_prompts_give_choices_in_their_order(api: Api) -> None:
    alone = [(await _complete(api, prompt)) for prompt in (PROMPT, OTHER, PROMPT)]
    together = await _complete(api, [PROMPT, OTHER, PROMPT])
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]
    assert together.usage.total_tokens == sum(answer.usage.total_tokens for answer in alone)


async def test_several_prompts_share_a_stream(api: Api) -> None:
    whole = await _complete(api, [PROMPT, OTHER])
    texts: defaultdict[int, str] = defaultdict(str)
    usages = []
    async for chunk in await _complete(
        api, [PROMPT, OTHER], stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usages.append(chunk.usage)
    assert [texts[0], texts[1]] == [choice.text for choice in whole.choices]
    assert usages[-1] == whole.usage
    assert set(usages[:-1]) == {None}


async def test_echo_puts_the_prompt_first(api: Api, tokenizer: Tokenizer) -> None:
    plain = (await _complete(api, PROMPT)).choices[0].text
    ids = tokenizer.encode(PROMPT, add_special=True, parse_special=True)
    assert (await _complete(api, PROMPT, echo=True)).choices[0].text == PROMPT + plain
    assert (await _complete(api, ids, echo=True)).choices[0].text == PROMPT + plain
    chunks = [chunk.choices[0].text async for chunk in await _complete(api, PROMPT, echo=True, stream=True)]
    assert chunks[0] == PROMPT
    assert "".join(chunks) == PROMPT + plain


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "no token"),
        ([49152], "token id 49152"),
        ([-1], "token id -1"),
        ([], "must be a string"),
        ([PROMPT, 5], "must be a string"),
        ([True], "must be a string"),
        ({"text": PROMPT}, "must be a string"),
    ],
)
async def test_impossible_prompts_are_refused(api: Api, prompt: Any, words: str) -> None:
    content = {"model": MODEL, "prompt": prompt}
    with pytest.raises(openai.BadRequestError, match=words):
        await api.openai.post("/completions", cast_to=object, body=content)


async def test_an_over_long_prompt_is_refused(api: Api) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await _complete(api, [7] * 256)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    longest = await _complete(api, [7] * 255)
    assert longest.usage.completion_tokens == 1


async def test_models_are_listed_and_found(api: Api) -> None:
    [model] = (await api.openai.models.list()).data
    assert (model.id, model.object, model.created) == (MODEL, "model", 1_700_000_000)
    assert await api.openai.models.retrieve(MODEL) == model
    assert await api.openai.models.retrieve("default") == model
    with pytest.raises(openai.NotFoundError, match="use `smollm2`") as caught:
        await api.openai.models.retrieve("some/other")
    assert caught.value.code == "model_not_found"


async def test_an_unknown_model_is_not_found(api: Api) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9") as caught:
        await _complete(api, PROMPT, model="gpt-9")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
