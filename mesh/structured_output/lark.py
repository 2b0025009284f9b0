"""Grammars in Lark's notation, as OpenAI's custom tools, Guidance and llguidance have them.

Rules, terminals, strings, ranges of letters, regular expressions with flags, groups, `[optional]`, `? * +`,
`~ n..m` and `{m,n}`, aliases, priorities, `%import common.X`, `%ignore`, `%json {…}`, and control tokens by
their id, `<[7]>`. A text is valid if it has any reading, as with Lark's own Earley parser: terminals take no
more than the rest leaves them, and priorities tell nothing. What is ignored may stand between terminals of
rules. A rule that begins with itself becomes a repetition.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from mesh.structured_output.gbnf import NOTHING, SchemaError, either, mapped, maybe, seq, times, to_gbnf
from mesh.structured_output.json_schema import Converter, check_size
from mesh.structured_output.notations import SPACE
from mesh.structured_output.strings import parse_pattern
from stages.grammar.gbnf_parser import (
    MAX_GRAMMAR_BYTES,
    MAX_NESTING,
    MAX_REPEATS,
    Chars,
    Choice,
    Expression,
    Literal,
    Ref,
    Repeat,
    Sequence,
    Token,
    merged,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAME: Final = r"[?!]*_?[A-Za-z]\w*"
_LARK: Final = re.compile(
    rf"^[ \t]*(?:{_NAME}[ \t]*(?:\.-?\d+)?[ \t]*(?:\[[^\]\n]*\])?[ \t]*:(?!:)|%[a-z]+\b)", re.MULTILINE
)
_GBNF: Final = re.compile(r"^[ \t]*[A-Za-z0-9-]+[ \t]*::=", re.MULTILINE)
_PIECE: Final = re.compile(
    r"""(?P<space>[ \t\f]+|//[^\n]*|\#[^\n]*|\\\r?\n)
    |(?P<line>\r?\n)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)
    |(?P<word>%[a-z]+)
    |(?P<name>_?[A-Za-z][A-Za-z0-9_]*)
    |(?P<token><[^<>\s]*>)
    |(?P<number>-?[0-9]{1,9})
    |(?P<mark>\.\.|->|[\[\](){}|:~.?*+!,=])""",
    re.VERBOSE,
)
_TOKEN: Final = re.compile(r"<\[([0-9]{1,9})\]>")
_ESCAPE: Final = re.compile(r'\\(?:(["\\/nrtfv])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))')
_CONTROLS: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_ANY: Final = r"[\s\S]"
# Flags of regular expressions: letters of either case, and `.` for line ends; the others change nothing here.
_FLAGS: Final = frozenset("isum")
_START: Final = "start"
# Those of rules of other meaning in grammars.
_NAMES: Final = {_START: "root", "root": "0-root", SPACE.name: "0-space"}
_IGNORED: Final = "0-ignored"
_OPENING: Final = {"(": ")", "[": "]", "{": "}"}
_SHOWN_CHARS: Final = 24
_MOST_PIECES: Final = 100_000
_COMMON: Final = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_FLOAT": r"[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*(?:[^*]|\*+[^*/])*\*+/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""Terminals of Lark's own library, as regular expressions."""


@dataclass(frozen=True)
class _Piece:
    kind: str
    text: str
    line: int
    value: Any = None


class _Parser:
    def __init__(self, text: str) -> None:
        self._pieces = list(_joined_lines(list(_pieces(text))))
        self._at = 0
        self._depth = 0
        self._is_terminal = False
        self._has_ignored = any(piece.text == "%ignore" for piece in self._pieces)
        self._ignored: list[Expression] = []
        self._rules: dict[str, Expression] = {}
        self._schemas: dict[str, Expression] = {}
        self._used: dict[str, _Piece] = {}

    def rules(self) -> dict[str, Expression]:
        while self._piece.kind != "end":
            if not self._skip("line"):
                self._statement()
        for name, piece in self._used.items():
            if name not in self._rules:
                self._fail(f"{piece.text} is not defined", piece)
        if _rule_name(_START) not in self._rules:
            raise SchemaError("it has no rule named start")
        if self._has_ignored:
            self._rules[_IGNORED] = times(either(*self._ignored), 0, None)
            root = _rule_name(_START)
            self._rules[root] = seq(Ref(_IGNORED), self._rules[root])
        return self._rules | self._schemas

    @property
    def _piece(self) -> _Piece:
        return self._pieces[self._at]

    def _skip(self, *wanted: str) -> bool:
        """Whether the next piece is one of some marks or kinds; it is passed over then."""
        piece = self._piece
        is_one = (piece.text if piece.kind == "mark" else piece.kind) in wanted
        self._at += is_one
        return is_one

    def _take(self, what: str) -> _Piece:
        piece = self._piece
        if not self._skip(what):
            self._fail(f"{what} must be here")
        return piece

    def _fail(self, what: str, piece: _Piece | None = None) -> NoReturn:
        at = self._piece if piece is None else piece
        shown = f", at `{at.text[:_SHOWN_CHARS]}`" if at.text.strip() and piece is None else ""
        raise SchemaError(f"line {at.line}: {what}{shown}")

    def _statement(self) -> None:
        if self._piece.kind == "word":
            self._directive()
        else:
            self._definition()
        if self._piece.kind not in {"line", "end"}:
            self._fail("this does not belong to a rule")

    def _directive(self) -> None:
        piece = self._piece
        self._at += 1
        if piece.text == "%import":
            self._import()
        elif piece.text == "%ignore":
            self._is_terminal = True
            self._ignored.append(self._alternatives())
        elif piece.text == "%llguidance":
            if piece.value:
                self._fail("options of %llguidance are not supported: leave them out", piece)
        else:
            self._fail(f"{piece.text} is not supported", piece)

    def _import(self) -> None:
        library = self._take("name")
        if library.text != "common":
            self._fail("only terminals of `common` can be imported", library)
        self._skip(".")
        if self._skip("("):
            while not self._skip(")"):
                self._add_common(self._take("name"), None)
                self._skip(",")
            return
        name = self._take("name")
        self._add_common(name, self._take("name") if self._skip("->") else None)

    def _add_common(self, name: _Piece, alias: _Piece | None) -> None:
        pattern = _COMMON.get(name.text)
        if pattern is None:
            self._fail(f"common.{name.text} is not known", name)
        self._rules[_rule_name((alias or name).text)] = parse_pattern(pattern, is_whole=True)

    def _definition(self) -> None:
        while self._skip("?", "!"):
            pass
        name = self._take("name")
        if self._piece.text == "{":
            self._fail("templates are not supported: write the rule out")
        if self._skip("."):
            self._take("number")
        suffix = self._attributes() if self._skip("[") else ""
        self._take(":")
        self._is_terminal = _is_terminal(name.text)
        found = self._alternatives()
        key = _rule_name(name.text)
        if key in self._rules:
            self._fail(f"{name.text} is defined twice", name)
        self._rules[key] = seq(_without_left_recursion(found, key), *([suffix] if suffix else []))

    def _attributes(self) -> str:
        """Attributes of a rule, as llguidance knows them; returns the text behind it."""
        suffix = ""
        while not self._skip("]"):
            name = self._take("name")
            value = self._value() if self._skip("=") else ""
            if name.text == "suffix":
                suffix = value
            elif name.text not in {"capture", "lazy"}:
                self._fail(f"the attribute {name.text} of a rule is not supported: leave it out", name)
            self._skip(",")
        return suffix

    def _value(self) -> str:
        piece = self._piece
        self._at += 1
        return self._text(piece) if piece.kind == "string" else piece.text

    def _alternatives(self) -> Expression:
        options = [self._sequence()]
        while self._skip("|"):
            options.append(self._sequence())
        return either(*options)

    def _sequence(self) -> Expression:
        items: list[Expression] = []
        while (item := self._item()) is not None:
            items.append(self._repeated(item))
        if self._skip("->"):
            self._take("name")
        return seq(*items) if items else NOTHING

    def _item(self) -> Expression | None:
        piece = self._piece
        if piece.text in {"(", "["}:
            return self._group()
        if piece.kind not in {"string", "regex", "name", "token", "word"}:
            return None
        self._at += 1
        if piece.kind == "name":
            return self._reference(piece)
        if piece.kind == "token":
            return self._token(piece)
        made = {"string": self._string, "regex": self._regex, "word": self._json}
        return self._terminal(made[piece.kind](piece))

    def _group(self) -> Expression:
        opening = self._piece
        self._at += 1
        self._depth += 1
        if self._depth > MAX_NESTING:
            self._fail(f"groups nest deeper than {MAX_NESTING}", opening)
        inner = self._alternatives()
        self._take(_OPENING[opening.text])
        self._depth -= 1
        return inner if opening.text == "(" else maybe(inner)

    def _terminal(self, found: Expression) -> Expression:
        """A terminal, with what is ignored behind it where it is a part of a rule."""
        return seq(found, Ref(_IGNORED)) if self._has_ignored and not self._is_terminal else found

    def _reference(self, piece: _Piece) -> Expression:
        if self._piece.text == "{" and not self._is_count(1):
            self._fail("templates are not supported: write the rule out")
        if self._is_terminal and not _is_terminal(piece.text):
            self._fail(f"a terminal cannot refer to the rule {piece.text}", piece)
        name = _rule_name(piece.text)
        self._used.setdefault(name, piece)
        return self._terminal(Ref(name)) if _is_terminal(piece.text) else Ref(name)

    def _token(self, piece: _Piece) -> Token:
        found = _TOKEN.fullmatch(piece.text)
        if found is None:
            self._fail(f"{piece.text[:_SHOWN_CHARS]}: write a control token by its id, such as <[7]>", piece)
        return Token(int(found[1]))

    def _json(self, piece: _Piece) -> Expression:
        if piece.text != "%json":
            self._fail(f"{piece.text} is not supported here", piece)
        try:
            check_size(piece.value)
            converter = Converter(piece.value, f"{len(self._schemas)}-json-")
            found = converter.expression(piece.value)
        except SchemaError as error:
            where = f" at `{error.where}`" if error.where else ""
            self._fail(f"%json{where}: {error.reason}", piece)
        if found is None:
            self._fail("%json: it allows no value at all", piece)
        self._schemas |= converter.rules
        return found

    def _string(self, piece: _Piece) -> Expression:
        text, is_any_case = self._text(piece), piece.text.endswith("i")
        if self._skip(".."):
            last = self._text(self._take("string"))
            if len(text) != 1 or len(last) != 1 or last < text:
                self._fail("a range goes from one character to a later one", piece)
            return Chars(((ord(text), ord(last)),))
        return _in_any_case(Literal(text)) if is_any_case else Literal(text)

    def _text(self, piece: _Piece) -> str:
        inner = piece.text[1 : piece.text.rindex('"')]
        if "\\" in _ESCAPE.sub("", inner):
            self._fail("an escape in this text is not known: write \\\\ for a backslash", piece)
        text = _ESCAPE.sub(_escaped, inner)
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            self._fail("half a surrogate pair is no text", piece)
        return text

    def _regex(self, piece: _Piece) -> Expression:
        body, _, flags = piece.text[1:].rpartition("/")
        if unknown := set(flags) - _FLAGS:
            self._fail(f"the flag {min(unknown)} of a regular expression is not supported", piece)
        if "s" in flags:
            body = re.sub(r"(\\.)|(\[(?:\\.|[^\]\\])*\])|\.", lambda part: part[1] or part[2] or _ANY, body)
        try:
            found = parse_pattern(body, is_whole=True)
        except SchemaError as error:
            self._fail(error.reason, piece)
        return _in_any_case(found) if "i" in flags else found

    def _is_count(self, ahead: int) -> bool:
        """Whether what follows a brace is a number of repetitions."""
        piece = self._pieces[self._at + ahead]
        return piece.kind == "number" or piece.text == ","

    def _repeated(self, item: Expression) -> Expression:
        while True:
            if self._skip("?"):
                item = Repeat(item, 0, 1)
            elif self._skip("*"):
                item = Repeat(item, 0, None)
            elif self._skip("+"):
                item = Repeat(item, 1, None)
            elif self._skip("~"):
                least = most = self._count()
                if self._skip(".."):
                    most = self._count()
                item = self._times(item, least, most)
            elif self._skip("{"):
                least = 0 if self._piece.text == "," else self._count()
                bound: int | None = least
                if self._skip(","):
                    bound = None if self._piece.text == "}" else self._count()
                self._take("}")
                item = self._times(item, least, bound)
            else:
                return item

    def _times(self, item: Expression, least: int, most: int | None) -> Expression:
        if most is not None and most < least:
            self._fail(f"{least} to {most} times is impossible")
        return Repeat(item, least, most)

    def _count(self) -> int:
        number = int(self._take("number").text)
        if not 0 <= number <= MAX_REPEATS:
            self._fail(f"{number} times is not possible: 0 to {MAX_REPEATS} are")
        return number


def is_lark(grammar: str) -> bool:
    """Whether a grammar is in Lark's notation rather than in GBNF."""
    return _GBNF.search(grammar) is None and _LARK.search(grammar) is not None


def lark_rules(grammar: str) -> dict[str, Expression]:
    """The rules of a grammar in Lark's notation; the first one to apply is `root`.

    Raises:
        SchemaError: With the line and the reason, if it is invalid, or has something that is not supported.
    """
    num_bytes = len(grammar.encode(errors="surrogatepass"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise SchemaError(f"it has {num_bytes} bytes: at most {MAX_GRAMMAR_BYTES} work, make it smaller")
    return _Parser(grammar).rules()


def gbnf_of(grammar: str) -> str:
    """A grammar in GBNF, of one that is in either notation.

    Raises:
        SchemaError: As `lark_rules`.
    """
    return to_gbnf(lark_rules(grammar)) if is_lark(grammar) else grammar


def _pieces(text: str) -> Iterator[_Piece]:
    at, line = 0, 1
    while at < len(text):
        found = _PIECE.match(text, at)
        if found is None:
            raise SchemaError(f"line {line}: nothing begins with `{text[at : at + 1]}` in Lark's notation")
        kind, shown, value = str(found.lastgroup), found[0], None
        at = found.end()
        if kind == "word" and shown in {"%json", "%llguidance"}:
            begin = at + len(text[at:]) - len(text[at:].lstrip())
            try:
                value, at = json.JSONDecoder().raw_decode(text, begin)
            except (ValueError, RecursionError):
                raise SchemaError(f"line {line}: JSON must follow {shown}") from None
        if kind != "space":
            yield _Piece(kind, shown, line, value)
        line += text.count("\n", found.start(), at)
    yield _Piece("end", "", line)


def _joined_lines(pieces: list[_Piece]) -> Iterator[_Piece]:
    """Pieces without those line ends that end no rule."""
    if len(pieces) > _MOST_PIECES:
        raise SchemaError(f"it has {len(pieces)} parts: at most {_MOST_PIECES} work, make it smaller")
    depth = 0
    # The next piece that is no line end, from the back.
    following = ""
    goes_on = [False] * len(pieces)
    for place in range(len(pieces) - 1, -1, -1):
        goes_on[place] = following == "|"
        if pieces[place].kind != "line":
            following = pieces[place].text
    before = ""
    for piece, is_continued in zip(pieces, goes_on, strict=True):
        if piece.kind == "mark":
            depth += (piece.text in _OPENING) - (piece.text in _OPENING.values())
        if piece.kind != "line" or not (depth > 0 or is_continued or before in {"|", ":"}):
            yield piece
        if piece.kind != "line":
            before = piece.text


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _rule_name(name: str) -> str:
    """Name of a rule in GBNF, which has no underscores; none of Lark's begins with a digit."""
    return _NAMES.get(name) or name.replace("_", "-")


def _escaped(found: re.Match[str]) -> str:
    sign, *codes = found.groups()
    if sign is not None:
        return _CONTROLS.get(sign, sign)
    code = int(next(filter(None, codes)), 16)
    return chr(code) if code <= 0x10FFFF else "\ud800"


def _in_any_case(expression: Expression) -> Expression:
    """An expression with ASCII letters in upper and lower case."""

    def change(each: Expression) -> Expression:
        match each:
            case Literal(text):
                letters = [Chars(_both_cases([(ord(letter), ord(letter))])) for letter in text]
                return seq(*letters) if letters else each
            case Chars(ranges):
                return Chars(_both_cases(ranges))
            case _:
                return each

    return mapped(expression, change)


def _both_cases(ranges: Any) -> tuple[tuple[int, int], ...]:
    found = list(ranges)
    for low, high in ranges:
        for first, last, shift in ((0x41, 0x5A, 0x20), (0x61, 0x7A, -0x20)):
            if max(low, first) <= min(high, last):
                found.append((max(low, first) + shift, min(high, last) + shift))
    return merged(found)


def _without_left_recursion(expression: Expression, name: str) -> Expression:
    """A rule's expression; alternatives that begin with the rule itself repeat behind the others."""
    options = expression.options if isinstance(expression, Choice) else (expression,)
    tails, others = [], []
    for option in options:
        items = option.items if isinstance(option, Sequence) else (option,)
        if items and items[0] == Ref(name):
            tails.append(seq(*items[1:]) if items[1:] else NOTHING)
        else:
            others.append(option)
    if not tails or not others:
        return expression
    return seq(either(*others), times(either(*tails), 0, None))
