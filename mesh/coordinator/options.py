"""Options of the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from speculative.controller import ControllerOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from stages.grammar.token_masks import TokenTexts


@dataclass(frozen=True)
class CoordinatorOptions:
    """How sessions run.

    Attributes:
        context_length: Positions of one session.
        num_slots: Sessions at once.
        max_rows: Most rows of one window.
        n_vocab: Token ids are below this.
        max_waiting: Requests that may wait for a slot; at least 1.
        controller: Limits of speculation, and switches that take parts of it away.
        can_trim: Whether sessions can go back to an earlier position. Where they cannot, nothing is
            proposed, a session goes on with what a slot holds only if it wants all of it, and replays
        compute everything.
        cancels: Whether stages are told at once of windows that a rejection voided; without, they learn it
            from the next window.
        repair_wait_s: How long a new request waits for a broken ring to be whole again, in seconds.
        most_crashes: A session that was alone under way at so many crashes of stages in a row, at the same
            place, is not tried again.
        ping_interval_s: Between two questions to each stage whether it lives, in seconds.
        ping_timeout_s: A stage that leaves them unanswered for longer is lost.
        token_texts: Gives the vocabulary, which a tail needs to follow a grammar; None refuses grammars.
    """

    context_length: int
    num_slots: int
    max_rows: int
    n_vocab: int
    max_waiting: int = 64
    controller: ControllerOptions = field(default_factory=ControllerOptions)
    can_trim: bool = True
    cancels: bool = True
    repair_wait_s: float = 2.5
    most_crashes: int = 2
    ping_interval_s: float = 0.25
    ping_timeout_s: float = 1.2
    token_texts: Callable[[], TokenTexts] | None = None
