"""Planning in a thread, and the first plan of a model.

The event loop is free meanwhile: tokens, pings and joins do not wait. The inputs of a plan may change while
it is made, so they are compared again before the plan is used, with no await between the comparison and the
reservation: two models never count on the same memory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import structlog

from mesh.placement.context_choice import EXAMINED_S, choose_context
from mesh.placement.host_capacity import in_one_kind
from mesh.placement.link_choices import (
    HIDDEN_VALUE_BYTES,
    has_an_order,
    hosts_of,
    ordered_by_links,
    planned_wires,
)
from mesh.placement.links import LinkProbeOptions
from mesh.placement.memory_estimate import StageSizes
from mesh.serve.preflight import placed
from spanmesh_proto.errors import ModelDoesNotFit, NotEnoughHosts
from stages.cancellable_work import CancellableWork
from stages.runtime.numerics import exact_reasons
from stages.transport.hidden_codec import HiddenType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mesh.options.host import HeadOptions
    from mesh.placement.context_choice import ContextChoice
    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.links import Links
    from mesh.placement.planner import Plan
    from mesh.serve.allocations import ModelAllocation
    from mesh.serve.head import Head
    from mesh.serve.preflight import Preflight

# A good plan is found in a fraction of this time; the search for a better one ends here.
_MOST_S: Final = 2.0
# Round trips of each size on each link before the stages are placed.
_NUM_PROBES: Final = 6
# Sent over each link for its bandwidth: more than fits into the first round trips of a connection.
_BULK_BYTES: Final = 256 * 1024

log = structlog.get_logger()

Inputs = TypeVar("Inputs")
Result = TypeVar("Result")


@dataclass(frozen=True)
class InitialPlan:
    """The first plan of a model."""

    plan: Plan
    """The plan."""
    context: ContextChoice | None
    """Choice of the context; None if the operator named one."""


class InitialPlacement:
    """Made of what the user says, what hosts bring, and what their links are like.

    Args:
        options: What the user says.
        known: What was found out beforehand.
        head: Open.
        allocation: What hosts have left for the model.
        announce: Tells hosts and the status what is going on.
    """

    def __init__(
        self,
        options: HeadOptions,
        known: Preflight,
        head: Head,
        allocation: ModelAllocation,
        announce: Callable[[str], None],
    ) -> None:
        self._options = options
        self._known = known
        self._head = head
        self._allocation = allocation
        self._announce = announce

    async def make(self) -> InitialPlan:
        """Place the model on the hosts that are ready, as they are when this returns, and choose its context.

        Raises:
            ModelDoesNotFit: With what is needed and what each host has.
            UncuttableModel: If the model cannot be cut as the user wants.
            NotEnoughHosts: If there is no host.
        """
        hosts = self._hosts()
        apart = [host.name for host in hosts if host.is_apart]
        if apart:
            log.warning(
                "hosts_kept_apart", hosts=apart, reason="--exact: attention is computed otherwise there"
            )
        idle = [host for host in hosts if host.uses_gpus and not host.in_exact_mode.uses_gpus]
        if idle and self._options.exact:
            reasons = exact_reasons(gpu.name for host in idle for gpu in host.gpus)
            log.warning("gpus_idle", hosts=[host.name for host in idle], reason=f"--exact: {reasons}")
        as_joined = await settled_plan(self._hosts, self._placed, _holds)
        survey = self._head.survey
        if self._options.topology is not None or not has_an_order(as_joined.plan, survey.head):
            return as_joined
        self._announce("measuring links")
        hidden_bytes = self._known.model.hidden_width * HIDDEN_VALUE_BYTES
        links = await survey.measure(LinkProbeOptions(hidden_bytes, _NUM_PROBES))
        # Other models may have taken some of the room meanwhile.
        return await settled_plan(self._hosts, partial(self._ordered_by_links, links), _holds)

    def _hosts(self) -> tuple[HostCapacity, ...]:
        hosts = tuple(self._allocation.capacity_of(member) for member in self._head.members.ready)
        is_free = self._options.exact and self._allocation.attention_version is None
        return in_one_kind(hosts) if is_free else hosts

    def _placed(self, hosts: Sequence[HostCapacity], is_time_up: Callable[[], bool]) -> InitialPlan:
        found = placed(self._options, self._known, hosts, is_time_up=is_time_up)
        return self._with_context(found, hosts, is_time_up)

    def _with_context(
        self, found: Plan, hosts: Sequence[HostCapacity], is_time_up: Callable[[], bool]
    ) -> InitialPlan:
        """The plan with the context that its hosts have room for, unless the operator named one."""
        if self._options.ctx_size is not None:
            return InitialPlan(found, None)
        until_s = time.monotonic() + EXAMINED_S

        def is_examined() -> bool:
            # Raises if no task waits for the plan any more.
            is_time_up()
            return time.monotonic() >= until_s

        sizes = StageSizes(self._known.model, self._known.workload)
        may_move = self._options.topology is None
        return InitialPlan(*choose_context(sizes, found, hosts, may_move=may_move, is_time_up=is_examined))

    def _ordered_by_links(
        self, links: Links, hosts: Sequence[HostCapacity], is_time_up: Callable[[], bool]
    ) -> InitialPlan:
        """The plan again with its hosts in the order that makes a token's round shortest."""

        def place(ordered: Sequence[HostCapacity]) -> Plan:
            return placed(self._options, self._known, ordered, is_time_up=is_time_up)

        as_joined = place(hosts)
        ordered = ordered_by_links(hosts, as_joined, place, self._head.survey.head, links)
        if ordered is None:
            log.warning("links_unknown", consequence="stages keep the order of joining")
            return self._with_context(as_joined, hosts, is_time_up)
        log.info(
            "ordered_by_links",
            hosts=hosts_of(ordered.plan),
            round_ms=round(ordered.round_ms, 2),
            as_joined_ms=round(ordered.as_joined_ms, 2),
        )
        return self._with_context(ordered.plan, hosts, is_time_up)

    async def wires(self, chosen: Plan) -> tuple[HiddenType, ...]:
        """Wire type of each stage's hidden states; `--wire auto` measures the links for it."""
        if self._options.hidden_type is not None:
            return (self._options.hidden_type,) * len(chosen.stages)
        if len({stage.host for stage in chosen.stages}) == 1:
            return (HiddenType.F32,) * len(chosen.stages)
        self._announce("measuring links")
        hidden_bytes = HiddenType.F32.row_bytes(self._known.model.hidden_width)
        links = await self._head.survey.measure(LinkProbeOptions(hidden_bytes, _NUM_PROBES, _BULK_BYTES))
        choices = planned_wires(
            chosen,
            StageSizes(self._known.model, self._known.workload),
            {
                member.name: self._allocation.capacity_of(member).fastest_gb_per_s
                for member in self._head.members
            },
            links,
        )
        log.info("wires_chosen", links=[choice.as_dict() for choice in choices if choice is not None])
        return tuple(HiddenType.F32 if choice is None else choice.proposed for choice in choices)


async def plan_in_thread(
    make: Callable[[Callable[[], bool]], Result], *, clock_s: Callable[[], float] = time.monotonic
) -> Result:
    """Make a plan in a thread of its own, which ends soon after a cancellation.

    Args:
        make: Makes it; gets what it should ask whether its time is up, see `mesh.placement.planner.plan`.
        clock_s: Monotonic, seconds.

    Raises:
        MeshError: What `make` raises.
    """
    work = CancellableWork()
    until_s = clock_s() + _MOST_S

    def is_time_up() -> bool:
        work.check()
        return clock_s() >= until_s

    return await work.run(lambda: make(is_time_up))


async def settled_plan(
    look: Callable[[], Inputs],
    make: Callable[[Inputs, Callable[[], bool]], Result],
    holds: Callable[[Inputs, Inputs, Result], bool],
) -> Result:
    """A plan that holds at the moment when this returns; the caller is to note it before it awaits anything.

    As long as what there is changes while a plan is made, it is made again.

    Args:
        look: What there is now, as a frozen snapshot.
        make: Makes a plan of that, in a thread; see `plan_in_thread`.
        holds: Whether a plan that was made of the first holds for the second, too.

    Raises:
        ModelDoesNotFit: With what is needed and what each host has, as it is now.
        NotEnoughHosts: If there is no host, as it is now.
    """
    while True:
        before = look()
        try:
            found = await plan_in_thread(partial(make, before))
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


def _holds(before: Sequence[HostCapacity], now: Sequence[HostCapacity], found: InitialPlan) -> bool:
    return is_room_as_before(before, now, hosts_of(found.plan))
