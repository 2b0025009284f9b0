"""Measurements of links between their dataclasses and their protobuf form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.cluster.link_probe import measure_link
from mesh.placement.links import Link, LinkWish
from spanmesh_proto import membership_pb2 as wire

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stages.transport.channels import Identity


def order_of(id: int, targets: Mapping[str, str], wish: LinkWish) -> wire.LinkOrder:
    """What the head asks a host for.

    Args:
        id: To tell the answer from others of the same host.
        targets: Addresses of echo services, by host.
        wish: What is to be measured of each.
    """
    return wire.LinkOrder(
        id=id,
        targets=[wire.LinkTarget(name=name, address=address) for name, address in targets.items()],
        hidden_bytes=wish.hidden_bytes,
        num_probes=wish.num_probes,
        bulk_bytes=wish.bulk_bytes,
    )


async def carry_out(order: wire.LinkOrder, source: str, secret: str, identity: Identity) -> wire.LinkReport:
    """Measure what is ordered from this host, one link after the other.

    Args:
        order: The head's.
        source: Name of this host.
        secret: The join token's.
        identity: What this host shows the others.
    """
    wish = LinkWish(order.hidden_bytes, order.num_probes, order.bulk_bytes)
    links = [
        await measure_link(source, target.name, target.address, wish, secret=secret, identity=identity)
        for target in order.targets
    ]
    return wire.LinkReport(
        id=order.id,
        links=[
            wire.MeasuredLink(
                target=link.target,
                small_ms=link.small_ms,
                hidden_ms=link.hidden_ms,
                bytes_per_s=link.bytes_per_s,
                failure=link.failure,
            )
            for link in links
        ],
    )


def links_of(source: str, report: wire.LinkReport) -> list[Link]:
    """What a host measured."""
    return [
        Link(
            source,
            link.target,
            tuple(link.small_ms),
            tuple(link.hidden_ms),
            link.bytes_per_s if link.HasField("bytes_per_s") else None,
            link.failure,
        )
        for link in report.links
    ]
