"""Tagged arguments: values between tags, by the schemas of their parameters, passed on as one JSON object."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.text.answer_characters import EndOfText, skip_space
from mesh.text.answer_format import KEY, common_begin
from mesh.text.argument_values import read_value

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Sequence

    from mesh.text.answer_characters import Characters
    from mesh.text.answer_format import ArgumentTags
    from mesh.text.call_marks import CallMarks

_STRING: Final = frozenset({"string"})
_ALL: Final = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
# The first that fits: bool is an int.
_TYPES: Final = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (object, "null"),
)
_OPTIONS: Final = ("anyOf", "oneOf")
_MAX_DEPTH: Final = 16
# Schemas, properties and constants that one walk may meet: it runs between the tokens of all answers.
_MAX_VISITS: Final = 10_000
_MAX_NAME_CHARS: Final = 256
_NAME: Final = re.compile(r"[\w.:/-]+")
_SPACES: Final = re.compile(r"\s*")


class ParameterSchemas:
    """Schemas of a function's parameters, as far as they tell texts from other values.

    Args:
        schema: JSON schema of the parameters as one object; anything else says nothing.
    """

    def __init__(self, schema: Any) -> None:
        self._root: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        self._named = _Gathering(self._root).properties()
        self._kinds: dict[str | None, _Kind] = {}

    def has(self, name: str) -> bool:
        """Whether a parameter has a schema of its own."""
        return name in self._named

    def is_text(self, name: str) -> bool:
        """Whether all values of a parameter are strings."""
        return self._kind_of(name).types == _STRING

    def as_json(self, name: str, text: str) -> str:
        """A value as JSON: by its schema if possible, else what JSON reads in it, else a string.

        Args:
            name: Name of the parameter.
            text: The value as the model wrote it.
        """
        kind = self._kind_of(name)
        types = kind.types
        as_text = json.dumps(text, ensure_ascii=False)
        if types == _STRING or ("string" in types and text in kind.texts):
            return as_text
        found = read_value(text)
        if found is None:
            return as_text
        written, value = found
        if isinstance(value, str) and "string" not in types:
            # JSON within JSON, as some models write it.
            inner = read_value(value)
            return inner[0] if inner is not None and _type_of(inner[1]) in types else written
        is_other = _type_of(value) not in types or isinstance(value, str)
        return as_text if is_other and "string" in types else written

    def _kind_of(self, name: str) -> _Kind:
        key = name if name in self._named else None
        if key not in self._kinds:
            self._kinds[key] = _Gathering(self._root).kind(self._named.get(key))
        return self._kinds[key]


@dataclass(frozen=True)
class _Kind:
    """Facts of a schema about values."""

    types: frozenset[str]
    """Types that they may have; all of them where the schema does not tell."""
    texts: frozenset[str] = frozenset()
    """Strings among the constants that it names."""


class _TooLarge(Exception):
    """A walk has met more than it may."""


class _Gathering:
    """One walk over a schema and what it refers to, which meets each schema once.

    Args:
        root: The schema that references begin at.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = _MAX_VISITS
        # By identity; None while it is being walked, so that a cycle says nothing.
        self._types_by_id: dict[int, frozenset[str] | None] = {}
        self._properties_by_id: dict[int, dict[str | None, Any]] = {}
        self._texts: set[str] = set()

    def kind(self, schema: Any) -> _Kind:
        """Facts of a value's schema; none where it is too large."""
        try:
            types = self._types(schema, 0)
        except _TooLarge:
            return _Kind(_ALL)
        return _Kind(types, frozenset(self._texts))

    def properties(self) -> dict[str | None, Any]:
        """Schemas of the root's properties by name, those of its branches too; None for further ones."""
        try:
            return self._properties(self._root, 0)
        except _TooLarge:
            return _own_properties(self._root)

    def _spend(self, num_visits: int) -> None:
        self._num_left -= num_visits
        if self._num_left < 0:
            raise _TooLarge

    def _types(self, schema: Any, depth: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return _ALL
        key = id(schema)
        if key not in self._types_by_id:
            self._types_by_id[key] = None
            self._types_by_id[key] = self._types_within(schema, depth)
        return self._types_by_id[key] or _ALL

    def _types_within(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        found = _ALL
        types, values = _names(schema.get("type")), _constants(schema)
        self._spend(1 + len(types) + len(values))
        if types:
            found &= types
        if values:
            found &= {_type_of(value) for value in values}
            self._texts.update(value for value in values if isinstance(value, str))
        for key in _OPTIONS:
            if options := _list(schema.get(key)):
                self._spend(len(options))
                found &= frozenset[str]().union(*(self._types(option, depth + 1) for option in options))
        for each in self._all_of(schema):
            found &= self._types(each, depth + 1)
        return found or _ALL

    def _properties(self, schema: Any, depth: int) -> dict[str | None, Any]:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return {}
        key = id(schema)
        if key not in self._properties_by_id:
            self._properties_by_id[key] = {}
            self._properties_by_id[key] = self._properties_within(schema, depth)
        return self._properties_by_id[key]

    def _properties_within(self, schema: Mapping[str, Any], depth: int) -> dict[str | None, Any]:
        # Those that the root has itself are there anyway.
        self._spend(1)
        parts = [_own_properties(schema)]
        for key in _OPTIONS:
            options = [self._properties(option, depth + 1) for option in _list(schema.get(key))]
            parts.append(self._merged("anyOf", options))
        parts += [self._properties(each, depth + 1) for each in self._all_of(schema)]
        return self._merged("allOf", parts)

    def _merged(self, key: str, parts: Sequence[dict[str | None, Any]]) -> dict[str | None, Any]:
        """Properties of several schemas; one that some have is bound by these together."""
        parts = [part for part in parts if part]
        if len(parts) < 2:
            return parts[0] if parts else {}
        found: dict[str | None, list[Any]] = {}
        for part in parts:
            self._spend(len(part))
            for name, schema in part.items():
                found.setdefault(name, []).append(schema)
        return {name: schemas[0] if len(schemas) == 1 else {key: schemas} for name, schemas in found.items()}

    def _all_of(self, schema: Mapping[str, Any]) -> list[Any]:
        """Schemas that hold beside this one."""
        found = list(_list(schema.get("allOf")))
        self._spend(len(found))
        return [*found, self._target(schema["$ref"])] if "$ref" in schema else found

    def _target(self, reference: Any) -> Any:
        found: Any = self._root
        for step in str(reference).removeprefix("#").split("/")[1:]:
            if not isinstance(found, Mapping):
                return None
            found = found.get(step.replace("~1", "/").replace("~0", "~"))
        return found


class TaggedArguments:
    """Reader of the arguments of one call.

    A value may hold tags: one counts only if what must follow it does. Then it also ends a value that has no
    end tag. Tags of a whole call within a value are part of it, up to the end of that call.

    Args:
        characters: The next one is the first behind the name of the function.
        marks: Marks of the call.
        tags: Tags of its arguments.
        names: Names of the functions.
        schemas: Schemas of the function's parameters.
        argue: Called with each piece of the JSON object.
        is_cut: Tells at the end of the text whether a limit ended it: then the object stays incomplete.
        is_stopped: Tells at the end of the text whether a stop string ended it: then the object stays
            incomplete if a value is open.

    Attributes:
        is_in_value: Whether the text so far ends within a value.
    """

    def __init__(
        self,
        characters: Characters,
        marks: CallMarks,
        tags: ArgumentTags,
        names: Collection[str],
        *,
        schemas: ParameterSchemas,
        argue: Callable[[str], None],
        is_cut: Callable[[], bool],
        is_stopped: Callable[[], bool],
    ) -> None:
        self._characters = characters
        self._names = names
        self._marks = marks
        self._tags = tags
        self._schemas = schemas
        self._argue = argue
        self._is_cut = is_cut
        self._is_stopped = is_stopped
        self.is_in_value = False
        # Calls within the value that have begun and not ended.
        self._num_shown = 0
        self._given: set[str] = set()
        self._block_begins = marks.blocks
        self._block_ends = marks.ends
        self._behind_argument = _present(tags.key, marks.tag_end, *self._block_ends)
        # With these a call begins, and with those it ends.
        self._begins = _present(marks.tag) or self._block_begins
        self._ends = _present(marks.tag_end) or self._block_ends
        # Of the argument that is being read.
        self._value_end = tags.value_end
        self._in_value: tuple[str, ...] = ()

    def read(self) -> Generator[None, str, None]:
        """Consume all arguments, and the tag that ends the call; whatever else is there ends it as well."""
        try:
            while (yield from self._argument()):
                pass
        except EndOfText:
            if not (self._is_cut() or (self.is_in_value and self._is_stopped())):
                self._close()
            raise
        self._close()

    @property
    def _key_end(self) -> str:
        """Behind the name of an argument, whatever the type of its value."""
        types = self._tags.types
        return common_begin(*(text for _, text in types)) if types else self._tags.key_end

    def _close(self) -> None:
        self._argue("}" if self._given else "{}")

    def _argument(self) -> Generator[None, str, bool]:
        """Consume one more argument; returns whether there is one."""
        characters, tags = self._characters, self._tags
        yield from skip_space(characters, _drop)
        mark = yield from characters.match(self._behind_argument)
        if mark != tags.key:
            if mark is not None and mark != self._marks.tag_end:
                characters.unread(mark)
            return False
        name = yield from read_name(characters, self._key_end, _drop)
        kind = (yield from self._kind()) if tags.types else None
        if value := tags.value.strip():
            yield from skip_space(characters, _drop)
            if (yield from characters.match((value,))) is None:
                return False
        if not name:
            return False
        # Of values of one name the first counts.
        argue = _drop if name in self._given else self._argue
        argue(f"{', ' if self._given else '{'}{json.dumps(name, ensure_ascii=False)}: ")
        self._given.add(name)
        yield from self._value(name, kind, argue)
        return True

    def _kind(self) -> Generator[None, str, str | None]:
        """Consume what tells the type of a value; returns its name, None if it is not known."""
        written = {text[len(self._key_end) :]: kind for kind, text in reversed(self._tags.types)}
        end = common_begin(*(text[::-1] for text in written))[::-1].lstrip(string.ascii_letters)
        told = ""
        while not told.endswith(end) and len(told) < _MAX_NAME_CHARS:
            told += yield from self._characters.take()
        return written.get(told)

    def _value(self, name: str, kind: str | None, argue: Callable[[str], None]) -> Generator[None, str, None]:
        tags = self._tags
        self._expect_end(tags.value_end.replace(KEY, name))
        is_text = self._schemas.is_text(name) if kind is None else kind == "string"
        value = _Value(
            argue,
            None if is_text and not tags.item else lambda text: self._as_json(name, kind, text),
            is_padded=self._tags.is_padded,
        )
        self.is_in_value, self._num_shown = True, 0
        try:
            literal = tags.literal
            if literal.begin and (yield from self._characters.match((literal.begin,))) is not None:
                self._expect_end(literal.end + self._value_end)
            while not (yield from self._part_ends(value)):
                pass
        except EndOfText:
            rest = self._characters.rest()
            if not (self._is_cut() or self._is_stopped()):
                for char in rest:
                    value.add(char)
                value.end()
            raise
        self.is_in_value = False
        value.end()

    def _expect_end(self, value_end: str) -> None:
        # What is nested has keys as well.
        key = () if self._tags.item else (self._tags.key,)
        marks = (value_end, *key, self._marks.tag_end, *self._block_ends, *self._begins)
        self._value_end, self._in_value = value_end, _present(*marks)

    def _as_json(self, name: str, kind: str | None, text: str) -> str:
        tags = self._tags
        if tags.item and tags.key and tags.key_end and tags.key in text:
            return json.dumps(_nested(text, tags), ensure_ascii=False)
        if kind is None:
            return self._schemas.as_json(name, text)
        found = read_value(text)
        return json.dumps(text, ensure_ascii=False) if found is None else found[0]

    def _part_ends(self, value: _Value) -> Generator[None, str, bool]:
        """Consume a part of a value, or its end tag; returns whether it has ended."""
        characters = self._characters
        mark = yield from characters.match(self._in_value)
        if mark is None:
            value.add((yield from characters.take()))
            return False
        if (yield from self._counts(mark, value)):
            if mark != self._value_end:
                characters.unread(mark)
            return True
        for char in mark:
            value.add(char)
        if mark in self._ends and self._num_shown:
            yield from self._end_shown(value)
        return False

    def _end_shown(self, value: _Value) -> Generator[None, str, None]:
        """Consume the end of the block behind a call within a value, which is part of it as well."""
        self._num_shown -= 1
        if self._marks.tag_end and (yield from self._look(self._block_ends_next, at_end=False)):
            yield from skip_space(self._characters, value.add)
            for char in (yield from self._characters.match(self._block_ends)) or "":
                value.add(char)

    def _counts(self, mark: str, value: _Value) -> Generator[None, str, bool]:
        """Whether a tag within a value ends it."""
        tags = self._tags
        if mark in self._begins:
            self._num_shown += yield from self._look(self._is_call, at_end=False)
            return False
        if self._num_shown:
            # Where nothing else follows, the call within had no end.
            return mark != tags.key and (yield from self._look(self._text_ends, at_end=True))
        if mark == tags.key:
            return value.is_at_line_start and (yield from self._names_another())
        if mark == self._value_end:
            return (yield from self._look(self._argument_ends, at_end=True, is_behind_value=True))
        if mark == self._marks.tag_end:
            return (yield from self._look(self._call_follows_block, at_end=True))
        return (yield from self._look(self._call_follows, at_end=True))

    def _names_another(self) -> Generator[None, str, bool]:
        """Whether the tag that has begun is that of a parameter without a value so far."""
        taken: list[str] = []
        try:
            name = yield from read_name(self._characters, self._key_end, taken.append)
        except EndOfText:
            name = ""
        self._characters.unread("".join(taken))
        return self._schemas.has(name) and name not in self._given

    def _look(
        self,
        probe: Callable[[_Lookahead], Generator[None, str, bool]],
        *,
        at_end: bool,
        is_behind_value: bool = False,
    ) -> Generator[None, str, bool]:
        """Result of a probe of the characters ahead.

        Args:
            probe: Takes characters, which are put back.
            at_end: What counts as found if the text ends there. Where a stop string has cut it, nothing is
                known about its end.
            is_behind_value: Whether an end tag of the value is before: then a stop string changes nothing.
        """
        ahead = _Lookahead(self._characters)
        try:
            found = yield from probe(ahead)
        except EndOfText:
            found = at_end and (is_behind_value or not self._is_stopped())
        self._characters.unread("".join(ahead.taken))
        return found

    def _block_ends_next(self, ahead: _Lookahead) -> Generator[None, str, bool]:
        yield from ahead.skip_space()
        return (yield from ahead.match(self._block_ends)) is not None

    def _text_ends(self, ahead: _Lookahead) -> Generator[None, str, bool]:
        """Whether nothing but ends of a call and of its block follow: at the end of the text, if at all."""
        for ends in (self._ends, self._block_ends):
            yield from ahead.skip_space()
            yield from ahead.match(ends)
        yield from ahead.skip_space()
        return False

    def _argument_ends(self, ahead: _Lookahead) -> Generator[None, str, bool]:
        yield from ahead.skip_space()
        mark = yield from ahead.match(self._behind_argument)
        if mark is not None:
            # Where names are tags, an end begins as a tag does.
            return not (mark == self._tags.key and self._tags.item and (yield from ahead.match(("/",))))
        return (yield from self._call_follows(ahead))

    def _call_follows_block(self, ahead: _Lookahead) -> Generator[None, str, bool]:
        yield from ahead.skip_space()
        yield from ahead.match(self._block_ends)
        return (yield from self._call_follows(ahead))

    def _call_follows(self, ahead: _Lookahead) -> Generator[None, str, bool]:
        """Whether a call of a known function, in tags of this kind, comes next."""
        yield from ahead.skip_space()
        found = yield from ahead.match(self._block_begins)
        if self._marks.tag:
            yield from ahead.skip_space()
            found = yield from ahead.match((self._marks.tag,))
        return found is not None and (yield from self._is_call(ahead, only_known=True))

    def _is_call(self, ahead: _Lookahead, *, only_known: bool = False) -> Generator[None, str, bool]:
        """Whether a name and what follows that of a function come next."""
        yield from ahead.skip_space()
        name = yield from ahead.read_name(self._marks.name_end)
        if not is_name(name) or (only_known and name not in self._names):
            return False
        if only_known and self._marks.tag:
            return True
        yield from ahead.skip_space()
        behind = (self._tags.key,) if only_known else (self._tags.key, *self._ends, "{")
        return (yield from ahead.match(behind)) is not None


class _Lookahead:
    """Characters ahead that are taken to be put back.

    Args:
        characters: Where they are taken from.

    Attributes:
        taken: What was taken, in order.
    """

    def __init__(self, characters: Characters) -> None:
        self.taken: list[str] = []
        self._characters = characters

    def skip_space(self) -> Generator[None, str, None]:
        yield from skip_space(self._characters, self.taken.append)

    def match(self, marks: Collection[str]) -> Generator[None, str, str | None]:
        mark = yield from self._characters.match(marks)
        self.taken.append(mark or "")
        return mark

    def read_name(self, end: str) -> Generator[None, str, str]:
        return (yield from read_name(self._characters, end, self.taken.append))


class _Value:
    """One value: a text is passed on as it comes, anything else once it is whole.

    Args:
        argue: Called with each piece of its JSON.
        as_json: Returns the JSON of the whole value; None if it is a text.
        is_padded: Whether a line break before and behind it is no part of it.

    Attributes:
        is_at_line_start: Whether its text so far is empty, or ends with a line break.
    """

    def __init__(
        self, argue: Callable[[str], None], as_json: Callable[[str], str] | None, *, is_padded: bool
    ) -> None:
        self.is_at_line_start = True
        self._argue = argue
        self._as_json = as_json
        self._is_padded = is_padded
        self._is_at_padding = is_padded
        # Of a text a line break that may be the one behind it; of anything else all characters.
        self._held: list[str] = []
        if as_json is None:
            argue('"')

    def add(self, char: str) -> None:
        is_padding, self._is_at_padding = self._is_at_padding and char == "\n", False
        self.is_at_line_start = char == "\n"
        if is_padding:
            return
        if self._as_json is None:
            self._pass_held()
        self._held.append(char)
        if self._as_json is None and not (char == "\n" and self._is_padded):
            self._pass_held()

    def _pass_held(self) -> None:
        self._argue(json.dumps("".join(self._held), ensure_ascii=False)[1:-1])
        self._held.clear()

    def end(self) -> None:
        if self._as_json is None:
            self._argue('"')
            return
        text = "".join(self._held)
        self._argue(self._as_json(text.removesuffix("\n") if self._is_padded else text))


def _own_properties(schema: Mapping[str, Any]) -> dict[str | None, Any]:
    named = schema.get("properties")
    found: dict[str | None, Any] = dict(named) if isinstance(named, Mapping) else {}
    others = schema.get("additionalProperties", False)
    return found if others is False else {**found, None: others}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _names(value: Any) -> frozenset[str]:
    given = [value] if isinstance(value, str) else [each for each in _list(value) if isinstance(each, str)]
    # Every integer is a number.
    return frozenset([*given, "integer"] if "number" in given else given)


def _constants(schema: Any) -> list[Any]:
    if not isinstance(schema, Mapping):
        return []
    return [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]


def _nested(text: str, tags: ArgumentTags, depth_left: int = _MAX_DEPTH) -> Any:
    """Value of what is written between tags in turn: an object, a list, a text, or what JSON reads in it."""
    found: list[tuple[str, Any]] = []
    text = text.strip()
    at = 0
    while depth_left and text.startswith(tags.key, at):
        start = at + len(tags.key)
        name, sign, _ = text[start : start + _MAX_NAME_CHARS].partition(tags.key_end)
        begin, end = f"{tags.key}{name}{tags.key_end}", tags.value_end.replace(KEY, name)
        start = at + len(begin)
        stop = _end_of(text, begin, end, start) if sign else -1
        if stop < 0:
            return text
        found.append((name, _nested(text[start:stop], tags, depth_left - 1)))
        behind = _SPACES.match(text, stop + len(end))
        at = len(text) if behind is None else behind.end()
    if not found:
        read = read_value(text)
        return text if read is None else read[1]
    return [value for _, value in found] if all(name == tags.item for name, _ in found) else dict(found)


def _end_of(text: str, begin: str, end: str, at: int) -> int:
    """Where the end tag of a tag ahead of a place is, others of its name in between; -1 without one."""
    num_open, next_end = 1, text.find(end, at)
    while next_end >= 0:
        if (next_begin := text.find(begin, at, next_end)) >= 0:
            num_open += 1
            at = next_begin + len(begin)
            continue
        num_open -= 1
        if not num_open:
            return next_end
        at = next_end + len(end)
        next_end = text.find(end, at)
    return -1


def _type_of(value: Any) -> str:
    return next(name for kind, name in _TYPES if isinstance(value, kind))


def is_name(text: str) -> bool:
    """Whether a function may have this name."""
    return _NAME.fullmatch(text) is not None


def read_name(characters: Characters, end: str, pass_on: Callable[[str], None]) -> Generator[None, str, str]:
    """Consume a name within a tag, and the end of the tag; returns the name, empty if there is none.

    A line break or another tag ends the name as well, as some models forget the end.

    Args:
        characters: The next one is the first of the name.
        end: End of the tag; empty if it has none.
        pass_on: Called with each character.
    """
    name = ""
    while (yield from characters.peek()) not in "\n<":
        char = yield from characters.take()
        pass_on(char)
        name += char
        if len(name) > _MAX_NAME_CHARS:
            return ""
        if end and name.endswith(end):
            return _plain(name.removesuffix(end))
    if end.startswith("<") and (yield from characters.match((end,))) is not None:
        for char in end:
            pass_on(char)
    return _plain(name)


def _plain(name: str) -> str:
    return name.strip().strip("\"'")


def _present(*marks: str) -> tuple[str, ...]:
    """Those that are not empty, each once."""
    return tuple(dict.fromkeys(filter(None, marks)))


def _drop(_char: str) -> None:
    pass
