"""Models that come and go, for the API: each gets what endpoints stand on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mesh.api.backend import backend_beside
from mesh.serve.stage_counts import stage_counts

if TYPE_CHECKING:
    from mesh.api.backend import Backends
    from mesh.serve.served_model import ServedModel


class Catalogue:
    """What the API answers for besides the first model.

    Args:
        backends: The API's.
    """

    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    async def add(self, model: ServedModel) -> None:
        """From now on requests that name the model reach it; while it loads they get 503."""
        engine = model.engine
        backend = backend_beside(
            self._backends.first,
            engine=engine,
            tokenizer=model.known.tokenizer,
            model_id=model.name,
            num_slots=model.known.workload.num_slots,
            status=model.state.as_dict,
            ready=lambda: engine.coordinator is not None,
            is_whole=lambda: engine.is_ready,
            refusal=lambda: engine.refusal,
            stage_counts=lambda: stage_counts(engine),
        )
        await asyncio.to_thread(backend.chat_template.try_out)
        self._backends.add(backend)

    def remove(self, name: str) -> None:
        """Nothing reaches the model any more; once is enough."""
        self._backends.remove(name)
