"""LangChain and LiteLLM, unmodified, against a real mesh."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from tests.support import mesh_in_process
from tests.support.api_harness import KEY

pytestmark = pytest.mark.model

mesh_url = mesh_in_process.mesh_url

QUESTION = "Name three fruits."


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


def langchain(mesh_url: str, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{mesh_url}/v1",
        api_key=SecretStr(KEY),
        model="default",
        temperature=0,
        max_completion_tokens=48,
        max_retries=0,
        **fields,
    )


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_streams_what_it_would_get_whole(mesh_url: str, *, responses: bool) -> None:
    model = langchain(mesh_url, use_responses_api=responses)
    whole = model.invoke(QUESTION)
    parts = list(model.stream(QUESTION))
    assert len(parts) > 3
    assert "".join(part.text for part in parts) == whole.text
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 3


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_gets_the_call_that_it_wants(mesh_url: str, *, responses: bool) -> None:
    model = langchain(mesh_url, use_responses_api=responses).bind_tools([multiply], tool_choice="multiply")
    answer = model.invoke([HumanMessage("What is 6 times 7?")])
    [call] = answer.tool_calls
    assert call["name"] == "multiply"
    assert all(isinstance(call["args"][name], int) for name in ("a", "b"))


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_knows_a_conversation_that_is_too_long(mesh_url: str, *, responses: bool) -> None:
    """Its middleware then summarizes."""
    with pytest.raises(ContextOverflowError):
        langchain(mesh_url, use_responses_api=responses).invoke("x " * 40_000)


async def test_langchain_asks_several_at_once(mesh_url: str) -> None:
    model = langchain(mesh_url)
    answers = await model.abatch([QUESTION, "Name three trees."])
    assert all(answer.text for answer in answers)


@pytest.mark.skipif(find_spec("litellm") is None, reason="LiteLLM is not installed: see CONTRIBUTING.md")
def test_litellm(mesh_url: str) -> None:
    """In a process of its own: see there."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.litellm_client", mesh_url, KEY],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["whole"] == found["streamed"] == found["later"] != ""
    assert json.loads(found["arguments"])["of"] in {"apple", "plum"}
    assert 3 < found["tokens"] <= 32
    assert "temperature" in found["refusal"]
    assert found["overflow"] == "ContextWindowExceededError"
