"""Server-sent events: what events and comments are on the wire, by WHATWG's format."""

from __future__ import annotations

from typing import Final

MEDIA_TYPE: Final = "text/event-stream"


def event(data: bytes, name: str = "") -> bytes:
    """An event.

    Args:
        data: Its data, in one line.
        name: Its name; empty for none.
    """
    named = b"event: " + name.encode() + b"\n" if name else b""
    return named + b"data: " + data + b"\n\n"


def comment(text: str) -> bytes:
    """A comment, which clients pass over.

    Args:
        text: Its text, in one line.
    """
    return b": " + text.encode() + b"\n\n"
