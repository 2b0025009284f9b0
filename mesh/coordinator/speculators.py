"""Gives each session its speculator, and keeps what the sessions of a coordinator learn together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from mesh.coordinator.guarded_proposer import GuardedProposer
from mesh.coordinator.limits import narrowed
from mesh.coordinator.speculator import Speculator
from speculative.controller import SharedMeasures

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.coordinator.options import CoordinatorOptions
    from mesh.engine import GenerationRequest
    from speculative.proposer import Proposer

log = structlog.get_logger()


class Speculators:
    """Makes them.

    Args:
        make_proposers: Gives each request its proposers, cheapest first; None if nothing is ever proposed.
        options: Limits of speculation, and the size of the vocabulary.
        num_sessions: How many run now.
        clock_ms: Monotonic.

    Attributes:
        shared: What the sessions learn together.
    """

    def __init__(
        self,
        make_proposers: Callable[[GenerationRequest], Sequence[Proposer]] | None,
        options: CoordinatorOptions,
        *,
        num_sessions: Callable[[], int],
        clock_ms: Callable[[], float],
    ) -> None:
        self.shared = SharedMeasures()
        self._make_proposers = make_proposers
        self._options = options
        self._num_sessions = num_sessions
        self._clock_ms = clock_ms

    @property
    def are_any(self) -> bool:
        """Whether anything is ever proposed."""
        return self._make_proposers is not None

    def make(self, session: int, request: GenerationRequest) -> Speculator | None:
        """The speculator of one request; None if nothing may be proposed for it.

        Args:
            session: For the log.
            request: Says how far it may speculate.
        """
        controller = narrowed(self._options.controller, request.speculation)
        if self._make_proposers is None or controller is None:
            return None
        try:
            proposers = self._make_proposers(request)
        except Exception as error:  # noqa: BLE001 - an answer without speculation is an answer
            log.warning("speculation_switched_off", session=session, reason=repr(error))
            return None
        if not proposers:
            return None
        return Speculator(
            [GuardedProposer(each, n_vocab=self._options.n_vocab, session=session) for each in proposers],
            controller,
            self.shared,
            end_tokens=request.end_tokens,
            num_sessions=self._num_sessions,
            clock_ms=self._clock_ms,
        )
