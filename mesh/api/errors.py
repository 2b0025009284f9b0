"""Errors as JSON responses."""

from __future__ import annotations

import asyncio
import json
import math
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import Response

from spanmesh_proto.errors import MeshError, Unauthorized, wire_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from starlette.exceptions import HTTPException
    from starlette.requests import Request

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
# Members of a container that are written in one step, unless they are large; those of a shorter one are
# written one by one.
_STEP: Final = 64
# Characters of a text that are written in one step.
_STEP_CHARS: Final = 64 * 1024
# What is written in a millisecond or so: characters, of which each value counts as some.
_MOST_AT_ONCE_CHARS: Final = 256 * 1024
_CHARS_OF_VALUE: Final = 16
# Too many requests, or no stage to answer: both are temporary.
_WORTH_A_RETRY: Final = frozenset({429, 503})
_RETRY_AFTER_S: Final = 5
# Paths of OpenAI's API that this server lacks, and what to do instead.
_MISSING: Final = {
    "/conversations": "send previous_response_id, or keep conversations at the client, as SQLiteSession of"
    " openai-agents does",
    "/responses/compact": "send truncation auto with a response, which leaves out the oldest turns",
}
_UNEXPECTED: Final = "internal error: the server's log has the reason under this request's id"


def json_bytes(value: Any) -> bytes:
    """Compact JSON in UTF-8, of anything that `json.loads` returns.

    A lone surrogate, which UTF-8 cannot encode, stays a JSON escape. NaN and infinity, which JSON lacks,
    become null: requests may hold them, the latter also as `1e999`.
    """
    return _json_text(value).encode("utf-8", "backslashreplace")


def large_json_bytes(value: Any) -> bytes:
    """As `json_bytes`; see `json_steps`."""
    return b"".join(step.encode("utf-8", "backslashreplace") for step in json_steps(value))


def json_size(value: Any) -> int:
    """Length of `large_json_bytes`, in bytes; see `json_steps`."""
    return sum(len(step.encode("utf-8", "backslashreplace")) for step in json_steps(value))


def is_large_json(value: Any) -> bool:
    """Whether writing a value as JSON takes so long that it belongs in a thread; looks at no more of it."""
    left, waiting = _MOST_AT_ONCE_CHARS, [value]
    while waiting:
        each = waiting.pop()
        left -= _CHARS_OF_VALUE
        if isinstance(each, str):
            left -= len(each)
        elif isinstance(each, dict | list | tuple):
            if _CHARS_OF_VALUE * len(each) > left:
                return True
            waiting += each
            if isinstance(each, dict):
                waiting += each.values()
        if left < 0:
            return True
    return False


def json_steps(value: Any) -> Iterator[str]:
    """Compact JSON in pieces, for a thread: between them other threads have the interpreter."""
    if isinstance(value, str) and len(value) > _STEP_CHARS:
        yield '"'
        for start in range(0, len(value), _STEP_CHARS):
            yield _json_text(value[start : start + _STEP_CHARS])[1:-1]
        yield '"'
        return
    if isinstance(value, dict) and value:
        members: list[Any] = list(value.items())
        begin, end = "{", "}"
    elif isinstance(value, list | tuple) and value:
        members = list(value)
        begin, end = "[", "]"
    else:
        yield _json_text(value)
        return
    for start in range(0, len(members), _STEP):
        step = members[start : start + _STEP]
        if len(members) > _STEP and not is_large_json(step):
            yield begin if not start else ","
            yield _json_text(dict(step) if begin == "{" else step)[1:-1]
            continue
        for index, member in enumerate(step, start):
            yield "," if index else begin
            if begin == "{":
                # Keys may be numbers, which JSON writes as texts.
                yield _json_text({member[0]: 0})[1:-2]
                member = member[1]  # noqa: PLW2901 - its value
            yield from json_steps(member)
    yield end


def _json_text(value: Any) -> str:
    try:
        return _ENCODER.encode(value)
    except ValueError:
        return _ENCODER.encode(_without_nonfinite(value))


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nonfinite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(each) for each in value]
    return value


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with one JSON value."""
    return Response(json_bytes(value), status, headers, media_type="application/json")


async def written_response(value: Any) -> Response:
    """`json_response` of a value that may be large, which is then written in a thread."""
    if not is_large_json(value):
        return json_response(value)
    return Response(await asyncio.to_thread(large_json_bytes, value), media_type="application/json")


def error_body(error: BaseException) -> dict[str, Any]:
    """Error object of an exception. Texts of foreign exceptions are left out: they may contain prompts."""
    wire = wire_of(error)
    message, param = (error.message, error.param) if isinstance(error, MeshError) else (_UNEXPECTED, None)
    return _error_object(message, wire.kind, wire.code, param)


def error_response(error: BaseException) -> Response:
    """Response for an exception."""
    headers = {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    status = wire_of(error).http
    if status in _WORTH_A_RETRY:
        retry_after_s = error.retry_after_s if isinstance(error, MeshError) else None
        headers["Retry-After"] = str(retry_after_s or _RETRY_AFTER_S)
    return json_response(error_body(error), status, headers)


async def on_mesh_error(_request: Request, error: Exception) -> Response:
    """Exception handler for all errors of this project."""
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler for errors of the framework: unknown routes, wrong methods."""
    http: HTTPException = error  # type: ignore[assignment]
    what = f"{request.method} {request.url.path}"
    path = request.url.path.removeprefix("/v1")
    instead = next((why for begin, why in _MISSING.items() if f"{path}/".startswith(f"{begin}/")), None)
    if instead is not None:
        message = f"{what} is not supported: {instead}"
        body = _error_object(message, "invalid_request_error", "not_found", None)
        return json_response(body, HTTPStatus.NOT_FOUND)
    code, message = {
        404: (
            "not_found",
            f"{what} does not exist here: did you mean /v1/chat/completions or /v1/models?",
        ),
        405: ("method_not_allowed", f"{what}: this path needs another method"),
    }.get(http.status_code, ("invalid_request_error", f"{what}: {HTTPStatus(http.status_code).phrase}"))
    body = _error_object(message, "invalid_request_error", code, None)
    return json_response(body, http.status_code, http.headers)


def _error_object(message: str, kind: str, code: str, param: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
