r"""Grammars of ECMAScript patterns.

A pattern matches anywhere in a string unless `^` and `$` anchor it. Shorthands such as `\d` mean ASCII, as in
every dialect; `\D`, `\W` and `\S` are ASCII, too, since dialects differ beyond. Lookaround, word boundaries
and back references (`(?=`, `\b`, `\1`) are not regular and are refused.
"""

from __future__ import annotations

import string
from typing import Final, NoReturn

from mesh.structured_output.gbnf import NOTHING, SchemaError, either, seq, times
from stages.grammar.gbnf_parser import (
    MAX_CODE_POINT,
    MAX_NESTING,
    MAX_REPEATS,
    Chars,
    CodeRange,
    Expression,
    complement,
    merged,
)

_DIGITS: Final = ((0x30, 0x39),)
_WORD: Final = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Final = ((0x09, 0x0D), (0x20, 0x20))
_SHORTHANDS: Final[dict[str, tuple[CodeRange, ...]]] = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_LINE_ENDS: Final = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_ANY: Final = Chars(((0, MAX_CODE_POINT),))
_MAX_CHARS: Final = 4096


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def whole(self) -> Expression:
        options: list[Expression] = []
        while True:
            starts = self._skip("^")
            inner = self._sequence()
            ends = self._skip("$")
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


def parse_pattern(pattern: str) -> Expression:
    """Grammar of the strings that match a pattern, from beginning to end.

    Raises:
        SchemaError: If it is no regular expression, or a grammar cannot express it.
    """
    if len(pattern) > _MAX_CHARS:
        raise SchemaError(f"pattern has {len(pattern)} characters: at most {_MAX_CHARS} work")
    return _Parser(pattern).whole()


def _is_count(digits: str) -> bool:
    return 0 < len(digits) <= 9 and digits.isascii() and digits.isdigit()
