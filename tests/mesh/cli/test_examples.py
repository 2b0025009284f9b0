"""What stands in examples/ works with a real mesh: programs run, configurations of agents lead to answers."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support import mesh_in_process
from tests.support.api_harness import KEY

pytestmark = pytest.mark.model

mesh_url = mesh_in_process.mesh_url

EXAMPLES = Path(__file__).parents[3] / "examples"
# Shortened: a small model's context would not hold an agent's own.
INSTRUCTIONS = "You are a coding agent. Call shell to look at files."
WORD = {"type": "string", "maxLength": 8}
SHELL = {
    "name": "shell",
    "description": "Runs a command.",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": WORD, "maxItems": 3}},
        "required": ["command"],
        "additionalProperties": False,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("stream_with_tools.py", ["local_time{", "result: "]),
        ("langchain_tools.py", ["streamed: ", "'name': 'multiply'", "answer: ", "total_tokens"]),
    ],
)
def test_programs_run(mesh_url: str, program: str, says: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / program, f"{mesh_url}/v1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"MESH_API_KEY": KEY},
    )
    assert done.returncode == 0, done.stderr
    for text in says:
        assert text in done.stdout


def test_codex_gets_what_it_needs(mesh_url: str) -> None:
    """Two turns as Codex takes them: everything streamed, nothing kept, the whole conversation each time."""
    config = tomllib.loads((EXAMPLES / "coding_agents" / "codex.config.toml").read_text())
    provider = config["model_providers"][config["model_provider"]]
    assert (provider["wire_api"], provider["env_key"]) == ("responses", "MESH_API_KEY")
    url = provider["base_url"].replace("http://127.0.0.1:8000", mesh_url)
    asked: dict[str, Any] = {
        "model": config["model"],
        "instructions": INSTRUCTIONS,
        "tools": [{"type": "function", "strict": False, **SHELL}],
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "stream": True,
        "prompt_cache_key": "a-conversation",
        "text": {"verbosity": "medium"},
    }
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]}
    call = last_response(url, {**asked, "input": [user], "tool_choice": "required"})["output"][-1]
    assert (call["type"], call["name"]) == ("function_call", "shell")
    json.loads(call["arguments"])
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "README.md"}
    turns = [user, call, result]
    limit = {"tool_choice": "none", "max_output_tokens": 16}
    second = last_response(url, {**asked, **limit, "input": turns})
    assert second["output"][-1]["content"][0]["text"]


def last_response(url: str, asked: dict[str, Any]) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {KEY}", "accept": "text/event-stream"}
    with httpx.stream("POST", f"{url}/responses", json=asked, headers=headers, timeout=120) as stream:
        assert stream.status_code == 200, stream.read()
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] in {"response.completed", "response.incomplete"}
    response: dict[str, Any] = events[-1]["response"]
    return response


def test_opencode_gets_what_it_needs(mesh_url: str) -> None:
    config = json.loads((EXAMPLES / "coding_agents" / "opencode.json").read_text())
    provider, _, model = config["model"].partition("/")
    options = config["provider"][provider]["options"]
    assert options["apiKey"] == "{env:MESH_API_KEY}"
    assert model in config["provider"][provider]["models"]
    url = options["baseURL"].replace("http://127.0.0.1:8000", mesh_url)
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        asked: Any = {"model": model, "tools": [{"type": "function", "function": SHELL}], "stream": True}
        asked |= {"stream_options": {"include_usage": True}, "max_tokens": 64, "temperature": 0}
        messages: Any = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": "List."}]
        chunks = list(client.chat.completions.create(messages=messages, **asked, tool_choice="required"))
    assert chunks[-1].usage is not None
    first = next(chunk.choices[0].delta.tool_calls for chunk in chunks if chunk.choices[0].delta.tool_calls)
    assert first[0].function.name == "shell"
