"""Grammars of answers in the model's own format: calls and content of a given form, behind free reasoning."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from mesh.api.structured_output import MAX_CALLS, AlternativeSchema, CallGrammar, ToolUse
from mesh.structured_output.continuation import rest_of
from mesh.structured_output.free_text import THOUGHTS, Spelling, Thoughts, text_rules, within
from mesh.structured_output.gbnf import (
    NOTHING,
    SchemaError,
    chars,
    either,
    mapped,
    maybe,
    seq,
    times,
    to_gbnf,
)
from mesh.structured_output.json_schema import Converter, check_size, checked_grammar
from mesh.structured_output.lark import lark_rules
from mesh.structured_output.notations import JSON, PYTHON, SPACE, SPACE_RULE, BareKeys, RawText
from mesh.structured_output.objects import object_of
from mesh.structured_output.tagged import TagForm, tagged_object_of
from mesh.text.answer_format import (
    CALL_ID,
    CONSTRAIN_MARK,
    INDEX,
    KEY,
    MARK,
    NAME,
    NUMBER,
    SLOTS,
    AnswerFormat,
    CallForm,
)
from spanmesh_proto.errors import InvalidRequest
from stages.grammar.gbnf_parser import Expression, Ref, parse_gbnf

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.structured_output.notations import Notation
    from mesh.text.answer_format import ArgumentTags, CallFormat, Headers

_TEXT: Final = Ref("text")
_CALL: Final = Ref("call")
_SAID: Final = Ref("said")
# Keywords of a schema that constrain nothing.
_NOTES: Final = frozenset({"$schema", "$id", "title", "description", "$defs", "definitions"})
_MOST_LEFT_OUT: Final = 16
# Requests repeat their schemas. Each client's are kept apart: how long one takes shows whether it is known.
_MAX_CACHED: Final = 64
_LEAST_MARK_CHARS: Final = 2
_ANY_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object"}
# As Mistral's templates want them; others take any.
_ID: Final = times(chars("AZ", "az", "09"), 9, 9)
_COUNT: Final = either("0", seq(chars("19"), times(chars("09"), 0, 3)))
_IN_SLOTS: Final = {CALL_ID: _ID, INDEX: _COUNT, NUMBER: _COUNT}


class _Builder:
    """Rules of the calls of one request.

    Args:
        answer_format: Format of answers.
        spelling: Control tokens.

    Attributes:
        rules: By name.
    """

    def __init__(self, answer_format: AnswerFormat, spelling: Spelling) -> None:
        self.rules: dict[str, Expression] = {}
        self._format = answer_format
        self._calls = calls = answer_format.calls
        self._spelling = spelling
        self._left_out: list[str] = []
        # Of each function its name and its arguments.
        self._functions: list[tuple[str, Expression | str]] = []
        marks = _marks(calls)
        raw = RawText(_TEXT, frozenset(mark[0] for mark in marks))
        self._notation: Notation = JSON
        self._form: TagForm | None = None
        if calls.form is CallForm.TAGGED and calls.tags is not None:
            self.rules |= text_rules(_TEXT.name, marks)
            self._form = self._tag_form(calls.tags, raw)
        elif calls.form is CallForm.FUNCTION:
            self._form = TagForm(
                NOTHING, lambda _: seq("="), lambda _: NOTHING, seq(", "), None, notation=PYTHON
            )
        elif calls.quote != '"':
            self.rules |= text_rules(_TEXT.name, marks)
            self._notation = BareKeys(calls.quote, spelling.of(calls.quote), raw)

    def add_call(self, function: Mapping[str, Any], *, is_free: bool, is_lenient: bool) -> None:
        """Add a function.

        Args:
            function: Name and parameters.
            is_free: Whether it takes any arguments.
            is_lenient: Whether what no grammar can express of its schema is left out.

        Raises:
            InvalidRequest: If its schema is invalid, or cannot be expressed.
        """
        name, parameters = function["name"], function["parameters"]
        what = f"the parameters of the function {name}"
        arguments: Expression | str = "{}" if self._form is None else ""
        if is_free:
            parameters = _ANY_ARGUMENTS
        if is_free or not _takes_nothing(parameters):
            converter = Converter(
                parameters,
                f"f{len(self._functions)}-",
                is_lenient=is_lenient,
                notation=self._notation_of_values,
            )
            arguments = _expression(converter, parameters, what, "tools", self._form)
            self.rules |= converter.rules
            self._left_out += [f"{what}, {each}" for each in converter.left_out]
        self._functions.append((name, arguments))

    def add_text_call(self, function: Mapping[str, Any], grammar: str) -> None:
        """Add a custom tool, whose one argument is a text.

        Args:
            function: Name and parameters.
            grammar: Grammar of the text, in Lark's notation.

        Raises:
            InvalidRequest: If the grammar is invalid, or has something that is not supported.
        """
        name, prefix = function["name"], f"f{len(self._functions)}-"
        what = f"the grammar of the custom tool {name}"
        try:
            rules = lark_rules(grammar)
        except (SchemaError, RecursionError) as error:
            raise InvalidRequest(f"{what}: {error}", param="tools") from None

        def renamed(each: Expression) -> Expression:
            return Ref(prefix + each.name) if isinstance(each, Ref) else each

        try:
            written = {
                prefix + rule: self._letters(mapped(expression, renamed))
                for rule, expression in rules.items()
            }
        except SchemaError as error:
            self._left_out.append(f"{what}: {error.reason}")
            self.add_call(function, is_free=False, is_lenient=True)
            return
        self.rules |= {SPACE.name: SPACE_RULE, **written}
        arguments = self._text_argument(function["parameters"], Ref(f"{prefix}root"))
        self._functions.append((name, arguments))

    def _letters(self, expression: Expression) -> Expression:
        """A part of a text that is an argument."""
        form = self._form
        return (self._notation_of_values if form is None or form.text is None else form.text).letters(
            expression
        )

    def _text_argument(self, parameters: Mapping[str, Any], letters: Expression) -> Expression:
        """Arguments that are one text."""
        form, notation = self._form, self._notation_of_values
        if form is None:
            text = notation.enclosed(letters)
            return object_of(dict(parameters), lambda *_: text, seq, notation) or NOTHING
        raw = letters if form.text is not None else notation.enclosed(letters)
        value = seq(form.value("string"), form.padded(raw))
        return tagged_object_of(dict(parameters), lambda *_: value, seq, form) or NOTHING

    def calls(self, tools: ToolUse, *, has_one_call: bool) -> Expression:
        """One or more calls."""
        calls, spelling = self._calls, self._spelling
        most = 1 if has_one_call or self._ends_with_call else MAX_CALLS
        if all(_takes_nothing(function["parameters"]) for function in tools.functions):
            # No call differs from an earlier one of its function, and small models never stop by themselves.
            most = min(most, len(tools.functions))
        self.rules[_CALL.name] = either(*(self._call(calls.call, each) for each in self._functions))
        begin = calls.begin + calls.call
        marks = self._format.content
        # Some templates write marks around no content as well.
        empty = maybe(spelling.of(marks.begin), spelling.of(marks.end)) if marks.end else NOTHING
        first: Expression = seq(empty, spelling.of(calls.begin), _CALL)
        if self._format.primer and begin.startswith(self._format.primer):
            rest = begin.removeprefix(self._format.primer)
            first = either(*(self._call(rest, each) for each in self._functions))
        if spelling.ends(calls.call_end):
            return first
        if most == 1:
            return seq(first, spelling.of(calls.end))
        more = times(seq(spelling.of(calls.separator), _CALL), 0, most - 1)
        return seq(first, more, spelling.of(calls.end))

    def content(self, form: AlternativeSchema) -> Expression:
        """Content of a given form, between the format's marks of content."""
        converter = Converter(form.schema, "answer-")
        found = _expression(converter, form.schema, form.param, form.param, None)
        self.rules |= converter.rules
        marks = self._format.content
        begin = marks.begin.removeprefix(self._format.primer)
        return seq(self._spelling.of(begin), found, self._spelling.of(marks.end))

    def said(self, calls: Expression) -> Expression:
        """Free text, with calls behind it or without."""
        marks = self._format.content
        of = self._spelling.of
        begin = of(marks.begin)
        if self._format.headers is not None:
            self.rules |= text_rules(_SAID.name, self._format.header_marks)
            return either(seq(begin, _SAID), calls)
        self.rules |= text_rules(_SAID.name, [_opening(self._calls), *filter(None, (marks.end,))])
        return seq(maybe(begin, _SAID, of(marks.end)) if marks.begin else _SAID, maybe(calls))

    def told(self) -> tuple[str, ...]:
        """What is not enforced."""
        found = self._left_out
        if (num_more := len(found) - _MOST_LEFT_OUT) > 0:
            found = [*found[:_MOST_LEFT_OUT], f"{num_more} more parts of schemas"]
        return tuple(found)

    @property
    def _notation_of_values(self) -> Notation:
        return self._notation if self._form is None else self._form.notation

    @property
    def _ends_with_call(self) -> bool:
        """Whether an answer is over with its first call."""
        calls = self._calls
        has_more = self._format.headers is None or calls.separator
        return not has_more or self._spelling.ends(calls.call_end + calls.separator)

    def _call(self, begin: str, function: tuple[str, Expression | str]) -> Expression:
        name, arguments = function
        calls = self._calls
        head = seq(self._spelled(begin, name), name, self._spelled(calls.name_end, name))
        headers = self._format.headers
        if headers is not None and headers.body in calls.name_end:
            head = either(head, self._header(headers, name))
        return seq(head, arguments, self._spelled(calls.call_end, name))

    def _header(self, headers: Headers, name: str) -> Expression:
        """Header of a call as models write it: the channel first, then who is called."""
        channel, _, kind = self._calls.name_end.partition(headers.body)[0].partition(" ")
        of = self._spelling.of
        return seq(
            of(f"{channel} {headers.recipient}"),
            name,
            maybe(" ", maybe(of(CONSTRAIN_MARK)), kind),
            of(headers.body),
        )

    def _spelled(self, text: str, name: str) -> Expression:
        """Grammar of a text with slots."""
        items: list[Expression] = []
        rest = text.replace(NAME, name)
        while slots := [slot for slot in rest if slot in _IN_SLOTS]:
            before, _, rest = rest.partition(slots[0])
            items += (self._spelling.of(before), _IN_SLOTS[slots[0]])
        return seq(*items, self._spelling.of(rest))

    def _tag_form(self, tags: ArgumentTags, raw: RawText) -> TagForm:
        spelling = self._spelling
        by_type = dict(tags.types)

        def value(kind: str) -> Expression:
            return spelling.of(by_type.get(kind, by_type.get("number", tags.key_end)) + tags.value)

        return TagForm(
            spelling.of(tags.key),
            value,
            lambda name: spelling.of(tags.value_end.replace(KEY, name)),
            spelling.of(tags.separator),
            raw,
            notation=PYTHON if tags.is_python else JSON,
            has_types=bool(by_type),
            ends_by_name=KEY in tags.value_end,
            is_padded=tags.is_padded,
            item=tags.item,
        )


def call_grammar(
    tools: ToolUse,
    answer_format: AnswerFormat,
    *,
    has_one_call: bool,
    thoughts: Thoughts,
    spelling: Spelling,
    alternative: AlternativeSchema | None = None,
) -> CallGrammar:
    """Grammar of answers with calls, or with content.

    Where neither calls are forced nor the answer has another form, it is free text, with calls behind it or
    without, functions that are not strict take any arguments, and of the other schemas what no grammar can
    express is left out.

    Args:
        tools: Functions to call.
        answer_format: Format of answers.
        has_one_call: Whether there is only one call.
        thoughts: Reasoning ahead of the answer.
        spelling: Control tokens, which marks of the format may be.
        alternative: Form of an answer without calls, if it has one.

    Raises:
        InvalidRequest: If a schema is invalid, or cannot be expressed as a grammar and must be.
    """
    builder = _Builder(answer_format, spelling)
    is_free = not tools.is_forced and alternative is None
    for function in tools.functions:
        if (grammar := tools.grammars.get(function["name"])) is not None:
            builder.add_text_call(function, grammar)
            continue
        is_strict = function["name"] in tools.strict_names
        builder.add_call(function, is_free=is_free and not is_strict, is_lenient=is_free or not is_strict)
    root = builder.calls(tools, has_one_call=has_one_call)
    if not tools.is_forced:
        root = builder.said(root) if alternative is None else either(root, builder.content(alternative))
    end = maybe(spelling.of(answer_format.end)) if answer_format.end else NOTHING
    rules = {"root": seq(THOUGHTS, root, end), **builder.rules, **thoughts.rules(spelling)}
    try:
        grammar = to_gbnf(rules)
    except RecursionError:
        raise InvalidRequest(
            "tools: their schemas are nested too deep: make them flatter", param="tools"
        ) from None
    return CallGrammar(checked_grammar(grammar, param="tools"), builder.told())


@lru_cache(_MAX_CACHED)
def grammar_in_format(
    grammar: str,
    answer_format: AnswerFormat,
    *,
    thoughts: Thoughts,
    spelling: Spelling,
    param: str,
    client: str | None,  # noqa: ARG001 - a part of the cache's key
    beginning: str = "",
) -> str:
    """Grammar of answers whose content matches a grammar.

    Args:
        grammar: Grammar of the content, GBNF.
        answer_format: Format of answers.
        thoughts: Reasoning ahead of the content.
        spelling: Control tokens, which marks of the format may be.
        param: The request's field with the grammar, for errors.
        client: Identity of the API key, or None.
        beginning: Content that the prompt ends with. The whole matches if it can begin so, else the rest.

    Raises:
        InvalidRequest: If the whole is too large for a grammar.
    """
    begin, end = answer_format.content.begin, answer_format.content.end
    if not (begin or end or thoughts.marks or beginning):
        return grammar
    content = parse_gbnf(grammar)
    content = rest_of(content, beginning) or content
    before = seq(THOUGHTS, spelling.of(begin.removeprefix(answer_format.primer)))
    behind = seq(spelling.of(end), maybe(spelling.of(answer_format.end)))
    rules = within(content, before, behind) | thoughts.rules(spelling)
    return checked_grammar(to_gbnf(rules), param=param)


def is_enforceable(answer_format: AnswerFormat) -> bool:
    """Whether the beginning of a call tells it from a text ahead of it."""
    if answer_format.primer:
        return False
    return answer_format.headers is not None or MARK.search(_opening(answer_format.calls)) is not None


def _takes_nothing(parameters: Mapping[str, Any]) -> bool:
    """Whether the schema of a function's parameters names none, and permits no others by name."""
    is_object = parameters.get("type", "object") in ("object", ["object"])
    others = parameters.get("additionalProperties", False)
    beside = parameters.keys() - {"type", "properties", "required", "additionalProperties", *_NOTES}
    is_empty = parameters.get("properties", {}) == {} and parameters.get("required", []) == []
    return is_object and others is False and not beside and is_empty


def _expression(converter: Converter, schema: Any, what: str, param: str, form: TagForm | None) -> Expression:
    """Grammar of a schema's values, and rules in the converter.

    Raises:
        InvalidRequest: If there is none, with its place.
    """
    try:
        check_size(schema)
        expression = converter.expression(schema) if form is None else converter.tagged(schema, form)
    except SchemaError as error:
        where = f" at `{error.where}`" if error.where else ""
        raise InvalidRequest(f"{what}{where}: {error.reason}", param=param) from None
    except RecursionError:
        raise InvalidRequest(f"{what}: it is nested too deep: make it flatter", param=param) from None
    if expression is None:
        raise InvalidRequest(f"{what}: it allows no value at all", param=param)
    return expression


def _opening(calls: CallFormat) -> str:
    """Mark with which calls begin."""
    text = next(iter(_pieces(calls.begin + calls.call)), "")
    found = MARK.match(text)
    return text if found is None else found[0]


def _marks(calls: CallFormat) -> tuple[str, ...]:
    """Marks that texts within calls must not have: any that could end a value, a call or all of them."""
    tags = calls.tags
    texts = [calls.begin, calls.call, calls.call_end, calls.end]
    if tags is not None:
        # What ends a name may be no more than `">`.
        inner = [text for text in (tags.key_end, tags.value) if text[:1] == tags.key[:1]]
        texts = [tags.value_end, tags.key, *inner, *texts]
    if calls.quote != '"':
        texts.append(calls.quote)
    return tuple(dict.fromkeys(piece for text in texts for piece in _pieces(text)))


def _pieces(text: str) -> list[str]:
    """Marks in a text of a format: its lines, up to a slot each."""
    for slot in SLOTS:
        text = text.replace(slot, f"{SLOTS[0]}\n")
    lines = [line.partition(SLOTS[0])[0].strip() for line in text.split("\n")]
    return [line for line in lines if len(line) >= _LEAST_MARK_CHARS]
