"""Marks of calls as a parser looks for them: whole, and without the white space around them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from mesh.text.answer_format import BARE_MARK, MARK, SLOTS, ArgumentTags, CallForm, CallFormat

_BETWEEN_TAGS: Final = re.compile(r"(?<=>)\s+(?=\S)")
_SLOT: Final = re.compile(f"[{SLOTS}]")
# Of an object, and of a list around it.
_OBJECT_BEGIN: Final = re.compile(r'[\[\s]*\{[^{}]*"?$')
_LIST_BEGIN: Final = re.compile(r"\[\s*$")
_NAME_KEY: Final = re.compile(r'"(\w+)":\s*"$')
_ARGUMENTS_KEY: Final = re.compile(r'"(\w+)":\s*$')
_NAMES: Final = r"([A-Za-z0-9_.-]+)"
# Never given back: several in a row would be tried in all divisions of the white space among them.
_SPACES: Final = r"\s*+"
_BLOCK, _BLOCK_END = "<tool_call>", "</tool_call>"
_MOST_CACHED: Final = 64


@dataclass(frozen=True)
class CallMarks:
    """Marks of calls."""

    blocks: tuple[str, ...]
    """With each of these a call begins, or all of them in this order."""
    tag: str
    """With this the name begins, if its mark is not whole without it; otherwise empty."""
    tag_end: str
    """With this the call ends that `tag` begins."""
    ends: tuple[str, ...]
    """These may stand behind calls, each once."""
    name_end: str
    """Behind a name that is followed by tags."""
    tags: ArgumentTags | None
    """Tags of arguments; None if they are no tagged ones."""
    is_bare: bool
    """Whether calls without marks are the whole answer."""
    name_keys: frozenset[str]
    """Members of an object that hold the name; none if the name is itself the key of the arguments."""
    arguments_keys: frozenset[str]
    """Members of an object that hold the arguments."""
    head: re.Pattern[str]
    """What is before the brace of arguments that follow a name; the name is its group."""

    @property
    def openings(self) -> tuple[str, ...]:
        """Marks with which calls begin."""
        return _shortest((*self.blocks, *filter(None, (self.tag,))))


@lru_cache(_MOST_CACHED)
def call_marks_of(calls: CallFormat) -> CallMarks:
    """Marks of a format of calls."""
    blocks: tuple[str, ...]
    tag = tag_end = ""
    before = calls.begin + calls.call
    match calls.form:
        case CallForm.OBJECT:
            blocks = _marks(_OBJECT_BEGIN.sub("", before).strip())
            ends = _marks(calls.call_end.rpartition("}")[2].strip(), calls.end.strip().lstrip("]").strip())
        case CallForm.FUNCTION:
            blocks = _marks(_LIST_BEGIN.sub("", before).strip())
            ends = _marks(calls.end.strip().lstrip("]").strip())
        case CallForm.NAMED:
            first = MARK.match(calls.call.strip())
            opening = _literal(calls.call).strip() if first is None else first[0]
            blocks = _marks(*_parts(calls.begin), opening)
            whole = (calls.call_end.strip(), calls.end.strip())
            ends = _marks(*whole, *(mark for text in whole for mark in MARK.findall(text)))
        case CallForm.TAGGED:
            parts = [*_parts(calls.begin), *_parts(calls.call)]
            end_parts = [*_parts(calls.call_end), *_parts(calls.end)]
            if parts and not parts[-1].endswith(">"):
                tag = parts.pop()
                tag_end = end_parts.pop(0) if end_parts else ""
                if not parts:
                    # Some histories leave out what most models write around calls.
                    parts, end_parts = [_BLOCK], [*end_parts, _BLOCK_END]
            blocks, ends = _marks(*parts), _marks(*end_parts)
    is_bare = not blocks and not tag
    return CallMarks(
        (BARE_MARK,) if is_bare else blocks,
        tag,
        tag_end,
        ends,
        calls.name_end.strip(),
        calls.tags,
        is_bare,
        frozenset() if calls.call.endswith('{"') else frozenset({"name", *_NAME_KEY.findall(calls.call)}),
        frozenset({"arguments", "parameters", *_ARGUMENTS_KEY.findall(calls.name_end)}),
        _head(calls, blocks),
    )


def _head(calls: CallFormat, blocks: tuple[str, ...]) -> re.Pattern[str]:
    """All of what is before a brace is optional but for the name, as models leave out much of it."""
    call = calls.call.strip()
    mark = next((each for each in blocks if call.startswith(each)), "")
    ahead = f"(?:{_flexible(call.removeprefix(mark))})?"
    behind = "".join(f"(?:{_flexible(part)})?" for part in _segments(calls.name_end.strip()))
    return re.compile(
        rf"{_SPACES}(?:{re.escape(mark)})?{_SPACES}{ahead}{_SPACES}{_NAMES}{_SPACES}{behind}{_SPACES}"
    )


def _segments(text: str) -> list[str]:
    """Parts of a text that each end with a slot, but for the last."""
    return re.findall(rf"[^{SLOTS}]*[{SLOTS}]|[^{SLOTS}]+", text)


def _flexible(text: str) -> str:
    """A regular expression for a text with slots, whatever white space it has."""
    words = (
        _SLOT.sub(r"[^\\s<>\\[\\]{}\"]*", re.sub(rf"([^{SLOTS}]+)", lambda found: re.escape(found[0]), word))
        for word in text.split()
    )
    return "".join(f"{_SPACES}{word}" for word in words) + _SPACES


def _literal(text: str) -> str:
    """A text up to its first slot."""
    return _SLOT.split(text)[0]


def _parts(text: str) -> tuple[str, ...]:
    """Marks of a text, which white space divides, up to its first slot."""
    return _marks(*_BETWEEN_TAGS.split(_literal(text).strip()))


def _marks(*texts: str) -> tuple[str, ...]:
    """Those that are not empty, each once."""
    return tuple(dict.fromkeys(filter(None, texts)))


def _shortest(marks: tuple[str, ...]) -> tuple[str, ...]:
    """Without marks that begin with another one."""
    return tuple(
        mark for mark in marks if not any(mark != other and mark.startswith(other) for other in marks)
    )
