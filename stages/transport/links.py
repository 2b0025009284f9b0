"""Links: ordered streams of frames to the next stage, and the choice among their kinds.

Frames: messages from one stage to the next, whatever link carries them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from spanmesh_proto import windows_pb2 as wire
from stages.transport.stage_link import StageLink

if TYPE_CHECKING:
    from collections.abc import Callable

    from spanmesh_proto.errors import MeshError
    from stages.transport.channels import Identity

# The receiver's limit for one frame.
MOST_BUNDLED_WINDOWS: Final = 256
LinkMessage = wire.Vocabulary | wire.Open | wire.WindowBundle


class Link(Protocol):
    """Sends sessions and windows to one stage, in order."""

    @property
    def num_messages(self) -> int:
        """Messages that were given to `send` so far."""

    @property
    def num_sent_bytes(self) -> int:
        """Size of all frames so far."""

    async def open(self) -> wire.Welcome:
        """Shake hands.

        Raises:
            ProtocolVersionMismatch: If the stage speaks another version.
            HostUnreachable: If the stage does not answer in time.
        """

    def send(self, message: LinkMessage) -> None:
        """Queue a message. For the event loop."""

    async def close(self) -> None:
        """End the stream."""


def frame_of(message: LinkMessage) -> wire.Frame:
    """The frame of a message."""
    if isinstance(message, wire.Open):
        return wire.Frame(open=message)
    if isinstance(message, wire.Vocabulary):
        return wire.Frame(vocabulary=message)
    return wire.Frame(windows=message)


def link_to(
    address: str,
    hello: wire.Hello,
    mesh_key: str,
    on_lost: Callable[[MeshError], None],
    *,
    host: str = "",
    identity: Identity | None = None,
) -> Link:
    """A link to a stage, which is yet to be opened.

    Args:
        address: `host:port` of the stage.
        hello: First frame, with the protocol version.
        mesh_key: Key shared by all stages and the coordinator.
        on_lost: Called once with the reason when the stream ends without `close`.
        host: Name of the host that must answer there.
        identity: TLS identity of this process; None if both ends are in one process.
    """
    return StageLink(address, hello, mesh_key, on_lost, host=host, identity=identity)
