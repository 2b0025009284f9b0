"""Functions that a model may call, and calls in a conversation: which fields, of which types."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from mesh.api.strict_body import StrictBody

MAX_TOOLS: Final = 256
MAX_NAME_CHARS: Final = 128

_Name = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_.-]{{1,{MAX_NAME_CHARS}}}$")]


class FunctionBody(StrictBody):
    """A function that the model may call. `parameters` is a JSON schema; without one it takes anything."""

    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(StrictBody):
    """A tool: functions are the only kind that runs at the client."""

    type: Literal["function"]
    function: FunctionBody


class CalledFunction(StrictBody):
    """What an assistant's message called, and how."""

    name: str
    arguments: str

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it: the arguments as values, if they are JSON."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.arguments
        return {"name": self.name, "arguments": arguments}


class ToolCallBody(StrictBody):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class FunctionName(StrictBody):
    """The one function that the model is to call."""

    name: str


class NamedTool(StrictBody):
    """The one tool that the model is to use."""

    type: Literal["function"]
    function: FunctionName


ToolChoiceInput = Literal["none", "auto", "required"] | NamedTool | None


def parse_tool_choice(value: Any) -> str | tuple[str] | None:
    """`none`, `auto`, `required`, or the name of the one function to call, as a tuple of one."""
    if value is None or value in ("none", "auto", "required"):
        return value  # type: ignore[no-any-return]
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return (function["name"],)
    raise PydanticCustomError(
        "tool_choice",
        'must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}',
    )
