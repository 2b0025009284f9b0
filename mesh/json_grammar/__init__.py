"""JSON Schema as grammars: what the tail enforces, so that an answer is valid by construction."""

from mesh.json_grammar.api import checked_grammar, json_object_grammar, schema_grammar
from mesh.json_grammar.convert import Converter
from mesh.json_grammar.errors import SchemaError
from mesh.json_grammar.gbnf import to_gbnf

__all__ = [
    "Converter",
    "SchemaError",
    "checked_grammar",
    "json_object_grammar",
    "schema_grammar",
    "to_gbnf",
]
