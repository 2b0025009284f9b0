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


def metered(
    scope: Scope, backend: Backend, jobs: Sequence[Job], *, most_at_once: int = 1
) -> tuple[Backend, int]:
    """The backend with an engine that counts for the API key of a request, if it came with one.

    Args:
        scope: Of the request.
        backend: The served model.
        jobs: What the request comes to, all of it.
        most_at_once: How many of the jobs would run at once if there was no key.

    Returns:
        It, and how many of the jobs may run at once.

    Raises:
        RateLimited: If the key has as many answers under way as it may have, or too few tokens left for what
            the jobs may come to.
    """
    visit = visit_of(scope)
    num_at_once = min(most_at_once, len(jobs))
    if visit is None:
        return backend, num_at_once
    num_at_once = visit.occupy(num_at_once, backend.model_id, backend.num_slots)
    visit.reserve(sum(len(job.request.prompt) + job.request.max_tokens for job in jobs))
    return replace(backend, engine=MeteredEngine(backend.engine, visit, len(jobs))), num_at_once


class MeteredEngine:
    """Passes everything on. A prompt is paid for once its answer begins, or once its client leaves.

    What the engine turns away, or fails at before the first token, costs nothing.

    Args:
        engine: Makes the tokens.
        visit: Where they are noted.
        num_answers: How many the request comes to.
    """

    def __init__(self, engine: Engine, visit: Visit, num_answers: int) -> None:
        self._engine = engine
        self._visit = visit
        self._num_left = num_answers

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
            # Its slot is free by now, and its client does not yet know: the next request finds a place.
            self._num_left -= 1
            self._visit.vacate(self._num_left)
