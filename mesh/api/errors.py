"""Errors as JSON responses."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import Response

from spanmesh_proto.errors import MeshError, Unauthorized, wire_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.exceptions import HTTPException
    from starlette.requests import Request


def json_bytes(value: Any) -> bytes:
    """Compact UTF-8. Half a surrogate pair, which UTF-8 cannot hold, stays a JSON escape."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response that holds one JSON value."""
    return Response(json_bytes(value), status, headers, media_type="application/json")


# Too many requests, and nobody there to answer: both pass.
_WORTH_A_RETRY: Final = frozenset({429, 503})
_RETRY_AFTER_S: Final = 5
_UNEXPECTED: Final = "something went wrong inside the server; its log has the reason under this request's id"


def error_body(error: BaseException) -> dict[str, Any]:
    """Any exception as an error object. The text of one that is not ours stays here: it may hold anything."""
    wire = wire_of(error)
    message, param = (error.message, error.param) if isinstance(error, MeshError) else (_UNEXPECTED, None)
    return _error_object(message, wire.kind, wire.code, param)


def error_response(error: BaseException) -> Response:
    """Any exception as a response."""
    headers = {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    status = wire_of(error).http
    if status in _WORTH_A_RETRY:
        retry_after_s = error.retry_after_s if isinstance(error, MeshError) else None
        headers["Retry-After"] = str(retry_after_s or _RETRY_AFTER_S)
    return json_response(error_body(error), status, headers)


async def on_mesh_error(_request: Request, error: Exception) -> Response:
    """Exception handler for everything that we raise on purpose."""
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler for what the framework refuses: unknown routes, wrong methods."""
    http: HTTPException = error  # type: ignore[assignment]
    what = f"{request.method} {request.url.path}"
    code, message = {
        404: (
            "not_found",
            f"{what} does not exist here: did you mean /v1/chat/completions or /v1/models?",
        ),
        405: ("method_not_allowed", f"{what}: this path takes another method"),
    }.get(http.status_code, ("invalid_request_error", f"{what}: {HTTPStatus(http.status_code).phrase}"))
    body = _error_object(message, "invalid_request_error", code, None)
    return json_response(body, http.status_code, http.headers)


def _error_object(message: str, kind: str, code: str, param: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
