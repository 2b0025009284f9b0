"""Deployment of an embedding model: its host, its process, and others when either is lost or leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.serve.embeddings.hosted import EmbeddingMaker, HostedEmbeddings
from mesh.serve.one_host import OneHostDeployment

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mesh.serve.allocations import HostAllocations
    from mesh.serve.embeddings.model import EmbeddingModel
    from mesh.serve.head import Head
    from mesh.serve.head_state import SavedRing
    from mesh.serve.host_draining import HostDraining
    from stages.weights.virtual_stages import StageCache


def embedding_deployment(
    model: EmbeddingModel,
    head: Head,
    cache: StageCache,
    allocations: HostAllocations,
    host_draining: HostDraining,
    *,
    former: SavedRing | None,
    term: int,
    before_planning: Callable[[], Awaitable[None]],
) -> OneHostDeployment:
    """Deployment of an embedding model, which is not begun; see `OneHostDeployment`.

    Args:
        model: The model.
        head: The open head.
        cache: Files of this host.
        allocations: Allocations of all models.
        host_draining: Hosts that are to leave.
        former: Its process of a former head, if there is one to take over.
        term: Term of this head.
        before_planning: Awaited unless the process is taken over.
    """
    return OneHostDeployment(
        HostedEmbeddings(model),
        EmbeddingMaker(model, head, cache),
        head,
        allocations,
        host_draining,
        former=former,
        term=term,
        before_planning=before_planning,
    )
