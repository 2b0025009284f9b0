"""Members of a mesh: their state, their protobuf messages, and the keepalive options of their streams.

A fact of a host has the same name in its dataclass and in `HostReport`, but for those in `_SENT_AS`, and is
copied by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from mesh.cluster.addresses import bind_address
from mesh.cluster.host_facts import HostFacts, Versions
from mesh.placement.host_capacity import Gpu
from spanmesh_proto import PROTOCOL_VERSION
from spanmesh_proto import membership_pb2 as wire
from spanmesh_proto.addresses import PortRange
from spanmesh_proto.errors import JoinError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from _typeshed import DataclassInstance
    from google.protobuf.message import Message

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PING_MS: Final = 2_000
_ANSWER_MS: Final = 2_000
# Both ends ping: an end that hears nothing closes the stream within 4 s. gRPC replies in threads of its own,
# so a process that is merely busy is not taken for lost.
KEEPALIVE: Final = (
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.keepalive_timeout_ms", _ANSWER_MS),
    # gRPC limits pings without data in between to this number; 0 is no limit.
    ("grpc.http2.max_pings_without_data", 0),
)
# Pings of a host within this interval are not treated as abuse.
SERVER_PINGS: Final = (
    ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS // 2),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", _PING_MS // 2),
)
# Fields of `HostFacts` and `Versions` that have another name in a report.
_SENT_AS: Final = {
    "num_threads": "threads",
    "software": "software_version",
    "llama_cpp": "llama_cpp_version",
    "ray": "ray_version",
    "python": "python_version",
}
# Fields of `Member` that a host says of itself when it joins; all others are the head's.
_OWN: Final = ("name", "address", "ray_node_name", "head_address")
# Fields of reports of admitted hosts, and those of `Member` that they change.
_LATER: Final = {"ray_is_running": "is_ready", "echo_port": "echo_port", "is_leaving": "is_leaving"}
_REPORTED_AS: Final = {own: name for name, own in _LATER.items()}


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


def ports_message(port_range: PortRange | None) -> wire.PortRange | None:
    """A port range as a field of a message."""
    return None if port_range is None else wire.PortRange(first=port_range.first, last=port_range.last)


def port_range_of(report: wire.HostReport | wire.HeadReport) -> PortRange | None:
    """The port range in a report.

    Raises:
        ClusterError: If it is none.
    """
    if not report.HasField("port_range"):
        return None
    return PortRange(report.port_range.first, report.port_range.last)


def report_of(
    member: Member,
    *,
    secret: str,
    check_ports: Sequence[int],
    check_nonce: bytes,
    certificate_request: bytes,
    rejoin_secret: str = "",
) -> wire.HostReport:
    """First report of a joining host."""
    facts = member.facts
    return wire.HostReport(
        protocol_version=PROTOCOL_VERSION,
        secret=secret,
        rejoin_secret=rejoin_secret,
        check_port=check_ports[0],
        check_nonce=check_nonce,
        certificate_request=certificate_request,
        gpus=[wire.Gpu(**_sent(gpu, wire.Gpu)) for gpu in facts.gpus],
        port_range=ports_message(member.port_range),
        check_ports=check_ports if member.port_range is not None else (),
        **{name: getattr(member, name) for name in _OWN},
        **_sent(facts, wire.HostReport),
        **_sent(facts.versions, wire.HostReport),
    )


def member_of(report: wire.HostReport) -> Member:
    """The member that a first report describes."""
    facts = HostFacts(
        versions=Versions(**_received(Versions, report)),
        gpus=tuple(Gpu(**_received(Gpu, gpu)) for gpu in report.gpus),
        **_received(HostFacts, report),
    )
    own = {name: getattr(report, name) for name in _OWN}
    return Member(facts=facts, port_range=port_range_of(report), **own)


def later_report(name: str, **changes: Any) -> wire.HostReport:
    """Report of an admitted host.

    Args:
        name: Its name.
        changes: Fields of its `Member`, of those that a host reports later.
    """
    return wire.HostReport(name=name, **{_REPORTED_AS[field]: value for field, value in changes.items()})


def changes_of(report: wire.HostReport) -> dict[str, Any]:
    """Changes of an admitted host's `Member` that a report tells, by field."""
    return {_LATER[field.name]: value for field, value in report.ListFields() if field.name in _LATER}


def _sent(source: DataclassInstance, kind: type[Message]) -> dict[str, Any]:
    """Scalars of a dataclass by their names in a message, those that it has; without unset ones."""
    values = {_SENT_AS.get(field.name, field.name): getattr(source, field.name) for field in fields(source)}
    return {name: value for name, value in values.items() if value is not None and _is_scalar(kind, name)}


def _received(kind: type[DataclassInstance], message: Message) -> dict[str, Any]:
    """Scalars of a message by their names in a dataclass, those that it has; without unset ones."""
    names = {_SENT_AS.get(field.name, field.name): field.name for field in fields(kind)}
    known = message.DESCRIPTOR.fields_by_name
    return {
        own: getattr(message, name)
        for name, own in names.items()
        if _is_scalar(type(message), name) and (not known[name].has_presence or message.HasField(name))
    }


def _is_scalar(kind: type[Message], name: str) -> bool:
    field = kind.DESCRIPTOR.fields_by_name.get(name)
    return field is not None and field.message_type is None
