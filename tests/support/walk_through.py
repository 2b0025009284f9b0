"""A document in which each command is followed by what it printed, held against what is printed now."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
THREE_HOSTS: Final = EXAMPLES / "three_hosts.md"
LEFT_OUT: Final = "…"


@dataclass(frozen=True)
class Step:
    """A command, and the lines that it printed when the document was written.

    `LEFT_OUT` stands for a part of a line, or, alone, for any number of lines.
    """

    section: str
    command: str
    recorded: tuple[str, ...]


def steps_of(document: Path) -> list[Step]:
    """Commands, those that print nothing worth showing left out; the block `text` belongs to the last one."""
    steps: list[Step] = []
    section = ""
    pattern = r"^## (?P<section>[^\n]+)$|^```(?P<kind>sh|text)\n(?P<body>.*?)^```$"
    for found in re.finditer(pattern, document.read_text(), re.DOTALL | re.MULTILINE):
        if found["section"]:
            section = found["section"]
        elif found["kind"] == "sh":
            lines = re.sub(r" *\\\n *", " ", found["body"]).splitlines()
            commands = [line for line in lines if not re.match(r"export |make |\. ", line)]
            steps += [Step(section, command, ()) for command in commands]
        else:
            last = steps.pop()
            assert not last.recorded, f"two blocks of text after {last.command}"
            steps.append(Step(last.section, last.command, tuple(found["body"].splitlines())))
    return steps


def shape(line: str) -> str:
    """A line without what differs from run to run: numbers, who holds which layers, widths of tables."""
    line = re.sub(r"\b(alpha|beta|gamma)\b", "HOST", line)
    line = re.sub(r"\d+(?:[.,:-]\d+)*", "#", line)
    line = re.sub(r"\[#, #\)(?:, \[#, #\))*", "LAYERS", line)
    line = re.sub(r"LAYERS to HOST(?:, LAYERS to HOST)*", "LAYERS to HOST", line)
    line = re.sub(r"[━─┏┓┳┡┩╇└┘┴]+", "", line)
    return " ".join(line.split())


def differences(recorded: tuple[str, ...], printed: str) -> list[str]:
    """What the document says and the command does not, and the other way round if nothing was left out."""
    old = {shape(line): line for line in recorded if line.strip()}
    new = {shape(line): line for line in printed.splitlines() if line.strip()}
    is_whole = old.pop(LEFT_OUT, None) is None
    patterns = {text: ".*".join(map(re.escape, text.split(LEFT_OUT))) for text in old}
    gone = [line for text, line in old.items() if not any(re.fullmatch(patterns[text], each) for each in new)]
    come = [line for text, line in new.items() if not re.fullmatch("|".join(patterns.values()), text)]
    return [
        *(f"no longer printed: {line}" for line in gone),
        *(f"not in the document: {line}" for line in come if is_whole),
    ]
