"""Measures one link, from this host."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final

import grpc

from mesh.cluster.echo import echo_key
from mesh.placement.links import Link
from spanmesh_proto import links_pb2 as wire
from spanmesh_proto import links_pb2_grpc as rpc
from spanmesh_proto.errors import HostUnreachable, MeshError
from stages.transport.channels import key_metadata, open_channel
from stages.transport.stage_link import explain

if TYPE_CHECKING:
    from mesh.placement.links import LinkWish
    from stages.transport.channels import Identity

    Bounce = grpc.aio.StreamStreamCall[wire.Probe, wire.Probe]

SMALL_BYTES: Final = 64
# The first round trips open the connection and find the other end asleep.
_NUM_WARM_UP: Final = 3
_CHUNK_BYTES: Final = 512 * 1024
_CONNECT_TIMEOUT_S: Final = 3.0


async def measure_link(
    source: str, target: str, address: str, wish: LinkWish, *, secret: str, identity: Identity
) -> Link:
    """Round trips over one held-open stream, as windows take it, then much data at once.

    Args:
        source: Name of this host.
        target: Name of the other.
        address: `host:port` of its echo service.
        wish: What is to be measured.
        secret: The join token's.
        identity: What this host shows the other.

    Returns:
        What was measured; a link that cannot be measured says why.
    """
    try:
        async with (
            asyncio.timeout(wish.patience_s),
            open_channel(address, target, identity) as channel,
        ):
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await channel.channel_ready()
            call = rpc.EchoStub(channel).Bounce(metadata=key_metadata(echo_key(secret)))
            await _round_trips(call, SMALL_BYTES, _NUM_WARM_UP)
            small_ms = await _round_trips(call, SMALL_BYTES, wish.num_probes)
            hidden_ms = await _round_trips(call, wish.hidden_bytes, wish.num_probes)
            rate = None
            if wish.bulk_bytes:
                # The first time TCP is still finding out how much the wire takes.
                await _bulk_s(call, wish.bulk_bytes)
                wire_s = await _bulk_s(call, wish.bulk_bytes) - min(small_ms) / 1e3
                rate = wish.bulk_bytes / max(wire_s, 1e-6)
            call.cancel()
    except TimeoutError:
        return Link(source, target, failure=f"{address} does not answer in time")
    except grpc.aio.AioRpcError as error:
        return Link(source, target, failure=explain(error, address).message)
    except MeshError as error:
        return Link(source, target, failure=error.message)
    return Link(source, target, tuple(small_ms), tuple(hidden_ms), rate)


async def _round_trips(call: Bounce, num_bytes: int, count: int) -> list[float]:
    """In milliseconds; the answers are small."""
    probe = wire.Probe(payload=bytes(num_bytes), answer_bytes=SMALL_BYTES)
    times_ms = []
    for _ in range(count):
        start_s = time.perf_counter()
        await _write(call, probe)
        await _answer(call)
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    return times_ms


async def _bulk_s(call: Bounce, num_bytes: int) -> float:
    """Seconds until the last of so many bytes is acknowledged."""
    sizes = [min(_CHUNK_BYTES, num_bytes - start) for start in range(0, num_bytes, _CHUNK_BYTES)]
    start_s = time.perf_counter()

    async def send() -> None:
        for size in sizes:
            await _write(call, wire.Probe(payload=bytes(size)))

    sender = asyncio.create_task(send())
    try:
        for _ in sizes:
            await _answer(call)
        await sender
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
    return time.perf_counter() - start_s


async def _write(call: Bounce, probe: wire.Probe) -> None:
    # A call that is over refuses to be written to; why it is over comes out when it is read.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(probe)


async def _answer(call: Bounce) -> None:
    if not isinstance(await call.read(), wire.Probe):
        raise HostUnreachable("the stream ended in the middle of a measurement")
