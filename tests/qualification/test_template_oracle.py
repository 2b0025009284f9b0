"""Conversations that llama.cpp's template code renders are rendered here, too."""

from __future__ import annotations

from typing import Final

import pytest

from meshbench.lab.llama_cpp_build import build_llama_rpc
from tests.qualification.template_oracle import (
    CONVERSATIONS,
    Comparison,
    Outcome,
    compared,
    rendered_here,
)
from tests.support.chat_templates import collected_templates, template_of

TEMPLATES = collected_templates()
# A macro of theirs calls itself for each letter of `null`, without an end, here as with llama.cpp.
ENDLESS: Final = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
}
pytestmark = pytest.mark.skipif(not TEMPLATES, reason="no source of llama.cpp: see SPANMESH_LLAMA_CPP")


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_no_conversation_is_refused(name: str) -> None:
    template = template_of(TEMPLATES[name].read_text())
    found = {each: rendered_here(template, body) for each, body in CONVERSATIONS.items()}
    refused = {each: outcome.reason for each, outcome in found.items() if outcome.prompt is None}
    assert refused.keys() == ({"types"} if name in ENDLESS else set()), refused


@pytest.mark.parametrize(
    ("conversation", "ours", "theirs", "outcome", "strange"),
    [
        ("plain", Outcome("a"), Outcome("a"), "equal", False),
        ("plain", Outcome("a"), Outcome("b"), "differs", True),
        ("parts", Outcome("a"), Outcome("b"), "differs", False),
        ("parts", Outcome(None, "no"), Outcome("b"), "refused here", True),
        ("plain", Outcome("a"), Outcome(None, "no"), "refused there", False),
        ("plain", Outcome(None, "no"), Outcome(None, "no"), "refused by both", False),
    ],
)
def test_what_llama_cpp_alone_renders_is_strange(
    conversation: str, ours: Outcome, theirs: Outcome, outcome: str, *, strange: bool
) -> None:
    found = Comparison("Qwen3-Coder", conversation, ours, theirs)
    assert (found.outcome, found.is_strange) == (outcome, strange)


@pytest.mark.sweep
# The first time llama-server is built.
@pytest.mark.timeout(1800)
def test_llama_server_renders_nothing_else() -> None:
    server = build_llama_rpc().server
    found = [each for name, path in TEMPLATES.items() for each in compared(name, path, server)]
    assert len(found) == len(TEMPLATES) * len(CONVERSATIONS)
    assert [(each.template, each.conversation, each.difference()) for each in found if each.is_strange] == []
