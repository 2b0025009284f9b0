"""Several answers to one prompt, reasoning beside them, and answers that go on with what is there."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mesh.text.tokenizer import Tokenizer
from tests.mesh.api.test_api_tools import saying, shown
from tests.support import api_harness
from tests.support.api_harness import MODEL, Api, ScriptedEngine, running_api
from tests.support.ring_api import running_ring_api
from tests.support.tiny_models import TinyModel

pytestmark = pytest.mark.model

tokenizer, engine, api = api_harness.tokenizer, api_harness.engine, api_harness.api

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: Any = [{"role": "user", "content": "Hello"}]
LONG: Any = [{"role": "user", "content": "Hello there, and good day to you. " * 4}]


async def test_each_choice_draws_its_own(tokenizer: Tokenizer) -> None:
    async with running_ring_api(tokenizer, num_slots=4) as ring:
        fields: dict[str, Any] = {"messages": LONG, "max_tokens": 12, "temperature": 1.5, "seed": 5}
        several = (await ring.api.http.post(CHAT, json={**fields, "n": 4})).json()
        alone = (await ring.api.http.post(CHAT, json={**fields})).json()
        second = (await ring.api.http.post(CHAT, json={**fields, "seed": 6})).json()
        await ring.is_idle()
    choices = several["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    texts = [choice["message"]["content"] for choice in choices]
    assert len(set(texts)) == 4
    assert texts[:2] == [each["choices"][0]["message"]["content"] for each in (alone, second)]
    usage = several["usage"]
    assert usage["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == 48


async def test_a_prompt_is_computed_once_for_all_its_choices(tokenizer: Tokenizer) -> None:
    computed: list[int] = []
    async with running_ring_api(tokenizer, num_slots=3) as ring:
        for runtime in ring.runtimes[:1]:
            runtime.on_decode = lambda spans: computed.append(sum(len(span.tokens) for span in spans))
        fields = {"messages": LONG, "max_tokens": 1, "temperature": 1}
        num_prompt = (await ring.api.http.post(CHAT, json={**fields, "n": 3})).json()["usage"][
            "prompt_tokens"
        ]
        assert num_prompt <= sum(computed) <= num_prompt + 2
        computed.clear()
        fields |= {"cache_prompt": False}
        await ring.api.http.post(CHAT, json={**fields, "n": 3})
        assert sum(computed) == 3 * num_prompt


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_choices_stream_side_by_side(tokenizer: Tokenizer, path: str) -> None:
    body: dict[str, Any] = {"messages": LONG} if path == CHAT else {"prompt": ["one two", "three"]}
    num = 2 if path == CHAT else 4
    async with running_ring_api(tokenizer, num_slots=4) as ring:
        fields = {**body, "max_tokens": 6, "temperature": 1, "seed": 9, "n": 2}
        whole = (await ring.api.http.post(path, json=fields)).json()
        texts = [""] * num
        client: Any = ring.api.openai.chat.completions if path == CHAT else ring.api.openai.completions
        async for chunk in await client.create(model=MODEL, stream=True, **fields):
            for choice in chunk.choices:
                texts[choice.index] += (choice.delta.content or "") if path == CHAT else choice.text
    said = [each["message"]["content"] if path == CHAT else each["text"] for each in whole["choices"]]
    assert texts == said


async def test_choices_end_when_the_first_fails(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([0.05, RuntimeError("oh")])
    async with running_api(engine, tokenizer) as api:
        response = await asyncio.wait_for(api.http.post(CHAT, json={"messages": HELLO, "n": 3}), 10)
    assert response.status_code == 500
    assert engine.num_running == 0
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": 17}, "n"),
        (CHAT, {"n": "2"}, "n"),
        (COMPLETIONS, {"prompt": ["x"] * 33, "n": 2}, "n"),
        (CHAT, {"reasoning_format": "raw"}, "reasoning_format"),
        (CHAT, {"continue_final_message": True}, "continue_final_message"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (CHAT, {"add_generation_prompt": 1}, "add_generation_prompt"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    api: Api, path: str, fields: dict[str, Any], param: str
) -> None:
    response = await api.http.post(path, json={"messages": HELLO, "prompt": "x", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


THOUGHT = "<think>\nWell, well.\n</think>\n\nYes."


async def test_reasoning_is_told_apart(tokenizer: Tokenizer) -> None:
    async with running_api(saying(tokenizer, THOUGHT), tokenizer) as api:
        whole = (await api.http.post(CHAT, json={"messages": HELLO})).json()
        raw = (await api.http.post(CHAT, json={"messages": HELLO, "reasoning_format": "none"})).json()
        stream = await api.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        deltas: list[Any] = [chunk.choices[0].delta async for chunk in stream]
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Well, well.", "Yes.")
    assert 2 < whole["usage"]["completion_tokens_details"]["reasoning_tokens"] < len(THOUGHT)
    assert raw["choices"][0]["message"] == {"role": "assistant", "content": THOUGHT, "refusal": None}
    assert raw["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Well, well."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."


async def test_marks_of_reasoning_stay_in_the_text_also_as_control_tokens(tmp_path: Path) -> None:
    path = TinyModel("llama", n_layers=1).write(tmp_path / "tiny.gguf", controls=("<think>", "</think>"))
    tokenizer = Tokenizer(path)
    ids = {tokenizer.name(token): token for token in range(tokenizer.n_vocab)}
    steps = [(ids[name],) for name in ("<think>", "H", "</think>", "Y", "</s>")]
    assert [tokenizer.piece(*step) for step in steps] == [b"", b"H", b"", b"Y", b""]
    async with running_api(ScriptedEngine(steps, context_length=2048), tokenizer) as api:
        split = (await api.http.post(CHAT, json={"messages": HELLO})).json()["choices"][0]["message"]
        raw = (await api.http.post(CHAT, json={"messages": HELLO, "reasoning_format": "none"})).json()
        asked: Any = {"model": MODEL, "messages": HELLO, "extra_body": {"reasoning_format": "none"}}
        stream = await api.openai.chat.completions.create(**asked, stream=True)
        streamed = [chunk.choices[0].delta.content or "" async for chunk in stream]
        completion = (await api.http.post(COMPLETIONS, json={"prompt": "x"})).json()["choices"][0]
    assert (split["reasoning_content"], split["content"]) == ("H", "Y")
    assert raw["choices"][0]["message"]["content"] == "".join(streamed) == "<think>H</think>Y"
    assert completion["text"] == "HY"


async def test_a_template_may_open_the_reasoning(tokenizer: Tokenizer) -> None:
    template = tokenizer.chat_template
    tokenizer.chat_template = "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}"
    try:
        async with running_api(saying(tokenizer, "Hm.\n</think>Yes."), tokenizer) as api:
            message = (await api.http.post(CHAT, json={"messages": HELLO})).json()["choices"][0]["message"]
    finally:
        tokenizer.chat_template = template
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


async def test_an_answer_may_go_on_with_the_last_message(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, " and that.")
    turns = [*HELLO, {"role": "assistant", "content": "This  "}]
    async with running_api(engine, tokenizer) as api:
        response = await api.http.post(CHAT, json={"messages": turns, "continue_final_message": True})
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"] == " and that."
        assert shown(engine, tokenizer).endswith("<|im_start|>assistant\nThis  ")
        await api.http.post(CHAT, json={"messages": turns, "add_generation_prompt": False})
        assert shown(engine, tokenizer).endswith("<|im_start|>assistant\nThis  <|im_end|>\n")
        await api.http.post(CHAT, json={"messages": turns})
        assert shown(engine, tokenizer).endswith("This  <|im_end|>\n<|im_start|>assistant\n")


async def test_a_template_that_drops_the_last_message_cannot_go_on_with_it(tokenizer: Tokenizer) -> None:
    template = tokenizer.chat_template
    tokenizer.chat_template = "{{ messages[0].content }}"
    try:
        async with running_api(saying(tokenizer, "x"), tokenizer) as api:
            turns = [*HELLO, {"role": "assistant", "content": "This"}]
            response = await api.http.post(CHAT, json={"messages": turns, "continue_final_message": True})
    finally:
        tokenizer.chat_template = template
    assert (response.status_code, response.json()["error"]["param"]) == (400, "continue_final_message")


async def test_timings_tell_of_each_stage(tokenizer: Tokenizer) -> None:
    async with running_ring_api(tokenizer) as ring:
        fields = {"messages": HELLO, "max_tokens": 9, "ignore_eos": True}
        timings = (await ring.api.http.post(CHAT, json=fields)).json()["timings"]
    assert [set(stage) for stage in timings["stages"]] == [{"windows", "compute_ms", "queue_ms"}] * 2
    assert [stage["windows"] for stage in timings["stages"]] == [8, 8]
    assert timings["wire_ms"] > 0
    assert timings["wire_ms_per_hop"] == pytest.approx(timings["wire_ms"] / 3 / 8, abs=0.001)
    took_ms = sum(stage["compute_ms"] + stage["queue_ms"] for stage in timings["stages"])
    # One window at a time, without speculation: that is all that the time went to.
    assert took_ms + timings["wire_ms"] <= timings["predicted_ms"] * 1.05
