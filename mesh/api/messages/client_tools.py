"""Anthropic's tools that clients run: their schemas, which models at Anthropic know by the type alone."""

from __future__ import annotations

import re
from typing import Any, Final

_DATED: Final = re.compile(r"(?P<kind>bash|text_editor|memory)_\d{8}")
_PATH: Final = {"type": "string", "description": "Absolute path of the file or folder."}
_LINES: Final = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "First and last line to show, from 1; -1 as the last means the end of the file.",
}
_TEXTS: Final[dict[str, Any]] = {
    "file_text": {"type": "string", "description": "Of create: content of the new file."},
    "old_str": {"type": "string", "description": "Of str_replace: the text to replace, which occurs once."},
    "new_str": {"type": "string", "description": "Of str_replace: the text in its place."},
    "insert_line": {
        "type": "integer",
        "description": "Of insert: the line before it, 0 at the beginning.",
    },
    "insert_text": {"type": "string", "description": "Of insert: the text."},
    "view_range": _LINES,
}
_DESCRIPTIONS: Final = {
    "bash": "Runs a command in a bash session that goes on from call to call.",
    "text_editor": "Shows, creates and edits text files.",
    "memory": "Keeps notes in files of the folder /memories, beyond this conversation.",
}
_SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "bash": {
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command to run."},
            "restart": {"type": "boolean", "description": "Whether to begin a new session instead."},
        },
    },
    "text_editor": {
        "type": "object",
        "properties": {
            "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
            "path": _PATH,
            **_TEXTS,
        },
        "required": ["command", "path"],
    },
    "memory": {
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "enum": ["view", "create", "str_replace", "insert", "delete", "rename"],
            },
            "path": _PATH,
            **_TEXTS,
            "old_path": {"type": "string", "description": "Of rename: the path so far."},
            "new_path": {"type": "string", "description": "Of rename: the new path."},
        },
        "required": ["command"],
    },
}


def is_client_tool(kind: str) -> bool:
    """Whether a tool's type names one that clients run."""
    return _DATED.fullmatch(kind) is not None


def described(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with its description and schema, if its type stands for them."""
    match = _DATED.fullmatch(kind) if isinstance(kind := tool.get("type"), str) else None
    if match is None:
        return tool
    name = match["kind"]
    own = {field: value for field, value in tool.items() if value is not None and field != "type"}
    return {"description": _DESCRIPTIONS[name], "input_schema": _SCHEMAS[name], **own}
