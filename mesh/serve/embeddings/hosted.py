"""Embedding model as its deployment knows it: what its one host is chosen by, its process, the link to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.embedding.link import EmbeddingLink
from mesh.placement.embedding_host import place_embeddings
from mesh.serve.one_host import Hosted
from mesh.serve.one_host_maker import OneHostMaker
from mesh.serve.whole_file import WholeFile
from stages.embedding.actor import EmbeddingActor
from stages.runtime.stage_runtime import RuntimeOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.planner import Plan
    from mesh.serve.embeddings.model import EmbeddingModel
    from mesh.serve.head import Head
    from stages.runtime.process_memory import StageMemory
    from stages.transport.channels import Identity
    from stages.weights.virtual_stages import StageCache


class HostedEmbeddings(Hosted):
    """An embedding model as its deployment knows it.

    Args:
        model: The model, whose engine waits for another host when one is lost.
    """

    def __init__(self, model: EmbeddingModel) -> None:
        self.name = model.name
        self.what = "an embedding model"
        self.setup = model.setup
        self.engine = model.engine
        self.state = model.state
        self.pipeline = model.pipeline
        self.layers = model.sizes.layers
        self.memory = model.sizes.memory
        self.request_bytes = model.known.text_bytes
        self.most_threads = model.load_request.threads
        self.computes_at_times = False
        self.can_do_without = False
        self._model = model

    def memory_on(self, host: HostCapacity) -> StageMemory | None:
        """See `Hosted.memory_on`."""
        return self._model.sizes.memory_on(host)

    def place(self, hosts: Sequence[HostCapacity]) -> Plan:
        """See `Hosted.place`."""
        return place_embeddings(self._model.sizes, hosts)

    async def answer_at(
        self, address: str, host: str, mesh_key: str, identity: Identity | None
    ) -> EmbeddingLink:
        """See `Hosted.answer_at`."""
        width = self._model.sizes.model.width
        link = EmbeddingLink(address, host, mesh_key, identity=identity, width=width)
        self._model.engine.resume(link)
        return link


class EmbeddingMaker(OneHostMaker):
    """Makes the process of one embedding model.

    Args:
        model: The model.
        head: The open head.
        cache: Files of this host, from which other hosts fetch.
    """

    def __init__(self, model: EmbeddingModel, head: Head, cache: StageCache) -> None:
        file = WholeFile(model.sizes.model.path, head, cache, stamps=model.known.stamps)
        super().__init__(file, head, model.transfers, EmbeddingActor)
        self._limits = model.sizes.limits

    def _options(self, num_threads: int, gpu_layers: tuple[tuple[str, int], ...]) -> RuntimeOptions:
        return RuntimeOptions(
            num_slots=self._limits.most_texts,
            ctx_size=self._limits.longest,
            num_threads=num_threads,
            gpu_layers=gpu_layers,
        )
