"""Members as protobuf messages, and the keepalive options of their streams.

A fact of a host has the same name in its dataclass and in `HostReport`, but for those in `_SENT_AS`, and is
copied by it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from mesh.cluster.host_facts import HostFacts, Versions
from mesh.cluster.members import Member
from mesh.placement.host_capacity import Gpu
from spanmesh_proto import PROTOCOL_VERSION
from spanmesh_proto import membership_pb2 as wire
from spanmesh_proto.addresses import PortRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import DataclassInstance
    from google.protobuf.message import Message

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
