"""Errors of the mesh, and the table of their gRPC status and HTTP error.

The tree, with one line on what each leaf means::

    MeshError                       anything of ours
    ├── ModelError                  something is wrong with the model file
    │   ├── InvalidModel            not a GGUF, truncated, or a tensor is missing
    │   ├── UncuttableModel         this architecture, or this place in it, cannot be cut exactly
    │   ├── ModelDoesNotFit         the hosts have too little free memory
    │   └── HubUnavailable          the model hub refuses, lacks the model, or does not answer
    ├── ProtocolError               a peer said something that the windows protocol does not allow
    │   ├── ProtocolVersionMismatch the two ends speak different versions
    │   ├── InvalidWindow           wrong sizes, positions or session in a window
    │   ├── PrefixMismatch          a slot does not hold the tokens that a session begins with
    │   └── UnknownSession          a window for a session that is not open here
    ├── JoinError                   a host could not become part of the mesh
    │   ├── InvalidJoinToken        the token is malformed, wrong or expired
    │   └── HostUnreachable         a host cannot be reached, or cannot be reached back
    ├── ClusterError                the mesh itself is not able to serve
    │   ├── PortInUse               another process listens there
    │   ├── StageFailed             a stage reported a failure or went away
    │   └── NotEnoughHosts          fewer hosts joined than were asked for
    └── RequestError                a client's request cannot be answered as it stands
        ├── InvalidRequest          malformed JSON, wrong types, impossible values
        ├── ContextLengthExceeded   prompt and answer do not fit the context
        ├── Unauthorized            no API key, or a wrong one
        ├── ModelNotFound           the request names a model that is not served
        ├── NotFound                the request names something else that is not here
        ├── NotSupported            the endpoint exists elsewhere, but not here
        ├── RequestTooLarge         the body is larger than any that is read
        ├── MisdirectedRequest      the Host header names another server
        ├── RateLimited             the API key has used up its share for now
        └── Overloaded              no room now; try again

An instance carries one message that names the thing and the remedy. `WIRE` is the only place where
an exception meets a gRPC status or an HTTP error; nothing else may translate one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


class MeshError(Exception):
    """Anything of ours.

    Args:
        message: One line for a person: the thing, its value, the remedy.
        param: The request field or option at fault, if there is one.
        retry_after_s: When trying again makes sense, in seconds.
    """

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        """Cross process borders (Ray) whole, keyword arguments included."""
        return (_rebuild, (type(self), self.message, self.param, self.retry_after_s))


def _rebuild(kind: type[MeshError], message: str, param: str | None, retry_after_s: int | None) -> MeshError:
    return kind(message, param=param, retry_after_s=retry_after_s)


class ModelError(MeshError):
    """Something is wrong with the model file."""


class InvalidModel(ModelError):
    """Not a GGUF, truncated, or a tensor is missing."""


class UncuttableModel(ModelError):
    """This architecture, or this place in it, cannot be cut exactly."""


class ModelDoesNotFit(ModelError):
    """The hosts have too little free memory."""


class HubUnavailable(ModelError):
    """The model hub refuses, lacks the model, or does not answer."""


class ProtocolError(MeshError):
    """A peer said something that the windows protocol does not allow."""


class ProtocolVersionMismatch(ProtocolError):
    """The two ends speak different versions; the message names both."""


class InvalidWindow(ProtocolError):
    """Wrong sizes, positions or session in a window."""


class PrefixMismatch(ProtocolError):
    """A slot does not hold the tokens that a session begins with."""


class UnknownSession(ProtocolError):
    """A window for a session that is not open here."""


class JoinError(MeshError):
    """A host could not become part of the mesh."""


class InvalidJoinToken(JoinError):
    """The token is malformed, wrong or expired."""


class HostUnreachable(JoinError):
    """A host cannot be reached, or cannot be reached back; the message names the address tried."""


class ClusterError(MeshError):
    """The mesh itself is not able to serve."""


class PortInUse(ClusterError):
    """Another process listens there."""


class StageFailed(ClusterError):
    """A stage reported a failure or went away."""


class NotEnoughHosts(ClusterError):
    """Fewer hosts joined than were asked for."""


class RequestError(MeshError):
    """A client's request cannot be answered as it stands."""


class InvalidRequest(RequestError):
    """Malformed JSON, wrong types, impossible values."""


class ContextLengthExceeded(RequestError):
    """Prompt and answer do not fit the context."""


class Unauthorized(RequestError):
    """No API key, or a wrong one."""


class ModelNotFound(RequestError):
    """The request names a model that is not served."""


class NotFound(RequestError):
    """The request names something else that is not here."""


class NotSupported(RequestError):
    """The endpoint exists elsewhere, but not here."""


class RequestTooLarge(RequestError):
    """The body is larger than any that is read."""


class MisdirectedRequest(RequestError):
    """The Host header names another server."""


class RateLimited(RequestError):
    """The API key has used up its share for now."""


class Overloaded(RequestError):
    """No room now; try again."""


@dataclass(frozen=True)
class Wire:
    """What an error looks like outside this process.

    Attributes:
        code: Stable string: OpenAI's `error.code`, the `code` key of log events, the code in a gRPC failure.
        grpc: Name of the member of `grpc.StatusCode`.
        http: HTTP status.
        kind: OpenAI's `error.type`.
    """

    code: str
    grpc: str
    http: int
    kind: str


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
    ModelNotFound: Wire("model_not_found", "NOT_FOUND", 404, "invalid_request_error"),
    NotFound: Wire("not_found", "NOT_FOUND", 404, "invalid_request_error"),
    NotSupported: Wire("not_supported", "UNIMPLEMENTED", 501, "invalid_request_error"),
    RequestTooLarge: Wire("request_too_large", "OUT_OF_RANGE", 413, "invalid_request_error"),
    MisdirectedRequest: Wire("misdirected_request", "PERMISSION_DENIED", 421, "invalid_request_error"),
    RateLimited: Wire("rate_limit_exceeded", "RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
    Overloaded: Wire("overloaded", "RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
}

BY_CODE: Final[dict[str, type[MeshError]]] = {wire.code: kind for kind, wire in reversed(WIRE.items())}


def wire_of(error: BaseException) -> Wire:
    """The wire form of any exception; one that is not ours is an internal error."""
    return WIRE[type(error)] if isinstance(error, MeshError) else WIRE[MeshError]


def from_code(code: str, message: str) -> MeshError:
    """The exception that a peer reported by its `code`; unknown codes become `MeshError`."""
    return BY_CODE.get(code, MeshError)(message)
