"""GBNF, llama.cpp's notation for grammars, from text to a tree. Pure; its time is linear in the text.

The notation: `name ::= alternatives`, with "literals", [a-z] and [^a-z] character classes, `.`, (groups),
the repetitions `* + ? {m} {m,} {m,n}`, and comments from `#` to the end of the line. A rule ends with its
line, unless a group is open or `::=` or `|` has just been read. llama.cpp's terminals for single tokens,
`<…>`, mean something only together with a vocabulary: they are refused.
"""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Final

from stages.grammar.limits import MAX_GRAMMAR_BYTES, MAX_NESTING, MAX_REPEATS, MAX_RULES, refusal
from stages.grammar.syntax import Chars, Choice, Expression, Literal, Ref, Repeat, Sequence
from stages.grammar.utf8_ranges import MAX_CODE_POINT, CodeRange, complement, merged

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME_LETTERS: Final = frozenset(string.ascii_letters + string.digits + "-")
_DIGITS: Final = frozenset(string.digits)
_HEX_LENGTHS: Final = {"x": 2, "u": 4, "U": 8}
_ESCAPES: Final = {"t": "\t", "r": "\r", "n": "\n", **{letter: letter for letter in '\\"[]-'}}
_SHOWN_CHARS: Final = 24
_MAX_REPEATS_IN_A_ROW: Final = 4


def parse_gbnf(text: str) -> dict[str, Expression]:
    """The rules of a grammar by name; of two of one name the later counts, as in llama.cpp.

    Raises:
        InvalidRequest: Naming the line at fault and what is wrong there.
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


class _Parser:
    def __init__(self, text: str) -> None:
        # One letter past the end that no rule can hold: no index needs a check.
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
            raise self._error("terminals for single tokens are not supported: write their text")
        known: dict[str, Callable[[], Expression]] = {
            '"': self._literal,
            "[": self._chars,
            ".": self._any,
            "(": self._group,
        }
        return known[letter]() if letter in known else None

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
