"""`return_token_ids`: every token that was said, whole or in chunks, whatever became of its text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.api.answering import AnswerPart, answer_parts
from mesh.api.generation_job import GenerationJob
from mesh.engine import GenerationRequest
from mesh.text.message_parts import MessagePart, joined
from mesh.text.tokenizer import Tokenizer
from tests.support.api_harness import MODEL, Api, ScriptedEngine, running_api

pytestmark = pytest.mark.model

HELLO: Any = [{"role": "user", "content": "Hello"}]
WANTED = {"return_token_ids": True}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer(smollm2_path)


@dataclass(frozen=True)
class Told:
    """An answer as OpenAI's client reads it."""

    text: str
    ids: list[int]
    prompt_ids: list[int]
    num_tokens: int


async def _whole(api: Api, **fields: Any) -> Told:
    extra = {**WANTED, **fields.pop("extra_body", {})}
    answer: Any = await api.openai.chat.completions.create(
        model=MODEL, messages=HELLO, extra_body=extra, **fields
    )
    (choice,) = answer.choices
    return Told(
        choice.message.content, choice.token_ids, answer.prompt_token_ids, answer.usage.completion_tokens
    )


async def _chunks(api: Api, **fields: Any) -> list[Any]:
    extra = {**WANTED, **fields.pop("extra_body", {})}
    options: Any = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": extra}
    stream: Any = await api.openai.chat.completions.create(model=MODEL, messages=HELLO, **options, **fields)
    return [chunk async for chunk in stream]


async def _streamed(api: Api, **fields: Any) -> Told:
    first, *chunks, last = await _chunks(api, **fields)
    choices = [chunk.choices[0] for chunk in chunks]
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in (*chunks, last))
    return Told(
        "".join(choice.delta.content or "" for choice in choices),
        [token for choice in choices for token in choice.token_ids],
        first.prompt_token_ids,
        last.usage.completion_tokens,
    )


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special=False, parse_special=True))


async def _agreed(tokenizer: Tokenizer, steps: Sequence[tuple[int, ...]], **fields: Any) -> Told:
    """What both ways tell, and the server counts, of one answer."""
    engine = ScriptedEngine(steps)
    async with running_api(engine, tokenizer) as api:
        whole, streamed = await _whole(api, **fields), await _streamed(api, **fields)
    assert whole == streamed
    assert len(whole.ids) == whole.num_tokens
    assert {request.prompt for request in engine.requests} == {tuple(whole.prompt_ids)}
    return whole


async def test_an_answer_s_ids_and_its_prompt_s(tokenizer: Tokenizer) -> None:
    told = await _agreed(tokenizer, [(300,), (301, 302)])
    assert told.ids == [300, 301, 302]
    assert tokenizer.name(told.prompt_ids[0]) == "<|im_start|>"


async def test_a_character_of_several_tokens(tokenizer: Tokenizer) -> None:
    llama = _encode(tokenizer, "🦙")
    steps = [(300, llama[0]), *[(token,) for token in llama[1:]], (301,)]
    told = await _agreed(tokenizer, steps)
    assert told.ids == [300, *llama, 301]
    assert "🦙" in told.text
    async with running_api(ScriptedEngine(steps), tokenizer) as api:
        _role, *chunks, _end, _usage = await _chunks(api)
    # Ids go out with the step that committed them, as vLLM's do, the text when it is whole.
    assert [tuple(chunk.choices[0].token_ids) for chunk in chunks] == steps
    assert chunks[1].choices[0].delta.content == ""


async def test_a_character_that_never_is_completed(tokenizer: Tokenizer) -> None:
    half = _encode(tokenizer, "🦙")[0]
    told = await _agreed(tokenizer, [(300,), (half,)])
    assert told.ids == [300, half]
    assert told.text.endswith("\ufffd")


async def test_a_stop_string_cuts_the_text_but_not_what_was_said(tokenizer: Tokenizer) -> None:
    words = [_encode(tokenizer, word)[0] for word in (" one", " two", " stop", " here", " never")]
    cut = await _agreed(tokenizer, [(words[0],), tuple(words[1:3]), tuple(words[3:])], stop=["op here"])
    assert (cut.text, cut.ids) == (" one two st", words[:4])
    held = await _agreed(tokenizer, [(word,) for word in words[:4]], stop=["here again"])
    assert (held.text, held.ids) == (" one two stop here", words[:4])


async def test_an_end_token_is_told_and_so_is_what_has_no_text(tokenizer: Tokenizer) -> None:
    end = min(tokenizer.end_tokens)
    ended = await _agreed(tokenizer, [(300,), (301, end)])
    assert ended.ids == [300, 301, end]
    ignored = await _agreed(
        tokenizer, [(end,), (300,), (end, end), (301,), (end,)], extra_body={"ignore_eos": True}
    )
    assert ignored.ids == [end, 300, end, end, 301, end]
    assert ignored.text == b"".join(map(tokenizer.piece, (300, 301))).decode()


async def test_a_completion_has_its_prompt_s_ids_in_each_choice(tokenizer: Tokenizer) -> None:
    prompts: Any = [[5, 6, 7], [8]]
    fields: Any = {"model": MODEL, "prompt": prompts, "echo": True, "extra_body": WANTED}
    async with running_api(ScriptedEngine([(300,), (301,)]), tokenizer) as api:
        whole: Any = await api.openai.completions.create(**fields)
        stream: Any = await api.openai.completions.create(**fields, stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
    assert [choice.prompt_token_ids for choice in whole.choices] == prompts
    assert [choice.token_ids for choice in whole.choices] == [[300, 301]] * 2
    assert not hasattr(whole, "prompt_token_ids")
    for index, prompt in enumerate(prompts):
        first, *later = [choice for choice in choices if choice.index == index]
        assert first.prompt_token_ids == prompt
        assert not any(hasattr(choice, "prompt_token_ids") for choice in later)
        assert [token for choice in (first, *later) for token in choice.token_ids] == [300, 301]
        text = "".join(choice.text for choice in (first, *later))
        assert text == whole.choices[index].text


async def test_logprobs_keep_to_the_text(tokenizer: Tokenizer) -> None:
    words = [_encode(tokenizer, word)[0] for word in (" one", " stop", " here")]
    async with running_api(ScriptedEngine([(word,) for word in words]), tokenizer) as api:
        fields: Any = {"stop": [" stop here"], "logprobs": True}
        plain = [chunk.choices[0] for chunk in (await _chunks(api, **fields))[1:-1]]
    assert [entry.token for choice in plain if choice.logprobs for entry in choice.logprobs.content] == [
        " one"
    ]
    assert [token for choice in plain for token in choice.token_ids] == words


@pytest.mark.parametrize("value", [None, False])
async def test_nobody_else_is_told(tokenizer: Tokenizer, value: Any) -> None:
    async with running_api(ScriptedEngine([(300,), (301,)]), tokenizer) as api:
        for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "Hello"})):
            for stream in (False, True):
                fields = {**body, "stream": stream, "return_token_ids": value}
                response = await api.http.post(path, json=fields)
                assert response.status_code == 200
                assert "token_ids" not in response.text


@pytest.mark.parametrize("value", [1, "true", [], {}])
async def test_anything_but_a_boolean_is_refused(tokenizer: Tokenizer, value: Any) -> None:
    async with running_api(ScriptedEngine([(300,)]), tokenizer) as api:
        for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "Hello"})):
            response = await api.http.post(path, json={**body, "return_token_ids": value})
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", "return_token_ids")
            assert "valid boolean" in error["message"]


# Pieces of text that tokens may stand for: letters of the stop strings below, halves of characters, nothing.
PIECES = (b"a", b"b", b"ab", b"\xf0\x9f", b"\xa6\x99", b"\xc3", b"", b"x")


@given(
    steps=st.lists(
        st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12
    ),
    stops=st.lists(st.sampled_from(["ab", "ba", "aab", "xa", "🦙"]), max_size=2, unique=True),
    end=st.sets(st.integers(0, len(PIECES) - 1), max_size=1),
)
async def test_parts_tell_each_token_once(
    steps: list[tuple[int, ...]], stops: list[str], end: set[int]
) -> None:
    # An engine commits nothing behind an end token.
    said: list[tuple[int, ...]] = []
    for step in steps:
        first_end = next((index for index, token in enumerate(step) if token in end), None)
        said.append(step if first_end is None else step[: first_end + 1])
        if first_end is not None:
            break
    request = GenerationRequest((1,), 99, frozenset(end))

    async def parts(*, wants_token_ids: bool) -> list[AnswerPart]:
        job = GenerationJob(request, tuple(stops), wants_token_ids=wants_token_ids)
        return [
            part async for part in answer_parts(ScriptedEngine(said), lambda _marks: PIECES.__getitem__, job)
        ]

    with_ids, without = await parts(wants_token_ids=True), await parts(wants_token_ids=False)
    for found in (with_ids, without):
        ids = [token for part in found for token in part.token_ids]
        assert ids == [token for step in said for token in step][: len(ids)]
        assert len(ids) == found[-1].num_tokens
    assert _said(with_ids) == _said(without)
    assert all(part.token_ids for part in with_ids)


def _said(parts: list[AnswerPart]) -> list[MessagePart]:
    return joined(piece for part in parts for piece in part.message_parts)
