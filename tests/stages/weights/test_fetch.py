"""Stages on their way to a host: over real TLS and gRPC, out of its own files, interrupted, damaged."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from mesh.cluster.addresses import free_port
from mesh.cluster.certificates import make_certificate
from spanmesh_proto.errors import HostUnreachable, InvalidJoinToken, InvalidModel, MeshError, ModelError
from stages.certification.certify import cut_stage
from stages.layers import LayerRange
from stages.weights import fetch
from stages.weights.assembly import SentPieces, note_path
from stages.weights.disk_cache import (
    CACHE_BYTES,
    KV_DISK_BYTES,
    MODELS,
    StageStore,
    StorageOptions,
    read_storage_options,
)
from stages.weights.fetch import FetchSource, RateLimit, fetch_stage
from stages.weights.virtual_stages import StageCache
from tests.mesh.cluster.test_membership import head
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

    from stages.weights.recipe import Recipe
    from tests.mesh.cluster.test_membership import HeadSide

# Some megabytes, nearly all of them in 42 pieces.
MODEL = TinyModel("llama", n_embd=256, n_ff=768, n_heads=8, head_size=32)
LAYERS = LayerRange(1, 5)

FETCHING = """
import asyncio, sys
from pathlib import Path
from stages.weights.fetch import FetchSource, fetch_stage
from stages.weights.assembly import SentPieces
from stages.weights.disk_cache import StageStore
folder, sha256, address, secret, certificate = sys.argv[1:]
source = FetchSource(address, Path(certificate).read_bytes(), secret)
asyncio.run(fetch_stage(StageStore(Path(folder)), sha256, source))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return MODEL.write(tmp_path / "model.gguf")


@pytest.fixture
def store(tmp_path: Path) -> StageStore:
    return StageStore(tmp_path / "host")


def cut_bytes(model: Path, layers: LayerRange = LAYERS) -> bytes:
    """What must come out, made by the other way."""
    output = model.with_name("expected.gguf")
    cut_stage(model, layers, output)
    return output.read_bytes()


def layer_bytes(recipe: Recipe, layers: range) -> int:
    """Of the weights of some of the model's layers."""
    return sum(
        piece.num_bytes
        for piece in recipe.pieces
        if piece.tensor.startswith("blk.") and int(piece.tensor.split(".")[1]) in layers
    )


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


async def test_a_stage_travels_whole_though_the_head_has_no_file_of_it(
    tmp_path: Path, model: Path, store: StageStore
) -> None:
    seen: list[tuple[int, int]] = []
    async with head(tmp_path) as side:
        recipe = side.cache.describe(model, LAYERS)
        fetched = await fetch_stage(store, recipe.sha256, side.source, progress=lambda *at: seen.append(at))
    assert fetched.path.read_bytes() == cut_bytes(model)
    assert fetched.transfer.head_bytes == recipe.weight_bytes
    assert fetched.transfer.reused_bytes == 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (recipe.weight_bytes, recipe.weight_bytes)
    # Nothing was written at the head but hashes.
    assert {path.name for path in (tmp_path / "head").iterdir()} == {"sources"}
    assert {path.suffix for path in store.root.iterdir()} == {".gguf", ".recipe"}


async def test_the_head_s_own_stage_is_copied_from_the_model(
    tmp_path: Path, model: Path, store: StageStore
) -> None:
    cache = StageCache(tmp_path / "head")
    recipe = cache.describe(model, LAYERS)
    store.keep(recipe)
    nobody = FetchSource("127.0.0.1:1", b"", "", cache.known_files(recipe.sha256))
    fetched = await fetch_stage(store, recipe.sha256, nobody)
    assert fetched.path.read_bytes() == cut_bytes(model)
    assert fetched.transfer.moved_bytes == 0


async def test_a_model_that_was_changed_since_it_was_hashed_is_not_copied(
    tmp_path: Path, model: Path, store: StageStore
) -> None:
    async with head(tmp_path) as side:
        recipe = side.cache.describe(model, LAYERS)
        known = side.cache.known_files(recipe.sha256)
        source = dataclasses.replace(side.source, model=known)
        dataclasses.replace(MODEL, seed=7).write(model)
        with pytest.raises(InvalidModel, match=r"model\.gguf was changed since its layers were hashed"):
            await fetch_stage(store, recipe.sha256, source)
        # The same bytes, but who knows: they are checked.
        MODEL.write(model)
        fetched = await fetch_stage(store, recipe.sha256, source)
    assert fetched.path.read_bytes() == cut_bytes(model)
    assert fetched.transfer.head_bytes == recipe.weight_bytes


async def test_only_layers_that_change_hands_are_sent(tmp_path: Path, model: Path, store: StageStore) -> None:
    async with head(tmp_path) as side:
        before = side.cache.describe(model, LayerRange(1, 3))
        await fetch_stage(store, before.sha256, side.source)
        store.settle(before.sha256)
        after = side.cache.describe(model, LayerRange(1, 5))
        fetched = await fetch_stage(store, after.sha256, side.source)
    assert fetched.transfer.head_bytes == layer_bytes(after, range(3, 5))
    assert fetched.transfer.reused_bytes == after.weight_bytes - layer_bytes(after, range(3, 5))
    assert fetched.path.read_bytes() == cut_bytes(model)


async def test_many_pieces_are_asked_for_little_by_little(
    tmp_path: Path, model: Path, store: StageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "MOST_RANGES", 1)
    async with head(tmp_path) as side:
        before = side.cache.describe(model, LayerRange(2, 3))
        await fetch_stage(store, before.sha256, side.source)
        store.settle(before.sha256)
        after = side.cache.describe(model, LAYERS)
        with capture_logs() as logs:
            fetched = await fetch_stage(store, after.sha256, side.source)
    # What the host has lies between what it lacks: layer 1 and layers 3 and 4 at least.
    assert sum(entry["event"] == "stage_sent" for entry in logs) > 1
    assert fetched.transfer.head_bytes == layer_bytes(after, range(1, 5)) - layer_bytes(after, range(2, 3))
    assert fetched.path.read_bytes() == cut_bytes(model)


async def test_a_host_s_own_copy_of_the_model_is_taken_where_it_is_the_same(
    tmp_path: Path, model: Path, store: StageStore
) -> None:
    own = tmp_path / "own" / "models"
    own.mkdir(parents=True)
    (own / "broken.gguf").write_bytes(b"no model")
    dataclasses.replace(MODEL, seed=7).write(own / "another.gguf")
    copy = own / "called-otherwise.gguf"
    shutil.copyfile(model, copy)
    async with head(tmp_path) as side:
        recipe = side.cache.describe(model, LAYERS)
        # One byte of it is another: that piece alone is sent.
        damaged = recipe.pieces[7]
        flip(copy, damaged.file_offset + 3)
        fetched = await fetch_stage(store, recipe.sha256, side.source, storage=StorageOptions(models=own))
    assert fetched.path.read_bytes() == cut_bytes(model)
    assert fetched.transfer.head_bytes == damaged.num_bytes


async def test_a_transfer_that_is_killed_goes_on_where_it_was(
    tmp_path: Path, model: Path, store: StageStore
) -> None:
    certificate = tmp_path / "certificate.pem"
    random_s = random.Random(6)
    recipe_bytes = sent_bytes = num_killed = 0
    async with head(tmp_path, rate=RateLimit(2e6)) as side:
        recipe = side.cache.describe(model, LAYERS)
        recipe_bytes = recipe.weight_bytes
        certificate.write_bytes(side.source.certificate_pem)
        argv = [sys.executable, "-c", FETCHING, str(store.root), recipe.sha256, side.source.address]
        argv += [side.source.secret]
        while not (store.root / f"{recipe.sha256}.gguf").exists() and num_killed < 2:
            process = subprocess.Popen([*argv, str(certificate)])  # noqa: ASYNC220 - at once
            partial = store.partial(recipe.sha256)
            try:
                await _until_it_fetches(partial, process)
                await asyncio.sleep(random_s.uniform(0.05, 0.3))
            finally:
                process.send_signal(signal.SIGKILL)
                await asyncio.to_thread(process.wait)
            num_killed += 1
        assert num_killed == 2
        # Whatever the disk did meanwhile: what the note claims is read again.
        note = note_path(store.partial(recipe.sha256))
        claimed = [index for index, flag in enumerate(note.read_bytes()) if flag]
        assert claimed
        flip(store.partial(recipe.sha256), recipe.pieces[claimed[-1]].at)
        fetched = await fetch_stage(store, recipe.sha256, side.source)
        sent_bytes = fetched.transfer.head_bytes
    assert fetched.path.read_bytes() == cut_bytes(model)
    assert fetched.transfer.wrong_pieces == 1
    claimed_bytes = sum(recipe.pieces[index].num_bytes for index in claimed[:-1])
    assert sent_bytes == recipe_bytes - claimed_bytes


async def test_what_is_being_written_when_a_fetch_is_cancelled_has_its_file_to_the_end(
    tmp_path: Path, model: Path, store: StageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), list[bool]()
    take = SentPieces.take

    def take_slowly(self: SentPieces, data: bytes) -> None:
        begun.set()
        time.sleep(0.2)
        take(self, data)
        ended.append(True)

    monkeypatch.setattr(SentPieces, "take", take_slowly)
    async with head(tmp_path) as side:
        recipe = side.cache.describe(model, LAYERS)
        fetch = asyncio.create_task(fetch_stage(store, recipe.sha256, side.source))
        assert await asyncio.to_thread(begun.wait, 20)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
    assert ended == [True]


async def _until_it_fetches(partial: Path, process: subprocess.Popen[bytes]) -> None:
    before = note_path(partial).read_bytes() if note_path(partial).exists() else b""
    async with asyncio.timeout(20):
        while process.poll() is None:
            note = note_path(partial)
            if note.exists() and note.read_bytes() != before:
                return
            await asyncio.sleep(0.01)


async def test_a_byte_that_turns_on_the_way_is_noticed_and_its_piece_sent_again(
    tmp_path: Path, model: Path, store: StageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with head(tmp_path) as side:
        recipe = side.cache.describe(model, LAYERS)
        piece = recipe.pieces[9]
        num_harmed = harm_sent_bytes(side, monkeypatch, piece.at + 5, num_times=1)
        with capture_logs() as logs:
            fetched = await fetch_stage(store, recipe.sha256, side.source)
    assert num_harmed() == 1
    assert fetched.path.read_bytes() == cut_bytes(model)
    assert fetched.transfer.head_bytes == recipe.weight_bytes + piece.num_bytes
    assert fetched.transfer.wrong_pieces == 1
    assert [entry["tensor"] for entry in logs if entry["event"] == "piece_damaged"] == [piece.tensor]


async def test_a_piece_that_never_comes_right_is_named(
    tmp_path: Path, model: Path, store: StageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with head(tmp_path) as side:
        recipe = side.cache.describe(model, LAYERS)
        harm_sent_bytes(side, monkeypatch, recipe.pieces[9].at, num_times=99)
        with pytest.raises(InvalidModel, match=r"arrived 3 times .* the head's copy of the model is damaged"):
            await fetch_stage(store, recipe.sha256, side.source)
    assert store.find(recipe.sha256) is None


def harm_sent_bytes(side: HeadSide, monkeypatch: pytest.MonkeyPatch, at: int, *, num_times: int):  # type: ignore[no-untyped-def]
    """Flip a bit of one byte of the stage whenever it is sent, so many times; gives how often that was."""
    opened, harmed = side.cache.open, [0]

    def open_stage(sha256: str) -> object:
        stage = opened(sha256)
        assert stage is not None
        read = stage.read

        def read_harmed(start: int, count: int) -> bytes:
            data = bytearray(read(start, count))
            if start <= at < start + len(data) and harmed[0] < num_times:
                data[at - start] ^= 1
                harmed[0] += 1
            return bytes(data)

        monkeypatch.setattr(stage, "read", read_harmed)
        return stage

    monkeypatch.setattr(side.cache, "open", open_stage)
    return lambda: harmed[0]


async def test_a_damaged_stage_gets_only_its_damaged_piece_anew(
    tmp_path: Path, model: Path, store: StageStore
) -> None:
    async with head(tmp_path) as side:
        recipe = side.cache.describe(model, LAYERS)
        path = (await fetch_stage(store, recipe.sha256, side.source)).path
        store.settle(recipe.sha256)
        flip(path, recipe.pieces[3].at)
        assert store.find(recipe.sha256) is None
        fetched = await fetch_stage(store, recipe.sha256, side.source)
    assert fetched.transfer.head_bytes == recipe.pieces[3].num_bytes
    assert fetched.path.read_bytes() == cut_bytes(model)


@pytest.mark.parametrize("place", ["header", "zeros", "size"])
async def test_damage_outside_the_pieces_is_noticed_as_well(
    tmp_path: Path, model: Path, store: StageStore, place: str
) -> None:
    async with head(tmp_path) as side:
        recipe = side.cache.describe(model, LAYERS)
        path = (await fetch_stage(store, recipe.sha256, side.source)).path
        if place == "size":
            os.truncate(path, recipe.size_bytes - 1)
        else:
            flip(path, 40 if place == "header" else next(recipe.zeros())[0])
        assert store.find(recipe.sha256) is None
        fetched = await fetch_stage(store, recipe.sha256, side.source)
    assert fetched.path.read_bytes() == cut_bytes(model)


async def test_two_fetches_of_one_stage_at_once_both_end_well(
    tmp_path: Path, model: Path, store: StageStore
) -> None:
    async with head(tmp_path) as side:
        recipe = side.cache.describe(model, LAYERS)
        both = await asyncio.gather(*(fetch_stage(store, recipe.sha256, side.source) for _ in range(2)))
    assert both[0].path == both[1].path
    assert sum(fetched.transfer.head_bytes for fetched in both) == recipe.weight_bytes
    assert both[0].path.read_bytes() == cut_bytes(model)


async def test_all_hosts_together_keep_to_the_rate(tmp_path: Path, model: Path) -> None:
    async with head(tmp_path, rate=RateLimit(8e6)) as side:
        recipe = side.cache.describe(model, LAYERS)
        begun_s = time.monotonic()
        stores = [StageStore(tmp_path / name) for name in ("one", "two")]
        await asyncio.gather(*(fetch_stage(store, recipe.sha256, side.source) for store in stores))
        took_s = time.monotonic() - begun_s
    assert took_s > 0.8 * 2 * recipe.weight_bytes / 8e6


async def test_stages_are_for_members_only(tmp_path: Path, model: Path, store: StageStore) -> None:
    async with head(tmp_path) as side:
        recipe = side.cache.describe(model, LAYERS)
        stranger = dataclasses.replace(side.source, secret="guess")
        with pytest.raises(InvalidJoinToken):
            await fetch_stage(store, recipe.sha256, stranger)


async def test_a_stage_that_the_head_does_not_know_is_named(tmp_path: Path, store: StageStore) -> None:
    async with head(tmp_path) as side:
        with pytest.raises(InvalidModel, match="no stage abcabcabcabc"):
            await fetch_stage(store, "abc" * 21 + "a", side.source)


async def test_a_hash_that_is_a_path_leads_nowhere(tmp_path: Path, store: StageStore) -> None:
    async with head(tmp_path) as side:
        with pytest.raises(MeshError, match="is not a sha256"):
            await fetch_stage(store, "../../private", side.source)


async def test_a_head_that_is_gone_is_named(store: StageStore) -> None:
    certificate = make_certificate(dt.datetime.now(dt.UTC))
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    source = FetchSource(address, certificate.certificate_pem, "secret")
    with pytest.raises(HostUnreachable, match=address):
        await fetch_stage(store, "ab" * 32, source)


async def test_the_cache_keeps_to_its_limit(tmp_path: Path, model: Path, store: StageStore) -> None:
    async with head(tmp_path) as side:
        recipes = [side.cache.describe(model, LayerRange(at, at + 1)) for at in range(1, 5)]
        limit = StorageOptions(cache_bytes=int(2.5 * max(recipe.size_bytes for recipe in recipes)))
        for recipe in recipes:
            await fetch_stage(store, recipe.sha256, side.source, storage=limit)
            store.settle(recipe.sha256)
            await asyncio.sleep(0.01)
        assert {stage.sha256 for stage in store.stages()} == {recipe.sha256 for recipe in recipes[2:]}
        with pytest.raises(ModelError, match="raise --cache-size"):
            await fetch_stage(store, recipes[0].sha256, side.source, storage=StorageOptions(cache_bytes=1000))


def test_what_a_host_s_user_says_reaches_its_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (MODELS, CACHE_BYTES, KV_DISK_BYTES):
        monkeypatch.delenv(name, raising=False)
    assert read_storage_options() == StorageOptions()
    for said in (StorageOptions(tmp_path, 5_000, 7_000), StorageOptions(tmp_path, 5_000, 0)):
        for name in (MODELS, CACHE_BYTES, KV_DISK_BYTES):
            monkeypatch.setenv(name, "")  # to be put back afterwards
        said.to_environment()
        assert read_storage_options() == said
        # Who says nothing leaves it as it is.
        StorageOptions().to_environment()
        assert read_storage_options() == said
