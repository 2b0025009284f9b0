"""Report tools: Markdown tables, figures and JSON lines."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

import structlog

from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path


def markdown_table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table; nothing at all if it has no lines. A `|` in a cell becomes a `/`."""
    body = ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]
    if not body:
        return ""
    return "\n".join(["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads), *body])


log = structlog.get_logger()


def can_draw() -> bool:
    """Whether matplotlib is installed; if not, a log line names the extra."""
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no_pictures", remedy="pip install 'spanmesh[bench]'")
        return False
    return True


def new_figure(across: str, up: str) -> tuple[Any, Any]:
    """A figure and its axes with two titles, without pyplot, which would look for a screen."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
    return figure, axes


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file and their line numbers, from 1; empty lines are passed over.

    Raises:
        MeshError: If the file cannot be read, or naming the line that is no JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise MeshError(f"cannot read {path}: {reason}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise MeshError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(fields, dict):
            raise MeshError(f"{path}, line {number}: not a JSON object")
        yield number, fields
