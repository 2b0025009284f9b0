"""An engine whose work is counted for the API key that asked for it."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from mesh.api.allowance import visit_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from starlette.types import Scope

    from mesh.api.allowance import Visit
    from mesh.api.backend import Backend
    from mesh.api.job import Job
    from mesh.engine import Committed, Engine, GenerationRequest


def metered(scope: Scope, backend: Backend, jobs: Sequence[Job]) -> Backend:
    """The backend with an engine that counts for the API key of a request, if it came with one.

    Raises:
        RateLimited: If the key has too few tokens left for what the jobs may come to.
    """
    visit = visit_of(scope)
    if visit is None:
        return backend
    visit.reserve(sum(len(job.request.prompt) + job.request.max_tokens for job in jobs))
    return replace(backend, engine=MeteredEngine(backend.engine, visit))


class MeteredEngine:
    """Passes everything on. A prompt is paid for once its answer begins, or once its client leaves.

    What the engine turns away, or fails at before the first token, costs nothing.

    Args:
        engine: Makes the tokens.
        visit: Where they are noted.
    """

    def __init__(self, engine: Engine, visit: Visit) -> None:
        self._engine = engine
        self._visit = visit

    @property
    def context_length(self) -> int:
        """The engine's."""
        return self._engine.context_length

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Committed, None]:
        """As the engine does."""
        num_prompt = len(request.prompt)
        try:
            async with aclosing(self._engine.generate(request)) as steps:
                async for step in steps:
                    self._visit.spend(num_prompt + len(step.tokens))
                    num_prompt = 0
                    yield step
        except Exception:
            num_prompt = 0
            raise
        finally:
            self._visit.spend(num_prompt)
