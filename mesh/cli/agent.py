"""`mesh agent`: coding agents with everything set for a mesh."""

from __future__ import annotations

import json
import os
import shutil
import sys
import urllib.parse
from dataclasses import dataclass, field
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

import click

from mesh.cli.head_client import ask_head
from mesh.cli.shared_options import head_options, int_option, key_of
from mesh.util.child_environment import API_KEY, foreign_environment
from mesh.util.printable import say
from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

# Below this an agent's instructions alone may fill the context.
_SHORT_CONTEXT: Final = 16_384
_MOST_OUTPUT: Final = 32_000
# Claude Code takes no smaller window for its summaries, and complains of one.
_LEAST_COMPACT_WINDOW: Final = 100_000
# An agent that has no key does not start.
_NO_KEY: Final = "none"
# The first token of a long prompt may take minutes.
_PATIENCE_MS: Final = 3_600_000


@dataclass(frozen=True)
class AgentSetup:
    """Start of an agent."""

    arguments: tuple[str, ...] = ()
    """Arguments before the user's own."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of this process."""


@dataclass(frozen=True)
class MeshEndpoint:
    """Facts of the mesh for an agent."""

    url: str
    """Of the API, without a path."""
    key: str | None
    """API key; None if the mesh needs none."""
    model: str
    """Name of the model."""
    context_length: int
    """Positions of a session."""
    max_output: int | None = None
    """Most tokens of an answer, if the user sets it."""

    @property
    def most_output(self) -> int:
        """Most tokens of an answer; unless they are set, as many as leave room for its prompt."""
        return self.max_output or min(self.context_length // 4, _MOST_OUTPUT)


@dataclass(frozen=True)
class _Agent:
    """A coding agent."""

    title: str
    """Its name."""
    install: str
    """Command that installs it."""
    setup: Callable[[MeshEndpoint], AgentSetup]
    """How it is started."""


def claude_setup(endpoint: MeshEndpoint) -> AgentSetup:
    """Claude Code, by its environment."""
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    sizes = tuple(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU"))
    windows = ["CLAUDE_CODE_MAX_CONTEXT_TOKENS"]
    if endpoint.context_length >= _LEAST_COMPACT_WINDOW:
        windows.append("CLAUDE_CODE_AUTO_COMPACT_WINDOW")
    return AgentSetup(
        environment={
            "ANTHROPIC_BASE_URL": endpoint.url,
            "ANTHROPIC_AUTH_TOKEN": endpoint.key or _NO_KEY,
            **dict.fromkeys((*models, *sizes), endpoint.model),
            # A key of another server must not be sent to this one, nor another server be asked.
            **dict.fromkeys(("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"), ""),
            **dict.fromkeys(windows, str(endpoint.context_length)),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.most_output),
            # Of the whole request, and of the wait for its next event and its next byte.
            **dict.fromkeys(
                ("API_TIMEOUT_MS", "CLAUDE_STREAM_IDLE_TIMEOUT_MS", "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS"),
                str(_PATIENCE_MS),
            ),
            "API_FORCE_IDLE_TIMEOUT": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
    )


def codex_setup(endpoint: MeshEndpoint) -> AgentSetup:
    """Codex, by its settings on the command line."""
    provider = {
        "name": "mesh",
        "base_url": f"{endpoint.url}/v1",
        "wire_api": "responses",
        "env_key": API_KEY,
        "stream_idle_timeout_ms": _PATIENCE_MS,
    }
    settings: dict[str, Any] = {
        "model": endpoint.model,
        "model_provider": "mesh",
        "model_context_window": endpoint.context_length,
        **{f"model_providers.mesh.{name}": value for name, value in provider.items()},
    }
    # A value is TOML, of which JSON's strings and numbers are a part.
    given = [
        part
        for name, value in settings.items()
        for part in ("-c", f"{name}={json.dumps(value, ensure_ascii=False)}")
    ]
    return AgentSetup(tuple(given), {API_KEY: endpoint.key or _NO_KEY})


def opencode_setup(endpoint: MeshEndpoint) -> AgentSetup:
    """OpenCode, by a configuration in its environment."""
    limit = {"context": endpoint.context_length, "output": endpoint.most_output}
    options = {
        "baseURL": f"{endpoint.url}/v1",
        "apiKey": f"{{env:{API_KEY}}}",
        "timeout": False,
        # Without these five minutes.
        **dict.fromkeys(("headerTimeout", "chunkTimeout"), _PATIENCE_MS),
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mesh",
        "options": options,
        "models": {endpoint.model: {"name": endpoint.model, "limit": limit}},
    }
    model = f"mesh/{endpoint.model}"
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": model,
        # For titles. Without it a model of another server may be asked.
        "small_model": model,
        "provider": {"mesh": provider},
    }
    return AgentSetup(
        environment={"OPENCODE_CONFIG_CONTENT": json.dumps(config), API_KEY: endpoint.key or _NO_KEY}
    )


AGENTS: Final = {
    "claude": _Agent("Claude Code", "npm install -g @anthropic-ai/claude-code", claude_setup),
    "codex": _Agent("Codex", "npm install -g @openai/codex", codex_setup),
    "opencode": _Agent("OpenCode", "npm install -g opencode-ai", opencode_setup),
}


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@head_options
@click.option("--model", default="default", show_default=True, help="Name of the model.")
@int_option(
    "--max-output",
    metavar="N",
    help="Most tokens of an answer; not for codex.  [default: a quarter of the context, at most 32000]",
)
@click.option(
    "--show", "is_shown", is_flag=True, help="Print the command instead of starting it; keys are left out."
)
@click.argument("agent", type=click.Choice(sorted(AGENTS)))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def agent(
    *,
    url: str,
    api_key_file: Path | None,
    model: str,
    max_output: int | None,
    is_shown: bool,
    agent: str,
    arguments: tuple[str, ...],
) -> None:
    """Start a coding agent that uses a running mesh.

    AGENT is claude, codex or opencode; ARGUMENTS, all that follows, are the agent's own. Nothing is written:
    all settings are those of this process.
    """
    chosen = AGENTS[agent]
    if max_output is not None and agent == "codex":
        raise ClusterError("Codex has no setting for --max-output: leave it out, or choose another agent")
    program = shutil.which(agent)
    if program is None and not is_shown:
        raise ClusterError(f"{chosen.title} is not installed: {chosen.install}")
    # Clients of OpenAI's API are given addresses with /v1.
    url, key = url.rstrip("/").removesuffix("/v1"), key_of(api_key_file)
    card = ask_head(f"{url}/v1/models/{urllib.parse.quote(model, safe='/')}", key)
    name, context_length = card.get("id"), card.get("max_model_len")
    if not isinstance(name, str) or not isinstance(context_length, int):
        raise ClusterError(f"{url} does not describe its model {model!r} as a mesh does: another server?")
    endpoint = MeshEndpoint(url, key, name, context_length, max_output)
    if endpoint.context_length < _SHORT_CONTEXT:
        say(_short_context_hint(endpoint, (card.get("meta") or {}).get("n_ctx_train")), err=True)
    setup = chosen.setup(endpoint)
    if is_shown:
        say(_shown(agent, setup, arguments, key))
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(  # noqa: S606 - the user named the program
        str(program), [agent, *setup.arguments, *arguments], {**foreign_environment(), **setup.environment}
    )


def _short_context_hint(endpoint: MeshEndpoint, n_ctx_train: int | None) -> str:
    """Remedy for a context that is too short for agents."""
    if n_ctx_train is not None and n_ctx_train < _SHORT_CONTEXT:
        remedy = f"it was trained for {n_ctx_train}, so serve a model that was trained for more"
    else:
        advised = min(2 * _SHORT_CONTEXT, n_ctx_train or 2 * _SHORT_CONTEXT)
        remedy = f"serve it with a larger --ctx-size, such as {advised}"
    return (
        f"{endpoint.model} is served with a context of {endpoint.context_length} positions, and agents send "
        f"long prompts: {remedy}"
    )


def _shown(agent: str, setup: AgentSetup, arguments: tuple[str, ...], key: str | None) -> str:
    """The command line, without the key."""
    assigned = [
        f"{name}={quote('…' if key is not None and value == key else value)}"
        for name, value in setup.environment.items()
    ]
    return " ".join([*assigned, agent, *map(quote, (*setup.arguments, *arguments))])
