"""The drafter of a group of API keys: which one new sessions of the group get, and the end of former ones."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.engine import GenerationRequest
    from speculative.draft.worker import Choose, DraftProposer, LoadedDrafter
    from speculative.proposer import Replace

BASE: Final = 0
"""Number of the base drafter."""


class GroupDrafter:
    """The drafter of a group. `is_of` and `open` are for the event loop, all else for the thread that tunes.

    A drafter that another takes the place of is closed with its last session, so that no answer loses its
    drafts.

    Args:
        base: The base drafter, which serves all other requests as well; not closed here.
        is_member: Whether a request is of the group.
    """

    def __init__(self, base: LoadedDrafter, is_member: Callable[[GenerationRequest], bool]) -> None:
        self._base = base
        self._is_member = is_member
        self._serving = (BASE, base)
        self._former: list[LoadedDrafter] = []
        # A drafter must not be closed between the choice and its session.
        self._guard = threading.Lock()

    @property
    def number(self) -> int:
        """Number of the drafter that new sessions get."""
        return self._serving[0]

    @property
    def is_alive(self) -> bool:
        """Whether that drafter drafts."""
        return self._serving[1].is_alive

    @property
    def has_former(self) -> bool:
        """Whether a former drafter has sessions left."""
        return bool(self._former)

    def is_of(self, request: GenerationRequest) -> bool:
        """Whether a request is of the group."""
        return self._is_member(request)

    def open(
        self, choose: Choose, client: str | None, replace: Replace | None = None
    ) -> DraftProposer | None:
        """A proposer for a session of the group, as `LoadedDrafter.open`; None if no drafter is alive."""
        with self._guard:
            for number, drafter in (self._serving, (BASE, self._base)):
                if drafter.is_alive:
                    return drafter.open(choose, client, replace, number)
        return None

    def serve(self, number: int, drafter: LoadedDrafter | None) -> None:
        """Give new sessions another drafter.

        Args:
            number: Its number.
            drafter: The drafter; None for the base drafter.
        """
        with self._guard:
            former = self._serving[1]
            self._serving = (BASE, self._base) if drafter is None else (number, drafter)
            if former is not self._base:
                self._former.append(former)

    def close_former(self, *, at_once: bool = False) -> None:
        """Close former drafters that have no sessions left, or all of them: their sessions go on without."""
        with self._guard:
            over = [each for each in self._former if at_once or not each.num_open]
            self._former = [each for each in self._former if each not in over]
        for drafter in over:
            drafter.close()

    def close(self) -> None:
        """Close all drafters but the base drafter."""
        self.serve(BASE, None)
        self.close_former(at_once=True)
