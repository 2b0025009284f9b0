"""Embedding models of the API, by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from mesh.text.text_jobs import TextModel
from mesh.text.text_service import TextService
from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from mesh.metrics.request_metrics import EmbeddingStatistics
    from mesh.status import EmbeddingModelStatus
    from mesh.text.tokenizer import Tokenizer
    from spanmesh_proto.errors import MeshError


class Embedder(Protocol):
    """Makes vectors of texts; see `mesh.embedding.engine.EmbeddingEngine`."""

    @property
    def statistics(self) -> EmbeddingStatistics:
        """Counts since the model was loaded."""

    @property
    def refusal(self) -> MeshError | None:
        """Error for all requests, while it is known that they cannot be answered."""

    @property
    def is_serving(self) -> bool:
        """Whether the model was loaded; stays true while it is loaded on another host."""

    async def embed(self, texts: Sequence[tuple[int, ...]], client: str | None = None) -> NDArray[np.float32]:
        """Vectors of some texts, float32 (texts, width)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class EmbeddingBackend:
    """One embedding model, as the endpoints use it."""

    model_id: str
    """Model name in requests and answers."""
    created: int
    """When the model was loaded, Unix seconds."""
    tokenizer: Tokenizer
    """Tokenizer of the model."""
    embedder: Embedder
    """Makes the vectors."""
    width: int
    """Numbers of a vector."""
    longest: int
    """Most tokens of a text."""
    status: Callable[[], EmbeddingModelStatus]
    """Its entry in `/mesh/status`."""

    @cached_property
    def texts(self) -> TextService:
        """Tokenizes texts of clients."""
        return TextService(TextModel(str(self.tokenizer.path), self.tokenizer.stamp))

    def require_ready(self) -> None:
        """Check that requests can be answered.

        Raises:
            MeshError: While the model is loading, or no host can hold it.
        """
        if (refusal := self.embedder.refusal) is not None:
            raise refusal
        if not self.embedder.is_serving:
            raise ClusterError("the model is still loading: try again in a moment", retry_after_s=2)


class EmbeddingBackends:
    """Those that are served, in the order of loading."""

    def __init__(self) -> None:
        self._by_name: dict[str, EmbeddingBackend] = {}

    def __iter__(self) -> Iterator[EmbeddingBackend]:
        return iter(tuple(self._by_name.values()))

    def add(self, backend: EmbeddingBackend) -> None:
        """Answer for one more; its name must be free."""
        self._by_name[backend.model_id] = backend

    def remove(self, name: str) -> None:
        """Answer for one no more; does nothing if it is not there."""
        self._by_name.pop(name, None)

    def find(self, name: str) -> EmbeddingBackend | None:
        """The one of this name; None if there is none."""
        return self._by_name.get(name)

    @property
    def first(self) -> EmbeddingBackend | None:
        """The one that was loaded before the others; None if there is none."""
        return next(iter(self._by_name.values()), None)
