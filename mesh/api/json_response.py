"""JSON as it goes out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Mapping


def json_bytes(value: Any) -> bytes:
    """Compact UTF-8. Half a surrogate pair, which UTF-8 cannot hold, stays a JSON escape."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response that holds one JSON value."""
    return Response(json_bytes(value), status, headers, media_type="application/json")
