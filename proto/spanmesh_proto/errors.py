"""Errors of the mesh: exception classes, and the table of their gRPC status and HTTP error.

The hierarchy, with the meaning of each class::

    MeshError                       base class of all errors of the mesh
    ├── ModelError                  a problem with the model file
    │   ├── InvalidModel            not a GGUF, truncated, or a tensor is missing
    │   ├── UncuttableModel         the architecture cannot be cut exactly at all, or not at this layer
    │   ├── ModelDoesNotFit         the hosts have too little free memory
    │   └── HubUnavailable          the model hub refuses, lacks the model, or does not answer
    ├── ProtocolError               a peer's message violates the windows protocol
    │   ├── ProtocolVersionMismatch the peers speak different versions
    │   ├── InvalidWindow           wrong sizes, positions or session in a window
    │   ├── PrefixMismatch          a slot does not hold the cached tokens that a session names
    │   └── UnknownSession          a window for a session that is not open at this stage
    ├── JoinError                   a host could not join the mesh
    │   ├── InvalidJoinToken        the token is malformed, wrong or expired
    │   └── HostUnreachable         no connection to a host, or from it back to the head
    ├── ClusterError                the mesh itself is not able to serve
    │   ├── PortInUse               another process listens on the port
    │   ├── StageFailed             a stage reported a failure or its connection ended
    │   └── NotEnoughHosts          fewer hosts joined than requested
    └── RequestError                a client's request that cannot be answered
        ├── InvalidRequest          malformed JSON, wrong types, impossible values
        ├── ContextLengthExceeded   prompt and answer do not fit the context
        ├── Unauthorized            no API key, or a wrong one
        ├── Forbidden               an API key without the right that the request needs
        ├── ModelNotFound           the request names a model that is not served
        ├── NotFound                the request names another resource that does not exist
        ├── NotSupported            an endpoint of the OpenAI API that the mesh does not implement
        ├── RequestTooLarge         the body exceeds the size limit
        ├── MisdirectedRequest      the Host header names another server
        ├── RateLimited             the API key has reached its rate limit
        └── Overloaded              no capacity at the moment; try again

An instance carries one message that names the thing and the remedy. An exception is translated to a gRPC
status or an HTTP error only by `WIRE`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


class MeshError(Exception):
    """Base class of all errors.

    Args:
        message: One line for the user: the thing, its value and the remedy.
        param: The request field or option at fault, if there is one.
        retry_after_s: Delay before a retry makes sense, in seconds.
    """

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the error with its keyword arguments, for transfer between processes (Ray)."""
        return (_rebuild, (type(self), self.message, self.param, self.retry_after_s))


class ModelError(MeshError):
    """A problem with the model file."""


class InvalidModel(ModelError):
    """Not a GGUF, truncated, or a tensor is missing."""


class UncuttableModel(ModelError):
    """The architecture cannot be cut exactly at all, or not at this layer."""


class ModelDoesNotFit(ModelError):
    """The hosts have too little free memory."""


class HubUnavailable(ModelError):
    """The model hub refuses, lacks the model, or does not answer."""


class ProtocolError(MeshError):
    """A peer's message violates the windows protocol."""


class ProtocolVersionMismatch(ProtocolError):
    """The peers speak different versions; the message names both."""


class InvalidWindow(ProtocolError):
    """Wrong sizes, positions or session in a window."""


class PrefixMismatch(ProtocolError):
    """A slot does not hold the cached tokens that a session names."""


class UnknownSession(ProtocolError):
    """A window for a session that is not open at this stage."""


class JoinError(MeshError):
    """A host could not join the mesh."""


class InvalidJoinToken(JoinError):
    """The token is malformed, wrong or expired."""


class HostUnreachable(JoinError):
    """No connection to a host, or from it back to the head; the message names the address tried."""


class ClusterError(MeshError):
    """The mesh itself is not able to serve."""


class PortInUse(ClusterError):
    """Another process listens on the port."""


class StageFailed(ClusterError):
    """A stage reported a failure or its connection ended."""


class NotEnoughHosts(ClusterError):
    """Fewer hosts joined than requested."""


class RequestError(MeshError):
    """A client's request that cannot be answered."""


class InvalidRequest(RequestError):
    """Malformed JSON, wrong types, impossible values."""


class ContextLengthExceeded(RequestError):
    """Prompt and answer do not fit the context."""


class Unauthorized(RequestError):
    """No API key, or a wrong one."""


class Forbidden(RequestError):
    """An API key without the right that the request needs."""


class ModelNotFound(RequestError):
    """The request names a model that is not served."""


class NotFound(RequestError):
    """The request names another resource that does not exist."""


class NotSupported(RequestError):
    """An endpoint of the OpenAI API that the mesh does not implement."""


class RequestTooLarge(RequestError):
    """The request body exceeds the size limit."""


class MisdirectedRequest(RequestError):
    """The Host header names another server."""


class RateLimited(RequestError):
    """The API key has reached its rate limit."""


class Overloaded(RequestError):
    """No capacity at the moment; try again."""


@dataclass(frozen=True)
class Wire:
    """Representation of an error outside this process."""

    code: str
    """Stable string: OpenAI's `error.code`, the `code` key of log events, the code in a gRPC failure."""
    grpc: str
    """Name of the member of `grpc.StatusCode`."""
    http: int
    """HTTP status."""
    kind: str
    """OpenAI's `error.type`."""


WIRE: Final[dict[type[MeshError], Wire]] = {
    MeshError: Wire("internal_error", "INTERNAL", 500, "server_error"),
    ModelError: Wire("model_error", "FAILED_PRECONDITION", 500, "server_error"),
    InvalidModel: Wire("invalid_model", "FAILED_PRECONDITION", 500, "server_error"),
    UncuttableModel: Wire("uncuttable_model", "FAILED_PRECONDITION", 500, "server_error"),
    ModelDoesNotFit: Wire("model_does_not_fit", "RESOURCE_EXHAUSTED", 500, "server_error"),
    HubUnavailable: Wire("hub_unavailable", "UNAVAILABLE", 503, "server_error"),
    ProtocolError: Wire("protocol_error", "INVALID_ARGUMENT", 500, "server_error"),
    ProtocolVersionMismatch: Wire("protocol_version_mismatch", "FAILED_PRECONDITION", 500, "server_error"),
    InvalidWindow: Wire("invalid_window", "INVALID_ARGUMENT", 500, "server_error"),
    PrefixMismatch: Wire("prefix_mismatch", "FAILED_PRECONDITION", 500, "server_error"),
    UnknownSession: Wire("unknown_session", "NOT_FOUND", 500, "server_error"),
    JoinError: Wire("join_failed", "FAILED_PRECONDITION", 500, "server_error"),
    InvalidJoinToken: Wire("invalid_join_token", "UNAUTHENTICATED", 401, "authentication_error"),
    HostUnreachable: Wire("host_unreachable", "UNAVAILABLE", 503, "server_error"),
    ClusterError: Wire("mesh_unavailable", "UNAVAILABLE", 503, "server_error"),
    PortInUse: Wire("port_in_use", "ALREADY_EXISTS", 500, "server_error"),
    StageFailed: Wire("stage_failed", "UNAVAILABLE", 503, "server_error"),
    NotEnoughHosts: Wire("not_enough_hosts", "UNAVAILABLE", 503, "server_error"),
    RequestError: Wire("invalid_request_error", "INVALID_ARGUMENT", 400, "invalid_request_error"),
    InvalidRequest: Wire("invalid_request_error", "INVALID_ARGUMENT", 400, "invalid_request_error"),
    ContextLengthExceeded: Wire("context_length_exceeded", "OUT_OF_RANGE", 400, "invalid_request_error"),
    Unauthorized: Wire("invalid_api_key", "UNAUTHENTICATED", 401, "invalid_request_error"),
    Forbidden: Wire("permission_denied", "PERMISSION_DENIED", 403, "invalid_request_error"),
    ModelNotFound: Wire("model_not_found", "NOT_FOUND", 404, "invalid_request_error"),
    NotFound: Wire("not_found", "NOT_FOUND", 404, "invalid_request_error"),
    NotSupported: Wire("not_supported", "UNIMPLEMENTED", 501, "invalid_request_error"),
    RequestTooLarge: Wire("request_too_large", "OUT_OF_RANGE", 413, "invalid_request_error"),
    MisdirectedRequest: Wire("misdirected_request", "PERMISSION_DENIED", 421, "invalid_request_error"),
    RateLimited: Wire("rate_limit_exceeded", "RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
    Overloaded: Wire("overloaded", "RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
}
BY_CODE: Final[dict[str, type[MeshError]]] = {wire.code: kind for kind, wire in reversed(WIRE.items())}


def too_long(
    num_tokens: int,
    context_length: int,
    remedy: str,
    *,
    what: str,
    most: int,
    is_least: bool = False,
    param: str | None = None,
) -> ContextLengthExceeded:
    """The error of a text that does not fit the context.

    Clients know it by words of the message, and then shorten the conversation: some by Anthropic's, which it
    begins with, others by OpenAI's.

    Args:
        num_tokens: Tokens of the text.
        context_length: Positions of the context.
        remedy: What to do about it.
        what: Name of the text.
        most: Most tokens that the text may have.
        is_least: Whether it may have more tokens than that.
        param: The request's field with the text.
    """
    least = "at least " if is_least else ""
    return ContextLengthExceeded(
        f"prompt is too long: {least}{num_tokens} tokens > {most} maximum. This model's maximum context"
        f" length is {context_length} tokens. However, {what} resulted in {least}{num_tokens} tokens:"
        f" {remedy}",
        param=param,
    )


def _rebuild(kind: type[MeshError], message: str, param: str | None, retry_after_s: int | None) -> MeshError:
    return kind(message, param=param, retry_after_s=retry_after_s)


def wire_of(error: BaseException) -> Wire:
    """Returns the wire form of any exception; one that is not a `MeshError` is an internal error."""
    return WIRE[type(error)] if isinstance(error, MeshError) else WIRE[MeshError]


def from_code(code: str, message: str) -> MeshError:
    """Returns the exception that a peer reported by its `code`; an unknown code becomes `MeshError`."""
    return BY_CODE.get(code, MeshError)(message)
