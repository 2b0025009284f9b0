"""Plans are made in a thread, of what is known then, and hold only if that is still so when they are made.

The event loop goes on meanwhile: tokens, pings and joins do not wait. What a plan is made of may change
while it is made, so it is looked at again before anything comes of the plan, without a pause between that
look and what is noted of the plan: two models never count on the same room.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import structlog

from spanmesh_proto.errors import ModelDoesNotFit, NotEnoughHosts
from stages.cancellable_work import CancellableWork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mesh.placement.host_capacity import HostCapacity

log = structlog.get_logger()

Inputs = TypeVar("Inputs")
Result = TypeVar("Result")

# A good plan is found in a fraction of it. A better one is looked for no longer.
_MOST_S: Final = 2.0


async def made_in_thread(
    make: Callable[[Callable[[], bool]], Result], *, clock_s: Callable[[], float] = time.monotonic
) -> Result:
    """Have a plan made in a thread of its own, which ends soon after this was cancelled.

    Args:
        make: Makes it; gets what it should ask whether its time is up, see `mesh.placement.planner.plan`.
        clock_s: Monotonic, seconds.

    Raises:
        MeshError: What `make` raises.
    """
    # Not one of the threads that everybody shares: those may all be busy with files for minutes.
    thread = ThreadPoolExecutor(1, "planning")
    work = CancellableWork(thread)
    until_s = clock_s() + _MOST_S

    def is_time_up() -> bool:
        work.check()
        return clock_s() >= until_s

    try:
        return await work.run(lambda: make(is_time_up))
    finally:
        thread.shutdown(wait=False)


async def agreed(
    look: Callable[[], Inputs],
    make: Callable[[Inputs, Callable[[], bool]], Result],
    holds: Callable[[Inputs, Inputs, Result], bool],
) -> Result:
    """A plan that holds at the moment when this returns; the caller is to note it before it awaits anything.

    As long as what there is changes while a plan is made, it is made again.

    Args:
        look: What there is now, as a frozen snapshot.
        make: Makes a plan of that, in a thread; see `made_in_thread`.
        holds: Whether a plan that was made of the first holds for the second, too.

    Raises:
        ModelDoesNotFit: With what is needed and what each host has, as it is now.
        NotEnoughHosts: If there is no host, as it is now.
    """
    while True:
        before = look()
        try:
            found = await made_in_thread(partial(make, before))
        except (ModelDoesNotFit, NotEnoughHosts):
            if look() == before:
                raise
        else:
            if holds(before, look(), found):
                return found
        log.info("planned_again", reason="hosts or stages changed meanwhile")


def is_room_as_before(
    before: Sequence[HostCapacity], now: Sequence[HostCapacity], counted_on: Iterable[str]
) -> bool:
    """Whether hosts give what they gave.

    Args:
        before: Hosts at one moment.
        now: Hosts at another.
        counted_on: Names of those that matter.
    """
    then, left = ({host.name: host for host in hosts} for hosts in (before, now))
    return all(name in then and then[name] == left.get(name) for name in counted_on)
