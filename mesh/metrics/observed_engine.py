"""An engine whose requests are counted and timed, and told of to whoever traces them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from mesh.metrics.request_watch import RequestWatch
from mesh.tracing.request_span import current_span

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from mesh.engine import Committed, Engine, GenerationRequest
    from mesh.metrics.request_statistics import RequestStatistics


class ObservedEngine:
    """Passes everything on. Costs a few microseconds a step, after the next window has left.

    Args:
        engine: Makes the tokens.
        statistics: Where they are counted.
        clock_s: Monotonic, seconds.
    """

    def __init__(self, engine: Engine, statistics: RequestStatistics, clock_s: Callable[[], float]) -> None:
        self._engine = engine
        self._statistics = statistics
        self._clock_s = clock_s

    @property
    def context_length(self) -> int:
        """The engine's."""
        return self._engine.context_length

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Committed, None]:
        """As the engine does."""
        clock_s = self._clock_s
        watch = RequestWatch(self._statistics, current_span(), request, clock_s())
        try:
            async with aclosing(self._engine.generate(request)) as steps:
                async for step in steps:
                    watch.step(step, clock_s())
                    yield step
        except GeneratorExit:
            # Whoever reads has enough, as behind a stop string; or its client left, and it was cancelled.
            watch.end("abort" if _is_cancelled() else "stop", clock_s())
            raise
        except asyncio.CancelledError:
            watch.end("abort", clock_s())
            raise
        except Exception:
            watch.end("error", clock_s())
            raise
        else:
            watch.end(None, clock_s())


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
