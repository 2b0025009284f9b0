"""Which functions one answer may call, and whether it must."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.api.tool_schemas import FunctionBody


@dataclass(frozen=True)
class ToolUse:
    """What one answer may call.

    Attributes:
        functions: Each with `name`, `description` if it has one, and `parameters`, a JSON schema.
        is_forced: Whether it must call at least one.
        has_one_call: Whether it is over with its first call.
    """

    functions: tuple[Mapping[str, Any], ...]
    is_forced: bool = False
    has_one_call: bool = False

    @property
    def names(self) -> frozenset[str]:
        """Of the functions."""
        return frozenset(function["name"] for function in self.functions)

    def for_template(self) -> list[dict[str, Any]]:
        """As chat templates know them."""
        return [{"type": "function", "function": dict(function)} for function in self.functions]


def tool_use_of(
    functions: Sequence[FunctionBody],
    choice: str | tuple[str] | None,
    *,
    is_parallel: bool | None,
    name_param: str,
) -> ToolUse | None:
    """What a request lets its answer call; None if nothing.

    A function that is named is the only one that the model is shown.

    Args:
        functions: That there are.
        choice: `none`, `auto`, `required`, or the name of the one to call, as a tuple of one.
        is_parallel: Whether there may be several calls; None is yes.
        name_param: The field that has a function's name, with `{}` for the function's number.

    Raises:
        InvalidRequest: If two have the same name, or the choice is of one that is not there.
    """
    seen: set[str] = set()
    for index, function in enumerate(functions):
        if function.name in seen:
            param = name_param.format(index)
            raise InvalidRequest(
                f"{param}: two functions are called {function.name}: give each a name of its own", param=param
            )
        seen.add(function.name)
    if not functions:
        if choice in (None, "auto", "none"):
            return None
        raise InvalidRequest("tool_choice asks for a call, but tools has no function", param="tool_choice")
    if choice == "none":
        return None
    shown = [_described(function) for function in functions]
    if isinstance(choice, tuple):
        if choice[0] not in seen:
            raise InvalidRequest(
                f"tool_choice names {choice[0]!r}, but tools has {', '.join(sorted(seen))}: name one of them",
                param="tool_choice",
            )
        shown = [function for function in shown if function["name"] == choice[0]]
        return ToolUse(tuple(shown), is_forced=True, has_one_call=True)
    return ToolUse(tuple(shown), is_forced=choice == "required", has_one_call=is_parallel is False)


def _described(function: FunctionBody) -> dict[str, Any]:
    found: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        found["description"] = function.description
    found["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return found
