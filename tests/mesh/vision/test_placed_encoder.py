"""An encoder on another host that is lost, moves, fails or answers anything, over gRPC."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from mesh.vision.encoder import EncodedPicture
from mesh.vision.encoder_link import EncoderLink
from mesh.vision.encoder_wire import facts_to_wire, parts_to_wire
from mesh.vision.placed_encoder import PlacedEncoder
from spanmesh_proto import pictures_pb2 as wire
from spanmesh_proto import pictures_pb2_grpc as rpc
from spanmesh_proto.errors import HostUnreachable, ProtocolError, StageFailed
from spanmesh_proto.image_chunk import ImageChunk
from stages.transport.channels import abort
from stages.vision.chunks import PictureParts
from stages.vision.picture import Picture
from stages.vision.projector import ProjectorFacts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WIDTH, ROWS = 4, 6
FACTS = ProjectorFacts("llava", WIDTH, 0, "ab" * 32)
PARTS = PictureParts(((5,), ImageChunk(1, ROWS), (6,)))
PICTURE = Picture(2, 2, bytes(12))
FIRST = wire.Rows(data=bytes(4 * WIDTH * ROWS), identity=FACTS.identity)


@dataclass
class There(rpc.PicturesServicer):
    """An encoder on another host, which answers as it is told."""

    facts: list[wire.Facts] = field(default_factory=lambda: [facts_to_wire(FACTS)])
    parts: list[wire.Parts] = field(default_factory=lambda: [parts_to_wire(PARTS)])
    rows: list[wire.Rows] = field(default_factory=lambda: [FIRST])
    times: int = 1
    error: StageFailed | None = None
    begins: asyncio.Event = field(default_factory=asyncio.Event)
    num_begun: int = 0
    num_sent: int = 0

    def __post_init__(self) -> None:
        self.begins.set()

    async def GetFacts(self, request: wire.FactsRequest, context: Any) -> AsyncIterator[wire.Facts]:  # noqa: N802
        for each in self.facts:
            yield each

    async def GetParts(self, request: wire.PartsRequest, context: Any) -> AsyncIterator[wire.Parts]:  # noqa: N802
        for each in self.parts:
            yield each

    async def Encode(self, request: wire.EncodeRequest, context: Any) -> AsyncIterator[wire.Rows]:  # noqa: N802
        self.num_begun += 1
        await self.begins.wait()
        if self.error is not None:
            await abort(context, self.error)
        for _ in range(self.times):
            for each in self.rows:
                self.num_sent += 1
                yield each


@dataclass
class Here:
    """The head's own process, which counts pictures."""

    num_encoded: int = 0
    facts_told: ProjectorFacts = FACTS

    async def facts(self) -> ProjectorFacts:
        return self.facts_told

    async def parts(self, width: int, height: int, *, client: str | None = None) -> PictureParts:
        return PARTS

    async def encode(
        self, picture: Picture, parts: PictureParts, *, client: str | None = None
    ) -> EncodedPicture:
        self.num_encoded += 1
        return EncodedPicture((np.ones((ROWS, WIDTH), np.float32),), "head")

    async def rest(self) -> None:
        pass


@asynccontextmanager
async def linked(there: There) -> AsyncIterator[EncoderLink]:
    server = grpc.aio.server()
    rpc.add_PicturesServicer_to_server(there, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = EncoderLink(f"127.0.0.1:{port}", "attic", "key", identity=None)
    try:
        yield link
    finally:
        await link.close()
        await server.stop(None)


async def begun(there: There, count: int, placed: PlacedEncoder) -> list[asyncio.Task[EncodedPicture]]:
    tasks = [asyncio.create_task(placed.encode(PICTURE, PARTS)) for _ in range(count)]
    async with asyncio.timeout(10):
        while there.num_begun < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return tasks


async def test_all_pictures_of_a_lost_host_are_encoded_on_the_head() -> None:
    """Two are under way, and two wait for their turn."""
    there, here = There(), Here()
    there.begins.clear()
    async with linked(there) as link:
        placed = PlacedEncoder(here)
        await placed.resume(link)
        tasks = await begun(there, 4, placed)
        await link.close()
        assert [each.identity for each in await asyncio.gather(*tasks)] == ["head"] * 4
    assert (there.num_begun, here.num_encoded) == (2, 4)


async def test_pictures_that_wait_move_with_the_encoder() -> None:
    former, new, here = There(), There(), Here()
    former.begins.clear()
    async with linked(former) as link, linked(new) as other:
        placed = PlacedEncoder(here)
        await placed.resume(link)
        tasks = await begun(former, 4, placed)
        await placed.resume(other)
        retired = asyncio.create_task(link.retire())
        await asyncio.sleep(0)
        former.begins.set()
        assert [each.identity for each in await asyncio.gather(*tasks)] == [FACTS.identity] * 4
        await retired
    assert (former.num_begun, new.num_begun, here.num_encoded) == (2, 2, 0)


async def test_a_picture_that_a_host_cannot_compute_is_encoded_on_the_head() -> None:
    there, here = There(error=StageFailed("its GPU is gone")), Here()
    async with linked(there) as link:
        placed = PlacedEncoder(here)
        await placed.resume(link)
        assert (await placed.encode(PICTURE, PARTS)).identity == "head"
        # What it is worth is known by its deployment, which asks for connections only.
        assert placed.is_elsewhere
    assert there.num_begun == 1


@pytest.mark.parametrize(
    "there",
    [
        There(rows=[wire.Rows(data=bytes(2**20))], times=1000),
        There(rows=[wire.Rows()], times=100_000),
        There(rows=[wire.Rows(data=bytes(4))]),
        There(rows=[]),
    ],
)
async def test_rows_of_a_host_are_bounded_by_those_of_the_picture(there: There) -> None:
    async with linked(there) as link:
        with pytest.raises(ProtocolError):
            await link.encode(PICTURE, PARTS)
    # A few are on their way when the first is too much.
    assert there.num_sent < 500


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [ImageChunk(0, 2**31)],
        [ImageChunk(0, 4097)],
        [ImageChunk(0, 3000), ImageChunk(3000, 3000)],
        [ImageChunk(1, 4)],
        [ImageChunk(0, 0), ImageChunk(0, 1)],
        [ImageChunk(0, 7, 3)],
        [(-1,), ImageChunk(1, 4)],
    ],
)
async def test_parts_of_a_host_are_those_of_a_picture(chunks: list[Any]) -> None:
    async with linked(There(parts=[parts_to_wire(PictureParts(tuple(chunks)))])) as link:
        with pytest.raises(ProtocolError, match="not those of a picture"):
            await link.parts(2, 2)


@pytest.mark.parametrize("told", [{"width": 8}, {"most_at_once": 9}, {"kind": "x"}, {"identity": "none"}])
async def test_a_host_has_the_head_s_own_projector(told: dict[str, Any]) -> None:
    async with linked(There(facts=[facts_to_wire(replace(FACTS, **told))])) as link:
        placed = PlacedEncoder(Here())
        with pytest.raises(ProtocolError):
            await placed.resume(link)
        assert not placed.is_elsewhere


async def test_a_host_that_does_not_answer_is_no_place() -> None:
    async with linked(There()) as link:
        await link.close()
        with pytest.raises(HostUnreachable):
            await PlacedEncoder(Here()).resume(link)
