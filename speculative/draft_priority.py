"""How a thread gives way to others while nobody waits for it."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class ThreadPriority:
    """The priority of one thread.

    Linux schedules each thread on its own terms, but lets only privileged processes (or those with a limit
    that allows it) take a concession back. Where that is not so, the thread stays as it is.

    Args:
        thread_id: The kernel's.
        niceness: What it yields to others at all times, 0 to 18.

    Attributes:
        can_be_lowered: Whether `lowered` has any effect.
    """

    def __init__(self, thread_id: int, niceness: int) -> None:
        self._thread_id = thread_id
        self._is_low = False
        # Where the second step is refused the first remains; so it is a small one.
        self.can_be_lowered = (
            self._be_nice(niceness) and self._be_nice(niceness + 1) and self._be_nice(niceness)
        )

    @contextmanager
    def lowered(self) -> Iterator[None]:
        """Run only where nobody else would while in the block, or until `raise_again`.

        Hold no lock in it, the interpreter's included, for longer than a moment: whoever wanted it would wait
        behind everybody else too.
        """
        if self.can_be_lowered:
            self._is_low = True
            self._schedule(is_idle=True)
        try:
            yield
        finally:
            self.raise_again()

    def raise_again(self) -> None:
        """End the block's effect; any thread may call it."""
        if self._is_low:
            self._is_low = False
            self._schedule(is_idle=False)

    def _be_nice(self, niceness: int) -> bool:
        if sys.platform != "linux":
            return False
        try:
            os.setpriority(os.PRIO_PROCESS, self._thread_id, niceness)
        except OSError:
            return False
        return True

    def _schedule(self, *, is_idle: bool) -> None:
        # Unlike a thread that is merely nice, an idle one is interrupted at once.
        if sys.platform == "linux":
            policy = os.SCHED_IDLE if is_idle else os.SCHED_OTHER
            os.sched_setscheduler(self._thread_id, policy, os.sched_param(0))
