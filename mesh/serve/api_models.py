"""Models of the API besides the first: routed by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.serve.served_model import backend_of

if TYPE_CHECKING:
    from mesh.api.backend import Backends
    from mesh.embedding.registry import EmbeddingBackend
    from mesh.serve.served_model import ServedModel


class ApiModelRegistry:
    """Models of the API besides the first.

    Args:
        backends: Backends of the API.
    """

    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    async def add(self, model: ServedModel) -> None:
        """Route requests that name the model to it; while it loads they get 503."""
        backend = backend_of(model, self._backends.first.api)
        await backend.texts.check(backend.now())
        self._backends.add(backend)

    def add_embeddings(self, backend: EmbeddingBackend) -> None:
        """Route requests for vectors that name the model to it; while it loads they get 503."""
        self._backends.embeddings.add(backend)

    def remove(self, name: str) -> None:
        """Stop routing requests to the model. Later calls have no effect."""
        self._backends.remove(name)
