"""Web page at / and its files.

They contain nothing of this mesh. The page requests its data itself, with the key that its user enters.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final, NamedTuple

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.types import Scope

router = APIRouter()
_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS: Final = {
    # No foreign resources, nothing inline, no frames; text never becomes markup.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFile(NamedTuple):
    """One file of the page."""

    body: bytes
    """Content, as in the package."""
    content_type: str
    """By its suffix."""
    etag: str
    """Hash of its content."""


@cache
def page_files() -> dict[str, PageFile]:
    """Files by path, `/` first."""
    found = {}
    for file in sorted(files("mesh.web").iterdir(), key=lambda each: each.name):
        content_type = _TYPES.get(file.name.rpartition(".")[2])
        if content_type is not None:
            body = file.read_bytes()
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            found[path] = PageFile(body, content_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return found


def page_answer(scope: Scope, *, has_keys: bool) -> Response | None:
    """Files of the page, and the page as the answer to a missing key; None for other requests.

    Args:
        scope: The request, which no key gate has seen.
        has_keys: Whether the API needs keys.
    """
    path = scope["path"]
    if path not in page_files():
        return None
    if path != "/":
        return _response(path, scope)
    # The page asks for the key; a browser shows the body of a 401.
    return _response("/", scope, status=401) if has_keys and _is_browser_without_key(scope) else None


@router.get("/", include_in_schema=False, response_model=None)
async def page(request: Request) -> Response:
    """The page itself, for those with a key; without one it comes with a 401: see `page_answer`."""
    return _response("/", request.scope)


def _is_browser_without_key(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"authorization" not in headers and b"text/html" in headers.get(b"accept", b"")


def _response(path: str, scope: Scope, *, status: int = 200) -> Response:
    file = page_files()[path]
    headers = {**_HEADERS, "ETag": file.etag}
    if status == 401:
        headers |= {"Cache-Control": "no-store", "WWW-Authenticate": "Bearer"}
    elif dict(scope["headers"]).get(b"if-none-match") == file.etag.encode():
        return Response(status_code=304, headers=headers)
    return Response(file.body, status, {**headers, "Content-Type": file.content_type})
