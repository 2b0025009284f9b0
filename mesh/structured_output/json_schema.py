"""JSON Schema to grammar, or the reason why it is impossible."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from mesh.structured_output.converter import Converter, check_size
from mesh.structured_output.gbnf import SchemaError, to_gbnf
from spanmesh_proto.errors import InvalidRequest
from stages.grammar.session_grammar import make_automaton

_MOST_WHERE_CHARS: Final = 120


def schema_grammar(schema: Any, *, param: str) -> str:
    """GBNF of the JSON texts that are valid by a schema.

    Args:
        schema: A JSON Schema, draft 4 to 2020-12; references lead within it.
        param: The request's field with the schema, for errors.

    Raises:
        InvalidRequest: If nothing is valid, or a grammar cannot express it; with the place and the reason.
    """
    try:
        grammar = _converted(schema)
    except SchemaError as error:
        where = f" at `{_shortened(error.where)}`" if error.where else ""
        raise InvalidRequest(f"{param}{where}: {error.reason}", param=param) from None
    except RecursionError:
        raise InvalidRequest(f"{param}: it is nested too deep: make it flatter", param=param) from None
    return checked_grammar(grammar, param=param)


def _converted(schema: Any) -> str:
    check_size(schema)
    converter = Converter(schema)
    root = converter.expression(schema)
    if root is None:
        raise SchemaError("it allows no value at all")
    return to_gbnf({"root": root, **converter.rules})


def _shortened(where: str) -> str:
    return where if len(where) <= _MOST_WHERE_CHARS else f"…{where[-_MOST_WHERE_CHARS:]}"


@cache
def json_object_grammar() -> str:
    """GBNF of any JSON object."""
    converter = Converter(document=True)
    root = converter.any_object()
    return to_gbnf({"root": root, **converter.rules})


def checked_grammar(grammar: str, *, param: str) -> str:
    """The grammar, checked as the tail checks it.

    Raises:
        InvalidRequest: If it is invalid.
    """
    try:
        make_automaton(grammar)
    except InvalidRequest as error:
        reason = error.message.removeprefix("grammar: ")
        words = reason if param == error.param else f"as a grammar, {reason}"
        raise InvalidRequest(f"{param}: {words}", param=param) from None
    return grammar
