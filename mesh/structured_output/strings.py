r"""Grammars of strings by length, format and ECMAScript pattern.

A pattern matches anywhere in a string unless `^` and `$` anchor it. Shorthands such as `\d` mean ASCII, as in
every dialect; `\D`, `\W` and `\S` are ASCII, too, since dialects differ beyond. Lookaround, word boundaries
and back references (`(?=`, `\b`, `\1`) are not regular and are refused.
"""

from __future__ import annotations

import json
import string
from typing import TYPE_CHECKING, Final, NoReturn

from mesh.structured_output.gbnf import HEX_DIGIT, NOTHING, SchemaError, chars, either, mapped, seq, times
from stages.grammar.gbnf_parser import (
    MAX_CODE_POINT,
    MAX_NESTING,
    MAX_REPEATS,
    Chars,
    Choice,
    CodeRange,
    Expression,
    Literal,
    Repeat,
    Sequence,
    complement,
    merged,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.structured_output.schema_resolver import Flat

_DIGITS: Final = ((0x30, 0x39),)
_WORD: Final = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Final = ((0x09, 0x0D), (0x20, 0x20))
_SHORTHANDS: Final[dict[str, tuple[CodeRange, ...]]] = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_LINE_ENDS: Final = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_ANY: Final = Chars(((0, MAX_CODE_POINT),))
_MAX_CHARS: Final = 4096
# Characters without escapes. JSON allows DEL, but terminals do not show it.
PLAIN: Final = complement([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F)])
# A UTF-16 code unit that is no surrogate, as an escape.
_ESCAPED_UNIT: Final = either(
    seq(chars("09", "ac", "ef", "AC", "EF"), times(HEX_DIGIT, 3, 3)),
    seq(chars("d", "D"), chars("07"), times(HEX_DIGIT, 2, 2)),
)
CHAR: Final[Expression] = either(
    Chars(PLAIN), seq("\\", either(chars('"', "\\", "b", "f", "n", "r", "t"), seq("u", _ESCAPED_UNIT)))
)
"""Any one character of a string."""
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_DATE: Final = (
    "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME: Final = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL: Final = "[a-z](?:[a-z0-9-]{0,30}[a-z0-9])?"
_HOST: Final = rf"{_LABEL}(?:\.{_LABEL}){{1,3}}"
PATTERNS: Final = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": "^P(?:[1-9][0-9]{0,3}W|[1-9][0-9]{0,3}D(?:T[1-9][0-9]{0,3}[HMS])?|T[1-9][0-9]{0,3}[HMS])$",
    "uuid": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "ipv4": rf"^(?:{_BYTE}\.){{3}}{_BYTE}$",
    "ipv6": "^(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$",
    "hostname": f"^{_HOST}$",
    "email": rf"^[a-z0-9](?:[a-z0-9_-]{{0,30}}[a-z0-9])?@{_HOST}$",
    "uri": rf"^https?://{_HOST}(?:/[A-Za-z0-9_~.-]{{1,40}}){{0,6}}/?$",
}


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def whole(self, *, is_anchored: bool) -> Expression:
        options: list[Expression] = []
        while True:
            starts = self._skip("^") or is_anchored
            inner = self._sequence()
            ends = self._skip("$") or is_anchored
            anything = times(_ANY, 0, None)
            options.append(seq(*([] if starts else [anything]), inner, *([] if ends else [anything])))
            if not self._skip("|"):
                break
        if self._at < len(self._pattern):
            self._fail("has an unexpected character")
        return either(*options)

    @property
    def _letter(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _skip(self, text: str) -> bool:
        if self._pattern.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _fail(self, what: str) -> NoReturn:
        raise SchemaError(f"pattern {self._pattern[:64]!r} {what}, at character {self._at}")

    def _sequence(self) -> Expression:
        items: list[Expression] = []
        while (letter := self._letter) and letter not in "|)$":
            if letter == "^":
                self._fail("has ^ elsewhere than at the beginning")
            item = self._atom()
            items.append(self._repeated(item))
        return seq(*items) if items else NOTHING

    def _atom(self) -> Expression:
        letter = self._letter
        if letter in "*+?{":
            self._fail("repeats nothing")
        self._at += 1
        if letter == "(":
            return self._group()
        if letter == "[":
            return self._class()
        if letter == ".":
            return Chars(complement(_LINE_ENDS))
        if letter == "\\":
            return Chars(self._escape(is_negated=False))
        if 0xD800 <= ord(letter) <= 0xDFFF:
            self._fail("has half a surrogate pair")
        return Chars(((ord(letter), ord(letter)),))

    def _group(self) -> Expression:
        self._depth += 1
        if self._depth > MAX_NESTING:
            self._fail(f"nests deeper than {MAX_NESTING}")
        if self._skip("?"):
            if self._skip("<") and self._letter not in {"=", "!"}:
                while self._letter and not self._skip(">"):
                    self._at += 1
            elif not self._skip(":"):
                self._fail("has a look-around, which a grammar cannot express")
        options = [self._sequence()]
        while self._skip("|"):
            options.append(self._sequence())
        if self._letter == "$":
            self._fail("has $ elsewhere than at the end")
        if not self._skip(")"):
            self._fail("lacks a `)`")
        self._depth -= 1
        return either(*options)

    def _class(self) -> Expression:
        is_negated = self._skip("^")
        ranges: list[CodeRange] = []
        while not self._skip("]"):
            low = self._member(is_negated=is_negated)
            if self._letter == "-" and self._pattern[self._at + 1 : self._at + 2] not in {"]", ""}:
                self._at += 1
                high = self._member(is_negated=is_negated)
                if len(low) > 1 or len(high) > 1 or low[0][0] != low[0][1] or high[0][1] < low[0][0]:
                    self._fail("has an invalid range")
                low = ((low[0][0], high[0][1]),)
            ranges += low
        found = complement(ranges) if is_negated else merged(ranges)
        if not found:
            self._fail("has a character class that matches nothing")
        return Chars(found)

    def _member(self, *, is_negated: bool) -> tuple[CodeRange, ...]:
        letter = self._letter
        if not letter:
            self._fail("lacks a `]`")
        self._at += 1
        if letter == "\\":
            if self._skip("b"):
                return ((8, 8),)
            return self._escape(is_negated=is_negated)
        return ((ord(letter), ord(letter)),)

    def _escape(self, *, is_negated: bool) -> tuple[CodeRange, ...]:
        letter = self._letter
        self._at += 1
        if letter in _CONTROLS:
            return ((ord(_CONTROLS[letter]),) * 2,)
        if letter and letter in "xu":
            return self._hex(2 if letter == "x" else 4)
        found = _SHORTHANDS.get(letter.lower())
        if found is not None:
            if letter.islower():
                # In a negated class: everything that any dialect includes, so that none of it is accepted.
                return merged((*found, (0x80, MAX_CODE_POINT))) if is_negated else found
            return complement(found) if is_negated else complement((*found, (0x80, MAX_CODE_POINT)))
        if not letter or letter in string.ascii_letters + string.digits:
            self._fail(f"has the escape \\{letter}, which a grammar cannot express")
        return ((ord(letter), ord(letter)),)

    def _hex(self, length: int) -> tuple[CodeRange, ...]:
        digits = self._pattern[self._at : self._at + length]
        if len(digits) < length or not set(digits) <= set(string.hexdigits):
            self._fail(f"needs {length} hex digits")
        self._at += length
        code = int(digits, 16)
        if 0xD800 <= code <= 0xDFFF:
            self._fail("has half a surrogate pair")
        return ((code, code),)

    def _repeated(self, item: Expression) -> Expression:
        letter = self._letter
        if not letter or letter not in "*+?{":
            return item
        self._at += 1
        if letter == "{":
            least, most = self._bounds()
        else:
            least, most = int(letter == "+"), 1 if letter == "?" else None
        # A lazy one matches the same strings.
        self._skip("?")
        if self._letter and self._letter in "*+{":
            self._fail("repeats a repetition")
        return times(item, least, most)

    def _bounds(self) -> tuple[int, int | None]:
        body, brace, _ = self._pattern[self._at :].partition("}")
        first, comma, last = body.partition(",")
        if not brace or not _is_count(first) or (last and not _is_count(last)):
            self._fail("has a { without a repetition: write \\{")
        self._at += len(body) + 1
        least = int(first)
        most = int(last) if last else None if comma else least
        if max(least, most or 0) > MAX_REPEATS or (most is not None and most < least):
            self._fail(f"repeats too often: at most {MAX_REPEATS} times are supported")
        return least, most


def parse_pattern(pattern: str, *, is_whole: bool = False) -> Expression:
    """Grammar of the strings that match a pattern, from beginning to end.

    Args:
        pattern: The pattern.
        is_whole: Whether it describes the whole string, without anchors as well.

    Raises:
        SchemaError: If it is no regular expression, or a grammar cannot express it.
    """
    if len(pattern) > _MAX_CHARS:
        raise SchemaError(f"pattern has {len(pattern)} characters: at most {_MAX_CHARS} work")
    return _Parser(pattern).whole(is_anchored=is_whole)


def _is_count(digits: str) -> bool:
    return 0 < len(digits) <= 9 and digits.isascii() and digits.isdigit()


def quoted(text: str) -> str:
    """A text as a JSON string, non-ASCII characters as they are."""
    return json.dumps(text, ensure_ascii=False)


def in_string(
    expression: Expression,
    written: Callable[[str], str] | None = None,
    plain: tuple[CodeRange, ...] = PLAIN,
) -> Expression:
    """An expression over characters with each character as a notation writes it.

    Args:
        expression: The expression.
        written: Returns a text as it is written between quotes; by default as in JSON.
        plain: Characters that are written as they are.
    """
    write = written or (lambda text: quoted(text)[1:-1])

    def change(each: Expression) -> Expression:
        match each:
            case Literal(text):
                return Literal(write(text))
            case Chars(ranges):
                usual = _intersection(ranges, plain)
                special = _intersection(ranges, complement(plain))
                escaped = [write(chr(code)) for low, high in special for code in range(low, high + 1)]
                return either(*([Chars(usual)] if usual else []), *escaped)
            case _:
                return each

    return mapped(expression, change)


def _intersection(
    left: tuple[tuple[int, int], ...], right: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    both = [
        (max(low, other_low), min(high, other_high))
        for low, high in merged(left)
        for other_low, other_high in right
        if max(low, other_low) <= min(high, other_high) <= MAX_CODE_POINT
    ]
    return merged(both)


def text_length(expression: Expression) -> tuple[int, int | None]:
    """The least and the most characters, None without a bound; for expressions that refer to no rule."""
    match expression:
        case Literal(text):
            return len(text), len(text)
        case Chars():
            return 1, 1
        case Sequence(items):
            return _total([text_length(item) for item in items])
        case Choice(options):
            spans = [text_length(option) for option in options]
            mosts = [most for _, most in spans]
            known = [most for most in mosts if most is not None]
            return min(least for least, _ in spans), max(known) if len(known) == len(mosts) else None
        case Repeat(item, least, most):
            inner_least, inner_most = text_length(item)
            bound = None if most is None or inner_most is None else most * inner_most
            return least * inner_least, 0 if inner_most == 0 or most == 0 else bound
        case _:
            raise TypeError(expression)


def _total(spans: list[tuple[int, int | None]]) -> tuple[int, int | None]:
    known = [most for _, most in spans if most is not None]
    return sum(least for least, _ in spans), sum(known) if len(known) == len(spans) else None


def lengths_of(flat: Flat) -> tuple[int, int | None]:
    """The least and the most characters of a string schema, None without a bound.

    Raises:
        SchemaError: If a grammar cannot count so many.
    """
    least, most = flat.get("minLength", 0), flat.get("maxLength")
    if (most is None or least <= most) and max(least, most or 0) > MAX_REPEATS:
        raise SchemaError(
            f"{'maxLength' if most else 'minLength'} is {max(least, most or 0)}: at most "
            f"{MAX_REPEATS} is supported"
        )
    return least, most


def pattern_of(flat: Flat) -> Expression | None:
    """Grammar of the pattern or the format of a string schema, over characters; None if it has neither.

    Raises:
        SchemaError: If it has both, or a grammar cannot express it.
    """
    form = PATTERNS.get(flat.get("format", ""))
    if "pattern" in flat and form is not None:
        raise SchemaError("pattern and format cannot be enforced together: leave one out")
    pattern = flat.get("pattern", form)
    return None if pattern is None else parse_pattern(pattern)


def of_length(expression: Expression, least: int, most: int | None) -> Expression:
    """The strings of an expression with this many characters.

    Raises:
        SchemaError: If that takes more than bounds on one repetition of single characters.
    """
    shortest, longest = text_length(expression)
    if least <= shortest and (most is None or (longest is not None and longest <= most)):
        return expression
    items = expression.items if isinstance(expression, Sequence) else (expression,)
    varying = [place for place, item in enumerate(items) if len({*text_length(item)}) > 1]
    if len(varying) == 1:
        [place] = varying
        item = items[place]
        if isinstance(item, Repeat) and text_length(item.item) == (1, 1):
            beside = shortest - item.least
            low = max(item.least, least - beside)
            highs = [
                each for each in (item.most, None if most is None else most - beside) if each is not None
            ]
            if not highs or low <= min(highs):
                bounded = Repeat(item.item, low, min(highs, default=None))
                return seq(*items[:place], bounded, *items[place + 1 :])
    raise SchemaError(
        "pattern and minLength or maxLength cannot be enforced together here: give the length in the pattern"
    )
