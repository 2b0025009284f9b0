"""Settings of templates for the amount of reasoning, found by rendering them."""

from typing import Any

import pytest

from mesh.text.reasoning_switches import ReasoningSwitches, ReasoningWish, switches_of
from tests.support.chat_templates import collected_templates, template_of

TEMPLATES = collected_templates()
ON, OFF = ReasoningWish(is_on=True), ReasoningWish(is_on=False)


def effort(level: str) -> ReasoningWish:
    return ReasoningWish(effort=level)


@pytest.mark.skipif(not TEMPLATES, reason="llama.cpp's templates are not here")
@pytest.mark.parametrize(
    ("name", "wish", "expected"),
    [
        ("openai-gpt-oss-120b", effort("minimal"), {"reasoning_effort": "low"}),
        ("openai-gpt-oss-120b", effort("none"), {"reasoning_effort": "low"}),
        ("openai-gpt-oss-120b", effort("max"), {"reasoning_effort": "high"}),
        ("Kimi-K3", effort("low"), {"thinking": True, "thinking_effort": "low"}),
        ("Kimi-K3", effort("medium"), {"thinking": True, "thinking_effort": "high"}),
        ("Kimi-K3", effort("none"), {"thinking": False}),
        ("Kimi-K3", OFF, {"thinking": False}),
        ("deepseek-ai-DeepSeek-V4", effort("max"), {"thinking": True, "reasoning_effort": "max"}),
        ("deepseek-ai-DeepSeek-V4", effort("low"), {"thinking": True, "reasoning_effort": "low"}),
        ("deepseek-ai-DeepSeek-V3.1", ON, {"enable_thinking": True, "thinking": True}),
        ("ByteDance-Seed-OSS", ReasoningWish(budget_tokens=512), {"thinking_budget": 512}),
        ("ByteDance-Seed-OSS", OFF, {"thinking_budget": 0}),
        ("Qwen-Qwen3-0.6B", OFF, {"enable_thinking": False}),
        ("Qwen-Qwen3-0.6B", effort("none"), {"enable_thinking": False}),
        ("MiniMax-M3", OFF, {"thinking_mode": "disabled"}),
        ("inclusionai-ling-3.0-flash", OFF, {"thinking_option": "off"}),
        ("tencent-Hy3", ON, {"reasoning_effort": "high"}),
        ("tencent-Hy3", effort("low"), {"reasoning_effort": "low"}),
        ("tencent-Hy3", OFF, {"reasoning_effort": "no_think"}),
        ("Cohere2MoE", OFF, {"reasoning": False}),
        ("ibm-granite-granite-3.3-2B-Instruct", ON, {"thinking": True}),
    ],
)
def test_what_is_wanted_becomes_what_the_template_knows(
    name: str, wish: ReasoningWish, expected: dict[str, Any]
) -> None:
    template = template_of(TEMPLATES[name].read_text())
    variables = template.reasoning_switches.variables(wish)
    assert {key: variables.get(key) for key in expected} == expected
    # None of it is refused.
    assert template.render([{"role": "user", "content": "Hello"}], variables)


@pytest.mark.skipif(not TEMPLATES, reason="llama.cpp's templates are not here")
def test_templates_without_settings_have_none() -> None:
    for name in ("Qwen-Qwen2.5-7B-Instruct", "meta-llama-Llama-3.1-8B-Instruct"):
        switches = template_of(TEMPLATES[name].read_text()).reasoning_switches
        assert not switches.has_any
        assert not switches.has_budget


def test_a_template_that_refuses_everything_has_none() -> None:
    assert switches_of(lambda _variables: None) == ReasoningSwitches()


def test_nothing_is_said_where_nothing_is_wanted() -> None:
    switches = ReasoningSwitches(("thinking",), (("reasoning_effort", ("none", "high")),), has_budget=True)
    assert switches.variables(ReasoningWish()) == {}
