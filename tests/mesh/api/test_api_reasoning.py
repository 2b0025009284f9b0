"""Reasoning through the API: how much of it there is, and answers of a given form behind it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mesh.text.tokenizer import Tokenizer
from stages.grammar.session_grammar import make_automaton
from tests.mesh.api.test_api_tools import saying
from tests.mesh.api.test_tool_grammar import needs_templates
from tests.stages.grammar.test_grammar import matches
from tests.support.api_harness import ScriptedEngine, running_api
from tests.support.chat_templates import collected_templates
from tests.support.tiny_models import TinyModel

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


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("said", "text", "others"),
    [
        ('{"colour": "r', 'ed"}', (RED, 'lue"}')),
        ('<think>Hm.</think>\n{"colour":', '"blue"}', (RED, "1}")),
        ("Here it is: ", RED, ('ed"}', "red")),
        ("<think>\nHm", f" well</think>{RED}", (RED, "red")),
    ],
)
async def test_a_form_is_for_a_message_that_is_continued(
    smollm2_path: Path, said: str, text: str, others: Any
) -> None:
    tokenizer = tokenizer_of(smollm2_path, PLAIN)
    engine = saying(tokenizer, text)
    turns = [*HELLO, {"role": "assistant", "content": said}]
    asked = {"messages": turns, "continue_final_message": True, "json_schema": SCHEMA}
    async with running_api(engine, tokenizer) as api:
        response = await api.http.post(CHAT, json=asked)
    assert response.status_code == 200, response.text
    assert allows(engine, text)
    assert not any(allows(engine, other) for other in others)


KNOWN = (
    "{{ enable_thinking }}|{{ 'brief' if reasoning_effort == 'low' }}|{{ thinking_budget }}|"
    "{{ messages[-1].content }}"
)


def shown(engine: ScriptedEngine, tokenizer: Tokenizer) -> str:
    return "".join(tokenizer.name(token) for token in engine.requests[-1].prompt)


@pytest.mark.parametrize(
    ("path", "asked", "prompt"),
    [
        (CHAT, {}, "||"),
        (CHAT, {"reasoning_effort": "low"}, "True|brief|"),
        (CHAT, {"reasoning_effort": "none"}, "False||"),
        (CHAT, {"enable_thinking": False}, "False||"),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 7}}, "True||7"),
        (CHAT, {"thinking": {"type": "auto"}}, "||"),
        (CHAT, {"thinking_budget": 7, "enable_thinking": False}, "False||7"),
        (CHAT, {"thinking_token_budget": 7}, "True||7"),
        (
            CHAT,
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": "maybe"}},
            "maybe|brief|",
        ),
        ("/v1/responses", {"reasoning": {"effort": "low"}}, "True|brief|"),
        ("/v1/responses", {"enable_thinking": False}, "False||"),
        ("/v1/responses", {"thinking_budget": 7}, "True||7"),
        ("/v1/messages", {}, "False||"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 7}}, "True||7"),
        ("/v1/messages", {"output_config": {"effort": "low"}, "enable_thinking": True}, "True|brief|"),
    ],
)
async def test_the_amount_of_reasoning_reaches_the_template(
    smollm2_path: Path, path: str, asked: Any, prompt: str
) -> None:
    tokenizer = tokenizer_of(smollm2_path, KNOWN)
    engine = saying(tokenizer, "x")
    body = {"input": "hi"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "hi"}]}
    limit = {"max_tokens": 9} if path == "/v1/messages" else {}
    async with running_api(engine, tokenizer) as api:
        response = await api.http.post(path, json={**body, **limit, **asked})
    assert response.status_code == 200, response.text
    assert shown(engine, tokenizer) == f"{prompt}|hi"
    assert "warnings" not in response.json()


async def test_what_the_template_has_no_setting_for_is_told(smollm2_path: Path) -> None:
    tokenizer = tokenizer_of(smollm2_path, "{{ messages[-1].content }}")
    hello: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    async with running_api(saying(tokenizer, "x"), tokenizer) as api:
        asked: dict[str, Any]
        for path, asked, field in (
            (CHAT, {**hello, "reasoning_effort": "low"}, "reasoning_effort"),
            ("/v1/responses", {"input": "hi", "reasoning": {"effort": "low"}}, "reasoning.effort"),
            (
                "/v1/messages",
                {**hello, "max_tokens": 9, "output_config": {"effort": "low"}},
                "output_config.effort",
            ),
        ):
            response = await api.http.post(path, json=asked)
            assert response.status_code == 200, response.text
            assert response.json()["warnings"][0].startswith(f"{field} has no effect")
        for asked, field in (
            ({"thinking_budget": 7}, "thinking_budget"),
            ({"thinking_token_budget": 7}, "thinking_token_budget"),
            ({"thinking": {"type": "enabled", "budget_tokens": 7}}, "thinking.budget_tokens"),
        ):
            response = await api.http.post(CHAT, json={**hello, **asked})
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == field
        # Anthropic's clients must send one.
        asked = {**hello, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 7}}
        assert (await api.http.post("/v1/messages", json=asked)).status_code == 200


@needs_templates
async def test_stop_strings_choices_and_logprobs_with_headers(tmp_path: Path) -> None:
    source = collected_templates()["openai-gpt-oss-120b"].read_text()
    controls = (*("<|start|>", "<|end|>", "<|message|>", "<|channel|>"), "<|call|>", "<|return|>")
    tokenizer = Tokenizer(TinyModel("llama", n_layers=1).write(tmp_path / "tiny.gguf", controls=controls))
    tokenizer.chat_template = source
    text = (
        "<|channel|>analysis<|message|>Hm, the final word.<|end|><|start|>assistant"
        "<|channel|>final<|message|>The end of it."
    )
    known = {name: tokenizer.special_token(name) or 0 for name in controls}
    # Of other texts each byte is a token.
    tokens = [
        token
        for part in re.split(r"(<\|[a-z]+\|>)", text)
        for token in ([known[part]] if part in known else (3 + byte for byte in part.encode()))
    ]
    engine = ScriptedEngine(
        [*((token,) for token in tokens), (min(tokenizer.end_tokens),)], context_length=8192
    )
    async with running_api(engine, tokenizer) as api:

        async def ask(**asked: Any) -> list[dict[str, Any]]:
            response = await api.http.post(CHAT, json={"messages": HELLO, **asked})
            assert response.status_code == 200, response.text
            choices: list[dict[str, Any]] = response.json()["choices"]
            return choices

        for stop, said in (("channel", "The end of it."), ("end", "The "), (" of", "The end")):
            (choice,) = await ask(stop=[stop])
            message = choice["message"]
            assert (message["reasoning_content"], message["content"]) == ("Hm, the final word.", said)
            assert choice["finish_reason"] == "stop"
        # Reasoning is text.
        (choice,) = await ask(stop=["final"])
        assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm, the", "")
        # The name of a control token is a stop string as a whole.
        (choice,) = await ask(stop=["<|end|>"])
        assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (
            "Hm, the final word.",
            "",
        )
        both = await ask(n=2, logprobs=True)
        assert [choice["message"]["content"] for choice in both] == ["The end of it."] * 2
        for choice in both:
            told = "".join(entry["token"] for entry in choice["logprobs"]["content"])
            assert told.endswith("The end of it.")


SWITCHED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if reasoning_effort is defined %}Effort: {{ reasoning_effort }}\n{% endif %}"
    "{% if thinking_budget is defined %}Budget: {{ thinking_budget }}\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n</think>\n{% else %}<think>\n"
    "{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("of_openrouter", "others"),
    [
        ({"effort": "high"}, {"reasoning_effort": "high"}),
        ({"effort": "high"}, {"reasoning_effort": "high", "reasoning": {"effort": "high"}}),
        ({"enabled": False}, {"enable_thinking": False}),
        ({"enabled": True}, {"thinking": {"type": "enabled"}}),
        ({"max_tokens": 64}, {"thinking_budget": 64}),
        ({}, {}),
    ],
)
async def test_openrouter_s_object_says_how_much_a_model_reasons(
    smollm2_path: Path, of_openrouter: dict[str, Any], others: dict[str, Any]
) -> None:
    tokenizer = tokenizer_of(smollm2_path, SWITCHED)
    engine = saying(tokenizer, "Hm.</think>Red.")
    async with running_api(engine, tokenizer) as api:
        for fields in ({"reasoning": of_openrouter}, others):
            response = await api.http.post(CHAT, json={"messages": HELLO, **fields})
            assert response.status_code == 200, response.text
        two = {"reasoning": {"effort": "low"}, "reasoning_effort": "high"}
        refused = await api.http.post(CHAT, json={"messages": HELLO, **two})
    first, second = (request.prompt for request in engine.requests)
    assert first == second
    assert refused.json()["error"]["param"] == "reasoning.effort"


@pytest.mark.parametrize("asked", [{"reasoning": {"exclude": True}}, {"include_reasoning": False}])
async def test_reasoning_is_left_out_for_those_who_do_not_want_it(smollm2_path: Path, asked: Any) -> None:
    tokenizer = tokenizer_of(smollm2_path, SWITCHED)
    async with running_api(saying(tokenizer, "Hm.</think>Red."), tokenizer) as api:
        for more in ({}, {"reasoning_format": "none"}):
            response = await api.http.post(CHAT, json={"messages": HELLO, **asked, **more})
            assert response.status_code == 200, response.text
            message = response.json()["choices"][0]["message"]
            assert message == {"role": "assistant", "content": "Red.", "refusal": None}
        streamed = await api.http.post(CHAT, json={"messages": HELLO, **asked, "stream": True})
    assert "Hm" not in streamed.text
    lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Red."
