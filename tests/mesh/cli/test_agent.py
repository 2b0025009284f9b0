"""`mesh agent`: what each agent is given, and what is told where one cannot start."""

import asyncio
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from mesh.api.api_keys import ApiKeys, KeyRecord, digest_of
from mesh.cli.agent import MeshEndpoint, claude_setup, codex_setup, opencode_setup
from mesh.text.tokenizer import Tokenizer
from tests.mesh.cli.test_ask_head import answering
from tests.support.api_harness import KEY, MODEL, Api, ScriptedEngine, running_api

pytestmark = pytest.mark.model

ENDPOINT = MeshEndpoint("http://127.0.0.1:8000", KEY, "model-x", 65_536)


@pytest_asyncio.fixture
async def api(smollm2_path: Path) -> AsyncIterator[Api]:
    keys = ApiKeys([KeyRecord("alice", digest_of(KEY))])
    engine = ScriptedEngine([(300,)], context_length=65_536)
    async with running_api(engine, Tokenizer(smollm2_path), keys=keys) as api:
        yield api


async def mesh(*arguments: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(Path(sys.executable).with_name("mesh")), *arguments],
            env={**os.environ, "PATH": str(path), "MESH_API_KEY": KEY, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return await asyncio.to_thread(run)


def stand_in(folder: Path, name: str) -> None:
    """A program that prints its arguments and environment."""
    program = folder / name
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    )
    program.chmod(0o755)


async def test_an_agent_starts_with_everything_set(api: Api, tmp_path: Path) -> None:
    for name in ("claude", "codex", "opencode"):
        stand_in(tmp_path, name)
    found = {}
    path = {"PYTHONPATH": "lib"}
    for name in ("claude", "codex", "opencode"):
        done = await mesh("agent", "--url", api.url, name, "-p", "hello", path=tmp_path, **path)
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(done.stdout)
        assert found[name][0][-2:] == ["-p", "hello"]
    claude = found["claude"][1]
    # It runs programs of the user's, to which nothing of our own children's applies.
    assert claude["PYTHONPATH"] == "lib"
    assert "PYTHONSAFEPATH" not in claude
    assert (claude["ANTHROPIC_BASE_URL"], claude["ANTHROPIC_AUTH_TOKEN"]) == (api.url, KEY)
    assert claude["ANTHROPIC_MODEL"] == claude["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == MODEL
    assert found["codex"][1]["MESH_API_KEY"] == KEY
    config = json.loads(found["opencode"][1]["OPENCODE_CONFIG_CONTENT"])
    assert config["provider"]["mesh"]["options"]["baseURL"] == f"{api.url}/v1"


def test_settings_of_codex_are_toml() -> None:
    setup = codex_setup(ENDPOINT)
    assert setup.arguments[::2] == ("-c",) * (len(setup.arguments) // 2)
    settings: dict[str, Any] = tomllib.loads("\n".join(setup.arguments[1::2]))
    assert settings["model_context_window"] == 65_536
    assert settings["model_providers"]["mesh"]["base_url"] == "http://127.0.0.1:8000/v1"
    example = tomllib.loads(Path("examples/coding_agents/codex.config.toml").read_text())
    assert example.keys() <= settings.keys()
    assert example["model_providers"]["mesh"].keys() <= settings["model_providers"]["mesh"].keys()


def test_the_configuration_of_opencode_is_that_of_the_example() -> None:
    config = json.loads(opencode_setup(ENDPOINT).environment["OPENCODE_CONFIG_CONTENT"])
    example = json.loads(Path("examples/coding_agents/opencode.json").read_text())
    assert config.keys() == example.keys()
    mine, theirs = config["provider"]["mesh"], example["provider"]["mesh"]
    assert mine.keys() == theirs.keys()
    assert mine["models"]["model-x"]["limit"] == {"context": 65_536, "output": 16_384}
    assert mine["options"].keys() == theirs["options"].keys()
    assert config["model"] == config["small_model"] == "mesh/model-x"


def test_agents_wait_for_long_prompts() -> None:
    """Each has limits of minutes of its own, which reading a long prompt exceeds."""
    claude = claude_setup(ENDPOINT).environment
    waits = ("API_TIMEOUT_MS", "CLAUDE_STREAM_IDLE_TIMEOUT_MS", "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS")
    assert {claude[name] for name in waits} == {"3600000"}
    assert claude["API_FORCE_IDLE_TIMEOUT"] == "0"
    config = json.loads(opencode_setup(ENDPOINT).environment["OPENCODE_CONFIG_CONTENT"])
    options = config["provider"]["mesh"]["options"]
    assert (options["timeout"], options["headerTimeout"], options["chunkTimeout"]) == (
        False,
        3_600_000,
        3_600_000,
    )


def test_answers_leave_room_for_their_prompts() -> None:
    assert claude_setup(ENDPOINT).environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "16384"


async def test_answers_may_be_bounded(api: Api, tmp_path: Path) -> None:
    for name in ("claude", "codex", "opencode"):
        stand_in(tmp_path, name)
    bound = ("agent", "--url", api.url, "--max-output", "48")
    claude = await mesh(*bound, "claude", path=tmp_path)
    assert json.loads(claude.stdout)[1]["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "48"
    opencode = await mesh(*bound, "opencode", path=tmp_path)
    config = json.loads(json.loads(opencode.stdout)[1]["OPENCODE_CONFIG_CONTENT"])
    assert config["provider"]["mesh"]["models"][MODEL]["limit"]["output"] == 48
    codex = await mesh(*bound, "codex", path=tmp_path)
    assert codex.returncode == 1
    assert "Codex has no setting for --max-output" in codex.stderr


def test_claude_is_given_a_window_that_it_takes() -> None:
    """It complains of less than 100,000 tokens, and has the context anyway."""
    name = "CLAUDE_CODE_AUTO_COMPACT_WINDOW"
    assert name not in claude_setup(ENDPOINT).environment
    assert claude_setup(ENDPOINT).environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    long = replace(ENDPOINT, context_length=131_072)
    assert claude_setup(long).environment[name] == "131072"


async def test_what_is_missing_is_told(api: Api, tmp_path: Path) -> None:
    absent = await mesh("agent", "--url", api.url, "claude", path=tmp_path)
    assert absent.returncode == 1
    assert "Claude Code is not installed: npm install -g @anthropic-ai/claude-code" in absent.stderr
    stand_in(tmp_path, "claude")
    wrong_key = await mesh("agent", "--url", api.url, "claude", path=tmp_path, MESH_API_KEY="sk-x")
    assert wrong_key.returncode == 1
    assert "needs another API key" in wrong_key.stderr
    unknown = await mesh("agent", "--url", api.url, "--model", "other", "claude", path=tmp_path)
    assert "is not served here" in unknown.stderr
    nobody = await mesh("agent", "--url", "http://127.0.0.1:9", "claude", path=tmp_path)
    assert "no mesh answers" in nobody.stderr


async def test_an_address_may_end_as_other_clients_want_it(api: Api, tmp_path: Path) -> None:
    shown = await mesh("agent", "--url", f"{api.url}/v1/", "--show", "claude", path=tmp_path)
    assert f"ANTHROPIC_BASE_URL={api.url} " in shown.stdout, shown.stderr


def test_a_server_that_is_no_mesh_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ollama's and others' description of a model has no length."""
    card = json.dumps({"id": "x", "object": "model"})
    monkeypatch.delenv("MESH_API_KEY", raising=False)
    with answering(f"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{card}".encode()) as url:
        command = [str(Path(sys.executable).with_name("mesh")), "agent", "--show", "--url", url, "codex"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {url} does not describe its model 'default' as a mesh does")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("n_ctx_train", "remedy"),
    [
        (8192, "it was trained for 8192, so serve a model that was trained for more"),
        (131_072, "serve it with a larger --ctx-size, such as 32768"),
        (20_480, "serve it with a larger --ctx-size, such as 20480"),
    ],
)
def test_a_context_that_is_too_short_for_agents_is_told_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, n_ctx_train: int, remedy: str
) -> None:
    card = json.dumps({"id": "x", "max_model_len": 8192, "meta": {"n_ctx_train": n_ctx_train}})
    monkeypatch.delenv("MESH_API_KEY", raising=False)
    with answering(f"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{card}".encode()) as url:
        command = [str(Path(sys.executable).with_name("mesh")), "agent", "--show", "--url", url, "codex"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        f"x is served with a context of 8192 positions, and agents send long prompts: {remedy}\n"
    )


async def test_a_command_is_shown_without_its_key(api: Api, tmp_path: Path) -> None:
    shown = await mesh("agent", "--url", api.url, "--show", "claude", "--resume", path=tmp_path)
    assert shown.stdout.rstrip().endswith(" claude --resume")
    assert f"ANTHROPIC_BASE_URL={api.url}" in shown.stdout
    assert KEY not in shown.stdout
