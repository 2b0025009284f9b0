"""Penalties, biases and logprobs as OpenAI's client sends and reads them, streamed and not."""

from typing import Any

import openai
import pytest

from mesh.text.tokenizer import Tokenizer
from tests.support import api_harness
from tests.support.api_harness import MODEL, Api, ScriptedEngine, running_api

pytestmark = pytest.mark.model

tokenizer, api = api_harness.tokenizer, api_harness.api

HELLO: Any = [{"role": "user", "content": "Hello"}]
LIKELIEST = ((300, -0.25), (2, -1.5), (301, -3.0))


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine([(300,), (301, 302)], likeliest=LIKELIEST)


async def _chat(api: Api, **fields: Any) -> Any:
    return await api.openai.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, **fields)


async def _streamed(api: Api, **fields: Any) -> list[Any]:
    chunks = [chunk async for chunk in await _chat(api, stream=True, **fields)]
    return [chunk.choices[0] for chunk in chunks]


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special=False, parse_special=True))


async def test_a_chat_s_logprobs(api: Api, tokenizer: Tokenizer) -> None:
    answer = await _chat(api, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert [entry.logprob for entry in content] == [-0.3, -0.301, -0.302]
    assert [bytes(entry.bytes) for entry in content] == [tokenizer.piece(token) for token in (300, 301, 302)]
    for entry in content:
        assert [(top.token, top.logprob) for top in entry.top_logprobs] == [
            (tokenizer.piece(300).decode(), -0.25),
            ("<|im_end|>", -1.5),  # a control token has a name, but no bytes
        ]
        assert entry.top_logprobs[1].bytes is None
    assert answer.choices[0].logprobs.refusal is None


async def test_without_top_logprobs_there_are_none(api: Api) -> None:
    content = (await _chat(api)).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in content] == [[], [], []]
    plain = await api.openai.chat.completions.create(model=MODEL, messages=HELLO, logprobs=False)
    assert plain.choices[0].logprobs is None


async def test_a_streamed_chat_s_logprobs_come_with_their_text(api: Api) -> None:
    whole = (await _chat(api, top_logprobs=3)).choices[0].logprobs.content
    choices = await _streamed(api, top_logprobs=3)
    assert [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content] == whole
    for choice in choices[1:-1]:
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.delta.content
    assert choices[0].logprobs is None
    assert choices[-1].logprobs is None


async def test_a_completion_s_logprobs(api: Api, tokenizer: Tokenizer) -> None:
    answer: Any = await api.openai.completions.create(model=MODEL, prompt="Hello", logprobs=1)
    choice = answer.choices[0]
    pieces = [tokenizer.piece(token).decode() for token in (300, 301, 302)]
    assert choice.logprobs.tokens == pieces
    assert choice.logprobs.token_logprobs == [-0.3, -0.301, -0.302]
    # The drawn token stands beside the likeliest.
    assert choice.logprobs.top_logprobs[1] == {pieces[0]: -0.25, pieces[1]: -0.301}
    offsets = choice.logprobs.text_offset
    assert offsets == [0, len(pieces[0]), len(pieces[0] + pieces[1])]
    assert all(choice.text[offset:].startswith(piece) for offset, piece in zip(offsets, pieces, strict=True))

    stream: Any = await api.openai.completions.create(model=MODEL, prompt="Hello", logprobs=1, stream=True)
    parts = [chunk.choices[0].logprobs async for chunk in stream if chunk.choices[0].logprobs]
    assert [token for part in parts for token in part.tokens] == pieces
    assert [offset for part in parts for offset in part.text_offset] == offsets
    assert len(parts) == 2


async def test_tokens_that_share_a_character_come_with_it(tokenizer: Tokenizer) -> None:
    ids = _encode(tokenizer, "🦙")
    assert len(ids) > 1
    engine = ScriptedEngine([(ids[0],), *[(token,) for token in ids[1:]], (300,)])
    async with running_api(engine, tokenizer) as api:
        choices = await _streamed(api)
        legacy: Any = await api.openai.completions.create(model=MODEL, prompt="Hello", logprobs=0)
    first = choices[1]
    assert "🦙" in first.delta.content
    assert b"".join(bytes(entry.bytes) for entry in first.logprobs.content).decode() == first.delta.content
    assert len(first.logprobs.content) == len(ids)
    assert "\\x" in first.logprobs.content[-1].token
    assert legacy.choices[0].logprobs.tokens[len(ids) - 1].startswith("bytes:\\x")
    assert set(legacy.choices[0].logprobs.text_offset[: len(ids)]) == {0}


async def test_a_token_waits_for_the_rest_of_its_character(tokenizer: Tokenizer) -> None:
    half, *rest = _encode(tokenizer, "🦙")
    async with running_api(ScriptedEngine([(300, half), (*rest, 301)]), tokenizer) as api:
        _role, first, second, _end = await _streamed(api)
    for choice in (first, second):
        told = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
        assert told.decode() == choice.delta.content
    assert len(first.logprobs.content) == 1


async def test_a_stop_string_takes_its_tokens_along(tokenizer: Tokenizer) -> None:
    words = [_encode(tokenizer, word)[0] for word in (" one", " two", " stop", " here")]
    async with running_api(ScriptedEngine([(word,) for word in words]), tokenizer) as api:
        whole = (await _chat(api, stop=[" stop here"])).choices[0]
        choices = await _streamed(api, stop=[" stop here"])
        cut = (await _chat(api, stop=["op h"])).choices[0]
        held = (await _chat(api, stop=["here again"])).choices[0]
    assert [entry.token for entry in whole.logprobs.content] == [" one", " two"]
    streamed = [entry.token for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert streamed == [" one", " two"]
    # Part of " stop" was said, so its logprob belongs to the answer; " here" was not.
    assert cut.message.content == " one two st"
    assert [entry.token for entry in cut.logprobs.content] == [" one", " two", " stop"]
    assert [entry.token for entry in held.logprobs.content] == [" one", " two", " stop", " here"]


async def test_an_end_token_is_no_part_of_the_answer(tokenizer: Tokenizer) -> None:
    end = min(tokenizer.end_tokens)
    async with running_api(ScriptedEngine([(300,), (301, end)]), tokenizer) as api:
        ended = (await _chat(api)).choices[0]
        ignored = (await _chat(api, extra_body={"ignore_eos": True})).choices[0]
    assert len(ended.logprobs.content) == 2
    assert [entry.bytes is None for entry in ignored.logprobs.content] == [False, False, True]


async def test_fields_reach_the_sampler(api: Api, engine: ScriptedEngine) -> None:
    async def asked(**fields: Any) -> Any:
        await api.openai.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, **fields)
        return engine.requests[-1].sampling

    both = await asked(frequency_penalty=-2, presence_penalty=0.5, logit_bias={"7": -100, "9": 2.5})
    assert (both.frequency_penalty, both.presence_penalty) == (-2.0, 0.5)
    assert both.logit_bias == ((7, -100.0), (9, 2.5))
    windows = {
        (1.3, 0): {"repetition_penalty": 1.3},
        (1.2, 64): {"repeat_penalty": 1.2},
        (1.1, 8): {"repeat_penalty": 1.1, "repeat_last_n": 8},
        (1.4, 0): {"repeat_penalty": 1.4, "repetition_penalty": 1.4, "repeat_last_n": -1},
        (1.0, 0): {"repeat_penalty": 1.5, "repeat_last_n": 0},
    }
    for (penalty, window), fields in windows.items():
        sampling = await asked(extra_body=fields)
        assert (sampling.repetition_penalty, sampling.repetition_window) == (penalty, window)
    assert engine.requests[-1].num_top_logprobs is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"frequency_penalty": 2.01}, "frequency_penalty", "2.01 is out of range: send -2 to 2"),
        ({"presence_penalty": -3}, "presence_penalty", "-3.0 is out of range"),
        ({"presence_penalty": "1"}, "presence_penalty", "valid number"),
        ({"repeat_penalty": 0}, "repeat_penalty", "0.0 is out of range: send 0.01 to 10; 1 switches it off"),
        ({"repetition_penalty": -1}, "repetition_penalty", "-1.0 is out of range"),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repeat_penalty", "send one of them"),
        ({"repeat_last_n": -2}, "repeat_last_n", "-2 is out of range: send -1 to"),
        ({"repeat_last_n": 10**400}, "repeat_last_n", "out of range"),
        ({"logit_bias": [1]}, "logit_bias", 'such as {"42": -100}'),
        ({"logit_bias": {"the": 1}}, "logit_bias", "'the' is not a token id"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias", "of token 5 is 100.5: send a number from -100"),
        ({"logit_bias": {"5": True}}, "logit_bias", "of token 5 is no number"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "twice"),
        ({"logit_bias": {"49152": 1}}, "logit_bias", "token id 49152: this model's ids go from 0 to 49151"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "token id -1"),
        (
            {"logit_bias": {str(token): 1 for token in range(1025)}},
            "logit_bias",
            "1025 entries: at most 1024",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs is 2, but logprobs is not true"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "21 is out of range: send 0 to 20"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs", "-1 is out of range"),
        ({"logprobs": 3}, "logprobs", "valid boolean"),
    ],
)
async def test_bad_values_are_refused(api: Api, fields: dict[str, Any], param: str, words: str) -> None:
    response = await api.http.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"].startswith(param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
async def test_bad_values_of_completions(api: Api, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await api.openai.completions.create(model=MODEL, prompt="Hello", **fields)
    assert caught.value.param == param
    allowed = await api.http.post("/v1/completions", json={"prompt": "Hello", "logprobs": False})
    assert allowed.json()["choices"][0]["logprobs"] is None


async def test_an_echoed_prompt_is_scored(api: Api, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    prompt = "Hé, <|im_start|>you"
    ids = _encode(tokenizer, prompt)
    answer: Any = await api.openai.completions.create(model=MODEL, prompt=prompt, logprobs=1, echo=True)
    choice = answer.choices[0]
    scored = choice.logprobs
    assert engine.requests[0].scores_prompt
    assert not engine.requests[0].uses_cache
    assert len(scored.tokens) == len(ids) + 3
    assert scored.token_logprobs == [None, *(-token / 1000 for token in ids[1:]), -0.3, -0.301, -0.302]
    assert scored.top_logprobs[0] is None
    assert scored.top_logprobs[1][tokenizer.piece(300).decode()] == -0.25
    places = dict(zip(scored.tokens, scored.text_offset, strict=True))
    assert choice.text.startswith("<|im_start|>", places["<|im_start|>"])
    assert choice.text.startswith("you", places["you"])
    assert scored.text_offset[len(ids)] == len(prompt)
    assert scored.text_offset == sorted(scored.text_offset)


async def test_a_streamed_score_is_that_of_the_whole_answer(api: Api) -> None:
    fields: Any = {"model": MODEL, "prompt": ["Hello, you", "And"], "logprobs": 1, "echo": True}
    whole = await api.openai.completions.create(**fields)
    found: dict[int, dict[str, list[Any]]] = {0: {}, 1: {}}
    async for chunk in await api.openai.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                for name, values in choice.logprobs.model_dump().items():
                    found[choice.index].setdefault(name, []).extend(values)
    assert [found[0], found[1]] == [choice.logprobs.model_dump() for choice in whole.choices]


@pytest.mark.parametrize("name", ["max_tokens", "n_predict"])
async def test_nothing_is_answered_behind_a_scored_prompt(api: Api, tokenizer: Tokenizer, name: str) -> None:
    fields = {"prompt": "Hello, you", "echo": True, "logprobs": 1, name: 0}
    answer = (await api.http.post("/v1/completions", json=fields)).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hello, you", "length")
    ids = _encode(tokenizer, "Hello, you")
    assert choice["logprobs"]["token_logprobs"] == [None, *(-token / 1000 for token in ids[1:])]
    assert answer["usage"]["completion_tokens"] == 0
    alone = (await api.http.post("/v1/completions", json={"prompt": "Hello", "echo": True, name: 0})).json()
    assert (alone["choices"][0]["text"], alone["choices"][0]["logprobs"]) == ("Hello", None)
    refused = await api.http.post("/v1/completions", json={"prompt": "Hello", name: 0})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == name


async def test_n_predict_is_another_name_of_max_tokens(api: Api, engine: ScriptedEngine) -> None:
    async def limit_of(path: str, **fields: Any) -> int:
        body = {"prompt": "Hello"} if path == "completions" else {"messages": HELLO}
        answer = await api.http.post(f"/v1/{path}", json={**body, **fields})
        assert answer.status_code == 200, answer.text
        return engine.requests[-1].max_tokens

    for path in ("completions", "chat/completions"):
        assert await limit_of(path, n_predict=7, ignore_eos=True) == 7
        assert engine.requests[-1].end_tokens == frozenset()
        assert await limit_of(path, n_predict=7, max_tokens=7) == 7
        room = engine.context_length - len(engine.requests[-1].prompt)
        assert await limit_of(path, n_predict=-1) == room
    refused = await api.http.post(
        "/v1/completions", json={"prompt": "Hello", "n_predict": 7, "max_tokens": 8}
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "n_predict"
