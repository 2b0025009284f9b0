"""`text.format` of a response: the same as `response_format` of a chat, written another way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mesh.api.schemas import JsonSchemaBody, ResponseFormatBody
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from mesh.api.responses.schemas import ResponsesBody

_WORDS: Final = (("response_format.json_schema", "text.format"), ("response_format", "text.format"))


def in_chat_words(body: ResponsesBody) -> ResponsesBody:
    """The body with `response_format` in place of `text.format`.

    Raises:
        InvalidRequest: If it has both.
    """
    wanted = None if body.text is None else body.text.format
    if wanted is None or wanted.type == "text":
        return body
    if body.response_format is not None:
        raise InvalidRequest(
            "text.format and response_format are the same: send one of them", param="text.format"
        )
    schema = None
    if wanted.type == "json_schema":
        given = {"schema": wanted.schema_} if "schema_" in wanted.model_fields_set else {}
        schema = JsonSchemaBody.model_validate({"name": wanted.name, **given})
    as_chat = ResponseFormatBody(type=wanted.type, json_schema=schema)
    return body.model_copy(update={"response_format": as_chat})


def in_own_words(error: InvalidRequest) -> InvalidRequest:
    """An error about `response_format` as one about `text.format`."""
    message, param = error.message, error.param
    for theirs, ours in _WORDS:
        message = message.replace(theirs, ours)
        param = None if param is None else param.replace(theirs, ours)
    return InvalidRequest(message, param=param)
