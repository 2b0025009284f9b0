"""The stage's actor as an ordinary object, with a real file and real TLS; only Ray is left out."""

from __future__ import annotations

import asyncio
import datetime as dt
import shutil
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from mesh.cluster.certificates import Authority, make_certificate
from spanmesh_proto import PROTOCOL_VERSION
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc
from spanmesh_proto.addresses import join_address
from spanmesh_proto.errors import ClusterError, MeshError, StageFailed
from stages.layers import LayerRange
from stages.runtime.process_memory import StageMemory
from stages.runtime.stage_runtime import RuntimeOptions
from stages.serving.actor import SecondFile, StageActor, StageConfig
from stages.serving.scheduler import QueueBarrier
from stages.serving.server import StageService
from stages.transport.channels import key_metadata, open_channel
from stages.transport.links import StageLink
from stages.weights.disk_cache import KV_DISK_BYTES
from stages.weights.fetch import FetchSource
from stages.weights.virtual_stages import StageCache
from tests.qualification.fuzz.gguf_fuzz import small_layout, write_layout
from tests.qualification.own_models import OWN_MODELS
from tests.support.assistant_files import write_assistant
from tests.support.disks import disk_of
from tests.support.ipv6 import needs_ipv6

if TYPE_CHECKING:
    from pathlib import Path

    from stages.runtime.stage_runtime import StageRuntime
    from stages.transport.channels import Identity

pytestmark = pytest.mark.model
AUTHORITY = Authority(make_certificate(dt.datetime.now(dt.UTC)))
COORDINATOR = AUTHORITY.own_identity(["coordinator"], "127.0.0.1")


@pytest.fixture
def configs(smollm2_path: Path, tmp_path: Path) -> list[StageConfig]:
    """Two stages whose files are here already."""
    model = tmp_path / "small.gguf"
    write_layout(smollm2_path, small_layout(smollm2_path, num_layers=2, num_tokens=256), model)
    cache = StageCache(tmp_path / "cache")
    ranges = (LayerRange(0, 1), LayerRange(1, 2))
    files = [cache.cut(model, layers) for layers in ranges]
    return [
        StageConfig(
            stage_index=index,
            layers=layers,
            sha256=file.sha256,
            source=FetchSource("127.0.0.1:9", b"", ""),
            options=RuntimeOptions(ctx_size=64),
            host=f"host-{index}",
            memory=StageMemory(0, 0, 0, 0),
            beside_bytes=0,
            mesh_id="mesh",
            mesh_key="key",
            cache_dir=str(tmp_path / "cache"),
        )
        for index, (layers, file) in enumerate(zip(ranges, files, strict=True))
    ]


async def certify(actor: StageActor, host: str, authority: Authority = AUTHORITY) -> None:
    request = await actor.certificate_request()
    await actor.take_certificate(authority.sign(request, host, "127.0.0.1"), authority.certificate_pem)


async def layers_at(address: str, identity: Identity, host: str) -> tuple[int, int]:
    hello = wire.Hello(protocol_version=PROTOCOL_VERSION, mesh_id="mesh", sender="test")
    link = StageLink(address, hello, "key", lambda _error: None, host=host, identity=identity)
    try:
        welcome = await link.open()
    finally:
        await link.close()
    return welcome.layer_start, welcome.layer_stop


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
async def test_stages_serve_and_link_with_keys_that_they_made_themselves(
    configs: list[StageConfig], host: str
) -> None:
    first, second = (StageActor(config) for config in configs)
    try:
        for number, actor in enumerate((first, second)):
            await actor.load()
            with pytest.raises(ClusterError, match="before it was loaded and certified"):
                await actor.start(host)
            await certify(actor, f"host-{number}")
        addresses = [join_address(host, await actor.start(host)) for actor in (first, second)]
        assert await layers_at(addresses[0], COORDINATOR, "host-0") == (0, 1)
        with pytest.raises(MeshError, match="does not answer"):
            await first.connect(addresses[1], "host-0")
        await first.connect(addresses[1], "host-1")
    finally:
        await first.stop()
        await second.stop()


async def test_the_latest_certificate_counts_from_the_next_connection(configs: list[StageConfig]) -> None:
    actor = StageActor(configs[0])
    with pytest.raises(ClusterError, match="a certificate that it did not request"):
        await actor.take_certificate(b"", b"")
    other = Authority(make_certificate(dt.datetime.now(dt.UTC)))
    try:
        await actor.load()
        await certify(actor, "host-0", other)
        address = f"127.0.0.1:{await actor.start('127.0.0.1')}"
        with pytest.raises(MeshError, match="does not answer"):
            await layers_at(address, COORDINATOR, "host-0")
        await certify(actor, "host-0")
        assert await layers_at(address, COORDINATOR, "host-0") == (0, 1)
    finally:
        await actor.stop()


@pytest.mark.parametrize(
    ("head_says", "host_says", "most_bytes"),
    [(0, None, None), (5_000, None, 5_000), (5_000, 7_000, 7_000), (0, 7_000, 7_000), (5_000, 0, None)],
)
async def test_a_host_s_own_disk_limit_wins(
    head_says: int,
    host_says: int | None,
    most_bytes: int | None,
    configs: list[StageConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the stage that is the model itself is known by the bytes of its file."""
    monkeypatch.setenv(KV_DISK_BYTES, "" if host_says is None else str(host_says))
    config = replace(configs[0], kv_disk_bytes=head_says)
    whole = replace(config, sha256="", whole=str(config.cache_root.parent / "small.gguf"))
    for actor in (StageActor(config), StageActor(whole)):
        try:
            await actor.load()
            await certify(actor, "host-0")
            await actor.start("127.0.0.1")
            service = actor._service
            assert isinstance(service, StageService)
            disk = disk_of(service)
            assert (disk.opening is not None) == (most_bytes is not None)
            if disk.opening is not None:
                await disk.opening
            assert (disk.stats().most_bytes if disk.is_open else None) == most_bytes
        finally:
            await actor.stop()
    folders = [path for path in (config.cache_root / "kv").glob("*") if path.is_dir()]
    assert len(folders) == (0 if most_bytes is None else 2)


async def test_a_disk_is_not_opened_where_nothing_can_be_bound(configs: list[StageConfig]) -> None:
    """Its files may be in use by the stage that has the port."""
    actor = StageActor(replace(configs[0], kv_disk_bytes=5_000))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        try:
            await actor.load()
            await certify(actor, "host-0")
            with pytest.raises(ClusterError, match="cannot listen"):
                await actor.start("127.0.0.1", [taken.getsockname()[1]])
            service = actor._service
            assert isinstance(service, StageService)
            assert disk_of(service).opening is None
        finally:
            await actor.stop()


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_model_that_was_replaced_while_it_was_loaded_keeps_no_blocks(
    is_replaced: bool,  # noqa: FBT001
    configs: list[StageConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would be found by stages with the new weights."""
    model = configs[0].cache_root.parent / "small.gguf"
    config = replace(configs[0], sha256="", whole=str(model), kv_disk_bytes=5_000)
    load = StageActor._load_file

    def load_and_replace(actor: StageActor, path: Path) -> StageRuntime:
        loaded = load(actor, path)
        if is_replaced:
            other = model.with_suffix(".new")
            shutil.copyfile(model, other)
            other.replace(model)
        return loaded

    monkeypatch.setattr(StageActor, "_load_file", load_and_replace)
    actor = StageActor(config)
    try:
        await actor.load()
        await certify(actor, "host-0")
        with capture_logs() as logs:
            await actor.start("127.0.0.1")
            service = actor._service
            assert isinstance(service, StageService)
            opening = disk_of(service).opening
            assert opening is not None
            await opening
        assert disk_of(service).is_open != is_replaced
        reasons = [each["reason"] for each in logs if each["event"] == "disk_not_opened"]
        said = f"{model} was changed since it was loaded: load the model again"
        assert reasons == ([said] if is_replaced else [])
    finally:
        await actor.stop()


async def test_a_stage_that_computes_nothing_any_more_ends_its_process_and_serves_no_peer(
    configs: list[StageConfig],
) -> None:
    ended = asyncio.Event()
    actor = StageActor(configs[1], end_process=ended.set)
    await actor.load()
    await certify(actor, "host-1")
    address = f"127.0.0.1:{await actor.start('127.0.0.1')}"
    service = actor._service
    assert isinstance(service, StageService)
    service._engine._scheduler.change(QueueBarrier(lambda: 1 / 0))
    async with asyncio.timeout(20):
        await ended.wait()
    # The process that a test does not end.
    with pytest.raises(StageFailed, match="ended: ZeroDivisionError"):
        await layers_at(address, COORDINATOR, "host-1")
    with pytest.raises(StageFailed, match="ended: ZeroDivisionError"):
        await actor.rejoin(1, "another mesh", "another key", 0)
    await actor.stop()


async def test_a_stage_that_no_coordinator_wants_any_more_ends_its_process(
    configs: list[StageConfig],
) -> None:
    ended = asyncio.Event()
    actor = StageActor(replace(configs[1], orphan_s=0.2), end_process=ended.set)
    await actor.load()
    await certify(actor, "host-1")
    address = f"127.0.0.1:{await actor.start('127.0.0.1')}"
    async with open_channel(address, "host-1", COORDINATOR) as channel:
        control = rpc.StageStub(channel).Control(metadata=key_metadata("key"))
        hello = wire.Hello(protocol_version=PROTOCOL_VERSION, mesh_id="mesh", sender="test")
        await control.write(wire.ControlRequest(hello=hello))
        assert isinstance(await control.read(), wire.ControlReply)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ended.wait(), 0.6)
    async with asyncio.timeout(20):
        await ended.wait()
    with pytest.raises(MeshError, match="does not answer"):
        await layers_at(address, COORDINATOR, "host-1")


@pytest.fixture
def assisted(tmp_path: Path) -> StageConfig:
    """The tail of a Gemma 4 with an assistant, which are fetched from files of this host."""
    model = OWN_MODELS["gemma4-dense"](1).write(tmp_path / "model.gguf")
    assistant = write_assistant(tmp_path / "assistant.gguf")
    cache = StageCache(tmp_path / "cache")
    layers = LayerRange(1, 3)
    recipes = cache.describe(model, layers), cache.describe_whole(assistant)
    sources = []
    for recipe in recipes:
        cache.store.keep(recipe)
        sources.append(FetchSource("127.0.0.1:1", b"", "", cache.known_files(recipe.sha256)))
    return StageConfig(
        stage_index=1,
        layers=layers,
        sha256=recipes[0].sha256,
        source=sources[0],
        options=RuntimeOptions(ctx_size=64, exact=True, has_reader=True),
        host="host-1",
        memory=StageMemory(0, 0, 0, 0),
        beside_bytes=0,
        mesh_id="mesh",
        mesh_key="key",
        cache_dir=str(tmp_path / "cache"),
        second_file=SecondFile(recipes[1].sha256, sources[1]),
    )


async def drafts_off(config: StageConfig) -> str | None:
    """Why a loaded stage does not draft, as it tells: empty if it does; None without an assistant."""
    actor = StageActor(config)
    try:
        await actor.load()
        await certify(actor, "host-1")
        await actor.start("127.0.0.1")
        assert actor._stage is not None
        content = await actor.content()
        assert content is not None
        assert content.assistant == (config.second_file.sha256 if config.second_file is not None else "")
        stats = actor._stage.stats()
        return stats.drafts_off if stats.HasField("drafts_off") else None
    finally:
        await actor.stop()
        assert actor._held == []


async def test_a_tail_brings_its_assistant_and_loads_it(assisted: StageConfig, tmp_path: Path) -> None:
    assert await drafts_off(assisted) == ""
    assert assisted.second_file is not None
    # It lies in the cache now, where another stage finds it.
    (tmp_path / "assistant.gguf").unlink()
    nowhere = replace(assisted.second_file, source=FetchSource("127.0.0.1:1", b"", ""))
    assert await drafts_off(replace(assisted, second_file=nowhere)) == ""
    assert await drafts_off(replace(assisted, second_file=None)) is None


async def test_an_assistant_that_cannot_be_loaded_is_done_without(assisted: StageConfig) -> None:
    with capture_logs() as logs:
        plain = replace(assisted, options=replace(assisted.options, has_reader=False))
        assert "cannot read the KV cache of layers" in (await drafts_off(plain) or "")
    assert [each["event"] for each in logs if each["log_level"] == "warning"] == ["assistant_failed"]


def test_a_stage_with_another_assistant_does_not_take_its_place(assisted: StageConfig) -> None:
    content = assisted.content
    assert content.computes_as(content)
    assert not content.computes_as(replace(content, assistant=""))
    assert not content.computes_as(replace(content, assistant="ab"))
