"""Which ring a stage belongs to, where in it, and whose peers it therefore talks to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from spanmesh_proto.errors import ProtocolError, ProtocolVersionMismatch

if TYPE_CHECKING:
    from spanmesh_proto import windows_pb2 as wire
    from spanmesh_proto.errors import MeshError

# A mesh id is a sha256 in hex.
_SHOWN_CHARS: Final = 64


@dataclass(frozen=True)
class RingPlace:
    """One stage's place.

    Attributes:
        stage_index: From 0, in the pipeline.
        mesh_id: Which ring it is.
        mesh_key: Shared by all stages and the coordinator of the ring.
        term: Of the coordinator that the ring is for.
    """

    stage_index: int
    mesh_id: str
    mesh_key: str
    term: int

    def is_of(self, hello: wire.Hello) -> bool:
        """Whether a peer greeted this very ring."""
        return hello.mesh_id == self.mesh_id

    def refusal(self, hello: wire.Hello | None) -> MeshError | None:
        """Why a peer is not talked to; None if it is.

        Args:
            hello: The first message of its stream; None if that was something else.
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
        """What a peer of a lower term is told.

        Args:
            sender: What the peer calls itself.
            term: The peer's.
        """
        return ProtocolError(
            f"{sender} is of term {term}, stage {self.stage_index} serves term {self.term}: another "
            "`mesh serve` has taken the mesh over; end the older one"
        )


def _shown(text: str) -> str:
    """What a peer says of itself, fit for one line: a status with more is not delivered at all."""
    return "".join(letter for letter in text[:_SHOWN_CHARS] if letter.isprintable())
