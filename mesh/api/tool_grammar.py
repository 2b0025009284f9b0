"""Grammars that hold an answer to calls of functions, written as the model's template teaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.structured_output.converter import Converter, check_size
from mesh.structured_output.gbnf import SchemaError, chars, either, seq, times, to_gbnf
from mesh.structured_output.json_schema import checked_grammar
from mesh.structured_output.strings import quoted
from mesh.text.message_parts import CallFormat
from spanmesh_proto.errors import InvalidRequest
from stages.grammar.gbnf_parser import Chars, Expression, Ref, complement

if TYPE_CHECKING:
    from collections.abc import Mapping

# A model that never stops calling is stopped.
MAX_CALLS: Final = 16
_CALL: Final = Ref("call")
_SPACES: Final = times(chars(" ", "\n"), 0, 4)


@dataclass(frozen=True)
class Instead:
    """JSON that may come instead of calls.

    Attributes:
        schema: Of it.
        param: The request's field that it came from, for errors.
    """

    schema: Any
    param: str


def call_grammar(
    functions: tuple[Mapping[str, Any], ...],
    call_format: CallFormat,
    *,
    has_one_call: bool,
    thought_end: str | None = None,
    instead: Instead | None = None,
) -> str:
    """GBNF of one or more calls.

    Args:
        functions: Each with `name` and `parameters`, a JSON schema.
        call_format: How calls are written.
        has_one_call: Whether there is only one.
        thought_end: What ends the reasoning that the prompt began, if it did: the calls come behind it.
        instead: What may come instead of calls, if anything.

    Raises:
        InvalidRequest: If a schema cannot be a grammar.
    """
    rules: dict[str, Expression] = {}
    calls = []
    for index, function in enumerate(functions):
        arguments, more = _value(
            function["parameters"],
            f"f{index}-",
            f"the parameters of the function {function['name']}",
            "tools",
        )
        rules |= more
        key = "parameters" if call_format is CallFormat.LLAMA else "arguments"
        calls.append(seq(f'{{"name": {quoted(function["name"])}, "{key}": ', arguments, "}"))
    root = _in_format(call_format, 0 if has_one_call else MAX_CALLS - 1)
    if instead is not None:
        answer, more = _value(instead.schema, "answer-", instead.param, instead.param)
        rules |= more
        root = either(root, answer)
    if thought_end is not None:
        root = seq(_thoughts(thought_end), thought_end, _SPACES, root)
    rules["call"] = either(*calls)
    try:
        grammar = to_gbnf({"root": root, **rules})
    except RecursionError:
        raise InvalidRequest("tools: their schemas nest too deep: make them flatter", param="tools") from None
    return checked_grammar(grammar, param="tools")


def _value(schema: Any, prefix: str, what: str, param: str) -> tuple[Expression, dict[str, Expression]]:
    converter = Converter(schema, prefix)
    try:
        check_size(schema)
        expression = converter.expression(schema)
    except SchemaError as error:
        where = f" at `{error.where}`" if error.where else ""
        raise InvalidRequest(f"{what}{where}: {error.reason}", param=param) from None
    except RecursionError:
        raise InvalidRequest(f"{what}: it nests too deep: make it flatter", param=param) from None
    if expression is None:
        raise InvalidRequest(f"{what}: it allows no value at all", param=param)
    return expression, converter.rules


def _in_format(call_format: CallFormat, most_more: int) -> Expression:
    match call_format:
        case CallFormat.HERMES:
            one = seq("<tool_call>\n", _CALL, "\n</tool_call>")
            return _several(one, "\n", most_more)
        case CallFormat.LLAMA:
            return _several(_CALL, "; ", most_more)
        case CallFormat.MISTRAL:
            return seq("[TOOL_CALLS][", _several(_CALL, ", ", most_more), "]")


def _several(one: Expression, between: str, most_more: int) -> Expression:
    return seq(one, times(seq(between, one), 0, most_more)) if most_more else one


def _thoughts(end: str) -> Expression:
    """Any text without what looks like the beginning of the end."""
    first, second = (_but(letter) for letter in end[:2])
    return times(either(first, seq(end[0], second)), 0, None)


def _but(letter: str) -> Chars:
    return Chars(complement(((ord(letter), ord(letter)),)))
