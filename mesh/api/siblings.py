"""Several answers to one prompt: the first computes it, the others begin with what it left in the caches."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from mesh.api.answer import AnswerPart, answer_parts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from mesh.api.backend import Backend
    from mesh.api.job import Job


class Siblings:
    """The answers to one request.

    Args:
        backend: The served model.
        jobs: Further answers to a prompt come right behind its first.
    """

    def __init__(self, backend: Backend, jobs: Sequence[Job]) -> None:
        self._backend = backend
        self._jobs = jobs
        self._begun: list[asyncio.Event] = []
        for job in jobs:
            self._begun.append(self._begun[-1] if job.is_further else asyncio.Event())

    async def parts(self, index: int) -> AsyncGenerator[AnswerPart, None]:
        """One job's parts. Further answers wait until the first has begun, if they may use what it leaves.

        If it fails before that they never run: whoever reads them all must end them.

        Raises:
            MeshError: Whatever the engine raises.
        """
        job, begun = self._jobs[index], self._begun[index]
        if job.is_further and job.request.uses_cache:
            await begun.wait()
        engine, piece_with = self._backend.engine, self._backend.tokenizer.piece_with
        async with aclosing(answer_parts(engine, piece_with, job)) as parts:
            async for part in parts:
                begun.set()
                yield part
