"""The plan that a mesh starts with: who holds what, in which order, and how hidden states travel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

from mesh.cluster.links import LinkWish
from mesh.planner import HostCapacity, Plan, plan
from mesh.serve.link_order import by_links, round_times
from mesh.serve.measured_links import HIDDEN_VALUE_BYTES
from mesh.serve.preflight import own_capacity
from mesh.serve.wires import planned_wires
from mesh.stage_sizes import StageSizes
from stages.hidden_codec import HiddenType

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.cluster.members import Member
    from mesh.serve.head import Head
    from mesh.serve.options import ServeOptions
    from mesh.serve.preflight import Preflight

log = structlog.get_logger()

# Round trips of each size on each link before the stages are placed.
_NUM_PROBES: Final = 6
# Sent over each link for its bandwidth: more than fits into the first round trips of a connection.
_BULK_BYTES: Final = 256 * 1024
# A round through fewer hosts, the head among them, is the same in any order.
_FEWEST_FOR_AN_ORDER: Final = 4


class FirstPlan:
    """Made of what the user says, what hosts bring, and what their links are like.

    Args:
        options: What the user says.
        known: What was found out beforehand.
        head: Open.
        say: Tells everybody what is going on.
    """

    def __init__(
        self, options: ServeOptions, known: Preflight, head: Head, say: Callable[[str], None]
    ) -> None:
        self._options = options
        self._known = known
        self._head = head
        self._say = say

    async def make(self) -> Plan:
        """Place the model on the hosts that are ready.

        Raises:
            ModelDoesNotFit: With what is needed and what each host has.
            UncuttableModel: If the model cannot be cut as the user wants.
            NotEnoughHosts: If there is no host.
        """
        hosts = [self.capacity_of(member) for member in self._head.members.ready]
        return await self._ordered_by_links(hosts, self._placed(hosts))

    def capacity_of(self, member: Member) -> HostCapacity:
        """A host as the planner sees it."""
        if member.ray_node_name == self._head.own.ray_node_name:
            return own_capacity(member.name, self._known)
        return HostCapacity(member.name, member.facts.memory_bytes, member.facts.speed_gb_per_s)

    def _placed(self, hosts: Sequence[HostCapacity]) -> Plan:
        return plan(
            self._known.model,
            hosts,
            self._known.workload,
            num_stages=self._options.num_stages,
            split=self._options.split,
        )

    async def _ordered_by_links(self, hosts: Sequence[HostCapacity], placed: Plan) -> Plan:
        """The plan again with its hosts in the order that makes a token's round shortest."""
        survey = self._head.survey
        chosen = tuple(dict.fromkeys(stage.host for stage in placed.stages))
        if len({survey.head, *chosen}) < _FEWEST_FOR_AN_ORDER:
            return placed
        self._say("measuring links")
        hidden_bytes = self._known.model.hidden_width * HIDDEN_VALUE_BYTES
        links = await survey.measure(LinkWish(hidden_bytes, _NUM_PROBES))
        before = round_times(chosen, survey.head, links)
        if before is None:
            log.warning("links_unknown", hosts=chosen, consequence="stages stay in the order of joining")
            return placed
        ordered = self._placed(by_links(hosts, chosen, survey.head, links))
        order = tuple(dict.fromkeys(stage.host for stage in ordered.stages))
        after = round_times(order, survey.head, links)
        if after is None or after.order_ms >= before.order_ms:
            order, ordered, after = chosen, placed, before
        log.info(
            "ordered_by_links",
            hosts=order,
            round_ms=round(after.order_ms, 2),
            as_joined_ms=round(before.order_ms, 2),
        )
        return ordered

    async def wires(self, placed: Plan) -> tuple[HiddenType, ...]:
        """How each stage's hidden states travel; `--wire auto` measures the links for it."""
        if self._options.wire is not None:
            return (self._options.wire,) * len(placed.stages)
        if len({stage.host for stage in placed.stages}) == 1:
            return (HiddenType.F32,) * len(placed.stages)
        self._say("measuring links")
        hidden_bytes = HiddenType.F32.row_bytes(self._known.model.hidden_width)
        links = await self._head.survey.measure(LinkWish(hidden_bytes, _NUM_PROBES, _BULK_BYTES))
        choices = planned_wires(
            placed,
            StageSizes(self._known.model, self._known.workload),
            {member.name: member.facts.speed_gb_per_s for member in self._head.members},
            links,
        )
        log.info("wires_chosen", links=[choice.as_dict() for choice in choices if choice is not None])
        return tuple(HiddenType.F32 if choice is None else choice.proposed for choice in choices)
