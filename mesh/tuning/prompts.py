"""Prompts whose answers are recorded: lines of a file, and user turns that the model writes itself."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from spanmesh_proto.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_OWN: Final = re.compile(r"own:(\d{1,6})")
_FORMS: Final = 'write {"prompt": "…"}, {"messages": […]} or, as Spec-Bench, {"turns": ["…"]}'
_MOST_LINE_BYTES: Final = 4 << 20
_NAME_CHARS: Final = 16
# Turns of the user, of one prompt: what is beyond is no chat that a person had.
_MOST_TURNS: Final = 64


@dataclass(frozen=True)
class Prompt:
    """What is asked, turn by turn."""

    name: str
    """By which its recorded answers are known."""
    turns: tuple[str, ...]
    """Texts of the user; of a raw prompt one, as the model reads it."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Messages before the first turn."""


@dataclass(frozen=True)
class OwnPrompts:
    """Prompts that the model writes itself."""

    count: int
    """How many."""


def read_prompts(words: str, path: Path, *, is_raw: bool) -> list[Prompt] | OwnPrompts:
    """What a command is asked to record.

    Args:
        words: `own:N`, or the path as it was written.
        path: A file of JSON lines.
        is_raw: Whether prompts are no chats.

    Raises:
        ModelError: If the file cannot be read, or with the number of a line that is no prompt.
    """
    own = _OWN.fullmatch(words)
    if own is not None:
        if is_raw or not int(own[1]):
            raise ModelError(f"{words}: the model writes one chat or more: leave out --raw, or name a file")
        return OwnPrompts(int(own[1]))
    try:
        with path.open("rb") as file:
            prompts = [_prompt(path, number, line, is_raw=is_raw) for number, line in _lines(path, file)]
    except OSError as error:
        raise ModelError(
            f"{words} cannot be read: {error.strerror or error}; name a file of prompts, or own:N for N that "
            "the model writes itself"
        ) from error
    if not prompts:
        raise ModelError(f"{words} holds no prompt: {_FORMS}, one a line")
    return prompts


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(_MOST_LINE_BYTES + 1):
        number += 1
        if len(line) > _MOST_LINE_BYTES:
            raise ModelError(f"line {number} of {path} has more than {_MOST_LINE_BYTES} bytes: shorten it")
        if line.strip():
            yield number, line


def _prompt(path: Path, number: int, line: bytes, *, is_raw: bool) -> Prompt:
    try:
        said = json.loads(line)
        # A half of a pair of surrogates is no text that could be sent.
        json.dumps(said, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise ModelError(f"line {number} of {path} is no JSON: {_FORMS}") from None
    found = _turns(said) if isinstance(said, dict) else None
    if found is None:
        raise ModelError(f"line {number} of {path} is no prompt: {_FORMS}")
    messages, turns = found
    if is_raw and (messages or len(turns) > 1):
        raise ModelError(f'line {number} of {path} is a chat: write {{"prompt": "…"}}, or leave out --raw')
    # Of the beginning, so that what goes on from it is known as the same.
    beginning = json.dumps([*messages, turns[0]], sort_keys=True).encode()
    name = hashlib.sha256(beginning).hexdigest()[:_NAME_CHARS]
    return Prompt(name, turns, messages)


def _turns(said: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]] | None:
    """Messages before the first turn, and the turns; None if the line has none of the forms."""
    match said:
        case {"prompt": str(text)} if text:
            return (), (text,)
        case {"turns": [str(), *_] as turns} if _are_texts(turns):
            return (), tuple(turns)
        case {"messages": [*before, {"role": "user", "content": str(text)}]} if text:
            if all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in before):
                return tuple(before), (text,)
    return None


def _are_texts(turns: Sequence[Any]) -> bool:
    return len(turns) <= _MOST_TURNS and all(isinstance(turn, str) and turn for turn in turns)
