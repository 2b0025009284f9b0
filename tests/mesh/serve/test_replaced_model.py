"""A model whose file is replaced while it is served: nothing of the new file gets into the ring."""

from __future__ import annotations

import dataclasses
import os
import shutil
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from mesh.cluster.host_facts import HostFacts, read_versions
from mesh.cluster.members import Member, Members
from mesh.options.host import HeadOptions
from mesh.options.model import LoadRequest
from mesh.placement.memory_estimate import StageSizes
from mesh.placement.planner import StagePlacement
from mesh.serve.embeddings.hosted import EmbeddingMaker
from mesh.serve.embeddings.model import check_embedding_model
from mesh.serve.stage_factory import StageMaker, Transfers
from spanmesh_proto.errors import InvalidModel
from stages.certification.certify import cut_stage
from stages.gguf import part_paths
from stages.layers import LayerRange
from stages.slicing.model_facts import read_model_facts
from stages.transport.hidden_codec import HiddenType
from stages.weights.disk_cache import StageStore
from stages.weights.fetch import fetch_stage
from stages.weights.hashing import stamps_of
from tests.mesh.cluster.test_membership import head
from tests.support.serve_harness import WORKLOAD
from tests.support.tiny_embedders import TinyEmbedder
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from mesh.serve.embeddings.model import EmbeddingModel
    from mesh.serve.head import Head
    from mesh.serve.preflight import Preflight
    from mesh.serve.stage_handle import StageHandle
    from tests.mesh.cluster.test_membership import HeadSide

MODEL = TinyModel("llama")
# With the same shape, so that its file has the same size.
ANOTHER = dataclasses.replace(MODEL, seed=7)
LAYERS, OTHER_LAYERS, ALL_LAYERS = LayerRange(1, 4), LayerRange(2, 5), LayerRange(0, 6)
# Of the ring, by host.
RING = (("attic", LayerRange(0, 1)), ("attic", LAYERS), ("desk", LayerRange(4, 6)))
REMEDY = r" was changed since it was served: start `mesh serve` again, or put the old file back"


@dataclass
class Mesh:
    """A head that serves a model, with its own member `attic` and another one, `desk`."""

    maker: StageMaker
    members: Members
    sizes: StageSizes
    folder: Path
    num_hosts: int = 0

    def stage(self, name: str, layers: LayerRange) -> StageHandle:
        """Of layers that were described."""
        member = self.members.find(name)
        assert member is not None
        placement = StagePlacement(name, layers, self.sizes.memory(layers))
        return self.maker.make(placement, member, wire=HiddenType.F32, num_threads=1)

    async def fetched(self, handle: StageHandle, store: StageStore | None = None) -> bytes:
        """What its host has then; a host with an empty cache unless a store is given."""
        self.num_hosts += 1
        store = store or StageStore(self.folder / f"host-{self.num_hosts}")
        config = handle.config
        return (await fetch_stage(store, config.sha256, config.source)).path.read_bytes()

    async def brought(self, name: str, layers: LayerRange) -> bytes:
        """As when a stage is placed on a host."""
        await self.maker.describe([(name, layers)])
        return await self.fetched(self.stage(name, layers))


def member(name: str, ray_node: str) -> Member:
    facts = HostFacts(2**40, 1, 20.0, read_versions())
    return Member(name, "127.0.0.1", facts, ray_node, is_ready=True)


def head_of(side: HeadSide, members: Members) -> Head:
    return cast(
        "Head",
        SimpleNamespace(
            driver=None,
            authority=side.authority,
            source_for=lambda _member: side.source,
            members=members,
            is_own=lambda member: member.ray_node_name == "attic.1",
        ),
    )


@asynccontextmanager
async def serving(model: Path, *, is_head_only: bool = False) -> AsyncIterator[Mesh]:
    members, facts = Members(), read_model_facts(model)
    if is_head_only:
        members.admit(member("attic", "attic.2"))
    else:
        members.admit(member("attic", "attic.1"))
        members.admit(member("desk", "desk.1"))
    options = HeadOptions(model=model, exact=True)
    known = SimpleNamespace(model=facts, workload=WORKLOAD, stamps=stamps_of(part_paths(model)), drafter=None)
    async with head(model.parent) as side:
        maker = StageMaker(
            options,
            cast("Preflight", known),
            head_of(side, members),
            side.cache,
            Transfers(),
        )
        yield Mesh(maker, members, StageSizes(facts, WORKLOAD), model.parent)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return MODEL.write(tmp_path / "model.gguf")


def expected(model: Path, layers: LayerRange) -> bytes:
    """Made by the other way."""
    output = model.with_name(f"expected-{layers.start}.gguf")
    cut_stage(model, layers, output)
    return output.read_bytes()


def replace_it(model: Path) -> Path:
    """Put another model in its place; returns where the old one is."""
    aside = model.rename(model.with_name("aside.gguf"))
    ANOTHER.write(model)
    assert model.stat().st_size == aside.stat().st_size
    return aside


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["attic", "desk"])
async def test_its_bytes_do_not_get_into_a_stage_of_the_old_one(model: Path, name: str) -> None:
    stage = expected(model, LAYERS)
    async with serving(model) as mesh:
        assert await mesh.brought(name, LAYERS) == stage
        replace_it(model)
        with pytest.raises(InvalidModel, match=r"model\.gguf was changed since .* or put the old file back"):
            await mesh.brought(name, LAYERS)


async def test_neither_if_that_was_described_a_moment_before(model: Path) -> None:
    async with serving(model) as mesh:
        await mesh.maker.describe(RING)
        replace_it(model)
        handle = mesh.stage("attic", LAYERS)
        with pytest.raises(InvalidModel, match=r"model\.gguf was changed since"):
            await mesh.fetched(handle)


@pytest.mark.parametrize("name", ["attic", "desk"])
async def test_its_layers_do_not_get_into_the_ring_of_the_old_one(model: Path, name: str) -> None:
    async with serving(model) as mesh:
        await mesh.maker.describe(RING)
        replace_it(model)
        with pytest.raises(InvalidModel, match=r"model\.gguf" + REMEDY):
            await mesh.maker.describe([(name, OTHER_LAYERS)])
        # It stays so.
        with pytest.raises(InvalidModel, match=r"model\.gguf" + REMEDY):
            await mesh.maker.describe([(name, OTHER_LAYERS)])


async def test_neither_if_it_came_before_anything_was_hashed(model: Path) -> None:
    async with serving(model) as mesh:
        replace_it(model)
        for layers in (LAYERS, ALL_LAYERS):
            with pytest.raises(InvalidModel, match=r"model\.gguf" + REMEDY):
                await mesh.maker.describe([("attic", layers)])


async def test_the_file_that_was_replaced_is_named(tmp_path: Path) -> None:
    model = MODEL.write(tmp_path / "model.gguf", tensors_per_file=20)
    parts = part_paths(model)
    assert len(parts) > 2
    async with serving(model) as mesh:
        await mesh.maker.describe(RING)
        flip(parts[1])
        with pytest.raises(InvalidModel, match=parts[1].name + REMEDY):
            await mesh.maker.describe([("desk", OTHER_LAYERS)])


@pytest.mark.parametrize("how", ["moved", "copied", "touched"])
async def test_the_old_file_may_be_put_back(model: Path, how: str) -> None:
    stages = {layers: expected(model, layers) for layers in (LAYERS, OTHER_LAYERS)}
    async with serving(model) as mesh:
        await mesh.maker.describe(RING)
        if how == "touched":
            os.utime(model)
        else:
            aside = replace_it(model)
            with pytest.raises(InvalidModel):
                await mesh.maker.describe([("desk", OTHER_LAYERS)])
            if how == "moved":
                aside.rename(model)
            else:
                shutil.copyfile(aside, model)
        for name in ("attic", "desk"):
            for layers, stage in stages.items():
                assert await mesh.brought(name, layers) == stage


@pytest.mark.parametrize("how", ["chmod", "link", "touch", "copy"])
async def test_what_was_hashed_is_not_hashed_again_before_a_repair(
    model: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = {layers: expected(model, layers) for layers in (LAYERS, OTHER_LAYERS)}
    async with serving(model) as mesh:
        await mesh.maker.describe(RING)
        if how == "chmod":
            os.chmod(model, 0o640)  # noqa: PTH101
        elif how == "link":
            os.link(model, model.with_name("backup.gguf"))
        elif how == "touch":
            os.utime(model)
        else:
            os.replace(shutil.copy2(model, model.with_name("copy.gguf")), model)  # noqa: PTH105
        with monkeypatch.context() as patched:
            patched.setattr("mesh.serve.stage_factory.described", None)
            await mesh.maker.describe(RING)
            # The pieces that a host lacks are checked when they are sent.
            for name in ("attic", "desk"):
                assert await mesh.fetched(mesh.stage(name, LAYERS)) == stages[LAYERS]
        assert await mesh.brought("desk", OTHER_LAYERS) == stages[OTHER_LAYERS]


@pytest.mark.parametrize("name", ["attic", "desk"])
async def test_another_model_with_the_time_of_the_old_one_is_noticed(model: Path, name: str) -> None:
    async with serving(model) as mesh:
        await mesh.maker.describe(RING)
        aside = replace_it(model)
        shutil.copystat(aside, model)
        await mesh.maker.describe([(name, LAYERS)])
        with pytest.raises(InvalidModel, match=r"model\.gguf was changed since its layers were hashed"):
            await mesh.fetched(mesh.stage(name, LAYERS))
        with pytest.raises(InvalidModel, match=r"model\.gguf" + REMEDY):
            await mesh.maker.describe([(name, OTHER_LAYERS)])


async def test_a_whole_model_on_the_head_may_be_moved_away_and_back(model: Path) -> None:
    async with serving(model) as mesh:
        aside = replace_it(model)
        with pytest.raises(InvalidModel, match=r"model\.gguf" + REMEDY):
            await mesh.maker.describe([("attic", ALL_LAYERS)])
        aside.rename(model)
        await mesh.maker.describe([("attic", ALL_LAYERS)])
        assert mesh.stage("attic", ALL_LAYERS).config.whole == str(model)


async def test_a_host_that_has_a_stage_needs_no_file(model: Path) -> None:
    stage, store = expected(model, LAYERS), StageStore(model.with_name("kept"))
    async with serving(model) as mesh:
        await mesh.maker.describe([("desk", LAYERS)])
        assert await mesh.fetched(mesh.stage("desk", LAYERS), store) == stage
        replace_it(model)
        await mesh.maker.describe([("desk", LAYERS)])
        assert await mesh.fetched(mesh.stage("desk", LAYERS), store) == stage
        os.unlink(model)  # noqa: PTH108
        await mesh.maker.describe([("desk", LAYERS)])
        assert await mesh.fetched(mesh.stage("desk", LAYERS), store) == stage
        # Where nothing is loaded, as when a replica takes over, nobody asks.
        await mesh.maker.describe([])
        with pytest.raises(InvalidModel, match=r"model\.gguf"):
            await mesh.maker.describe([("desk", OTHER_LAYERS)])


async def test_a_host_with_the_name_of_the_head_is_not_taken_for_it(model: Path) -> None:
    async with serving(model, is_head_only=True) as mesh:
        await mesh.maker.describe([("attic", ALL_LAYERS)])
        config = mesh.stage("attic", ALL_LAYERS).config
        assert config.whole is None
        assert config.source.model == ()
        assert await mesh.fetched(mesh.stage("attic", ALL_LAYERS)) == expected(model, ALL_LAYERS)


async def test_an_embedding_model_is_not_changed_for_another_either(tmp_path: Path) -> None:
    path = TinyEmbedder().write(tmp_path / "tiny.gguf")
    order = {"model": str(path), "embeddings": True, "ctx_size": 64, "threads": 1}
    known = check_embedding_model(LoadRequest.model_validate(order))
    served = cast("EmbeddingModel", SimpleNamespace(known=known, sizes=known.sizes, transfers=Transfers()))
    members, layers = Members(), known.sizes.layers
    members.admit(member("attic", "attic.1"))
    members.admit(member("desk", "desk.1"))
    async with head(tmp_path) as side:
        maker = EmbeddingMaker(served, head_of(side, members), side.cache)
        await maker.describe([("desk", layers)])
        aside = path.rename(tmp_path / "aside.gguf")
        TinyEmbedder(seed=2).write(path)
        with pytest.raises(InvalidModel, match=r"tiny\.gguf" + REMEDY):
            await maker.describe([("attic", layers)])
        # It may be in the cache there; it is not sent.
        await maker.describe([("desk", layers)])
        aside.rename(path)
        await maker.describe([("attic", layers), ("desk", layers)])
