"""Server-sent events, from bytes. Pure."""

from __future__ import annotations


class EventStream:
    """Cuts a stream into events, however the network cut it into pieces.

    Follows the HTML standard as far as OpenAI's servers use it: `data` lines, comments, either line end.
    Other fields are passed over.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                self._data.append(text[5:].removeprefix(b" "))
            elif not text and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
