"""Checks and report of the agents' turns."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from meshbench.report_tools import Check, Report, Section, checks_section, markdown_table
from tests.qualification.coding_agents.engines import TITLE, last_words, note_text
from tests.qualification.coding_agents.model_kinds import PREAMBLE, THOUGHT
from tests.qualification.coding_agents.recording import DONE
from tests.qualification.coding_agents.turns import TurnKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.qualification.coding_agents.recording import Exchange
    from tests.qualification.coding_agents.turns import Turn

_TITLES: Final = {TurnKind.PLAIN: "plain turn", TurnKind.TOOL: "tool turn"}
_LAST_EVENTS: Final = frozenset({DONE, "message_stop", "response.completed"})
_SHOWN_CHARS: Final = 300


def is_expected(exchange: Exchange) -> bool:
    """Whether an error status is no fault of the mesh's: paths that are no part of the API that it serves.

    Claude Code looks whether the server is there, and tells services of its maker about itself.
    """
    return (exchange.method, exchange.path) == ("HEAD", "/") or exchange.path.startswith("/api/")


def checks_of(turn: Turn) -> list[Check]:
    """What must hold of a turn."""
    checks = [
        _ended(turn),
        _none("no errors told by the agent", turn.output.errors),
        _none("no request refused", _refusals(turn)),
        _none("all streams whole", _broken_streams(turn)),
        _asked(turn),
        _answered(turn),
    ]
    if turn.kind is TurnKind.TOOL:
        checks += [_ran_tool(turn), _knows_word(turn), _told_apart(turn)]
    return checks


def is_good(turn: Turn) -> bool:
    """Whether all checks of a turn hold."""
    return all(check.holds for check in checks_of(turn))


def agents_report(
    turns: Sequence[Turn],
    versions: Mapping[str, str],
    conditions: Mapping[str, Any],
    failures: Sequence[str],
) -> Report:
    """Report of all turns; for programs, requests are without their bodies, which are in the recordings.

    Args:
        turns: All turns, in order.
        versions: Installed version of each agent's package, by package.
        conditions: How they were made.
        failures: Why other turns could not be taken.
    """
    passed = not failures and all(map(is_good, turns))
    return Report(
        title="Coding agents",
        conditions=conditions,
        sections=[
            Section("", _versions_table(turns, versions)),
            Section("Turns that could not be taken:", _block("\n".join(failures))),
            *(section for turn in turns for section in _sections(turn)),
            Section("", "", "\n\n".join(failures)),
        ],
        fields={
            "conditions": conditions,
            "versions": versions,
            "turns": [_turn_as_dict(turn) for turn in turns],
            "failures": failures,
            "passed": passed,
        },
        is_good=passed,
    )


def _sections(turn: Turn) -> list[Section]:
    kind = _TITLES[turn.kind] if turn.model is None else f"{_TITLES[turn.kind]}, {turn.model.title}"
    checks = checks_section(f"## {turn.program.title}, {kind}", checks_of(turn))
    headline = f"{turn.program.title} {turn.version}, {kind}, {turn.seconds:.0f} s"
    return [
        replace(checks, terminal=f"{headline}\n{checks.terminal}"),
        Section("", f"Answer: {_shown(turn.output.text)!r}"),
        Section("Requests, in the order of their ends:", _requests_table(turn.exchanges)),
        Section("", f"Events that the agent printed: {_counts(turn.output.events)}."),
        Section("End of its error output:", _block(turn.last_words)),
    ]


def _turn_as_dict(turn: Turn) -> dict[str, Any]:
    return {
        "agent": turn.program.title,
        "version": turn.version,
        "kind": turn.kind.name.lower(),
        "model": None if turn.model is None else turn.model.name,
        "exit_code": turn.exit_code,
        "seconds": turn.seconds,
        "output": turn.output,
        "requests": [
            {**asdict(exchange), "request": sorted(exchange.request), "num_tools": exchange.num_tools}
            for exchange in turn.exchanges
        ],
        "checks": [{**asdict(check), "verdict": check.verdict} for check in checks_of(turn)],
        "last_words": turn.last_words,
    }


def _ended(turn: Turn) -> Check:
    how = "at the time limit" if turn.exit_code is None else f"with code {turn.exit_code}"
    return Check("the agent ends with code 0", turn.exit_code == 0, f"{how} after {turn.seconds:.0f} s")


def _none(name: str, found: Sequence[str]) -> Check:
    return Check(name, not found, _shown("; ".join(found)) or "none")


def _refusals(turn: Turn) -> list[str]:
    return [
        f"{exchange.method} {exchange.path} {exchange.status} {exchange.error}"
        for exchange in turn.exchanges
        if exchange.status is not None and exchange.status >= 400 and not is_expected(exchange)
    ]


def _broken_streams(turn: Turn) -> list[str]:
    """Streams that were sent to their end, but end with another event than they should."""
    return [
        f"{exchange.path} ends with {exchange.last_event}"
        for exchange in turn.exchanges
        if exchange.is_complete and exchange.events and exchange.last_event not in _LAST_EVENTS
    ]


def _asked(turn: Turn) -> Check:
    """Whether the agent's own API was used, with answers in streams."""
    used = [
        exchange
        for exchange in turn.exchanges
        if exchange.path == turn.program.path and exchange.status == 200 and exchange.events
    ]
    least = 1 if turn.kind is TurnKind.PLAIN else 2
    return Check(f"{turn.program.path} was used", len(used) >= least, f"{len(used)} answers in streams")


def _answered(turn: Turn) -> Check:
    """Whether what the agent printed is what the server sent."""
    sent = {_words(exchange.text) for exchange in turn.exchanges if exchange.path == turn.program.path}
    text = _words(turn.output.text)
    return Check("the answer came out", bool(text) and text in sent, f"{len(text)} characters")


def _ran_tool(turn: Turn) -> Check:
    is_copied = turn.copied == note_text(turn.code_word)
    detail = "no copy" if turn.copied is None else f"{turn.copied!r}"
    tools = ", ".join(turn.output.tools) or "no tool"
    return Check("the command was run", is_copied and bool(turn.output.tools), f"{tools}; {detail}")


def _knows_word(turn: Turn) -> Check:
    return Check(
        "its result came back to the model", turn.code_word in turn.output.text, f"word {turn.code_word}"
    )


def _told_apart(turn: Turn) -> Check:
    """Whether texts and reasoning are the script's, without marks of the model's format."""
    answers = [each for each in turn.exchanges if each.path == turn.program.path and each.status == 200]
    told = (PREAMBLE, TITLE, json.dumps({"title": TITLE}), last_words(turn.code_word))
    thoughts = (THOUGHT,) if turn.model is not None and turn.model.reasons else ("", THOUGHT)
    strange = [each.text for each in answers if each.text.strip() not in told]
    strange += [each.reasoning for each in answers if each.reasoning.strip() not in thoughts]
    detail = (
        "; ".join(map(repr, strange)) or f"{sum(bool(each.reasoning) for each in answers)} with reasoning"
    )
    return Check("text, reasoning and calls are told apart", not strange, _shown(detail))


def _versions_table(turns: Sequence[Turn], versions: Mapping[str, str]) -> str:
    told = {turn.program.package: (turn.program.title, turn.version) for turn in turns}
    return markdown_table(
        ("agent", "package", "installed", "says"),
        ((title, package, versions.get(package, ""), says) for package, (title, says) in told.items()),
    )


def _requests_table(exchanges: Sequence[Exchange]) -> str:
    return markdown_table(
        ("request", "status", "tools", "stream events", "client"),
        (
            (
                f"{exchange.method} {exchange.path}",
                ("none" if exchange.status is None else str(exchange.status))
                + ("" if exchange.is_complete else ", cut off"),
                str(exchange.num_tools or ""),
                _counts(exchange.events),
                exchange.client,
            )
            for exchange in exchanges
        ),
    )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _block(text: str) -> str:
    return f"```text\n{text}\n```" if text else ""


def _words(text: str) -> str:
    return " ".join(text.split())


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
