"""Files of JSON lines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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
