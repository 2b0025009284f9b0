"""Pictures in request bodies: the forms in which clients send them, and texts that hold some.

Only what travels within the request is taken. Nothing is fetched from an address that a client names, and
no file is read: a server that does so can be sent into the network behind it.
"""

from __future__ import annotations

import binascii
import re
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from mesh.api.request_parsing import SHOWN_CHARS, StrictBody
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PICTURE_TYPES: Final = ("image_url", "input_image", "image")
"""Types of parts with a picture: of chats, of responses, of Anthropic's messages and of MCP's results."""
LOW_SIDE: Final = 512
"""Pixels of the longer side of a picture of which a client wants little detail."""
_DETAILS: Final = ("low", "high", "auto", "original")
# RFC 2397. A type and its parameters are short; the rest of the address is not searched.
_DATA_URL: Final = re.compile(r"data:([^,;\s]{0,100})((?:;[^,;\s]{0,100}){0,4}),", re.IGNORECASE)
_WHITE: Final = b" \t\r\n"
# The two characters of base64 that have others in URLs.
_OF_URLS: Final = bytes.maketrans(b"-_", b"+/")
# Reading so many holds the interpreter's lock for about a millisecond.
_STEP_CHARS: Final = 2**20
_SEND_DATA: Final = "send the picture itself, as data:image/png;base64,…"

Content = TypeVar("Content")


class ImageUrl(StrictBody):
    """Address of a picture, which holds the picture itself."""

    url: str
    detail: Literal["low", "high", "auto", "original"] | None = None


class ImageUrlPart(StrictBody):
    """A picture of a chat, for the API's document."""

    type: Literal["image_url"]
    image_url: str | ImageUrl


class InputImage(StrictBody):
    """A picture of a response, likewise."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["low", "high", "auto", "original"] | None = None


class ImageSource(StrictBody):
    """A picture in base64."""

    type: Literal["base64"]
    media_type: str | None = None
    data: str


class ImageBlock(StrictBody):
    """A picture of Anthropic's messages, likewise."""

    type: Literal["image"]
    source: ImageSource


class PicturePart(BaseModel):
    """A picture as it was sent."""

    model_config = ConfigDict(frozen=True, strict=True)

    text: str
    """The field that holds it, in base64."""
    start: int = 0
    """Where base64 begins in it: behind the head of a `data:` URL."""
    detail: Literal["low", "high", "auto", "original"] | None = None
    """Wanted detail; None leaves it to the server."""
    kind: str = "image"
    """Type of the part."""
    where: str = ""
    """Path of the part, for errors: within its message, or within the request."""
    fault: str = ""
    """Why it cannot be read, of a tool's result; empty if nothing is known to be wrong."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the picture at most, before it is decoded from base64."""
        return (len(self.text) - self.start) * 3 // 4

    @property
    def most_side(self) -> int:
        """Pixels of the longer side to which it is scaled down; 0 for none."""
        return LOW_SIDE if self.detail == "low" else 0

    def at(self, where: str) -> PicturePart:
        """The same with its path behind that of its message."""
        return self.model_copy(update={"where": f"{where}.{self.where}"})

    def data(self) -> bytes:
        """Bytes of the picture; for a thread, in steps between which other threads go on.

        Raises:
            InvalidRequest: If the text is no base64, or there is none.
        """
        if self.fault:
            raise InvalidRequest(self.fault, param=self.where)
        found, rest = [], b""
        try:
            for at in range(self.start, len(self.text), _STEP_CHARS):
                step = rest + self.text[at : at + _STEP_CHARS].encode("ascii").translate(_OF_URLS, _WHITE)
                whole = len(step) // 4 * 4
                found.append(binascii.a2b_base64(step[:whole], strict_mode=True))
                rest = step[whole:]
            if rest:
                found.append(binascii.a2b_base64(rest.ljust(4, b"="), strict_mode=True))
        except ValueError:
            raise InvalidRequest(
                f"{self.where}: the picture is no base64: {_SEND_DATA}", param=self.where
            ) from None
        return b"".join(found)


class PicturedText(BaseModel):
    """Text of a message with pictures in it."""

    model_config = ConfigDict(frozen=True, strict=True)

    parts: tuple[str | PicturePart, ...]
    """Texts and pictures in their order, each text on lines of its own except beside pictures."""
    prefix: str = ""
    """Text ahead of all."""

    @property
    def pictures(self) -> tuple[PicturePart, ...]:
        """The pictures alone."""
        return tuple(part for part in self.parts if isinstance(part, PicturePart))

    def at(self, where: str) -> PicturedText:
        """The same with the paths of its pictures behind that of its message."""
        parts = tuple(part.at(where) if isinstance(part, PicturePart) else part for part in self.parts)
        return self.model_copy(update={"parts": parts})


def is_picture(part: Any) -> bool:
    """Whether a part of a message is a picture by its type."""
    return isinstance(part, dict) and part.get("type") in PICTURE_TYPES


def picture_of(part: Mapping[str, Any], index: int) -> PicturePart:
    """The picture of a part; its data are looked at later.

    Args:
        part: The part, of a type of `PICTURE_TYPES`, as JSON.
        index: Its index in the message.

    Raises:
        PydanticCustomError: If it has none in a form that is read here; with the remedy.
    """
    kind = part["type"]
    if kind == "image":
        text, start, detail = *_source(part, index), None
    else:
        text, start, detail = _image_url(part, index)
    return PicturePart(text=text, start=start, detail=detail, kind=kind, where=f"content[{index}]")


def _image_url(part: Mapping[str, Any], index: int) -> tuple[str, int, Any]:
    given: Any = part.get("image_url")
    detail: Any = part.get("detail")
    if part.get("file_id") is not None:
        raise _refusal(index, "has a file_id, and this server keeps no files", _SEND_DATA)
    if isinstance(given, dict):
        given, detail = given.get("url"), given.get("detail", detail)
    if not isinstance(given, str):
        raise _refusal(index, "has no image_url, a string or an object with url", _SEND_DATA)
    if detail is not None and detail not in _DETAILS:
        raise _refusal(index, f"has the detail {_shown(detail)}", f"send one of {', '.join(_DETAILS)}")
    return given, _data_start(given, index), detail


def _source(part: Mapping[str, Any], index: int) -> tuple[str, int]:
    source = part.get("source")
    if source is None and isinstance(part.get("data"), str):
        # A result of a tool as MCP has it.
        return part["data"], 0
    if not isinstance(source, dict):
        raise _refusal(index, "has no source, an object", 'send {"type": "base64", "data": …}')
    kind, data = source.get("type"), source.get("data")
    if kind == "url" and isinstance(source.get("url"), str):
        return source["url"], _data_start(source["url"], index)
    if kind != "base64":
        raise _refusal(
            index,
            f"has a source of type {_shown(kind)}, and this server keeps no files",
            "send one of type base64",
        )
    if not isinstance(data, str):
        raise _refusal(index, "has a source without data, a string", "send the picture in base64")
    return data, 0


def _data_start(url: str, index: int) -> int:
    """Where base64 begins in a `data:` URL."""
    found = _DATA_URL.match(url)
    if found is None:
        raise _refusal(index, f"has the URL {_shown(url)}, and this server fetches nothing", _SEND_DATA)
    if not found[2].lower().endswith(";base64"):
        raise _refusal(index, "has a data: URL that is not in base64", _SEND_DATA)
    return found.end()


def _shown(value: Any) -> str:
    return repr(value[:SHOWN_CHARS]) if isinstance(value, str) else "that is no string"


def _refusal(index: int, what: str, remedy: str) -> PydanticCustomError:
    return PydanticCustomError(
        "picture", "part {index} {what}: {remedy}", {"index": index, "what": what, "remedy": remedy}
    )


def joined(parts: Iterable[str | PicturePart]) -> str | PicturedText:
    """Parts of a message as its text."""
    found = tuple(parts)
    texts = [part for part in found if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(found) else PicturedText(parts=found)


def placed(content: Content, where: str) -> Content:
    """Content of a message with the paths of its pictures behind that of the message."""
    return content.at(where) if isinstance(content, PicturedText) else content  # type: ignore[return-value]


def pictures_in(messages: Iterable[Mapping[str, Any]]) -> Iterator[PicturePart]:
    """The pictures of a conversation, in their order."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, PicturedText):
            yield from content.pictures
