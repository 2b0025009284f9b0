"""JSON Schema to grammar, or the reason why it is impossible: plain schemas to rules.

Where a schema leaves a choice: properties come in the order of the schema, optional ones may be omitted;
objects with `properties` have no others unless `additionalProperties` permits them, nor tuples without
`items`; each alternative of an `anyOf` holds alone; a schema without `type` has the types of its keywords;
numbers within bounds have no exponent; formats are written in one of their forms; between tokens there is at
most a space, or a newline and 20 blanks. How deeply a schema may be nested within itself is decided by the
grammar (stages/grammar/graph.py).
"""

from __future__ import annotations

import json
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from mesh.structured_output.gbnf import (
    NOTHING,
    InvalidSchemaError,
    SchemaError,
    either,
    maybe,
    seq,
    times,
    to_gbnf,
)
from mesh.structured_output.notations import JSON, SPACE_RULE
from mesh.structured_output.numbers import Bound, integer_between, number_between
from mesh.structured_output.objects import array_of, free_object, object_of
from mesh.structured_output.schema_resolver import REFUSED, Flat, Flattener, type_of, types_of
from mesh.structured_output.tagged import tagged_array_of, tagged_object_of
from spanmesh_proto.errors import InvalidRequest
from stages.grammar.gbnf_parser import Expression, Ref, Repeat
from stages.grammar.session_grammar import make_automaton

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from mesh.structured_output.notations import Notation
    from mesh.structured_output.tagged import TagForm
    from stages.grammar.automaton import Automaton

_MAX_RULES: Final = 4000
_MAX_NESTING: Final = 48
_MAX_SCHEMA_CHARS: Final = 128 * 1024
# Of all plain schemas, each as JSON: a nested schema counts once for each schema that contains it.
_MAX_PLAIN_CHARS: Final = 2 * 1024 * 1024
# Types of keywords, where a schema has no type.
_HINTS: Final = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
# Keywords that are left out one group after the other, where a grammar cannot express all of them.
_NARROWING: Final = (
    frozenset({"format", "uniqueItems"}),
    frozenset({"pattern", "multipleOf", "minProperties", "maxProperties"}),
    frozenset({
        "minLength", "maxLength", "minItems", "maxItems",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    }),
)  # fmt: skip
_ANY: Final = frozenset({"string", "number", "boolean", "null", "object", "array"})
_BRANCHES: Final = ("allOf", "anyOf", "oneOf")
_MOST_WHERE_CHARS: Final = 120


class Converter:
    """Adds rules for the schemas of one document.

    Args:
        document: The document to which `#` refers.
        prefix: Beginning of the names of its rules, so that several converters can share a grammar.
        is_lenient: Whether what no grammar can express is left out.
        notation: Notation of values.

    Attributes:
        rules: By name.
        left_out: Place and reason of what was left out.
    """

    def __init__(
        self, document: Any, prefix: str = "", *, is_lenient: bool = False, notation: Notation = JSON
    ) -> None:
        self._notation = notation
        self.left_out: list[str] = []
        self._is_lenient = is_lenient
        self.rules: dict[str, Expression] = {"space": SPACE_RULE}
        self._prefix = prefix
        self._flattener = Flattener(document)
        self._names: dict[str, str] = {}
        self._impossible: set[str] = set()
        self._path: list[str] = []
        self._num_chars = 0

    def expression(self, schema: Any, step: str = "") -> Expression | None:
        """Grammar of a schema's values; None if none is valid.

        Args:
            schema: Any JSON.
            step: Path from the enclosing schema, for errors.

        Raises:
            SchemaError: If a grammar cannot express it; if lenient, only if it is invalid.
        """
        return self._converted(schema, step, self._any_of)

    def tagged(self, schema: Any, form: TagForm) -> Expression | None:
        """Grammar of an object schema's values between tags; None if none is valid.

        Raises:
            SchemaError: As for `expression`.
        """
        return self._tagged(schema, "", form)

    def _converted(
        self, schema: Any, step: str, any_of: Callable[[Any], list[Expression]]
    ) -> Expression | None:
        self._path.append(step)
        try:
            self._require_depth()
            found = self._loosened(schema, any_of) if self._is_lenient else any_of(schema)
        except SchemaError as error:
            error.where = error.where or "/".join(filter(None, self._path))
            raise
        self._path.pop()
        return either(*dict.fromkeys(found)) if found else None

    def _loosened(self, schema: Any, any_of: Callable[[Any], list[Expression]]) -> list[Expression]:
        """Grammars with fewer keywords where a grammar cannot express all."""
        reason = ""
        depth = len(self._path)
        for looser in _looser(schema):
            rules, names, impossible = dict(self.rules), dict(self._names), set(self._impossible)
            num_left_out = len(self.left_out)
            try:
                found = any_of(looser)
            except InvalidSchemaError:
                raise
            except SchemaError as error:
                # Its rules may be incomplete.
                self.rules, self._names, self._impossible = rules, names, impossible
                del self.left_out[num_left_out:], self._path[depth:]
                reason = reason or error.reason
                continue
            if reason:
                dropped = ", ".join(key for key in schema if key not in looser)
                which = f" (without {dropped})" if dropped else ""
                place = "/".join(filter(None, self._path)) or "the schema"
                self.left_out.append(f"{place}: {reason}{which}")
            return found
        raise SchemaError(reason)

    def _tagged(self, schema: Any, step: str, form: TagForm) -> Expression | None:
        def any_of(looser: Any) -> list[Expression]:
            options: list[Expression | None] = []
            for flat in self._flattener.alternatives(looser):
                types = types_of(flat)
                if "$ref" in flat:
                    options.append(self._tagged(self._flattener.target(flat["$ref"]), flat["$ref"], form))
                elif "enum" in flat:
                    raise SchemaError("enum: an object between tags cannot be one of several")
                elif types is None or "object" in types:
                    options.append(
                        tagged_object_of(
                            flat, lambda inner, at: self._untagged(inner, at, form), self._rule, form
                        )
                    )
            return [option for option in options if option is not None]

        return self._converted(schema, step, any_of)

    def _untagged(self, schema: Any, step: str, form: TagForm) -> Expression | None:
        """A value between tags: a text as it is, anything else as JSON."""

        def any_of(looser: Any) -> list[Expression]:
            options: list[Expression | None] = []
            for flat in self._flattener.alternatives(looser):
                if "$ref" in flat:
                    options.append(self._untagged(self._flattener.target(flat["$ref"]), flat["$ref"], form))
                elif "enum" in flat:
                    options += map(form.constant, self._enum_values(flat))
                else:
                    options += self._untagged_types(flat, form)
            return [option for option in options if option is not None]

        return self._converted(schema, step, any_of)

    def _untagged_types(self, flat: Flat, form: TagForm) -> list[Expression | None]:
        types = _types_or_hints(flat)
        if not types:
            if not form.has_types:
                return [form.string_of({})]
            types = _ANY
        found = [form.string_of(flat)] if "string" in types else []
        rest = sorted(types - {"string"} - ({"integer"} if "number" in types else set()))
        is_apart = form.has_types or form.item
        for kinds in [[kind] for kind in rest] if is_apart else [rest] if rest else []:
            own = {**flat, "type": kinds}
            if form.item and kinds[0] in {"array", "object"}:
                value = self._named(own, lambda flat: self._nested(flat, form), "nested-")
            else:
                value = self._named(own)
            if value is not None:
                found.append(seq(form.value(kinds[0]), form.padded(value, is_exact=False)))
        return found

    def _nested(self, flat: Flat, form: TagForm) -> Expression | None:
        """An object or a list between tags, within a value."""

        def convert(inner: Any, at: str) -> Expression | None:
            return self._untagged(inner, at, form)

        if flat["type"] == ["array"]:
            return tagged_array_of(flat, convert, form)
        found = tagged_object_of(flat, convert, self._rule, form)
        # Of no members nothing is to be seen between tags.
        if found == NOTHING:
            return self._plain(flat)
        return either(found.item, "{}") if isinstance(found, Repeat) and not found.least else found

    def _any_of(self, schema: Any) -> list[Expression]:
        options = [self._named(flat) for flat in self._flattener.alternatives(schema)]
        return [option for option in options if option is not None]

    def _named(
        self, flat: Flat, plain: Callable[[Flat], Expression | None] | None = None, mark: str = ""
    ) -> Expression | None:
        """A rule for a plain schema, shared by equal schemas, within itself, too.

        Args:
            flat: The schema.
            plain: Returns its grammar; by default that of the notation.
            mark: Beginning of the names of rules that this grammar is for.
        """
        key = mark + json.dumps(flat, sort_keys=False)
        self._num_chars += len(key)
        if self._num_chars > _MAX_PLAIN_CHARS:
            raise SchemaError("its alternatives are too long when written out: make it smaller")
        name = self._names.get(key)
        if name is None:
            kind = "ref" if "$ref" in flat else "-".join(sorted(types_of(flat) or ["value"]))
            name = self._names[key] = f"{self._prefix}{mark}{kind}-{len(self._names)}"
            self._require_room()
            self.rules[name] = Ref(name)  # reserves the name; not read before it is replaced
            found = (plain or self._plain)(flat)
            if found is None:
                self._impossible.add(name)
                del self.rules[name]
            else:
                self.rules[name] = found
        return None if name in self._impossible else Ref(name)

    def _plain(self, flat: Flat) -> Expression | None:
        if "$ref" in flat:
            return self.expression(self._flattener.target(flat["$ref"]), flat["$ref"])
        if "enum" in flat:
            return self._enum(flat)
        types = _types_or_hints(flat)
        if not types:
            return self.any_value()
        if "number" in types:
            types -= {"integer"}
        parts = [self._of_type(kind, flat) for kind in sorted(types)]
        found = [part for part in parts if part is not None]
        return either(*found) if found else None

    def _of_type(self, kind: str, flat: Flat) -> Expression | None:
        match kind:
            case "object":
                found = object_of(flat, self.expression, self._rule, self._notation)
            case "array":
                found = array_of(flat, self.expression, self._rule, self._notation.space)
            case "string":
                found = self._notation.text(flat)
            case "integer":
                found = _integer(flat)
            case "number":
                found = _number(flat)
            case _:
                words = self._notation
                found = either(words.true, words.false) if kind == "boolean" else seq(words.null)
        return found

    def _rule(self, expression: Expression) -> Expression:
        """A rule for an expression that is referred to more than once."""
        name = f"{self._prefix}part-{len(self.rules)}"
        self.rules[name] = expression
        self._require_room()
        return Ref(name)

    def _require_depth(self) -> None:
        if len(self._path) > _MAX_NESTING:
            raise SchemaError(f"it is nested deeper than {_MAX_NESTING}")

    def _require_room(self) -> None:
        if len(self.rules) > _MAX_RULES:
            raise SchemaError(f"it needs more than {_MAX_RULES} rules: make it smaller")

    def any_value(self) -> Expression:
        """Any JSON."""
        name, notation = f"{self._prefix}any", self._notation
        space = notation.space
        if name not in self.rules:
            value = Ref(name)
            self.rules[name] = either(
                free_object(value, notation),
                seq("[", space, maybe(value, times(seq(",", space, value), 0, None), space), "]"),
                notation.text({}) or NOTHING,
                number_between(None, None) or "0",
                either(notation.true, notation.false, notation.null),
            )
        return Ref(name)

    def any_object(self) -> Expression:
        """Any JSON object."""
        return free_object(self.any_value(), self._notation)

    def _enum(self, flat: Flat) -> Expression | None:
        found = dict.fromkeys(self._notation.constant(value) for value in self._enum_values(flat))
        return either(*found) if found else None

    def _enum_values(self, flat: Flat) -> list[Any]:
        """The values of an enum that the other keywords permit."""
        rest = {key: value for key, value in flat.items() if key != "enum"}
        types = types_of(rest)
        rest.pop("type", None)
        values = [value for value in flat["enum"] if types is None or _is_of(value, types)]
        return _fitting(rest, values)


def _types_or_hints(flat: Flat) -> frozenset[str]:
    """Types of a value, by its keywords if the schema names none; empty for any."""
    return types_of(flat) or frozenset(
        kind for kind, keywords in _HINTS.items() if any(keyword in flat for keyword in keywords)
    )


def _looser(schema: Any) -> Iterator[Any]:
    """The schema, then ever looser ones, down to its type."""
    yield schema
    if not isinstance(schema, dict):
        return
    known = _without(schema, REFUSED)
    yield known
    for narrowing in _NARROWING:
        known = _without(known, narrowing)
        yield known
    yield {key: value for key, value in known.items() if key not in _BRANCHES}
    yield {"type": schema["type"]} if "type" in schema else {}


def _without(schema: Any, keywords: Collection[str]) -> Any:
    """A schema without some keywords, in its alternatives as well."""
    if not isinstance(schema, dict):
        return schema
    left = {}
    for key, value in schema.items():
        if key in _BRANCHES and isinstance(value, list):
            # One of several is at least one of them.
            name = "anyOf" if key == "oneOf" and "anyOf" not in schema else key
            left[name] = [_without(each, keywords) for each in value]
        elif key not in keywords:
            left[key] = value
    if "anyOf" in left:
        left.pop("oneOf", None)
    return left


def _is_of(value: Any, types: frozenset[str]) -> bool:
    kind = type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def _fitting(flat: Flat, values: list[Any]) -> list[Any]:
    """The values that are valid by the keywords of their own type."""
    by_kind: dict[str, Automaton | None] = {}
    found = []
    for value in values:
        kind = "number" if type_of(value) == "integer" else type_of(value)
        own = {key: flat[key] for key in _HINTS.get(kind, ()) if key in flat}
        if own and kind in {"object", "array"}:
            raise SchemaError(f"enum names an {kind} beside {min(own)}: leave one of them out")
        if own and kind not in by_kind:
            by_kind[kind] = _automaton({**own, "type": kind})
        automaton = by_kind.get(kind)
        if not own or (automaton is not None and _takes(automaton, _compact(value))):
            found.append(value)
    return found


def _automaton(schema: Flat) -> Automaton | None:
    converter = Converter(document=True)
    expression = converter.expression(schema)
    return None if expression is None else make_automaton(to_gbnf({**converter.rules, "root": expression}))


def _takes(automaton: Automaton, text: str) -> bool:
    return automaton.may_end(automaton.after(automaton.start, text.encode()))


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _integer(flat: Flat) -> Expression | None:
    least, most = _bounds(flat)
    low = None if least is None else _ceiling(*least)
    high = None if most is None else -_ceiling(-most[0], most[1])
    multiple_of = flat.get("multipleOf", 1)
    if multiple_of != int(multiple_of) or multiple_of < 1:
        raise SchemaError(f"multipleOf is {multiple_of}: only whole numbers for integers are supported")
    return integer_between(low, high, int(multiple_of))


def _number(flat: Flat) -> Expression | None:
    if "multipleOf" in flat:
        return _integer(flat)
    return number_between(*_bounds(flat))


def _bounds(flat: Flat) -> tuple[Bound | None, Bound | None]:
    lows = _found(flat, "minimum", "exclusiveMinimum")
    highs = _found(flat, "maximum", "exclusiveMaximum")
    return max(lows, default=None), min(highs, key=lambda bound: (bound[0], not bound[1]), default=None)


def _found(flat: Flat, inclusive: str, exclusive: str) -> list[Bound]:
    return [(Decimal(str(flat[key])), key == exclusive) for key in (inclusive, exclusive) if key in flat]


def _ceiling(bound: Decimal, is_excluded: bool) -> int:  # noqa: FBT001 - the two parts of a bound
    whole = int(bound.to_integral_value(rounding="ROUND_CEILING"))
    return whole + 1 if is_excluded and whole == bound else whole


def check_size(schema: Any) -> None:
    """Check the size of a schema.

    Raises:
        SchemaError: If it is too large.
    """
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (RecursionError, ValueError):
        raise SchemaError(
            "it is nested too deep, or has values that JSON lacks: half a surrogate pair, NaN or infinity"
        ) from None
    if len(text) > _MAX_SCHEMA_CHARS:
        raise SchemaError(f"it has {len(text)} characters: at most {_MAX_SCHEMA_CHARS} work")


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
