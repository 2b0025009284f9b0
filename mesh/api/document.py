"""The API as an OpenAPI document at `/openapi.json`: what routes say of themselves, and the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from mesh.api.answer_schemas import ErrorBody

if TYPE_CHECKING:
    from pydantic import BaseModel

_REF: Final = "#/components/schemas/{model}"
# What any route may answer, whatever its own work is.
_ANYWHERE: Final = {
    400: "The request is malformed.",
    401: "An API key is needed, or another one.",
    421: "The Host header names another machine, and no API key is asked for.",
    429: "The API key has used up its share, or the waiting line is full.",
    503: "The model is not there yet or any more, or too many connections are open.",
}
_ELSEWHERE: Final = {
    404: "The model is not served here.",
    413: "The body is too large.",
    501: "This is not done here.",
}
_RETRY: Final = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}
_WITH_RETRY: Final = frozenset({429, 503})
_SCHEME: Final = "key"
# Those that routes say they take.
_bodies: set[type[BaseModel]] = set()


def answers(ok: type[BaseModel], *also: int, is_streamed: bool = False) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: one good answer, and all the bad ones.

    Args:
        ok: The body of a 200.
        also: Statuses that not every route has.
        is_streamed: Whether a 200 may be a stream of events instead.
    """
    good: dict[str, Any] = {"model": ok}
    if is_streamed:
        good["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: good, **refuses(*also)}


def refuses(*also: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route, only the bad ones.

    Args:
        also: Statuses that not every route has.
    """
    texts = _ANYWHERE | {status: _ELSEWHERE[status] for status in also}
    return {
        status: {"model": ErrorBody, "description": texts[status]}
        | ({"headers": _RETRY} if status in _WITH_RETRY else {})
        for status in sorted(texts)
    }


def answers_with(schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers other JSON than an object."""
    return {**answers(ErrorBody), 200: {"content": {"application/json": {"schema": schema}}}}


def answers_text(description: str, media_type: str = "text/plain") -> dict[int | str, dict[str, Any]]:
    """`responses` of a route whose good answer is no JSON."""
    content = {media_type: {"schema": {"type": "string"}}}
    return {**answers(ErrorBody), 200: {"description": description, "content": content}}


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its body itself."""
    _bodies.add(body)
    schema = {"$ref": _REF.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class DocumentedApp(FastAPI):
    """FastAPI, which knows the routes; the bodies that they read themselves are added."""

    def openapi(self) -> dict[str, Any]:
        """The document; made once."""
        if self.openapi_schema is None:
            document = super().openapi()
            components = document["components"]
            named = sorted(_bodies, key=lambda body: body.__name__)
            _, bodies = models_json_schema([(body, "validation") for body in named], ref_template=_REF)
            components["schemas"] |= bodies["$defs"]
            components["securitySchemes"] = {_SCHEME: {"type": "http", "scheme": "bearer"}}
            document["security"] = [{_SCHEME: []}]
            for path in document["paths"].values():
                for operation in path.values():
                    # Paths hold text only, so that this error of FastAPI's cannot come.
                    operation["responses"].pop("422", None)
                    if "501" in operation["responses"]:
                        # Nor can a good answer, which FastAPI takes for granted.
                        operation["responses"].pop("200", None)
            for name in ("HTTPValidationError", "ValidationError"):
                components["schemas"].pop(name, None)
            self.openapi_schema = document
        return self.openapi_schema
