"""Tables in Markdown. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def markdown_table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table; nothing at all if it has no lines. A `|` in a cell becomes a `/`."""
    body = ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]
    if not body:
        return ""
    return "\n".join(["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads), *body])
