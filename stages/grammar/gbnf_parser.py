"""GBNF parser: grammar text to syntax tree, with size limits and UTF-8 ranges.

The notation: `name ::= alternatives`, with "literals", [a-z] and [^a-z] character classes, `.`, (groups), the
repetitions `* + ? {m} {m,} {m,n}`, and comments from `#` to the end of the line. A rule ends with its line,
unless a group is open or the line ends with `::=` or `|`. `<[7]>` is the control token with the id 7, as in
llama.cpp; its other terminals for single tokens are refused.
"""

from __future__ import annotations

import re
import string
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# A range is split where the length of its encoding changes and where its continuation bytes would not cover
# their whole range, so that each part is a product of byte ranges, as in RE2 and in Rust's utf8-ranges.
# Surrogates have no encoding and are left out.
MAX_CODE_POINT: Final = 0x10FFFF
_SURROGATES: Final = (0xD800, 0xDFFF)
# The last code point of each length of encoding.
_LAST_OF_LENGTH: Final = (0x7F, 0x7FF, 0xFFFF, MAX_CODE_POINT)
ByteRange = tuple[int, int]
CodeRange = tuple[int, int]
# A grammar is an untrusted program. Sizes are checked before it runs; its computation cannot be known before
# and is counted while it runs. Legitimate grammars stay far below all of these bounds.
MAX_GRAMMAR_BYTES: Final = 256 * 1024
MAX_RULES: Final = 8192
MAX_NODES: Final = 100_000
MAX_REPEATS: Final = 16_384
MAX_NESTING: Final = 64
# Most nesting of a grammar within itself, as of objects in objects: see graph.py.
MAX_RECURSION: Final = 16
# Most parallel readings of a text.
MAX_CONFIGS: Final = 4096
# Most states and frames of one automaton, which bounds its memory. At half of them a new session gets a new
# one.
MAX_STATES: Final = 65_536
MAX_TABLE_CELLS: Final = 8 * 1024 * 1024
# Elementary steps (about a microsecond each): for one token, and for one answer.
MAX_DRAW_WORK: Final = 200_000
MAX_ANSWER_WORK: Final = 4_000_000
_NAME_LETTERS: Final = frozenset(string.ascii_letters + string.digits + "-")
_DIGITS: Final = frozenset(string.digits)
_HEX_LENGTHS: Final = {"x": 2, "u": 4, "U": 8}
_ESCAPES: Final = {"t": "\t", "r": "\r", "n": "\n", **{letter: letter for letter in '\\"[]-'}}
_SHOWN_CHARS: Final = 24
_TOKEN: Final = re.compile(r"<\[([0-9]{1,9})\]>")
NOT_UTF8: Final = 0xFF
"""A byte that no text has."""
_TOKEN_CODE: Final = struct.Struct(">BI")
_MAX_REPEATS_IN_A_ROW: Final = 4


@dataclass(frozen=True)
class Literal:
    """A text, possibly empty."""

    text: str


@dataclass(frozen=True)
class Chars:
    """One code point of these ranges: disjoint, ascending, not empty."""

    ranges: tuple[CodeRange, ...]


@dataclass(frozen=True)
class Token:
    """A control token, which has no text."""

    id: int
    """Its id."""

    @property
    def code(self) -> bytes:
        """Bytes that stand for it: no text has them, since UTF-8 never begins so."""
        return _TOKEN_CODE.pack(NOT_UTF8, self.id)


@dataclass(frozen=True)
class Ref:
    """Reference to a rule."""

    name: str


@dataclass(frozen=True)
class Sequence:
    """Expressions one after the other."""

    items: tuple[Expression, ...]


@dataclass(frozen=True)
class Choice:
    """One of several expressions."""

    options: tuple[Expression, ...]


@dataclass(frozen=True)
class Repeat:
    """An expression repeated at least and at most a number of times; None is no bound."""

    item: Expression
    least: int
    most: int | None


Expression = Literal | Chars | Token | Ref | Sequence | Choice | Repeat


class _Parser:
    def __init__(self, text: str) -> None:
        # Ends with a character that no rule can contain, so that no index needs a check.
        self._text = text.replace("\0", "\ufffd") + "\0"
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Expression]:
        rules: dict[str, Expression] = {}
        self._space(over_lines=True)
        while not self._is_over:
            name = self._name()
            self._space()
            if not self._text.startswith("::=", self._at):
                raise self._error("`::=` must follow the name of a rule")
            self._at += 3
            self._space(over_lines=True)
            rules[name] = self._choice(in_group=False)
            if not self._is_over and self._letter not in "\r\n":
                raise self._error("a rule must end with its line")
            self._space(over_lines=True)
            if len(rules) > MAX_RULES:
                raise refusal(f"it has more than {MAX_RULES} rules: make it smaller")
        return rules

    @property
    def _letter(self) -> str:
        return self._text[self._at]

    @property
    def _is_over(self) -> bool:
        return self._at == len(self._text) - 1

    def _error(self, what: str) -> Exception:
        line = self._text.count("\n", 0, self._at) + 1
        rest = self._text[self._at : self._at + _SHOWN_CHARS].rstrip("\0").partition("\n")[0]
        return refusal(f"line {line}: {what}" + (f", at `{rest}`" if rest else ""))

    def _space(self, *, over_lines: bool = False) -> None:
        while (letter := self._letter) in " \t#" or (over_lines and letter in "\r\n"):
            if letter == "#":
                while not self._is_over and self._letter not in "\r\n":
                    self._at += 1
            else:
                self._at += 1

    def _name(self) -> str:
        start = self._at
        while self._letter in _NAME_LETTERS:
            self._at += 1
        if start == self._at:
            raise self._error("a name of letters, digits and hyphens must be here")
        return self._text[start : self._at]

    def _choice(self, *, in_group: bool) -> Expression:
        options = [self._sequence(in_group=in_group)]
        while self._letter == "|":
            self._at += 1
            self._space(over_lines=True)
            options.append(self._sequence(in_group=in_group))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, *, in_group: bool) -> Expression:
        items: list[Expression] = []
        num_repeats = 0
        while True:
            if self._letter in "*+?{":
                if not items:
                    raise self._error("there is nothing to repeat")
                if num_repeats == _MAX_REPEATS_IN_A_ROW:
                    raise self._error("too many repetitions in a row")
                items[-1] = self._repeat(items[-1], in_group=in_group)
                num_repeats += 1
            elif (item := self._item()) is not None:
                items.append(item)
                num_repeats = 0
            else:
                return items[0] if len(items) == 1 else Sequence(tuple(items))
            self._space(over_lines=in_group)

    def _item(self) -> Expression | None:
        letter = self._letter
        if letter in _NAME_LETTERS:
            return Ref(self._name())
        if letter in "<!":
            return self._token()
        known: dict[str, Callable[[], Expression]] = {
            '"': self._literal,
            "[": self._chars,
            ".": self._any,
            "(": self._group,
        }
        return known[letter]() if letter in known else None

    def _token(self) -> Token:
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            raise self._error(
                "of terminals for single tokens only `<[ID]>` works, for a control token: write others' text"
            )
        self._at = found.end()
        return Token(int(found[1]))

    def _any(self) -> Chars:
        self._at += 1
        return Chars(((0, MAX_CODE_POINT),))

    def _group(self) -> Expression:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self._error(f"groups nest deeper than {MAX_NESTING}")
        self._at += 1
        self._space(over_lines=True)
        inner = self._choice(in_group=True)
        if self._letter != ")":
            raise self._error("`)` is missing")
        self._at += 1
        self._depth -= 1
        return inner

    def _literal(self) -> Literal:
        self._at += 1
        letters: list[str] = []
        while self._letter != '"':
            code = self._code_point("a literal")
            if 0xD800 <= code <= 0xDFFF:
                raise self._error("half a surrogate pair is no text")
            letters.append(chr(code))
        self._at += 1
        return Literal("".join(letters))

    def _chars(self) -> Chars:
        self._at += 1
        is_negated = self._letter == "^"
        self._at += is_negated
        ranges: list[CodeRange] = []
        while self._letter != "]":
            low = high = self._code_point("a character class")
            if self._letter == "-" and self._text[self._at + 1] != "]":
                self._at += 1
                high = self._code_point("a character class")
                if high < low:
                    raise self._error("a range of characters runs backwards")
            ranges.append((low, high))
        self._at += 1
        found = complement(ranges) if is_negated else merged(ranges)
        if not any(low < 0xD800 or high > 0xDFFF for low, high in found):
            raise self._error("a character class matches nothing")
        return Chars(found)

    def _code_point(self, where: str) -> int:
        letter = self._letter
        if self._is_over:
            raise self._error(f"{where} does not end")
        self._at += 1
        if letter != "\\":
            return ord(letter)
        escape = self._letter
        self._at += 1
        if escape in _ESCAPES:
            return ord(_ESCAPES[escape])
        length = _HEX_LENGTHS.get(escape)
        if length is None:
            raise self._error(f"the escape `\\{escape}` is unknown".replace("\0", ""))
        digits = self._text[self._at : self._at + length]
        if len(digits) < length or not set(digits) <= set(string.hexdigits):
            raise self._error(f"`\\{escape}` needs {length} hex digits")
        self._at += length
        code = int(digits, 16)
        if code > MAX_CODE_POINT:
            raise self._error(f"there is no code point {digits}")
        return code

    def _repeat(self, item: Expression, *, in_group: bool) -> Repeat:
        letter = self._letter
        self._at += 1
        if letter != "{":
            return Repeat(item, int(letter == "+"), 1 if letter == "?" else None)
        self._space(over_lines=in_group)
        least = most = self._count()
        self._space(over_lines=in_group)
        if self._letter == ",":
            self._at += 1
            self._space(over_lines=in_group)
            most = self._count() if self._letter in _DIGITS else -1
            self._space(over_lines=in_group)
        if self._letter != "}":
            raise self._error("`}` is missing")
        self._at += 1
        if 0 <= most < least:
            raise self._error(f"{least} to {most} times is impossible")
        return Repeat(item, least, None if most < 0 else most)

    def _count(self) -> int:
        start = self._at
        while self._letter in _DIGITS:
            self._at += 1
        digits = self._text[start : self._at]
        if not digits:
            raise self._error("a number must be here")
        if len(digits) > 9 or int(digits) > MAX_REPEATS:
            raise self._error(f"{digits[:12]} times is too often: at most {MAX_REPEATS} work")
        return int(digits)


def merged(ranges: Iterable[CodeRange]) -> tuple[CodeRange, ...]:
    """The same code points as few disjoint ranges, ascending."""
    out: list[CodeRange] = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return tuple(out)


def complement(ranges: Iterable[CodeRange]) -> tuple[CodeRange, ...]:
    """All other code points."""
    out: list[CodeRange] = []
    start = 0
    for low, high in merged(ranges):
        if start < low:
            out.append((start, low - 1))
        start = high + 1
    if start <= MAX_CODE_POINT:
        out.append((start, MAX_CODE_POINT))
    return tuple(out)


def byte_sequences(ranges: Iterable[CodeRange]) -> list[tuple[ByteRange, ...]]:
    """UTF-8 encodings of the code points of `ranges`.

    Returns:
        Sequences of 1 to 4 byte ranges; a text of one code point matches exactly one of them.
    """
    return [sequence for low, high in merged(ranges) for sequence in _sequences(low, high)]


def _sequences(low: int, high: int) -> Iterator[tuple[ByteRange, ...]]:
    if low > high:
        return
    if low <= _SURROGATES[1] and high >= _SURROGATES[0]:
        yield from _sequences(low, min(high, _SURROGATES[0] - 1))
        yield from _sequences(max(low, _SURROGATES[1] + 1), high)
        return
    for last in _LAST_OF_LENGTH:
        if low <= last < high:
            yield from _sequences(low, last)
            yield from _sequences(last + 1, high)
            return
    yield from _of_one_length(low, high)


def _of_one_length(low: int, high: int) -> Iterator[tuple[ByteRange, ...]]:
    for bits in (6, 12, 18):
        rest = (1 << bits) - 1
        if high <= 0x7F or low & ~rest == high & ~rest:
            break
        # Lower bits must cover their whole range where higher ones differ.
        if low & rest:
            yield from _of_one_length(low, low | rest)
            yield from _of_one_length((low | rest) + 1, high)
            return
        if high & rest != rest:
            yield from _of_one_length(low, (high & ~rest) - 1)
            yield from _of_one_length(high & ~rest, high)
            return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))


def refusal(reason: str) -> InvalidRequest:
    """The error for a grammar that does not work."""
    return InvalidRequest(f"grammar: {reason}", param="grammar")


def parse_gbnf(text: str) -> dict[str, Expression]:
    """The rules of a grammar by name; of two with one name the later counts, as in llama.cpp.

    Raises:
        InvalidRequest: With the line and the error.
    """
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise refusal(
            f"it holds half a surrogate pair at character {error.start}: send valid Unicode"
        ) from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise refusal(f"it has {num_bytes} bytes: at most {MAX_GRAMMAR_BYTES} work, make it smaller")
    return _Parser(text).rules()
