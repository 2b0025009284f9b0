"""From the bytes of a request to a checked body."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from mesh.api import unsupported
from mesh.api.json_bounds import has_at_most, max_values
from spanmesh_proto.errors import InvalidRequest, RequestTooLarge

if TYPE_CHECKING:
    from starlette.requests import Request

    from mesh.api.unknown_fields import UnknownFields

_MOST_BYTES: Final = 16 * 1024 * 1024
_LEAST_BYTES: Final = 1024 * 1024
_BYTES_PER_POSITION: Final = 256

Body = TypeVar("Body", bound=BaseModel)


def max_body_bytes(context_length: int) -> int:
    """Bytes of the largest body that is read: ample for a full context, little enough to parse in a moment.

    Parsing holds up all other answers, since it cannot be shared out among threads.
    """
    return min(_LEAST_BYTES + _BYTES_PER_POSITION * context_length, _MOST_BYTES)


async def read_body(
    request: Request, kind: type[Body], unknown: UnknownFields, *, context_length: int
) -> Body:
    """Read, parse and check a JSON body.

    The content type must be JSON's: a web page cannot send that to another origin without asking first,
    so no page can make a visitor's browser use a server on the visitor's own machine.

    Args:
        request: With the body.
        kind: What it must be.
        unknown: Where fields that nobody knows are noted.
        context_length: Positions of a session; longer ones want larger bodies.

    Raises:
        RequestTooLarge: As soon as it is known, whatever of it is still to come.
        InvalidRequest: Naming the field at fault, if it is one.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidRequest("send the body as JSON, with the header `Content-Type: application/json`")
    data = await _read(request, max_body_bytes(context_length))
    most_values = max_values(context_length)
    if not has_at_most(data, most_values):
        raise InvalidRequest(f"the body holds more than {most_values} values: send less")
    fields = _parse(data)
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise as_invalid_request(error) from None
    extra = body.model_extra or {}
    unsupported.refuse_unsupported(extra)
    unknown.note(name for name in extra if name not in unsupported.NAMES)
    return body


async def _read(request: Request, most_bytes: int) -> bytes:
    told = request.headers.get("content-length", "")
    num_bytes = int(told) if told.isdecimal() else 0
    data = bytearray()
    if num_bytes <= most_bytes:
        async for part in request.stream():
            data += part
            num_bytes = len(data)
            if num_bytes > most_bytes:
                break
    if num_bytes > most_bytes:
        raise RequestTooLarge(
            f"the body is larger than {most_bytes} bytes, which is more than a context holds"
        )
    return bytes(data)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {error.start} is wrong") from None
    except (ValueError, RecursionError):
        raise InvalidRequest(
            "the body is not usable JSON: a number is too long or it nests too deep"
        ) from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    return fields


def as_invalid_request(error: ValidationError, within: str = "") -> InvalidRequest:
    """What was wrong first, naming the field.

    Args:
        error: Of a body, or of part of one.
        within: Where in the body that part is.
    """
    # The input itself stays out of the message: it may be part of a prompt.
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = within
    for step in first["loc"]:
        param += f"[{step}]" if isinstance(step, int) else f".{step}" if param else str(step)
    message = first["msg"]
    if first["type"] == "string_unicode":
        message = "Text holds half a surrogate pair: send valid Unicode"
    return InvalidRequest(f"{param}: {message[:1].lower()}{message[1:]}", param=param or None)
