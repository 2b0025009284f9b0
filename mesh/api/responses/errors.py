"""Errors of /v1/responses in the words of its requests, and the form of its streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mesh.api import server_sent_events
from mesh.api.errors import error_body, is_large_json, json_bytes, large_json_bytes
from mesh.api.event_stream import StreamForm
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_WORDS: Final = (("response_format.json_schema", "text.format"), ("response_format", "text.format"))


def as_responses_error(error: InvalidRequest) -> InvalidRequest:
    """An error about `response_format` as one about `text.format`."""
    message, param = error.message, error.param
    for theirs, ours in _WORDS:
        message = message.replace(theirs, ours)
        param = None if param is None else param.replace(theirs, ours)
    return InvalidRequest(message, param=param)


def numbered(events: Iterable[Mapping[str, Any]], first: int) -> bytes:
    """Events of a stream, each named by its type.

    Args:
        events: The events, in order.
        first: Number of the first one in its stream.
    """
    data = []
    for number, event in enumerate(events, first):
        fields = {**event, "sequence_number": number}
        write = large_json_bytes if is_large_json(fields) else json_bytes
        data.append(server_sent_events.event(write(fields), event["type"]))
    return b"".join(data)


def early_error(error: BaseException) -> bytes:
    """Event that ends a stream with an error before there is a response."""
    told = error_body(error)["error"]
    event = {"type": "error", "code": told["code"], "message": told["message"], "param": told["param"]}
    return numbered([event], 0)


RESPONSES_STREAM: Final = StreamForm(server_sent_events.MEDIA_TYPE, server_sent_events.comment, early_error)
"""Form of streams of responses."""
