"""Links of another kind than gRPC's: stages and their sessions notice nothing of it."""

import asyncio
from collections.abc import Callable

import pytest

from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import GenerationRequest
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import MeshError
from stages.sampling.sampler import Sampler, SamplingParams
from stages.serving.server import StageService
from stages.transport.channels import Identity
from stages.transport.links import Link, LinkMessage, frame_of
from tests.support.fake_stage import FakeRuntime, plain_answer
from tests.support.repairable_ring import NUM_STAGES, RepairableRing, serving
from tests.support.ring_harness import collect

PROMPT = tuple(range(3, 40))
NUM_TOKENS = 20


class DirectLink:
    """Hands frames to a stage in the same process."""

    def __init__(self, target: StageService) -> None:
        self._target = target
        self.num_messages = self.num_sent_bytes = 0

    async def open(self) -> wire.Welcome:
        return wire.Welcome()

    def send(self, message: LinkMessage) -> None:
        data = frame_of(message).SerializeToString()
        self.num_messages += 1
        self.num_sent_bytes += len(data)
        asyncio.get_running_loop().call_soon(self._target.receive, wire.Frame.FromString(data))

    async def close(self) -> None:
        pass


async def test_stages_are_linked_without_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = RepairableRing()
    links: list[Link] = []

    def link_to(
        address: str,
        _hello: wire.Hello,
        _mesh_key: str,
        _on_lost: Callable[[MeshError], None],
        *,
        host: str,
        identity: Identity | None,
    ) -> Link:
        assert (host, identity) == ("", None)
        (target,) = (stage.service for stage in ring.running if stage.address.address == address)
        links.append(DirectLink(target))
        return links[-1]

    monkeypatch.setattr("stages.serving.server.link_to", link_to)
    async with serving(ring, CoordinatorOptions(128, 4, FakeRuntime.max_rows, 64)) as coordinator:
        tokens, _ = await collect(coordinator, GenerationRequest(PROMPT, NUM_TOKENS))
        sent = [stage.service.stats().num_sent_bytes for stage in ring.running]
    assert tokens == plain_answer(PROMPT, NUM_TOKENS, Sampler(SamplingParams()).sample)
    assert [link.num_sent_bytes for link in links] == sent[: NUM_STAGES - 1]
    assert all(sent[: NUM_STAGES - 1])
