"""Allocations: memory and threads of hosts that each model takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mesh.cluster.members import Member
    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.planner import StagePlacement
    from mesh.serve.pipeline import Fleet
    from mesh.serve.stage_handle import StageHandle


@dataclass(frozen=True, eq=False)
class InTheWay:
    """A copy that has to go.

    Attributes:
        fleet: Whose.
        copy: The stage that was loaded ahead, or is being so.
    """

    fleet: Fleet
    copy: StageHandle


class Ledger:
    """The accounts of all models, in the order in which they came.

    Args:
        is_head: Whether a member is the head's own host, where draft models are.
    """

    def __init__(self, is_head: Callable[[Member], bool]) -> None:
        self.is_head = is_head
        self._accounts: list[Account] = []

    def __iter__(self) -> Iterator[Account]:
        return iter(tuple(self._accounts))

    def open(
        self, name: str, fleet: Fleet, *, draft_bytes: int = 0, most_threads: int | None = None
    ) -> Account:
        """An account for a model; see `Account`."""
        account = Account(self, name, fleet, draft_bytes=draft_bytes, most_threads=most_threads)
        self._accounts.append(account)
        return account

    def close(self, account: Account) -> None:
        """Forget a model; what it held must be free by now."""
        if account in self._accounts:
            self._accounts.remove(account)

    def layers_on(self, host: str) -> str:
        """What a host holds, for people: layers of the first model, then those of others by their names."""
        held = []
        for account in self._accounts:
            layers = ", ".join(str(stage.layers) for stage in account.noted if stage.host == host)
            if layers:
                held.append(self._named(account, layers))
        return "; ".join(held)

    def copies_on(self, host: str) -> list[str]:
        """What a host has loaded ahead, likewise."""
        return [
            self._named(account, str(copy.config.layers))
            for account in self._accounts
            for copy in account.fleet.copies
            if copy.member.name == host
        ]

    def held_bytes(self, member: Member) -> int:
        """What all models take of a host's own memory, draft models and copies included."""
        drafts = sum(account.draft_bytes for account in self._accounts) if self.is_head(member) else 0
        return drafts + sum(
            sum(placement.memory.total_bytes for placement in account.fleet.held_on(member.name))
            + sum(copy.config.memory.total_bytes for copy in account.fleet.copies_on(member.name))
            for account in self._accounts
        )

    def _named(self, account: Account, what: str) -> str:
        return what if account is self._accounts[0] else f"{account.name} {what}"


class Account:
    """One model's, and what it may count on beside all others.

    Args:
        ledger: Of all.
        name: Of the model, as clients see it.
        fleet: Its stages and copies.
        draft_bytes: What its draft model takes of the head.
        most_threads: Of each host for this model; None for those that no other model computes with.

    Attributes:
        noted: Its stages as they were told to everybody.
    """

    def __init__(
        self,
        ledger: Ledger,
        name: str,
        fleet: Fleet,
        *,
        draft_bytes: int = 0,
        most_threads: int | None = None,
    ) -> None:
        self._ledger = ledger
        self.name = name
        self.fleet = fleet
        self.draft_bytes = draft_bytes
        self._most_threads = most_threads
        self.noted: tuple[StagePlacement, ...] = ()

    def capacity_of(self, member: Member) -> HostCapacity:
        """What a host gives to this model's stages; copies of other models give way to them."""
        return self._capacity(member, beside_copies=False)

    def capacity_for_copies(self, member: Member) -> HostCapacity:
        """What it gives to this model's copies, for which nothing gives way."""
        return self._capacity(member, beside_copies=True)

    def threads_of(self, member: Member) -> int:
        """How many of a host's threads this model's stages may have together, at least one.

        They spin: two models that compute at the same time with more threads than there are processors slow
        each other down many times over.
        """
        if self._most_threads is not None:
            return min(self._most_threads, member.facts.num_threads)
        taken = sum(
            handle.config.options.num_threads
            for other in self._others()
            for handle in (*other.fleet.handles, *other.fleet.loading)
            if handle.member.name == member.name
        )
        return max(1, member.facts.num_threads - taken)

    def in_the_way(self, member: Member) -> tuple[InTheWay, ...]:
        """Copies of other models that leave too little room on a host for what this model intends there."""
        host, accounts = member.name, tuple(self._ledger)
        drafts = sum(account.draft_bytes for account in accounts) if self._ledger.is_head(member) else 0
        left = member.facts.capacity(host, draft_bytes=drafts)
        becoming = {placement.layers for placement in self.fleet.intended if placement.host == host}
        staying = [copy for copy in self.fleet.copies_on(host) if copy.config.layers not in becoming]
        for memory in (
            *(placement.memory for account in accounts for placement in account.fleet.held_on(host)),
            *(copy.config.memory for copy in staying),
        ):
            left = left.without(memory)
        going = []
        for other in self._others():
            for copy in other.fleet.copies_on(host):
                beside = left.without(copy.config.memory)
                if beside.is_overdrawn:
                    going.append(InTheWay(other.fleet, copy))
                else:
                    left = beside
        return tuple(going)

    def _others(self) -> Iterator[Account]:
        return (account for account in self._ledger if account is not self)

    def _capacity(self, member: Member, *, beside_copies: bool) -> HostCapacity:
        is_head = self._ledger.is_head(member)
        host = member.facts.capacity(member.name, draft_bytes=self.draft_bytes if is_head else 0)
        others = tuple(self._others())
        held = [placement.memory for other in others for placement in other.fleet.held_on(member.name)]
        if beside_copies:
            held += [copy.config.memory for other in others for copy in other.fleet.copies_on(member.name)]
        drafts = sum(other.draft_bytes for other in others) if is_head else 0
        return host.beside(held, draft_bytes=drafts)
