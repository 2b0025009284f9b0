"""The embedding model's actor as an ordinary object, with a real model and real TLS; only Ray is left out."""

from __future__ import annotations

import asyncio
import datetime as dt
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mesh.cluster.certificates import Authority, make_certificate
from mesh.embedding.link import EmbeddingLink
from spanmesh_proto import embedding_pb2 as wire
from spanmesh_proto import embedding_pb2_grpc as rpc
from spanmesh_proto.errors import ClusterError, HostUnreachable, ModelDoesNotFit, ProtocolError, StageFailed
from stages.embedding.actor import EmbeddingActor, EmbeddingService
from stages.embedding.runtime import EmbeddingRuntime
from stages.layers import LayerRange
from stages.runtime.process_memory import StageMemory, free_memory_bytes
from stages.runtime.stage_runtime import RuntimeOptions
from stages.serving.actor import StageConfig
from stages.transport.channels import key_metadata, open_channel
from stages.weights.fetch import FetchSource
from tests.support.tiny_embedders import TinyEmbedder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.model
AUTHORITY = Authority(make_certificate(dt.datetime.now(dt.UTC)))
HEAD = AUTHORITY.own_identity(["coordinator"], "127.0.0.1")
TEXTS = [[5, 6, 7], [8, 9], [10] * 60]


@pytest.fixture
def config(tmp_path: Path) -> StageConfig:
    return StageConfig(
        stage_index=0,
        layers=LayerRange(0, 2),
        sha256="",
        whole=str(TinyEmbedder().write(tmp_path / "tiny.gguf")),
        source=FetchSource("127.0.0.1:9", b"", ""),
        options=RuntimeOptions(num_slots=8, ctx_size=64),
        host="attic",
        memory=StageMemory(0, 0, 0, 0),
        beside_bytes=0,
        mesh_id="mesh",
        mesh_key="key",
        cache_dir=str(tmp_path / "cache"),
    )


@asynccontextmanager
async def serving(actor: EmbeddingActor) -> AsyncIterator[str]:
    """Its address."""
    try:
        await actor.load()
        request = await actor.certificate_request()
        certificate = AUTHORITY.sign(request, "attic", "127.0.0.1")
        await actor.take_certificate(certificate, AUTHORITY.certificate_pem)
        yield f"127.0.0.1:{await actor.start('127.0.0.1')}"
    finally:
        await actor.stop()


@asynccontextmanager
async def linked(address: str, *, key: str = "key", host: str = "attic") -> AsyncIterator[EmbeddingLink]:
    link = EmbeddingLink(address, host, key, identity=HEAD, width=64)
    try:
        yield link
    finally:
        await link.close()


def num_calls(actor: EmbeddingActor) -> int:
    """Calls that wait or are computed."""
    service = actor._service
    assert isinstance(service, EmbeddingService)
    return service._num_calls


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_texts_go_in_and_vectors_come_out_in_their_order(config: StageConfig) -> None:
    async with serving(EmbeddingActor(config)) as address, linked(address) as link:
        together = await link.embed(TEXTS)
        assert together.rows.shape == (3, 64)
        assert together.rows.dtype == np.float32
        assert together.compute_s > 0
        # Many calls at once are computed one after the other.
        alone = await asyncio.gather(*(link.embed([tokens]) for tokens in TEXTS))
        for row, one in zip(together.rows, alone, strict=True):
            assert float(row @ one.rows[0]) >= 0.9999


async def test_what_does_not_fit_is_refused_and_the_next_batch_is_computed(config: StageConfig) -> None:
    async with serving(EmbeddingActor(config)) as address, linked(address) as link:
        with pytest.raises(ProtocolError, match="a text has 65 tokens; 1 to 64 fit"):
            await link.embed([[5] * 65])
        with pytest.raises(ProtocolError, match="a text has token 999"):
            await link.embed([[999]])
        assert (await link.embed([[5]])).rows.shape == (1, 64)
        async with linked(address) as narrow:
            narrow._width = 32
            with pytest.raises(ProtocolError, match=r"vectors of \[64\] numbers, expected one with 32"):
                await narrow.embed([[5]])


async def test_only_the_head_with_the_key_gets_in(config: StageConfig) -> None:
    async with serving(EmbeddingActor(config)) as address:
        async with linked(address, key="wrong") as link:
            with pytest.raises(StageFailed, match="key is missing or wrong"):
                await link.embed([[5]])
        async with linked(address, host="desk") as link:
            with pytest.raises(HostUnreachable, match="the embedding model on desk does not answer"):
                await link.embed([[5]])
        async with open_channel(address, "attic", HEAD) as channel:
            call = channel.unary_stream(
                "/spanmesh.embedding.Embedding/Embed", bytes, wire.Vectors.FromString
            )(b"\xff\xff", metadata=key_metadata("key"))
            with pytest.raises(Exception, match="not a message of this protocol"):
                [answer async for answer in call]
            stub = rpc.EmbeddingStub(channel)
            call = stub.Embed(wire.EmbedRequest(), metadata=key_metadata("key"))
            with pytest.raises(Exception, match="0 texts in a batch"):
                [answer async for answer in call]


async def test_another_head_gets_in_with_its_own_key_and_the_former_one_does_not(config: StageConfig) -> None:
    actor = EmbeddingActor(config)
    with pytest.raises(ClusterError, match="before it was started"):
        await actor.rejoin(0, "next", "next key", 7)
    async with serving(actor) as address, linked(address) as former:
        before = await former.embed(TEXTS)
        await actor.rejoin(0, "next", "next key", 7)
        with pytest.raises(StageFailed, match="key is missing or wrong"):
            await former.embed(TEXTS)
        async with linked(address, key="next key") as link:
            assert np.array_equal((await link.embed(TEXTS)).rows, before.rows)
            with pytest.raises(ProtocolError, match="has taken over the mesh"):
                await actor.rejoin(0, "older", "older key", 6)
            assert (await link.embed(TEXTS)).rows.shape == (3, 64)


async def test_a_call_that_is_cancelled_before_its_turn_is_not_computed(
    config: StageConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    released = threading.Event()
    embed = EmbeddingRuntime.embed

    def slow(runtime: EmbeddingRuntime, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        computed.append(texts[0][0])
        assert released.wait(20)
        return embed(runtime, texts)

    monkeypatch.setattr(EmbeddingRuntime, "embed", slow)
    actor = EmbeddingActor(config)
    async with serving(actor) as address, linked(address) as link:
        try:
            calls = [asyncio.create_task(link.embed([[token]])) for token in range(5, 10)]
            await until(lambda: num_calls(actor) == 5 and len(computed) == 1)
            kept, *others = (
                call for call, token in zip(calls, range(5, 10), strict=True) if token in computed
            )
            assert others == []
            for call in calls:
                if call is not kept:
                    call.cancel()
            await until(lambda: num_calls(actor) == 1)
        finally:
            released.set()
        assert (await kept).rows.shape == (1, 64)
        assert (await link.embed([[10]])).rows.shape == (1, 64)
        assert len(computed) == 2
        assert computed[1] == 10


async def test_a_model_that_no_head_wants_any_more_ends_its_process(config: StageConfig) -> None:
    ended = asyncio.Event()
    actor = EmbeddingActor(replace(config, orphan_s=0.2), end_process=ended.set)
    async with serving(actor) as address:
        async with asyncio.timeout(20):
            await ended.wait()
        async with linked(address) as link:
            with pytest.raises(HostUnreachable):
                await link.embed([[5]])


async def test_one_that_does_not_fit_is_refused_with_what_helps(config: StageConfig) -> None:
    large = StageMemory(0, 0, 2 * free_memory_bytes(), 0)
    actor = EmbeddingActor(replace(config, memory=large))
    for work in (actor.check_memory, actor.load):
        with pytest.raises(ModelDoesNotFit, match=r"does not fit on attic now: .*; lower --ctx-size, stop"):
            await work()
    await actor.stop()
