"""Place of a stage in a ring: whom it greets, and whom it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import ProtocolError, ProtocolVersionMismatch

if TYPE_CHECKING:
    from spanmesh_proto.errors import MeshError

# Length of a mesh id: a sha256 in hex.
_SHOWN_CHARS: Final = 64


@dataclass(frozen=True)
class RingPlace:
    """Place of a stage in a ring."""

    stage_index: int
    """Place in the pipeline, from 0."""
    mesh_id: str
    """Identifier of the ring."""
    mesh_key: str
    """Key shared by all stages and the coordinator."""
    term: int
    """Term of the ring's coordinator."""

    @property
    def hello(self) -> wire.Hello:
        """First message to other stages of the ring."""
        return hello_of(self.mesh_id, f"stage {self.stage_index}", self.term)

    def is_of(self, hello: wire.Hello) -> bool:
        """Whether a hello is for this ring."""
        return hello.mesh_id == self.mesh_id

    def refusal(self, hello: wire.Hello | None) -> MeshError | None:
        """The error for a peer of another ring, version or lower term; None if it fits.

        Args:
            hello: First message of its stream; None if that was something else.
        """
        if hello is None:
            return ProtocolError("the first message of a stream must be a Hello")
        if hello.protocol_version != PROTOCOL_VERSION:
            return ProtocolVersionMismatch(
                f"{_shown(hello.sender) or 'the peer'} speaks protocol version {hello.protocol_version} "
                f"(spanmesh {_shown(hello.software_version) or 'unknown'}), stage {self.stage_index} "
                f"speaks {PROTOCOL_VERSION} (spanmesh {SOFTWARE_VERSION}): install the same spanmesh on "
                "every host"
            )
        if not self.is_of(hello):
            return ProtocolError(
                f"this stage belongs to mesh {self.mesh_id!r}, not to {_shown(hello.mesh_id)!r}"
            )
        if hello.term < self.term:
            return self.stale(_shown(hello.sender) or "the peer", hello.term)
        return None

    def stale(self, sender: str, term: int) -> ProtocolError:
        """The error for a peer of a lower term.

        Args:
            sender: The peer's name.
            term: The peer's.
        """
        return ProtocolError(
            f"{sender} is of term {term}, stage {self.stage_index} serves term {self.term}: another "
            "`mesh serve` has taken over the mesh; stop the older one"
        )


def hello_of(mesh_id: str, sender: str, term: int) -> wire.Hello:
    """First message to a stage.

    Args:
        mesh_id: Identifier of its ring.
        sender: Name of who sends it.
        term: Term of the ring's coordinator.
    """
    return wire.Hello(
        protocol_version=PROTOCOL_VERSION,
        software_version=SOFTWARE_VERSION,
        mesh_id=mesh_id,
        sender=sender,
        term=term,
    )


def _shown(text: str) -> str:
    """Text of a peer, shortened to one line: gRPC does not deliver a status with more."""
    return "".join(letter for letter in text[:_SHOWN_CHARS] if letter.isprintable())
