"""The encoder of pictures on other hosts, in one process: placed, lost, drained; the head in its place."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import psutil
import pytest

from mesh.cluster.certificates import Authority, make_certificate
from mesh.cluster.members import Members
from mesh.serve.allocations import HostAllocations
from mesh.serve.failures import Incidents
from mesh.serve.host_draining import HostDraining
from mesh.serve.pictures import ServedPictures
from mesh.serve.stage_factory import Transfers
from mesh.serve.vision.hosting import EncoderHosting, hosted_encoder
from mesh.status import ModelDescription
from mesh.vision.encoder import EncoderProcess
from mesh.vision.placed_encoder import PlacedEncoder
from spanmesh_proto.errors import ClusterError, HostUnreachable, InvalidRequest
from stages.vision.picture import Picture
from stages.vision.projector import ProjectorOptions
from stages.weights.fetch import FetchSource
from stages.weights.virtual_stages import StageCache
from tests.support import tiny_projectors
from tests.support.serve_harness import InProcessDriver, Messages, host, written_at_once
from tests.support.tiny_projectors import text_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from mesh.cluster.membership_server import MembershipService
    from mesh.serve.head import Head
    from mesh.serve.served_model import ServedModel
    from mesh.vision.encoder import PictureEncoder

pytestmark = pytest.mark.model

SMALL = Picture(90, 70, bytes(range(210)) * 90)
STRIP = Picture(16, 1600, bytes(16 * 1600 * 3))
LARGE = 2**32


class Announcements(Messages):
    def announce_to_all(self, state: str) -> None:
        self.said.announced.append(state)


@dataclass
class Hosting:
    """What tests look at."""

    hosting: EncoderHosting
    pictures: ServedPictures
    members: Members
    driver: InProcessDriver
    allocations: HostAllocations
    draining: HostDraining
    incidents: Incidents

    @property
    def where(self) -> list[str]:
        return [handle.member.name for handle in self.pictures.pipeline.handles]

    async def rows(self, picture: Picture = SMALL) -> np.ndarray:
        placed = self.pictures.placed
        parts = await placed.parts(picture.width, picture.height)
        return np.concatenate((await placed.encode(picture, parts)).chunks)

    async def until_on(self, *hosts: str) -> None:
        await until(lambda: self.where == list(hosts) and bool(hosts) is (self.pictures.placed.is_elsewhere))

    def kill(self) -> None:
        (handle,) = self.pictures.pipeline.handles
        self.driver.kill(handle._actor)


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def processes() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "mesh.vision.encoder_worker" in child.cmdline()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text_model(tmp_path / "model.gguf")
    return tmp_path


@asynccontextmanager
async def hosting(folder: Path, wanted: str, kind: str = "llava") -> AsyncIterator[Hosting]:
    path = getattr(tiny_projectors, kind)(folder / "mmproj.gguf")
    encoder = EncoderProcess(ProjectorOptions(str(path), str(folder / "model.gguf"), 1))
    await encoder.facts()
    members, driver, incidents = Members(), InProcessDriver(), Incidents(time.time)
    messages, pictures = Announcements(members), ServedPictures.of(encoder)
    head = SimpleNamespace(
        driver=driver,
        authority=Authority(make_certificate(dt.datetime.now(dt.UTC))),
        members=members,
        service=messages,
        source_for=lambda _member: FetchSource("127.0.0.1:1", b"", ""),
        own=SimpleNamespace(name="none of them", address="127.0.0.1"),
        # All are this host, so that all read the files themselves.
        is_own=lambda _member: True,
    )
    model = SimpleNamespace(
        name="m",
        pictures=pictures,
        options=SimpleNamespace(mmproj_host=wanted),
        state=SimpleNamespace(incidents=incidents, transfers=Transfers()),
    )
    allocations = HostAllocations(lambda _member: False)
    draining = HostDraining(
        members,
        cast("MembershipService", messages),
        lambda: [(pictures.pipeline, incidents)],
        on_new_token=lambda: None,
        clock_s=time.monotonic,
        until_written=written_at_once,
    )
    opened = hosted_encoder(
        cast("ServedModel", model),
        cast("Head", head),
        StageCache(folder / "head"),
        allocations,
        draining,
        term=7,
    )
    try:
        async with opened as found, draining.releasing():
            yield Hosting(found, pictures, members, driver, allocations, draining, incidents)
        assert list(allocations) == []
    finally:
        encoder.close()
        await driver.close()


async def test_a_named_host_encodes_and_the_head_does_while_it_is_lost(folder: Path) -> None:
    async with hosting(folder, "attic") as mesh:
        before = await mesh.rows()
        mesh.members.admit(host("desk", LARGE))
        mesh.members.admit(host("attic", LARGE))
        own = {process.pid for process in processes()}
        await mesh.hosting.decided()
        # Its memory counts as used before any layers are placed.
        attic = mesh.members.find("attic")
        assert attic is not None
        assert mesh.allocations.held_bytes(attic) == mesh.pictures.sizes.memory.total_bytes
        await mesh.until_on("attic")
        assert np.array_equal(await mesh.rows(), before)
        described = mesh.pictures.describe(ModelDescription(name="m"))
        assert (described.projector, described.projector_host) == ("mmproj.gguf", "attic")
        # The head's process has ended.
        await until(lambda: own.isdisjoint(process.pid for process in processes()))

        mesh.kill()
        # Nothing waits until the loss is known.
        assert np.array_equal(await mesh.rows(), before)
        await until(lambda: mesh.incidents.repairs.count == 1)
        await mesh.until_on("attic")
        assert np.array_equal(await mesh.rows(), before)

        mesh.members.remove("attic")
        await until(lambda: not mesh.pictures.placed.is_elsewhere)
        assert np.array_equal(await mesh.rows(), before)
        await mesh.until_on()
    assert processes() == []


async def test_a_picture_that_ends_the_process_costs_no_host(folder: Path) -> None:
    async with hosting(folder, "attic", "gemma4") as mesh:
        mesh.members.admit(host("attic", LARGE))
        before = await mesh.rows()
        await mesh.hosting.decided()
        await mesh.until_on("attic")
        with pytest.raises(InvalidRequest, match=r"16 × 1600 pixels ended its process \(SIGABRT\)"):
            await mesh.rows(STRIP)
        assert mesh.where == ["attic"]
        assert mesh.pictures.placed.is_elsewhere
        assert np.array_equal(await mesh.rows(), before)
        assert mesh.incidents.failures == ()


async def test_a_process_that_is_loaded_and_does_not_answer_is_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosting(folder, "attic") as mesh:
        mesh.members.admit(host("attic", LARGE))
        await mesh.hosting.decided()
        await mesh.until_on("attic")
        resume, is_cut = PlacedEncoder.resume, [True]

        async def once_cut(placed: PlacedEncoder, link: PictureEncoder) -> None:
            if is_cut:
                is_cut.pop()
                raise HostUnreachable("the network is cut")
            await resume(placed, link)

        monkeypatch.setattr(PlacedEncoder, "resume", once_cut)
        mesh.kill()
        await until(lambda: mesh.incidents.repairs.count == 1)
        await mesh.until_on("attic")
        assert mesh.driver.num_created == 3
        # Long before it would be an orphan.
        async with asyncio.timeout(10):
            await until(lambda: len(processes()) == 1)


async def test_a_host_that_leaves_gives_the_encoder_back_to_the_head(folder: Path) -> None:
    async with hosting(folder, "attic") as mesh:
        mesh.members.admit(host("attic", LARGE))
        await mesh.hosting.decided()
        await mesh.until_on("attic")
        before = await mesh.rows()
        assert await mesh.draining.drain("attic") == {"host": "attic", "drained": True}
        assert mesh.where == []
        assert np.array_equal(await mesh.rows(), before)


@pytest.mark.parametrize("wanted", ["auto", "attic", "head"])
async def test_without_a_place_of_use_the_head_encodes(folder: Path, wanted: str) -> None:
    """No host has a GPU, and the one that is named is too small."""
    async with hosting(folder, wanted) as mesh:
        mesh.members.admit(host("attic", 1))
        mesh.members.admit(host("desk", LARGE))
        await mesh.hosting.decided()
        assert mesh.where == []
        assert len(await mesh.rows()) == 16
        assert mesh.driver.num_created == 0


async def test_a_host_that_cannot_load_it_leaves_it_with_the_head(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosting(folder, "attic") as mesh:
        before = await mesh.rows()
        mesh.members.admit(host("attic", LARGE))

        async def facts(encoder: EncoderProcess) -> None:
            del encoder
            raise ClusterError("llama.cpp's library for pictures is missing")

        with monkeypatch.context() as there:
            there.setattr(EncoderProcess, "facts", facts)
            await mesh.hosting.decided()
            await until(lambda: mesh.driver.num_created and not mesh.pictures.pipeline.intended)
        assert np.array_equal(await mesh.rows(), before)
