"""Forced calls of random models with the templates and the control tokens of real ones, in exact mode."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from mesh.text.answer_format import BARE_MARK, MARK, texts_of
from mesh.text.tokenizer import Tokenizer
from speculative.controller import ControllerOptions
from stages.runtime.stage_runtime import RuntimeOptions
from tests.mesh.api.test_tool_grammar import CHOSEN, LOOK, NOTHING, needs_templates
from tests.support.api_harness import running_api
from tests.support.chat_templates import collected_templates, template_of
from tests.support.proposers import Parrot
from tests.support.ring_harness import running_coordinator, running_stages
from tests.support.tiny_models import TinyModel

CTX_SIZE = 8192
# As many calls as there may be, in letters where a template's marks are no tokens.
MAX_TOKENS = 4000
NUM_AT_ONCE = 8
TOOLS: Any = [{"type": "function", "function": {"description": "Looks.", **tool}} for tool in (LOOK, NOTHING)]
STRICT: Any = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
VALID = {function["name"]: Draft202012Validator(function["parameters"]) for function in (LOOK, NOTHING)}
THINKS = {"enable_thinking": True}
CHOSEN_TOOL = {"type": "function", "function": {"name": "look"}}
# In turn, by seed.
WISHES: Any = (
    {"tools": STRICT, "tool_choice": "required"},
    {"tools": STRICT, "tool_choice": "required", **THINKS},
    {"tools": STRICT, "tool_choice": CHOSEN_TOOL, **THINKS},
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
)
# So that a model without sense ends its reasoning at all.
BIAS = 12


async def answers_of(api: Any, number: int, **fields: Any) -> list[dict[str, Any]]:
    """Answer of each seed, several at once."""
    places = asyncio.Semaphore(NUM_AT_ONCE)

    async def answer(seed: int) -> dict[str, Any]:
        body = {
            "messages": [{"role": "user", "content": "Look at it."}],
            "max_tokens": MAX_TOKENS,
            "seed": seed,
            "return_token_ids": True,
            **WISHES[seed % len(WISHES)],
            **fields,
        }
        async with places:
            response = await api.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()["choices"][0]
        return found

    return await asyncio.gather(*map(answer, range(number)))


def check_calls(choice: dict[str, Any], wish: dict[str, Any]) -> None:
    """They are complete and valid, and nothing else is said."""
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls", choice
    assert not message["content"]
    calls = [call["function"] for call in message["tool_calls"]]
    for function in calls:
        VALID[function["name"]].validate(json.loads(function["arguments"]))
    if wish["tool_choice"] == CHOSEN_TOOL:
        assert [function["name"] for function in calls] == ["look"]
    if not wish.get("parallel_tool_calls", True):
        assert len(calls) == 1


@needs_templates
@pytest.mark.parametrize("number", [len(WISHES), pytest.param(200, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", CHOSEN)
async def test_forced_calls_are_valid_with_speculation_and_without(
    name: str, number: int, tmp_path: Path
) -> None:
    source = collected_templates()[name].read_text()
    template = template_of(source)
    answer_format = template.answer_format
    controls = tuple(dict.fromkeys(mark for text in answer_format.texts for mark in MARK.findall(text)))
    model = TinyModel("llama", n_layers=2, n_ctx_train=CTX_SIZE).write(tmp_path / "m.gguf", controls=controls)
    tokenizer = Tokenizer(model)
    tokenizer.chat_template = source
    ends = tokenizer.control_tokens([each.end for each in answer_format.reasoning])
    bias = {str(token): BIAS for token in ends.values()}
    found = []
    options = RuntimeOptions(ctx_size=CTX_SIZE, num_slots=NUM_AT_ONCE, exact=True)
    async with running_stages(model, (1,), options, tmp_path / "cache") as stages:
        for make_proposer in (None, Parrot):
            async with (
                running_coordinator(
                    stages,
                    context_length=CTX_SIZE,
                    num_slots=NUM_AT_ONCE,
                    make_proposer=make_proposer,
                    controller=ControllerOptions(fixed_width=3, fixed_depth=2),
                    n_vocab=tokenizer.n_vocab,
                    token_texts=tokenizer.texts,
                ) as coordinator,
                running_api(coordinator, tokenizer) as api,
            ):
                found.append(await answers_of(api, number, logit_bias=bias))
    off, on = found
    assert [choice["token_ids"] for choice in on] == [choice["token_ids"] for choice in off]
    for seed, choice in enumerate(off):
        check_calls(choice, WISHES[seed % len(WISHES)])
    if number > len(WISHES):
        has_reasoning = template.reasoning_switches.has_any
        assert any(choice["message"].get("reasoning_content") for choice in off) == has_reasoning
        assert template.has_one_call or any(len(choice["message"]["tool_calls"]) > 1 for choice in off)
    # Marks are written as tokens, not in letters, unless llama.cpp gives their tokens a text.
    texts = set(texts_of(answer_format.calls)) - {BARE_MARK}
    marks = set(tokenizer.control_tokens(texts).values())
    assert not marks or all(marks & set(choice["token_ids"]) for choice in off)
