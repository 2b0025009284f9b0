"""What a request's answer must look like: `response_format`, `json_schema` or `grammar`, as one grammar."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from mesh.api.tool_grammar import Instead
from mesh.structured_output.json_schema import checked_grammar, json_object_grammar, schema_grammar
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from mesh.api.schemas import GenerationBody, ResponseFormatBody

# Requests come again and again with the same schema.
_MOST_KEPT: Final = 64


def grammar_of(body: GenerationBody) -> str | None:
    """The grammar that an answer must match; None if it is free.

    A large schema takes a second: not for the event loop.

    Args:
        body: The checked body.

    Raises:
        InvalidRequest: If a schema cannot be a grammar, a grammar is none, or two of them are given.
    """
    found = {
        "response_format": _of_format(body.response_format),
        "json_schema": None if body.json_schema is None else _of_schema(body.json_schema, "json_schema"),
        "grammar": _checked(body.grammar) if body.grammar else None,
    }
    given = [name for name, grammar in found.items() if grammar is not None]
    if len(given) > 1:
        raise InvalidRequest(
            f"{given[1]} and {given[0]} both say what the answer must look like: send one of them",
            param=given[1],
        )
    return found[given[0]] if given else None


def schema_of(body: GenerationBody) -> Instead | None:
    """The schema that an answer must match, of a body that has a grammar; None if it came as a grammar."""
    if body.json_schema is not None:
        return Instead(body.json_schema, "json_schema")
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None or wanted.type == "json_object":
        return Instead({"type": "object"}, "response_format")
    return Instead(wanted.json_schema.schema_, "response_format.json_schema.schema")


def _of_format(wanted: ResponseFormatBody | None) -> str | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return json_object_grammar()
    param = "response_format.json_schema"
    if wanted.json_schema is None:
        raise InvalidRequest(f"{param} is missing: response_format.type json_schema needs it", param=param)
    if "schema_" not in wanted.json_schema.model_fields_set:
        raise InvalidRequest(f"{param}.schema is missing: send a JSON Schema", param=f"{param}.schema")
    return _of_schema(wanted.json_schema.schema_, f"{param}.schema")


def _of_schema(schema: Any, param: str) -> str:
    try:
        # The order of properties is the answer's: it tells two schemas apart.
        return _converted(json.dumps(schema), param)
    except RecursionError:
        raise InvalidRequest(f"{param}: it nests too deep: make it flatter", param=param) from None


@lru_cache(_MOST_KEPT)
def _checked(grammar: str) -> str:
    return checked_grammar(grammar, param="grammar")


@lru_cache(_MOST_KEPT)
def _converted(schema_json: str, param: str) -> str:
    return schema_grammar(json.loads(schema_json), param=param)
