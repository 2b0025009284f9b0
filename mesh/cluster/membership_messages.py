"""Members as protobuf messages, and the keepalive options of their streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mesh.cluster.host_facts import HostFacts, Versions
from mesh.cluster.members import Member
from mesh.placement.host_capacity import Gpu
from spanmesh_proto import PROTOCOL_VERSION
from spanmesh_proto import membership_pb2 as wire
from spanmesh_proto.addresses import PortRange

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        software_version=facts.versions.software,
        secret=secret,
        rejoin_secret=rejoin_secret,
        name=member.name,
        address=member.address,
        check_port=check_ports[0],
        check_nonce=check_nonce,
        memory_bytes=facts.memory_bytes,
        threads=facts.num_threads,
        speed_gb_per_s=facts.speed_gb_per_s,
        platform=facts.versions.platform,
        llama_cpp_version=facts.versions.llama_cpp,
        ray_version=facts.versions.ray,
        python_version=facts.versions.python,
        ray_node_name=member.ray_node_name,
        certificate_request=certificate_request,
        gpus=[
            wire.Gpu(
                name=gpu.name,
                description=gpu.description,
                free_bytes=gpu.free_bytes,
                total_bytes=gpu.total_bytes,
                speed_gb_per_s=gpu.speed_gb_per_s,
                shares_host_memory=gpu.shares_host_memory,
            )
            for gpu in facts.gpus
        ],
        gpu_layers=facts.gpu_layers,
        port_range=ports_message(member.port_range),
        check_ports=check_ports if member.port_range is not None else (),
        cpu_moe_layers=facts.cpu_moe_layers,
        head_address=member.head_address,
        attention_version=facts.attention_version,
    )


def member_of(report: wire.HostReport) -> Member:
    """The member that a report describes."""
    return Member(
        name=report.name,
        address=report.address,
        facts=HostFacts(
            memory_bytes=report.memory_bytes,
            num_threads=report.threads,
            speed_gb_per_s=report.speed_gb_per_s,
            versions=Versions(
                software=report.software_version,
                llama_cpp=report.llama_cpp_version,
                ray=report.ray_version,
                python=report.python_version,
                platform=report.platform,
            ),
            gpus=tuple(
                Gpu(
                    gpu.name,
                    gpu.description,
                    gpu.free_bytes,
                    gpu.total_bytes,
                    gpu.speed_gb_per_s,
                    gpu.shares_host_memory,
                )
                for gpu in report.gpus
            ),
            gpu_layers=report.gpu_layers if report.HasField("gpu_layers") else None,
            cpu_moe_layers=report.cpu_moe_layers if report.HasField("cpu_moe_layers") else None,
            attention_version=report.attention_version,
        ),
        ray_node_name=report.ray_node_name,
        port_range=port_range_of(report),
        head_address=report.head_address,
    )
