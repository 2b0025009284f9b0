"""Options of the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from speculative.controller import ControllerOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from stages.grammar.automaton import TokenTexts


@dataclass(frozen=True)
class CoordinatorOptions:
    """Options of a coordinator's core: limits of its sessions, liveness and recovery."""

    context_length: int
    """Positions of one session, prompt and answer together."""
    num_slots: int
    """Concurrent sessions."""
    max_rows: int
    """Most rows of one window."""
    n_vocab: int
    """Number of token ids."""
    max_waiting: int = 64
    """Requests that may wait for a slot; at least 1."""
    controller: ControllerOptions = field(default_factory=ControllerOptions)
    """Limits of speculation, and fixed widths and depths."""
    can_trim: bool = True
    """Whether sessions can go back to any earlier position."""
    cancels: bool = True
    """Whether stages are told at once of windows that a rejection voided; otherwise the next window tells
    them."""
    repair_wait_s: float = 2.5
    """Longest time that a new request waits for a broken ring, in seconds."""
    most_crashes: int = 2
    """Number of stage crashes in a row, at the same position and with no other session in flight, after which
    a session is ended."""
    ping_interval_s: float = 0.25
    """Interval of the pings to each stage, in seconds."""
    ping_timeout_s: float = 1.2
    """Silence after which a stage counts as lost, in seconds."""
    still_timeout_s: float = 1.2
    """Time without anything to do at any stage after which windows that sessions wait for count as lost, in
    seconds."""
    token_texts: Callable[[], TokenTexts] | None = None
    """Returns the vocabulary, which a tail needs for grammars; None refuses grammars."""
    num_groups: int | None = None
    """Fixed number of groups of decoding sessions; None to find the best one."""
