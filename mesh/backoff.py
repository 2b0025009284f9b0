"""When and whether to try again to join. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import ClusterError, HostUnreachable, JoinError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spanmesh_proto.errors import MeshError

_FIRST_S: Final = 0.5
# A try is one connection: a price worth paying for being back seconds after the head is.
_MOST_S: Final = 2.0


def backoff_s(jitter: Callable[[], float]) -> Iterator[float]:
    """Pauses between tries, in seconds: each about twice as long as the one before, up to two seconds.

    Args:
        jitter: From 0 to 1. Each pause is between a half and three halves of what it would be without.
    """
    pause_s = _FIRST_S
    while True:
        yield pause_s * (0.5 + jitter())
        pause_s = min(2 * pause_s, _MOST_S)


def may_pass(error: MeshError) -> bool:
    """Whether what ended a stay may be over after a while.

    A head that is away may come back; one that still believes this host to be there under its name finds out;
    a Ray node can be started again. But a token that is refused now is refused for good, and so is a version.
    """
    return type(error) in {JoinError, HostUnreachable} or isinstance(error, ClusterError)
