"""How a thread gives way to others while nobody waits for it."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOWEST: Final = 19


class ThreadPriority:
    """The priority of one thread.

    Linux gives each thread its own niceness, but lets only privileged processes (or those with a limit that
    allows it) take one back. Where that is not so, the thread stays as it is.

    Args:
        thread_id: The kernel's.
        niceness: What it yields to others at all times, 0 to 18.

    Attributes:
        can_be_lowered: Whether `lowered` has any effect.
    """

    def __init__(self, thread_id: int, niceness: int) -> None:
        self._thread_id = thread_id
        self._niceness = niceness
        self._is_low = False
        # Where the second step is refused the first remains; so it is a small one.
        self.can_be_lowered = sys.platform == "linux" and self._set(niceness + 1) and self._set(niceness)

    @contextmanager
    def lowered(self) -> Iterator[None]:
        """Run behind everything else while in the block, or until `raise_again`.

        Hold no lock in it, the interpreter's included, for longer than a moment: whoever wanted it would wait
        behind everything else too.
        """
        self._is_low = True
        self._set(_LOWEST)
        try:
            yield
        finally:
            self.raise_again()

    def raise_again(self) -> None:
        """End the block's effect; any thread may call it."""
        if self._is_low:
            self._is_low = False
            self._set(self._niceness)

    def _set(self, niceness: int) -> bool:
        try:
            os.setpriority(os.PRIO_PROCESS, self._thread_id, niceness)
        except OSError:
            return False
        return True
