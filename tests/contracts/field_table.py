"""Writer of the table of request fields in docs/api.md, from the models of request bodies.

python -m tests.contracts.field_table docs/api.md
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mesh.api.embeddings import EmbeddingsBody
from mesh.api.messages.protocol import MessagesBody
from mesh.api.protocol import ChatBody, CompletionBody
from mesh.api.request_parsing import neutral_values
from mesh.api.responses.protocol import ResponsesBody
from mesh.api.tokenization import DetokenizeBody, TokenizeBody

BODIES: Mapping[str, type[BaseModel]] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "responses": ResponsesBody,
    "messages": MessagesBody,
    "embeddings": EmbeddingsBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
}
_BLOCK = re.compile(r"(<!-- fields -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
_MOST_INNER = 8


def rewritten(text: str) -> str:
    """The document with its table as it should be."""
    return _BLOCK.sub(lambda block: f"{block[1]}{field_table()}{block[2]}", text)


def field_table() -> str:
    """Fields with their values, each row with what the same endpoints take; then what all refuse."""
    told: dict[str, list[tuple[str, str]]] = {}
    for endpoint, kind in BODIES.items():
        schema = kind.model_json_schema()
        for name in kind.model_fields:
            values = _values(schema["properties"][name], schema.get("$defs", {}))
            told.setdefault(f"`{name}` {values}".strip(), []).append((endpoint, name))
    rows: dict[tuple[str, ...], list[str]] = {}
    for text, places in told.items():
        rows.setdefault(tuple(endpoint for endpoint, _ in places), []).append(text)
    lines = [f"| {', '.join(endpoints)} | {', '.join(sorted(texts))} |" for endpoints, texts in rows.items()]
    for endpoints, texts in _refused().items():
        lines.append(f"| refused by {', '.join(endpoints)} | {', '.join(sorted(texts))} |")
    return "\n".join(["| endpoint | fields and their values |", "|---|---|", *lines])


def _refused() -> dict[tuple[str, ...], list[str]]:
    """Fields that endpoints know and lack, by the endpoints; with the values that are taken all the same."""
    places: dict[str, list[str]] = {}
    for endpoint, kind in BODIES.items():
        for name, values in neutral_values(kind).items():
            if name not in kind.model_fields:
                shown = "".join(f" {_literal(value)}" for value in values)
                places.setdefault(f"`{name}`{shown}", []).append(endpoint)
    found: dict[tuple[str, ...], list[str]] = {}
    for text, endpoints in places.items():
        found.setdefault(tuple(endpoints), []).append(text)
    return found


def _values(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    options = schema.get("anyOf", [schema])
    outer = {key: value for key, value in schema.items() if key in ("minimum", "maximum")}
    texts = [_option({**outer, **option}, definitions) for option in options]
    return " or ".join(dict.fromkeys(text for text in texts if text))


def _option(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        inner = definitions[schema["$ref"].rpartition("/")[2]]
        return (
            "{" + _names(inner["properties"]) + "}" if "properties" in inner else _option(inner, definitions)
        )
    if "anyOf" in schema:
        return _values(schema, definitions)
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(_literal(value) for value in values if value not in ("", None))
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return f"{kind}{_range(schema)}"
    if kind == "array":
        items = schema.get("items")
        if schema.get("maxItems") == 0:
            return ""
        return f"list of {_values(items, definitions)}" if items else "list"
    return {"null": "", "boolean": "bool", "string": "text", "object": "object", None: "any"}[kind]


def _names(properties: Mapping[str, Any]) -> str:
    names = list(properties)
    return ", ".join(names if len(names) <= _MOST_INNER else [*names[:_MOST_INNER], "…"])


def _range(schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is None:
        return ""
    if most is None or most >= 2**31 - 1:
        return f" from {least:g}" if abs(least) < 2**62 else ""
    return f" {least:g} to {most:g}"


def _literal(value: Any) -> str:
    return f"`{value}`" if isinstance(value, str) else f"`{str(value).lower()}`"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(rewritten(page.read_text()))
