"""Texts of clients in what a chat template renders: kept apart from the template's own marks.

A control token such as `<|im_end|>` is made where the template writes its name, never where a client, a file
or a tool wrote the same letters. So in texts of clients the characters with which names of control tokens
begin and end are replaced by stand-ins before a template sees them, one for one, and put back when the prompt
is split at control tokens: a name that holds a stand-in is no mark. Templates write `<` and `>` around texts
of clients, too, such as keys of schemas: the inner parts of names get stand-ins as well.

Templates look into texts, too: `'</think>' in content`, `content.split(…)`, `content == …`. A `ClientText`
answers such questions as the original would; where it goes through code that knows nothing of it, the
stand-ins stay in, and the text can still not become a mark.

Stand-ins are surrogates: no valid text holds one, and requests that do are refused. llama.cpp's own Jinja
engine marks the parts of its strings for the same purpose (`common/jinja`, "input marking").
"""
# ruff: noqa: D102 - the methods of `ClientText` are those of `str`

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, Self, SupportsIndex

from markupsafe import Markup, escape

from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_FIRST: Final = 0xD800
_LAST: Final = 0xDFFF
_STAND_IN: Final = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")
# White space around a text that a template may strip; a longer text is not looked at for it.
_MOST_WHITE: Final = 64
# The inner parts of shorter names, such as `s` of `</s>`, are in ordinary texts all the time.
_LEAST_INNER_CHARS: Final = 3


class Marking:
    """Stand-ins for the characters with which the names of control tokens begin and end.

    Args:
        names: Names of control tokens, such as `<|im_end|>`.
    """

    def __init__(self, names: Iterable[str]) -> None:
        all_names = sorted(set(names))
        ends = sorted({end for name in all_names for end in (name[0], name[-1])})
        others = sorted(set("".join(all_names)).difference(ends))
        # A vocabulary with more of them than surrogates would be one of random bytes.
        pairs = list(zip(map(ord, [*ends, *others]), range(_FIRST, _LAST + 1), strict=False))
        self._of_all = dict(pairs)
        self._of_ends = dict(pairs[: len(ends)])
        self._originals = {stand_in: original for original, stand_in in pairs}
        self._ends = re.compile("[" + re.escape("".join(ends)) + "]") if ends else None
        # Changes of case are frequent in templates. No text of a client is within two names.
        self._names = "\ud800".join(all_names).lower()
        self._most_chars = max(map(len, all_names), default=0)
        self._inner = _inner_parts(all_names)

    def marked(self, text: str) -> str:
        """A client's text for a template: itself if it has no such character.

        Raises:
            InvalidRequest: If it has a lone surrogate.
        """
        require_unicode(text)
        if self._ends is None or not text:
            return text
        if self._is_within_name(text):
            marked = text.translate(self._of_all)
        else:
            marked = text if self._inner is None else self._inner.sub(self._replaced, text)
            if self._ends.search(text) is not None:
                marked = marked.translate(self._of_ends)
            elif marked is text:
                return text
        return ClientText(marked, text, self)

    def _is_within_name(self, text: str) -> bool:
        """Whether a template could write the rest of a name around a text, or around some of them."""
        if len(text) > self._most_chars + _MOST_WHITE:
            return False
        stripped = text.strip()
        return stripped != "" and stripped.lower() in self._names

    def _replaced(self, found: re.Match[str]) -> str:
        return found[0].translate(self._of_all)

    def unmarked(self, text: str) -> str:
        """The original of a text; as long as the text."""
        # The methods of `str`, since a `ClientText` answers for its original.
        return text if str.isascii(text) else str.translate(text, self._originals)

    def recognised(self, value: Any) -> Any:
        """Result of a template: as a client's text again if it holds one."""
        if type(value) is str and not value.isascii() and _STAND_IN.search(value) is not None:
            return ClientText(value, self.unmarked(value), self)
        return value

    def marked_all(self, value: Any) -> Any:
        """JSON with each text as a client's, keys too."""
        if isinstance(value, str):
            return self.marked(value)
        if isinstance(value, list | tuple):
            return [self.marked_all(each) for each in value]
        if isinstance(value, dict):
            return {self.marked(key): self.marked_all(each) for key, each in value.items()}
        return value

    def original_of(self, value: Any) -> Any:
        """JSON with each text as the client wrote it."""
        if isinstance(value, str):
            return self.unmarked(value)
        if isinstance(value, list | tuple):
            return [self.original_of(each) for each in value]
        if isinstance(value, dict):
            return {self.original_of(key): self.original_of(each) for key, each in value.items()}
        return value


class ClientText(str):
    """A text with stand-ins, which templates see as its original; the `str` itself has the stand-ins.

    Methods that look into the text look into the original; those that return a part return a `ClientText`.

    Args:
        text: With stand-ins.
        original: As the client wrote it, equally long.
        marking: Makes the stand-ins.
    """

    __slots__ = ("_marking", "_original")

    _marking: Marking
    _original: str

    def __new__(cls, text: str, original: str, marking: Marking) -> Self:
        """See the class."""
        made = super().__new__(cls, text)
        made._original = original
        made._marking = marking
        return made

    def _part(self, start: int, stop: int) -> ClientText:
        return self[start:stop]

    def _stretch(self, part: str, at: int) -> ClientText:
        return self._part(at, at + len(part))

    # Questions.

    def __contains__(self, part: object) -> bool:
        return _original(part) in self._original

    def __eq__(self, other: object) -> bool:
        return bool(self._original == _original(other))

    def __ne__(self, other: object) -> bool:
        return bool(self._original != _original(other))

    def __lt__(self, other: str) -> bool:
        return self._original < str(_original(other))

    def __le__(self, other: str) -> bool:
        return self._original <= str(_original(other))

    def __gt__(self, other: str) -> bool:
        return self._original > str(_original(other))

    def __ge__(self, other: str) -> bool:
        return self._original >= str(_original(other))

    def __hash__(self) -> int:
        return hash(self._original)

    def _asked(name: str) -> Callable[..., Any]:  # noqa: N805 - runs in the class's body
        method = getattr(str, name)

        def ask(self: ClientText, *values: Any) -> Any:
            return method(self._original, *map(_original, values))

        ask.__name__ = name
        return ask

    startswith, endswith = _asked("startswith"), _asked("endswith")
    find, rfind, index, rindex, count = map(_asked, ("find", "rfind", "index", "rindex", "count"))
    isalnum, isalpha, isascii, isdecimal = map(_asked, ("isalnum", "isalpha", "isascii", "isdecimal"))
    isdigit, isidentifier, islower = map(_asked, ("isdigit", "isidentifier", "islower"))
    isnumeric, isprintable, isspace = map(_asked, ("isnumeric", "isprintable", "isspace"))
    istitle, isupper = map(_asked, ("istitle", "isupper"))

    # Parts.

    def __getitem__(self, key: SupportsIndex | slice) -> ClientText:
        return ClientText(str.__getitem__(self, key), self._original[key], self._marking)

    def __iter__(self) -> Iterator[str]:
        return (self._part(at, at + 1) for at in range(len(self)))

    def strip(self, chars: str | None = None, /) -> ClientText:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> ClientText:
        return self._part(len(self) - len(self._original.lstrip(_original(chars))), len(self))

    def rstrip(self, chars: str | None = None, /) -> ClientText:
        return self._part(0, len(self._original.rstrip(_original(chars))))

    def removeprefix(self, prefix: str, /) -> ClientText:
        return self._part(len(self) - len(self._original.removeprefix(_original(prefix))), len(self))

    def removesuffix(self, suffix: str, /) -> ClientText:
        return self._part(0, len(self._original.removesuffix(_original(suffix))))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._divided(self._original.split(_original(sep), maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._divided(self._original.rsplit(_original(sep), maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:  # noqa: FBT001, FBT002 - as `str` has it
        found: list[str] = []
        at = 0
        whole = self._original.splitlines(keepends=True)
        for line, shown in zip(whole, self._original.splitlines(keepends), strict=True):
            found.append(self._stretch(shown, at))
            at += len(line)
        return found

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._in_three(self._original.partition(_original(sep)))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._in_three(self._original.rpartition(_original(sep)))

    def _in_three(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        first, second, third = parts
        middle = len(first) + len(second)
        return self._stretch(first, 0), self._stretch(second, len(first)), self._stretch(third, middle)

    def _divided(self, parts: list[str], sep: str | None) -> list[str]:
        found: list[str] = []
        at = 0
        for part in parts:
            if sep is None:
                at = self._original.index(part, at)
            found.append(self._stretch(part, at))
            at += len(part) + (0 if sep is None else len(sep))
        return found

    # Other texts.

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        # Templates that write a list or an object as it is get Python's form of it.
        return self._marking.marked(repr(self._original))

    def __html__(self) -> str:
        # Some templates call parts of a prompt HTML by `safe`, and what they join to those is escaped.
        return str.__str__(self._marking.marked(str(escape(self._original))))

    def __add__(self, other: str) -> str:
        if isinstance(other, Markup):
            return NotImplemented  # it escapes what is ahead of it
        return self._joined(str(self), other)

    def __radd__(self, other: str) -> str:
        return self._joined(other, str(self))

    def _joined(self, first: str, second: str) -> str:
        joined = str.__add__(first, second)
        return ClientText(joined, self._marking.unmarked(joined), self._marking)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        replaced = new.join(self.split(old, count)) if old else str.replace(self, old, new, count)
        return str(self._marking.recognised(replaced))

    def _changed(name: str) -> Callable[..., Any]:  # noqa: N805
        method = getattr(str, name)

        def change(self: ClientText, *values: Any) -> Any:
            return self._marking.marked(method(self._original, *map(_original, values)))

        change.__name__ = name
        return change

    lower, upper, casefold, swapcase = map(_changed, ("lower", "upper", "casefold", "swapcase"))
    title, capitalize, expandtabs = map(_changed, ("title", "capitalize", "expandtabs"))


def require_unicode(text: str) -> None:
    """Check a client's text.

    Raises:
        InvalidRequest: If it has a lone surrogate, which UTF-8 cannot encode.
    """
    if (found := None if text.isascii() else _STAND_IN.search(text)) is not None:
        raise InvalidRequest(
            f"the text has half a surrogate pair at character {found.start()}: send valid Unicode"
        )


def _inner_parts(names: Iterable[str]) -> re.Pattern[str] | None:
    """Finds what is between the first and the last character of a name; None without such names."""
    parts = {name[1:-1] for name in names if len(name) >= _LEAST_INNER_CHARS + 2}
    return re.compile(alternatives(parts)) if parts else None


def alternatives(names: Iterable[str]) -> str:
    """A regular expression for some names, the longest first, as a tree.

    `re` tries alternatives one after another: in a tree each letter of a text is compared with few of them.
    """
    tree: dict[str, Any] = {}
    for name in names:
        branch = tree
        for letter in name:
            branch = branch.setdefault(letter, {})
        branch[""] = {}
    return _expression(tree)


def _expression(tree: dict[str, Any]) -> str:
    parts = []
    for first, behind in sorted(tree.items(), reverse=True):  # the end of a name comes last
        stem, branch = first, behind
        while len(branch) == 1 and "" not in branch:  # no group where there is no fork
            ((letter, branch),) = branch.items()
            stem += letter
        parts.append(re.escape(stem) + (_expression(branch) if branch and set(branch) != {""} else ""))
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _original(value: Any) -> Any:
    if isinstance(value, ClientText):
        return value._original  # noqa: SLF001 - of the same kind
    return tuple(map(_original, value)) if isinstance(value, tuple) else value
