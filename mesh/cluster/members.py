"""Members of a mesh and their state."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from mesh.cluster.addresses import bind_address
from spanmesh_proto.errors import JoinError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mesh.cluster.host_facts import HostFacts
    from spanmesh_proto.addresses import PortRange

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Member:
    """One host of the mesh."""

    name: str
    """Its name, unique among the members."""
    address: str
    """IP address or host name for the other members."""
    facts: HostFacts
    """Memory, speed, GPUs and versions."""
    ray_node_name: str
    """Name of its Ray node, see `RayNodeConfig`."""
    is_ready: bool = False
    """Whether its Ray node runs, so that a stage can be placed there."""
    layers: str = ""
    """Layers that it holds, for messages; empty if none."""
    echo_port: int = 0
    """Port of its echo service; 0 if it has none."""
    is_leaving: bool = False
    """Whether it is to leave as soon as its layers have moved."""
    port_range: PortRange | None = None
    """Ports that it may listen on; None for any free ones."""
    other_addresses: tuple[str, ...] = ()
    """IP addresses besides `address` at which some members may reach it; only the head's host has such."""
    head_address: str = ""
    """Address at which it reaches the head's host; empty for that host's `address`."""

    @property
    def keeps_layers(self) -> bool:
        """Whether layers may stay on it, and others may come there; if not, they are placed anew."""
        return not self.is_leaving

    def address_for(self, peer: Member) -> str:
        """Address at which another member reaches this one."""
        return peer.head_address if peer.head_address in self.other_addresses else self.address

    @property
    def bind_address(self) -> str:
        """Address at which its servers for other members listen."""
        return bind_address(self.address, self.other_addresses)


class Members:
    """Members in the order of joining. For one event loop."""

    def __init__(self) -> None:
        self._by_name: dict[str, Member] = {}
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def ready(self) -> tuple[Member, ...]:
        """Members on which a stage can be placed."""
        return tuple(member for member in self if member.is_ready and member.keeps_layers)

    def find(self, name: str) -> Member | None:
        """The member of this name."""
        return self._by_name.get(name)

    def admit(self, member: Member) -> None:
        """Add a member.

        Raises:
            JoinError: If another member has its name, or the name is invalid.
        """
        check_name(member.name)
        other = self._by_name.get(member.name)
        if other is not None:
            raise JoinError(
                f"a host named {member.name!r} is in the mesh already (at {other.address}); choose another "
                "name "
                "with --name"
            )
        self._by_name[member.name] = member
        self._notify()

    def update(self, name: str, **changes: Any) -> None:
        """Change fields of a member; no effect if it has left."""
        member = self._by_name.get(name)
        if member is not None:
            self._by_name[name] = replace(member, **changes)
            self._notify()

    def remove(self, name: str) -> None:
        """Remove a member; no effect if it has left."""
        if self._by_name.pop(name, None) is not None:
            self._notify()

    async def changed(self) -> None:
        """Return at the next change."""
        await self._changed.wait()

    async def change_within(self, timeout_s: float) -> None:
        """Return at the next change, or when the time is over.

        Cancellation always works: `asyncio.wait_for` of Python 3.11 loses a cancellation that comes at the
        same moment as the change.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.changed()

    def _notify(self) -> None:
        # Wakes current waiters only; later ones wait for the next change.
        self._changed.set()
        self._changed = asyncio.Event()


def check_name(name: str) -> None:
    """Check that a name is fit for Ray nodes and tables.

    Raises:
        JoinError: If it is not 1 to 63 letters, digits, dots, dashes and underscores.
    """
    if not _NAME.fullmatch(name):
        raise JoinError(
            f"{name!r} cannot be a host's name: 1 to 63 letters, digits, '.', '-' and '_', the first a "
            "letter or "
            "digit; choose one with --name"
        )
