"""Answers in the formats of chat templates through the API: reasoning, content and calls are told apart."""

import json
from pathlib import Path
from typing import Any

import pytest

from mesh.text.tokenizer import Tokenizer
from tests.mesh.api.test_api_tools import saying
from tests.support.api_harness import running_api
from tests.support.chat_templates import collected_templates

COLLECTED = collected_templates()
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not COLLECTED, reason="no source of llama.cpp: see SPANMESH_LLAMA_CPP"),
]

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "x", "parameters": PARAMETERS},
}
# What a model says behind its template's prompt: reasoning, a text where the format has room for one, a call.
ANSWERS = {
    "openai-gpt-oss-120b": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Let me look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
        '<|message|>{"city": "Oslo"}'
    ),
    "google-gemma-4-31B-it": (
        "<|channel>thought\nHm.<channel|>Let me look."
        '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>'
    ),
    "deepseek-ai-DeepSeek-V4": (
        '<think>Hm.</think>Let me look.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>"
    ),
    "Kimi-K2-Thinking": (
        "<think>Hm.</think>Let me look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "Kimi-K3": (
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>Let me look.<|close|>response<|sep|>"
        "<|open|>tools<|sep|>"
        '<|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Oslo'
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    ),
    "LFM2.5-8B-A1B": (
        "<think>Hm.</think>Let me look.<|tool_call_start|>[weather(city='Oslo')]<|tool_call_end|>"
    ),
    "upstage-Solar-Open-100B": (
        "<|think|>Hm.<|end|><|begin|>assistant<|content|>Let me look.<|end|><|begin|>assistant<|tool_calls|>"
        '<|tool_call:begin|>id1<|tool_call:name|>weather<|tool_call:args|>{"city": "Oslo"}<|tool_call:end|>'
    ),
    "MiniMax-M3": (
        '<mm:think>Hm.</mm:think>Let me look.]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="weather">'
        "]<]minimax[>[<city>Oslo]<]minimax[>[</city>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
async def test_reasoning_text_and_calls_are_told_apart(smollm2_path: Path, name: str) -> None:
    tokenizer = Tokenizer(smollm2_path)
    tokenizer.chat_template = COLLECTED[name].read_text()
    asked = {"messages": HELLO, "tools": [WEATHER]}
    async with running_api(saying(tokenizer, ANSWERS[name]), tokenizer) as api:
        response = await api.http.post(CHAT, json=asked)
        assert response.status_code == 200, response.text
        streamed = await api.http.post(CHAT, json={**asked, "stream": True})
        card = (await api.http.get("/v1/models")).json()["data"][0]
    message = response.json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert (message["content"], message["reasoning_content"]) == ("Let me look.", "Hm.")
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me look."
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm."
    calls = [each["function"] for delta in deltas for each in delta.get("tool_calls") or ()]
    assert calls[0]["name"] == "weather"
    assert json.loads("".join(each.get("arguments") or "" for each in calls)) == {"city": "Oslo"}
    assert card["answer_format"]["is_found"]
    assert "NAME" in card["answer_format"]["call"]
