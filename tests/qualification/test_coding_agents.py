"""Turns of coding agents: the script, the recording, what agents print, and the report; no agent is run."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from mesh.api.http_server import serve_api
from mesh.engine import Committed, GenerationRequest
from mesh.text.chat_template import with_tool_note
from mesh.text.tokenizer import Tokenizer
from meshbench.lab.llama_cpp_build import unpacked_source
from spanmesh_proto.errors import ContextLengthExceeded, MeshError
from tests.qualification.coding_agents import npm_install
from tests.qualification.coding_agents.agents import CLAUDE, CODEX, OPENCODE, PROGRAMS, AgentOutput
from tests.qualification.coding_agents.engines import (
    COMMAND,
    TITLE,
    BoundedAnswers,
    ScriptedModel,
    answer_to,
    last_words,
    note_text,
)
from tests.qualification.coding_agents.model_kinds import (
    GEMMA_4,
    HARMONY,
    NOTE,
    PREAMBLE,
    THOUGHT,
    ModelKind,
)
from tests.qualification.coding_agents.npm_install import (
    installed_version,
    pinned_versions,
    programs_folder,
    require_installed,
)
from tests.qualification.coding_agents.recorded_server import recorded
from tests.qualification.coding_agents.recording import Exchange, exchange_of, read_recording
from tests.qualification.coding_agents.report import agents_report, checks_of, is_good
from tests.qualification.coding_agents.turns import Turn, TurnKind, TurnOptions, agent_environment, take_turns
from tests.support import api_harness
from tests.support.api_harness import NO_AUTHORITIES, ScriptedEngine, app_of
from tests.support.lab_fixtures import require_lab

tokenizer = api_harness.tokenizer
TEXT = {"type": "string"}
BASH: Any = {"name": "Bash", "parameters": {"properties": {"command": TEXT, "timeout": {"type": "number"}}}}
EXEC = {"name": "exec_command", "parameters": {"properties": {"cmd": TEXT, "tty": {"type": "boolean"}}}}
SHELL = {"name": "shell", "parameters": {"properties": {"command": {"type": "array", "items": TEXT}}}}
DESCRIBED: Any = {
    "name": "bash",
    "description": "Runs a command.\nSee <tools>\n and \u2028.",
    "parameters": {
        "properties": {"command": TEXT, "description": TEXT, "limit": {"type": ["integer", "null"]}},
        "required": ["command", "description", "limit"],
    },
}
USER = {"role": "user", "content": "Copy the note."}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "Bash", "arguments": {"command": COMMAND}}}],
}
# As Claude Code works: it calls the tool, sends the result, and prints events.
AGENT = """
import json, os, subprocess, sys, urllib.request

if sys.argv[1:] == ["--version"]:
    print("0.0 (stand-in)")
    raise SystemExit
assert sys.argv[1] == "-p"
with open("/proc/net/route") as routes:
    assert len(routes.readlines()) == 1, "more than loopback"
TOOL = {"name": "Bash", "input_schema": {"properties": {"command": {"type": "string"}}}}


def ask(messages):
    body = {"max_tokens": 500, "messages": messages, "tools": [TOOL], "stream": True}
    headers = {"x-api-key": os.environ["ANTHROPIC_AUTH_TOKEN"], "content-type": "application/json"}
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages?beta=true"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        lines = response.read().decode().split("\\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    arguments = "".join(delta.get("partial_json", "") for delta in deltas)
    return "".join(delta.get("text", "") for delta in deltas), arguments


user = {"role": "user", "content": sys.argv[2]}
text, arguments = ask([user])
use = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": json.loads(arguments)}
print(json.dumps({"type": "assistant", "message": {"content": [use]}}))
done = subprocess.run(use["input"]["command"], shell=True, capture_output=True, text=True)
result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": done.stdout}
turns = [user, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
text, _ = ask(turns)
print(json.dumps({"type": "result", "subtype": "success", "is_error": False, "result": text}))
"""
SLEEP = ["sleep", "98765"]
LAST = last_words("cafe")


def prompt_of(*messages: dict[str, Any], tools: Any = ()) -> str:
    """As the template of a model that knows no tools writes it."""
    offered = [{"type": "function", "function": tool} for tool in tools]
    return "\n".join(message["content"] for message in with_tool_note(messages, offered))


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        (BASH, {"command": COMMAND}),
        (EXEC, {"cmd": COMMAND}),
        (SHELL, {"command": ["bash", "-c", COMMAND]}),
        (DESCRIBED, {"command": COMMAND, "description": "Copy the note", "limit": 60_000}),
    ],
)
def test_the_script_calls_the_shell_that_is_offered(tool: Any, arguments: dict[str, Any]) -> None:
    other = {"name": "write", "description": "Writes.", "parameters": {"type": "object"}}
    prompt = prompt_of({"role": "system", "content": "You are an agent."}, USER, tools=[other, tool])
    assert list(NOTE.offered(prompt)) == ["write", tool["name"]]
    text, _, call = answer_to(prompt, is_json=False).partition("<tool_call>\n")
    assert text == "I copy it.\n"
    assert json.loads(call.removesuffix("\n</tool_call>")) == {"name": tool["name"], "arguments": arguments}


def test_the_script_ends_with_what_the_command_printed() -> None:
    result = {"role": "tool", "content": f"exit code 0\n{note_text('cafe')}"}
    done = answer_to(prompt_of(USER, CALLED, result, tools=[BASH]), is_json=False)
    assert done == "The note is copied. Its code word is cafe."
    failed = {"role": "tool", "content": "no such file"}
    assert "no such file" in answer_to(prompt_of(USER, CALLED, failed, tools=[BASH]), is_json=False)
    # A word from elsewhere is no result.
    told = {"role": "user", "content": note_text("cafe")}
    assert "<tool_call>" in answer_to(prompt_of(told, tools=[BASH]), is_json=False)


def test_the_script_answers_what_agents_ask_beside_their_work() -> None:
    assert answer_to(prompt_of(USER), is_json=False) == TITLE
    assert json.loads(answer_to(prompt_of(USER), is_json=True)) == {"title": TITLE}
    write = {"name": "write", "parameters": {}}
    assert answer_to(prompt_of(USER, tools=[write]), is_json=False).endswith("tools: write")


@asynccontextmanager
async def scripted_server(
    tokenizer: Tokenizer, recording: Path, kind: ModelKind = NOTE
) -> AsyncIterator[httpx.AsyncClient]:
    app = app_of(ScriptedModel(tokenizer, 4096, kind), tokenizer)
    async with (
        serve_api(recorded(app, recording), "127.0.0.1", 0) as url,
        httpx.AsyncClient(base_url=url, timeout=60, verify=NO_AUTHORITIES) as client,
    ):
        yield client


@pytest.mark.model
async def test_a_turn_by_messages_is_recorded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    recording = tmp_path / "requests.jsonl"
    tool = {"name": "Bash", "input_schema": BASH["parameters"]}
    user: Any = {"role": "user", "content": "Copy the note."}
    asked: Any = {"model": "default", "max_tokens": 500, "tools": [tool]}
    async with scripted_server(tokenizer, recording) as client:
        called = await client.post("/v1/messages", json={**asked, "messages": [user]})
        blocks = called.json()["content"]
        assert [block["type"] for block in blocks] == ["text", "tool_use"]
        assert blocks[1]["input"] == {"command": COMMAND}
        result = {"type": "tool_result", "tool_use_id": blocks[1]["id"], "content": note_text("beef")}
        turns = [user, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
        await client.post("/v1/messages", json={**asked, "messages": turns, "stream": True})
        await client.post("/v1/messages", json={"max_tokens": 2, "messages": [user]})
        await client.post("/v1/messages", json={"messages": [user]})
        await client.get("/health")
    first, last, title, refused = read_recording(recording)
    assert (first.method, first.path, first.status, first.num_tools) == ("POST", "/v1/messages", 200, 1)
    assert (first.text, first.events) == ("I copy it.", {})
    assert first.client.startswith("python-httpx")
    assert last.text == "The note is copied. Its code word is beef."
    assert (last.events["message_start"], last.last_event) == (1, "message_stop")
    assert last.request["messages"][2]["content"] == [result]
    assert title.text != TITLE
    assert TITLE.startswith(title.text.strip())
    assert (refused.status, refused.is_complete) == (400, True)
    assert "max_tokens" in refused.error


@pytest.mark.model
async def test_a_turn_by_responses_and_chats_is_recorded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    recording = tmp_path / "requests.jsonl"
    crew = {"type": "namespace", "name": "crew", "tools": [{"type": "function", "name": "spawn"}]}
    tools: Any = [crew, {"type": "function", **EXEC}]
    result = {"type": "function_call_output", "call_id": "c1", "output": note_text("feed")}
    call = {"type": "function_call", "call_id": "c1", "name": "exec_command", "arguments": "{}"}
    chat: Any = {"messages": [{"role": "user", "content": "Copy."}], "stream": True}
    async with scripted_server(tokenizer, recording) as client:
        asked = {"tools": tools, "stream": True}
        await client.post("/v1/responses", json={"input": "Copy.", **asked})
        await client.post("/v1/responses", json={"input": [call, result], **asked})
        function = {"type": "function", "function": DESCRIBED}
        await client.post("/v1/chat/completions", json={**chat, "tools": [function]})
        await client.post("/v1/chat/completions", json=chat)
    called, told, chat_call, title = read_recording(recording)
    assert called.num_tools == 2
    assert called.events["response.function_call_arguments.done"] == 1
    assert told.text == "The note is copied. Its code word is feed."
    assert called.last_event == told.last_event == "response.completed"
    assert (chat_call.text, title.text) == ("I copy it.", TITLE)
    assert chat_call.last_event == title.last_event == "[DONE]"
    assert title.events["chat.completion.chunk"] > 1


@pytest.mark.model
@pytest.mark.parametrize("kind", [HARMONY, GEMMA_4], ids=lambda kind: kind.name)
@pytest.mark.skipif(unpacked_source() is None, reason="no source of llama.cpp: see SPANMESH_LLAMA_CPP")
async def test_models_with_templates_take_a_turn(smollm2_path: Path, tmp_path: Path, kind: ModelKind) -> None:
    tokenizer = Tokenizer(kind.write_model(smollm2_path, tmp_path))
    recording = tmp_path / "requests.jsonl"
    tool = {"name": "Bash", "input_schema": BASH["parameters"] | {"required": ["command"]}}
    user: Any = {"role": "user", "content": "Copy the note."}
    asked: Any = {"max_tokens": 500, "tools": [tool], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    async with scripted_server(tokenizer, recording, kind) as client:
        called = await client.post("/v1/messages", json={**asked, "messages": [user]})
        blocks = called.json()["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
        assert (blocks[0]["thinking"].strip(), blocks[1]["text"].strip()) == (THOUGHT, PREAMBLE)
        assert blocks[2]["input"] == {"command": COMMAND}
        assert called.json()["stop_reason"] == "tool_use"
        result = {"type": "tool_result", "tool_use_id": blocks[2]["id"], "content": note_text("beef")}
        turns = [user, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
        await client.post("/v1/messages", json={**asked, "messages": turns, "stream": True})
        # Without reasoning in the history, and in another API.
        function = {"name": "exec_command", "arguments": json.dumps({"cmd": COMMAND})}
        items = [
            {"role": "user", "content": "Copy."},
            {"type": "function_call", "call_id": "c1", **function},
            {"type": "function_call_output", "call_id": "c1", "output": note_text("feed")},
        ]
        tools = [{"type": "function", **EXEC}]
        await client.post("/v1/responses", json={"input": items, "tools": tools, "stream": True})
        await client.post("/v1/chat/completions", json={"messages": [user], "stream": True})
    _, told, without, title = read_recording(recording)
    assert told.text == last_words("beef")
    assert told.last_event == "message_stop"
    missing = "The reasoning ahead of the call is not there."
    assert without.text == (missing if kind.reasons else last_words("feed"))
    assert title.text == TITLE
    assert title.reasoning == (THOUGHT if kind.reasons else "")


def test_a_template_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANMESH_LLAMA_CPP", str(tmp_path))
    with pytest.raises(MeshError, match="SPANMESH_LLAMA_CPP, or choose --template note"):
        HARMONY.write_model(tmp_path / "model.gguf", tmp_path)


@pytest.mark.model
async def test_the_scripted_model_refuses_what_does_not_fit(tokenizer: Tokenizer) -> None:
    with pytest.raises(ContextLengthExceeded):
        await answer(ScriptedModel(tokenizer, 4), GenerationRequest((1, 2, 3, 4), 5))


async def answer(engine: Any, request: GenerationRequest) -> list[Committed]:
    return [step async for step in engine.generate(request)]


def test_answers_end_after_a_number_of_tokens() -> None:
    engine = ScriptedEngine([(5, 6), (7,), (8,), (9, 10)])
    request = GenerationRequest((1,), 100, end_tokens=frozenset((2, 3)))
    steps = asyncio.run(answer(BoundedAnswers(engine, 3), request))
    assert [(step.tokens, step.finish) for step in steps] == [((5, 6), None), ((7, 2), "stop")]
    # The model cannot end it before.
    assert engine.requests[0].sampling.logit_bias == ((2, -100.0), (3, -100.0))
    assert BoundedAnswers(engine, 3).context_length == engine.context_length


@pytest.mark.parametrize("changes", [{"max_tokens": 3}, {"end_tokens": frozenset()}, {"grammar": "root ::="}])
def test_other_answers_are_as_the_model_gives_them(changes: dict[str, Any]) -> None:
    engine = ScriptedEngine([(5,), (6,), (7,), (8,)])
    request = replace(GenerationRequest((1,), 100, end_tokens=frozenset((2,))), **changes)
    steps = asyncio.run(answer(BoundedAnswers(engine, 3), request))
    assert [step.tokens for step in steps] == [(5,), (6,), (7,), (8,)]
    assert engine.requests[0].sampling == request.sampling
    if "grammar" in changes:
        assert engine.requests[0].max_tokens == 12


def test_a_stream_that_is_cut_off_is_told_apart() -> None:
    sent = b'event: message_start\ndata: {"type": "message_start"}\n\n: ping\n\nevent: content_bl'
    exchange = exchange_of(
        method="POST",
        path="/v1/messages",
        client="",
        status=200,
        content_type="text/event-stream; charset=utf-8",
        request=b"no JSON",
        response=sent,
        is_complete=False,
    )
    assert (exchange.events, exchange.last_event) == ({"message_start": 1}, "message_start")
    assert (exchange.request, exchange.num_tools, exchange.text) == ({}, 0, "")


def test_what_claude_code_prints() -> None:
    said = {"type": "text", "text": "I copy it."}
    used = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {}}
    lines: list[Any] = [
        {"type": "system", "subtype": "init"},
        {"type": "assistant", "message": {"content": [said, used]}},
        {"type": "user", "message": {"content": []}},
        {"type": "result", "subtype": "success", "is_error": False, "result": "Done."},
    ]
    printed = "\n".join(["a warning", *map(json.dumps, lines), ""])
    output = CLAUDE.output(printed)
    assert (output.text, output.tools, output.errors) == ("Done.", ("Bash",), ())
    assert output.events == {"system": 1, "assistant": 1, "user": 1, "result": 1}
    assert output.others == ("a warning",)
    failed = {"type": "result", "subtype": "success", "is_error": True, "result": "API Error: 400"}
    assert CLAUDE.output(json.dumps(failed)).errors == ("success: API Error: 400",)
    assert CLAUDE.output("").errors == ("no result",)


def test_what_codex_prints() -> None:
    command = {"type": "command_execution", "command": COMMAND, "exit_code": 0}
    lines: list[Any] = [
        {"type": "thread.started", "thread_id": "x"},
        {"type": "item.completed", "item": {"type": "error", "message": "unknown model"}},
        {"type": "item.completed", "item": {"type": "agent_message", "text": "I copy it."}},
        {"type": "item.completed", "item": command},
        {"type": "item.completed", "item": {"type": "agent_message", "text": "Done."}},
        {"type": "turn.completed", "usage": {}},
    ]
    output = CODEX.output("\n".join(map(json.dumps, lines)))
    assert (output.text, output.tools, output.errors) == ("Done.", ("command_execution",), ())
    lines[3]["item"]["exit_code"] = 1
    lines[5] = {"type": "turn.failed", "error": {"message": "stream disconnected"}}
    lines.append({"type": "error", "message": "reconnecting"})
    assert CODEX.output("\n".join(map(json.dumps, lines))).errors == (
        f"{COMMAND}: exit code 1",
        "stream disconnected",
        "reconnecting",
        "no turn was completed",
    )


def test_what_opencode_prints() -> None:
    tool = {"type": "tool", "tool": "bash", "state": {"status": "completed"}}
    lines: list[Any] = [
        {"type": "step_start", "part": {}},
        {"type": "text", "part": {"text": "I copy it."}},
        {"type": "tool_use", "part": tool},
        {"type": "step_finish", "part": {"reason": "tool-calls"}},
        {"type": "text", "part": {"text": "Done."}},
        {"type": "step_finish", "part": {"reason": "stop"}},
    ]
    output = OPENCODE.output("\n".join(map(json.dumps, lines)))
    assert (output.text, output.tools, output.errors) == ("Done.", ("bash",), ())
    tool["state"] = {"status": "error", "error": "denied"}
    lines = [*lines[:3], {"type": "error", "error": {"name": "APIError"}}]
    assert OPENCODE.output("\n".join(map(json.dumps, lines))).errors == (
        "bash: denied",
        '{"name": "APIError"}',
        "no step was finished",
    )


def test_events_of_an_unknown_shape_are_an_error() -> None:
    output = CODEX.output(json.dumps({"type": "item.completed", "item": {}}))
    assert len(output.errors) == 1
    assert "unknown shape" in output.errors[0]
    assert output.events == {"item.completed": 1}


def good_exchange(text: str) -> Exchange:
    return Exchange(
        method="POST",
        path="/v1/messages",
        client="claude-cli/1",
        status=200,
        request={"tools": [BASH], "messages": []},
        events={"message_start": 1, "message_stop": 1},
        last_event="message_stop",
        text=text,
        is_complete=True,
    )


def good_turn(**changes: Any) -> Turn:
    turn = Turn(
        program=CLAUDE,
        version="1.0",
        kind=TurnKind.TOOL,
        model=NOTE,
        exit_code=0,
        seconds=3.0,
        output=AgentOutput(LAST.replace(" ", "\n", 1), ("Bash",), (), {"result": 1}),
        exchanges=[good_exchange(PREAMBLE), good_exchange(f"{LAST} ")],
        code_word="cafe",
        copied=note_text("cafe"),
        last_words="",
    )
    return replace(turn, **changes)


def failing(turn: Turn) -> list[str]:
    assert is_good(turn) is all(check.holds for check in checks_of(turn))
    return [check.name for check in checks_of(turn) if not check.holds]


def test_a_good_turn_passes() -> None:
    assert failing(good_turn()) == []
    plain = good_turn(kind=TurnKind.PLAIN, model=None, copied=None, exchanges=[good_exchange(LAST)])
    assert failing(plain) == []


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({"exit_code": 1}, ["the agent ends with code 0"]),
        ({"exit_code": None}, ["the agent ends with code 0"]),
        ({"copied": None}, ["the command was run"]),
        ({"copied": "else"}, ["the command was run"]),
        (
            {"code_word": "beef", "copied": note_text("beef")},
            ["its result came back to the model", "text, reasoning and calls are told apart"],
        ),
        ({"exchanges": [good_exchange(LAST)]}, ["/v1/messages was used"]),
        ({"exchanges": [good_exchange(PREAMBLE), good_exchange(TITLE)]}, ["the answer came out"]),
        (
            {"exchanges": [good_exchange(f"<|message|>{PREAMBLE}"), good_exchange(LAST)]},
            ["text, reasoning and calls are told apart"],
        ),
        ({"model": HARMONY}, ["text, reasoning and calls are told apart"]),
        ({"output": AgentOutput(LAST, ("Bash",), ("retried",))}, ["no errors told by the agent"]),
        ({"output": AgentOutput(LAST)}, ["the command was run"]),
    ],
)
def test_what_goes_wrong_is_named(changes: dict[str, Any], failed: list[str]) -> None:
    assert failing(good_turn(**changes)) == failed


@pytest.mark.parametrize(
    ("exchange", "failed"),
    [
        ({"status": 400, "events": {}, "error": "no such field"}, ["no request refused"]),
        ({"path": "/v1/models", "status": 404, "events": {}}, ["no request refused"]),
        ({"last_event": "error"}, ["all streams whole"]),
        ({"last_event": "message_start", "is_complete": False}, []),
        ({"status": None, "events": {}, "is_complete": False}, []),
        ({"method": "HEAD", "path": "/", "status": 405, "events": {}}, []),
        ({"path": "/api/event_logging/batch", "status": 404, "events": {}}, []),
    ],
)
def test_further_requests_are_judged(exchange: dict[str, Any], failed: list[str]) -> None:
    further = replace(good_exchange(PREAMBLE), **exchange)
    assert failing(good_turn(exchanges=[*good_turn().exchanges, further])) == failed


def test_the_report_tells_requests_events_and_versions() -> None:
    turns = [good_turn(), good_turn(kind=TurnKind.PLAIN, exit_code=1, last_words="it crashed")]
    versions = {CLAUDE.package: "2.1.0"}
    conditions, failures = {"spanmesh": "0.2"}, ["Codex: its server ended"]
    report = agents_report(turns, versions, conditions, failures)
    page, text, found = report.markdown(), report.text(), json.loads(report.json())
    assert "| Claude Code | @anthropic-ai/claude-code | 2.1.0 | 1.0 |" in page
    assert "## Claude Code, tool turn, the note on tools" in page
    assert "| POST /v1/messages | 200 | 1 | message_start 1, message_stop 1 | claude-cli/1 |" in page
    assert "FAILS" in page
    assert "it crashed" in page
    assert "its server ended" in page
    assert found["passed"] is False
    assert found["versions"] == versions
    # Bodies of requests stay in the recordings.
    assert found["turns"][0]["requests"][0]["request"] == ["messages", "tools"]
    assert json.loads(agents_report(turns[:1], versions, {}, []).json())["passed"] is True
    assert "FAILS" in text
    assert text.endswith("its server ended")


def test_all_agents_have_fixed_versions() -> None:
    versions = pinned_versions()
    assert versions.keys() == {program.package for program in PROGRAMS.values()}
    assert all(version.count(".") == 2 for version in versions.values())


def stand_in(folder: Path, name: str, program: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{program}")
    path.chmod(0o755)
    return path


def test_what_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MeshError, match="need node and npm; on Debian: apt-get install nodejs npm"):
        npm_install.install(tmp_path / "agents")
    stand_in(programs_folder(tmp_path), "claude", "")
    with pytest.raises(MeshError, match=r"Codex, OpenCode not found in .*--install"):
        require_installed(tmp_path, PROGRAMS.values())
    require_installed(tmp_path, [CLAUDE])


def test_npm_installs_fixed_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "tools"
    stand_in(tools, "node", "")
    npm = "import json, sys\nopen(sys.argv[3] + '/told', 'w').write(json.dumps(sys.argv[1:]))\n"
    stand_in(tools, "npm", npm)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    npm_install.install(tmp_path / "agents")
    told = json.loads((tmp_path / "agents" / "told").read_text())
    assert told[:3] == ["install", "--prefix", str(tmp_path / "agents")]
    assert f"{CODEX.package}@{pinned_versions()[CODEX.package]}" in told
    stand_in(tools, "npm", "print('no such package')\nraise SystemExit(1)\n")
    with pytest.raises(MeshError, match="no such package"):
        npm_install.install(tmp_path / "agents")


def test_the_installed_version_is_read(tmp_path: Path) -> None:
    assert installed_version(tmp_path, CLAUDE.package) == ""
    folder = tmp_path / "node_modules" / CLAUDE.package
    folder.mkdir(parents=True)
    (folder / "package.json").write_text('{"version": "1.2.3"}')
    assert installed_version(tmp_path, CLAUDE.package) == "1.2.3"


def test_agents_get_no_variables_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-secret")
    own = {"DISABLE_TELEMETRY": "1"}
    found = agent_environment(tmp_path, tmp_path / "home", tmp_path / "work", own)
    assert found.keys() == {"PATH", "HOME", "PWD", "LANG", "TERM", "DISABLE_TELEMETRY"}
    assert found["PATH"].split(os.pathsep)[0] == str(programs_folder(tmp_path))
    assert (found["HOME"], found["PWD"]) == (str(tmp_path / "home"), str(tmp_path / "work"))


@pytest.mark.lab
@pytest.mark.model
def test_an_agent_takes_its_turn_with_loopback_alone(tmp_path: Path) -> None:
    """A program in Claude Code's place, started by `mesh agent`, against the scripted model."""
    require_lab()
    agents, output = tmp_path / "agents", tmp_path / "output"
    stand_in(programs_folder(agents), "claude", AGENT)
    output.mkdir()
    options = TurnOptions(
        agents=agents, output=output, ctx_size=4096, time_limit_s=60, kinds=(TurnKind.TOOL,)
    )
    (turn,) = take_turns(CLAUDE, options)
    assert failing(turn) == [], (turn, (output / "claude-tool-note.errors.txt").read_text())
    assert turn.version == "0.0 (stand-in)"
    asked = [exchange for exchange in turn.exchanges if exchange.path == "/v1/messages"]
    assert [exchange.num_tools for exchange in asked] == [1, 1]
    # `mesh agent` asked what is served.
    assert turn.exchanges[0].path.startswith("/v1/models/")


@pytest.mark.lab
@pytest.mark.model
def test_an_agent_that_hangs_is_ended(tmp_path: Path) -> None:
    require_lab()
    agents, output = tmp_path / "agents", tmp_path / "output"
    program = (
        "import subprocess, sys\n"
        "if '-p' in sys.argv:\n"
        f"    subprocess.run({SLEEP!r}, start_new_session=True)\n"
    )
    stand_in(programs_folder(agents), "claude", program)
    output.mkdir()
    options = TurnOptions(agents=agents, output=output, ctx_size=4096, time_limit_s=3, kinds=(TurnKind.TOOL,))
    (turn,) = take_turns(CLAUDE, options)
    assert turn.exit_code is None
    assert "the agent ends with code 0" in failing(turn)
    assert not any(process.info["cmdline"] == SLEEP for process in psutil.process_iter(["cmdline"]))
