"""Reasoning through the API: answers of a given form behind it, in all three APIs."""

import json
from pathlib import Path
from typing import Any

import pytest

from mesh.text.tokenizer import Tokenizer
from stages.grammar.session_grammar import make_automaton
from tests.mesh.api.test_api_tools import saying
from tests.stages.grammar.test_grammar import matches
from tests.support.api_harness import ScriptedEngine, running_api

pytestmark = pytest.mark.model

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "Name a colour"}]
OPEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nMARK\n{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
RED = '{"colour": "red"}'
GRAMMAR = 'root ::= thoughts "!"?\nthoughts ::= "red" | "blue" root'


def tokenizer_of(path: Path, template: str) -> Tokenizer:
    tokenizer = Tokenizer(path)
    tokenizer.chat_template = template
    return tokenizer


def allows(engine: ScriptedEngine, text: str) -> bool:
    grammar = engine.requests[-1].grammar
    assert grammar is not None
    return matches(make_automaton(grammar), text)


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}},
        {"response_format": {"type": "json_object"}},
        {"json_schema": SCHEMA},
        {"grammar": GRAMMAR},
    ],
)
@pytest.mark.parametrize("mark", ["think", "THINK"])
async def test_a_form_is_for_what_follows_reasoning(smollm2_path: Path, asked: Any, mark: str) -> None:
    begin, end = ("<think>", "</think>") if mark == "think" else ("[THINK]", "[/THINK]")
    tokenizer = tokenizer_of(smollm2_path, OPEN.replace("MARK", begin))
    said = "red!" if "grammar" in asked else RED
    text = f"Hm, <b>{{ or [ </b>{end}\n\n{said}"
    engine = saying(tokenizer, text)
    async with running_api(engine, tokenizer) as api:
        response = await api.http.post(CHAT, json={"messages": HELLO, **asked})
        assert response.status_code == 200, response.text
        message = response.json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm, <b>{ or [ </b>", said)
        assert allows(engine, text)
        assert allows(engine, f"{end}{said}")
        assert not allows(engine, said)
        assert not allows(engine, f"Hm{end}Well, {said}")
        assert not allows(engine, f"Hm{end}{end}{said}")
        await api.http.post(CHAT, json={"messages": HELLO, "reasoning_format": "none", **asked})
        assert allows(engine, text)


async def test_a_form_is_for_what_follows_reasoning_in_every_api(smollm2_path: Path) -> None:
    tokenizer = tokenizer_of(smollm2_path, OPEN.replace("MARK", "<think>"))
    text = f"Hm.\n</think>\n\n{RED}"
    engine = saying(tokenizer, text)
    form = {"type": "json_schema", "schema": SCHEMA}
    async with running_api(engine, tokenizer) as api:
        response = await api.http.post(
            "/v1/responses", json={"input": "Name a colour", "text": {"format": {"name": "c", **form}}}
        )
        assert response.status_code == 200, response.text
        thought, said = response.json()["output"]
        assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "Hm.")
        assert said["content"][0]["text"] == RED
        assert allows(engine, text)
        assert not allows(engine, RED)
        response = await api.http.post(
            "/v1/messages", json={"messages": HELLO, "max_tokens": 99, "output_config": {"format": form}}
        )
        assert response.status_code == 200, response.text
        assert [
            block.get("thinking") or json.loads(block["text"]) for block in response.json()["content"]
        ] == [
            "Hm.",
            {"colour": "red"},
        ]
        assert allows(engine, text)
        assert not allows(engine, RED)
