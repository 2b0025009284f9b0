"""Coding agents: how each is run without a terminal, and what its output says."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


@dataclass(frozen=True)
class AgentOutput:
    """What an agent printed."""

    text: str = ""
    """Its last answer."""
    tools: tuple[str, ...] = ()
    """Tools that it ran, in order."""
    errors: tuple[str, ...] = ()
    """Errors that it told of."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Number of its events by type."""
    others: tuple[str, ...] = ()
    """Lines that are no events."""


@dataclass(frozen=True)
class AgentProgram:
    """An agent as an npm package."""

    name: str
    """Its program, and its name for `mesh agent`."""
    title: str
    """Its name for people."""
    package: str
    """Its npm package."""
    path: str
    """Path of the API that it uses."""
    arguments: Callable[[str], list[str]]
    """Makes its arguments from a prompt."""
    read: Callable[[Sequence[Mapping[str, Any]]], AgentOutput]
    """Reads its events."""
    environment: Mapping[str, str]
    """Variables that switch off what it does beside its work, such as telemetry."""

    def output(self, printed: str) -> AgentOutput:
        """What its standard output says."""
        events, others = _events_and_others(printed)
        try:
            told = self.read(events)
        except (AttributeError, KeyError, TypeError) as error:
            told = AgentOutput(errors=(f"events of an unknown shape: {error!r}",))
        counts = Counter(str(event.get("type", "")) for event in events)
        return AgentOutput(told.text, told.tools, told.errors, dict(counts), tuple(others))


def _events_and_others(printed: str) -> tuple[list[dict[str, Any]], list[str]]:
    events: list[dict[str, Any]] = []
    others: list[str] = []
    for line in filter(str.strip, printed.split("\n")):
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if isinstance(found, dict):
            events.append(found)
        else:
            others.append(line)
    return events, others


def read_claude(events: Sequence[Mapping[str, Any]]) -> AgentOutput:
    """Events of `--output-format stream-json`: messages, and a result at the end."""
    text = ""
    tools: list[str] = []
    errors: list[str] = []
    for event in events:
        if event.get("type") == "assistant":
            blocks = event["message"]["content"]
            tools += [block["name"] for block in blocks if block["type"] == "tool_use"]
        elif event.get("type") == "result":
            text = str(event.get("result") or "")
            if event.get("is_error") or event.get("subtype") != "success":
                errors.append(f"{event.get('subtype')}: {text or event.get('errors', '')}")
    if not any(event.get("type") == "result" for event in events):
        errors.append("no result")
    return AgentOutput(text, tuple(tools), tuple(errors))


def read_codex(events: Sequence[Mapping[str, Any]]) -> AgentOutput:
    """Events of `exec --json`: items of a turn. Items of the type error are warnings."""
    text = ""
    tools: list[str] = []
    errors: list[str] = []
    for event in events:
        kind, item = event.get("type"), event.get("item", {})
        if kind == "item.completed":
            if item["type"] == "agent_message":
                text = item["text"]
            elif item["type"] == "command_execution":
                tools.append(item["type"])
                if item.get("exit_code") != 0:
                    errors.append(f"{item['command']}: exit code {item.get('exit_code')}")
        elif kind == "turn.failed":
            errors.append(str(event["error"]["message"]))
        elif kind == "error":
            errors.append(str(event["message"]))
    if not any(event.get("type") == "turn.completed" for event in events):
        errors.append("no turn was completed")
    return AgentOutput(text, tuple(tools), tuple(errors))


def read_opencode(events: Sequence[Mapping[str, Any]]) -> AgentOutput:
    """Events of `run --format json`: parts of messages that are complete."""
    text = ""
    tools: list[str] = []
    errors: list[str] = []
    for event in events:
        kind, part = event.get("type"), event.get("part", {})
        if kind == "text":
            text = part["text"]
        elif kind == "tool_use":
            tools.append(part["tool"])
            state = part["state"]
            if state["status"] != "completed":
                errors.append(f"{part['tool']}: {state.get('error', state['status'])}")
        elif kind == "error":
            errors.append(json.dumps(event.get("error")))
    if not any(event.get("type") == "step_finish" for event in events):
        errors.append("no step was finished")
    return AgentOutput(text, tuple(tools), tuple(errors))


def _switches(names: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(names, "1")


CLAUDE: Final = AgentProgram(
    name="claude",
    title="Claude Code",
    package="@anthropic-ai/claude-code",
    path="/v1/messages",
    # It lets nobody skip all permissions as root.
    arguments=lambda prompt: [
        *("-p", prompt, "--allowedTools", "Bash"),
        *("--output-format", "stream-json", "--verbose"),
    ],
    read=read_claude,
    environment=_switches(("DISABLE_AUTOUPDATER", "DISABLE_ERROR_REPORTING", "DISABLE_TELEMETRY")),
)
CODEX: Final = AgentProgram(
    name="codex",
    title="Codex",
    package="@openai/codex",
    path="/v1/responses",
    # Its sandbox makes namespaces of its own, and here is one already.
    arguments=lambda prompt: [
        *("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("-c", "analytics.enabled=false", "-c", "check_for_update_on_startup=false"),
        prompt,
    ],
    read=read_codex,
    environment={},
)
OPENCODE: Final = AgentProgram(
    name="opencode",
    title="OpenCode",
    package="opencode-ai",
    path="/v1/chat/completions",
    arguments=lambda prompt: ["run", "--format", "json", prompt],
    read=read_opencode,
    environment={
        **_switches(
            f"OPENCODE_DISABLE_{what}"
            for what in ("AUTOUPDATE", "DEFAULT_PLUGINS", "LSP_DOWNLOAD", "MODELS_FETCH", "EXTERNAL_SKILLS")
        ),
        # It installs its own plugin interface at the start, and goes on without.
        "npm_config_offline": "true",
        "npm_config_fetch_retries": "0",
    },
)
PROGRAMS: Final = {program.name: program for program in (CLAUDE, CODEX, OPENCODE)}
