"""An engine before there is one: the API can say that it is loading while stages load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from mesh.coordinator.coordinator import Coordinator
    from mesh.engine import Committed, GenerationRequest
    from spanmesh_proto.errors import MeshError


class PendingEngine:
    """Passes requests to the coordinator once it is there. Implements `mesh.engine.Engine`.

    Args:
        context_length: Positions of one session.

    Attributes:
        coordinator: None until the ring is connected.
        ended: Why it answers no more, once the model was unloaded.
    """

    def __init__(self, context_length: int) -> None:
        self.context_length = context_length
        self.coordinator: Coordinator | None = None
        self.ended: MeshError | None = None

    @property
    def is_ready(self) -> bool:
        """Whether every stage is connected."""
        return self.coordinator is not None and self.coordinator.is_ready

    @property
    def refusal(self) -> MeshError | None:
        """Why no request is answered for now, if the mesh was given up until hosts join."""
        return None if self.coordinator is None else self.coordinator.refusal

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Committed, None]:
        """See `Engine.generate`.

        Raises:
            ClusterError: While the model is loading.
            MeshError: Once it was unloaded.
        """
        if self.ended is not None:
            raise self.ended
        if self.coordinator is None:
            raise ClusterError("the model is still loading: try again in a moment", retry_after_s=2)
        return self.coordinator.generate(request)
