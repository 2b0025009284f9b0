"""Argument values that are no JSON, passed on as JSON: objects with bare keys, and what Python writes."""

from __future__ import annotations

import ast
import json
import math
from typing import TYPE_CHECKING, Any, Final, NoReturn

from mesh.text.answer_characters import SPACE, StringEscaper, UnexpectedText, skip_space

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from mesh.text.answer_characters import Characters

_CLOSING: Final = {"{": "}", "[": "]", "(": ")"}
_ENDS_BARE: Final = ",}]" + SPACE
_MOST_KEY_CHARS: Final = 256
_MOST_DEPTH: Final = 64
# It is read between the tokens of all answers.
_MOST_PYTHON_CHARS: Final = 100_000
_OF_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}
_WORDS: Final = {"true": "True", "false": "False", "null": "None"}


class BareObject:
    """Reader of an object with bare keys, as `{key:<|"|>text<|"|>,other:[1,2]}`.

    Args:
        characters: The next one is the brace.
        quote: What is around texts, in which nothing is escaped.
        argue: Called with each piece of the JSON object.
    """

    def __init__(self, characters: Characters, quote: str, argue: Callable[[str], None]) -> None:
        self._characters = characters
        self._quote = quote
        self._argue = argue
        # What would close the objects and lists that are open.
        self._closing: list[str] = []
        self._lacks_value = True

    def read(self) -> Generator[None, str, None]:
        """Consume the object.

        Raises:
            UnexpectedText: If it goes on otherwise than one does; what has been passed on is whole.
        """
        try:
            yield from self._value()
        except UnexpectedText:
            self._argue(("null" if self._lacks_value else "") + "".join(reversed(self._closing)))
            raise

    def _value(self) -> Generator[None, str, None]:
        characters = self._characters
        char = yield from skip_space(characters, _drop)
        if (yield from characters.match((self._quote,))) is not None:
            self._lacks_value = False
            yield from self._pass_text()
        elif char == '"':
            # Some answers have JSON's own quotes.
            self._argue(json.dumps((yield from self._quoted()), ensure_ascii=False))
        elif char == "{":
            yield from self._members("}", has_keys=True)
        elif char == "[":
            yield from self._members("]", has_keys=False)
        else:
            word = yield from self._bare(_ENDS_BARE)
            found = read_value(word)
            self._argue(json.dumps(word, ensure_ascii=False) if found is None else found[0])
        self._lacks_value = False

    def _members(self, end: str, *, has_keys: bool) -> Generator[None, str, None]:
        characters = self._characters
        if len(self._closing) > _MOST_DEPTH:
            raise UnexpectedText
        self._argue((yield from characters.take()))
        self._closing.append(end)
        self._lacks_value = False
        separator = ""
        while (yield from skip_space(characters, _drop)) != end:
            if has_keys:
                yield from self._key(separator)
            else:
                self._argue(separator)
                self._lacks_value = separator != ""
            yield from self._value()
            separator = ", "
            char = yield from skip_space(characters, _drop)
            if char == ",":
                yield from characters.take()
            elif char != end:
                raise UnexpectedText
        self._argue((yield from characters.take()))
        self._closing.pop()

    def _key(self, separator: str) -> Generator[None, str, None]:
        characters = self._characters
        if (yield from characters.match((self._quote,))) is not None:
            key = yield from self._text()
        elif (yield from characters.peek()) == '"':
            key = yield from self._quoted()
        else:
            key = (yield from self._bare(":")).strip()
        if (yield from skip_space(characters, _drop)) != ":":
            raise UnexpectedText
        yield from characters.take()
        self._argue(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        self._lacks_value = True

    def _pass_text(self) -> Generator[None, str, None]:
        self._argue('"')
        while (yield from self._characters.match((self._quote,))) is None:
            char = yield from self._characters.take()
            self._argue(json.dumps(char, ensure_ascii=False)[1:-1])
        self._argue('"')

    def _text(self) -> Generator[None, str, str]:
        text: list[str] = []
        while (yield from self._characters.match((self._quote,))) is None:
            text.append((yield from self._characters.take()))
        return "".join(text)

    def _quoted(self) -> Generator[None, str, str]:
        yield from self._characters.take()
        text: list[str] = []
        while (char := (yield from self._characters.take())) != '"':
            text.append(char)
            if char == "\\":
                text.append((yield from self._characters.take()))
        try:
            found: str = json.loads(f'"{"".join(text)}"', strict=False)
        except ValueError:
            return "".join(text)
        return found

    def _bare(self, ends: str) -> Generator[None, str, str]:
        text: list[str] = []
        while (yield from self._characters.peek()) not in ends:
            text.append((yield from self._characters.take()))
            if len(text) > _MOST_KEY_CHARS:
                break
        if not text:
            raise UnexpectedText
        return "".join(text)


class PythonArguments:
    """Reader of arguments as Python writes them: `key='text', other=[1, None])`.

    Args:
        characters: The next one is the first behind the parenthesis.
        argue: Called with each piece of the JSON object.
    """

    def __init__(self, characters: Characters, argue: Callable[[str], None]) -> None:
        self._characters = characters
        self._argue = argue

    def read(self) -> Generator[None, str, None]:
        """Consume the arguments, and the parenthesis behind them.

        Raises:
            UnexpectedText: If they are none; what has been passed on is whole.
        """
        characters = self._characters
        before = "{"
        while (yield from skip_space(characters, _drop)) != ")":
            key = ""
            while (char := (yield from characters.take())) != "=":
                key += char
                if len(key) > _MOST_KEY_CHARS:
                    self._argue("{}" if before == "{" else "}")
                    raise UnexpectedText
            self._argue(f"{before}{json.dumps(key.strip(), ensure_ascii=False)}: ")
            yield from skip_space(characters, _drop)
            before = ", "
            text = yield from self._value()
            found = read_value(text, is_expression=True)
            self._argue(json.dumps(text.strip(), ensure_ascii=False) if found is None else found[0])
            if (yield from skip_space(characters, _drop)) == ",":
                yield from characters.take()
        yield from characters.take()
        self._argue("{}" if before == "{" else "}")

    def _value(self) -> Generator[None, str, str]:
        """Consume an expression: up to a comma or a parenthesis of no bracket in it."""
        characters = self._characters
        text: list[str] = []
        closing: list[str] = []
        while True:
            char = yield from characters.peek()
            if not closing and char in ",)":
                return "".join(text)
            text.append((yield from characters.take()))
            if char in "\"'":
                yield from self._string(char, text)
            elif char in _CLOSING:
                closing.append(_CLOSING[char])
            elif closing and char == closing[-1]:
                closing.pop()

    def _string(self, quote: str, text: list[str]) -> Generator[None, str, None]:
        while True:
            char = yield from self._characters.take()
            text.append(char)
            if char == "\\":
                text.append((yield from self._characters.take()))
            elif char == quote:
                return


def read_value(text: str, *, is_expression: bool = False) -> tuple[str, Any] | None:
    """JSON of a value that is written as JSON or as Python has it, and the value; None if it is neither.

    Args:
        text: The value as it is written; in its texts line breaks may stand as they are.
        is_expression: Whether texts and numbers may be as Python has them, too, beside lists and objects.
    """
    text = text.strip()
    written = StringEscaper().escaped(_OF_PYTHON.get(text, text))
    try:
        return written, json.loads(written, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        pass
    if not (is_expression or text[:1] in {"{", "["}) or len(text) > _MOST_PYTHON_CHARS:
        return None
    for each in (text, text.replace("\n", "\\n")):
        try:
            written = json.dumps(_evaluated(each), ensure_ascii=False, allow_nan=False)
            return written, json.loads(written)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _evaluated(expression: str) -> Any:
    """Value of constants, lists and objects; words of JSON are those of Python.

    Raises:
        ValueError: Or another error, if it is anything else.
    """
    tree = ast.parse(expression, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _WORDS:
            node.id = _WORDS[node.id]
    return ast.literal_eval(ast.unparse(tree))


def _drop(_char: str) -> None:
    pass
