"""Models from a hub, by a real HTTP server on loopback: chosen, pulled, gone on with, refused."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from mesh.cli.main import run
from mesh.draft.drafter import loadable_file, own_head
from mesh.hub import (
    HubLibrary,
    HubReference,
    RepoFile,
    Repository,
    choose,
    choose_projector,
    drafters_in,
    parse_reference,
)
from spanmesh_proto.errors import HubUnavailable, InvalidModel, ModelError
from stages.certification.certify import cut_stage
from stages.layers import LayerRange
from stages.slicing.model_facts import read_model_facts
from stages.weights import http_download
from stages.weights.disk_cache import StageStore, hold
from stages.weights.fetch import fetch_stage
from stages.weights.piece_sources import HubFile
from stages.weights.virtual_stages import StageCache
from tests.mesh.cluster.test_membership import head
from tests.support.eagle3 import DRAFTER
from tests.support.hub_server import COMMIT, running_hub
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TinyModel
from tests.support.tiny_projectors import llava

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mesh.options.host import HeadOptions
    from tests.support.hub_server import Hub

REFERENCE = HubReference("org/tiny-GGUF", wanted="Q8_0")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub", reason="needs the extra hub")
    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(http_download, "_FIRST_PAUSE_S", 0.01)
        monkeypatch.setattr("mesh.hub._FIRST_PAUSE_S", 0.01)
        # Small enough that a tiny model has several.
        monkeypatch.setattr(http_download, "_BLOCK_BYTES", 2**14)
        files = TinyModel("llama").write(tmp_path / "tiny-Q8_0.gguf")
        other = TinyModel("llama", seed=2).write(tmp_path / "tiny-Q4_K_M.gguf")
        running.files = {"tiny-Q8_0.gguf": files.read_bytes(), "tiny-Q4_K_M.gguf": other.read_bytes()}
        yield running


@pytest.fixture
def library(tmp_path: Path) -> HubLibrary:
    return HubLibrary(tmp_path / "cache")


@dataclasses.dataclass
class Orders:
    """What `mesh serve` and `mesh load` would have done."""

    served: list[HeadOptions] = dataclasses.field(default_factory=list)
    loaded: list[dict[str, str]] = dataclasses.field(default_factory=list)

    async def serve(self, options: HeadOptions, _interruption: object) -> None:
        self.served.append(options)

    def load(self, _head: str, _key: str | None, order: dict[str, str]) -> dict[str, Any]:
        self.loaded.append(order)
        return {"stages": [], "model": "tiny", "plan": "one stage"}


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Orders:
    found = Orders()
    monkeypatch.setattr("mesh.cli.serve._serve", found.serve)
    monkeypatch.setattr("mesh.cli.load._watched", found.load)
    return found


def quietly(_label: str) -> Callable[[int, int], None]:
    return lambda _done, _total: None


def test_a_model_is_pulled_once(hub: Hub, library: HubLibrary) -> None:
    seen: dict[str, tuple[int, int]] = {}

    def progress(label: str) -> Callable[[int, int], None]:
        return lambda done, total: seen.__setitem__(label, (done, total))

    pulled = library.pull(REFERENCE, progress)
    data = hub.files["tiny-Q8_0.gguf"]
    assert pulled.path.read_bytes() == data
    assert pulled.path.parts[-4:] == ("org", "tiny-GGUF", COMMIT, "tiny-Q8_0.gguf")
    assert pulled.hub == (HubFile(f"{hub.url}/org/tiny-GGUF/resolve/{COMMIT}/tiny-Q8_0.gguf", len(data)),)
    assert set(seen.values()) == {(len(data), len(data))}
    assert hub.sent_bytes == len(data)
    assert library.pull(REFERENCE, quietly) == pulled
    assert hub.sent_bytes == len(data)
    (cached,) = library.models()
    assert cached.is_whole
    assert cached.name == f"hf:org/tiny-GGUF@{COMMIT[:8]}:tiny-Q8_0"


def test_a_pull_that_breaks_off_goes_on_where_it_was(hub: Hub, library: HubLibrary) -> None:
    data = hub.files["tiny-Q8_0.gguf"]
    hub.breaks_after.extend([1000] * 40)  # more in a row than it takes to give up
    hub.statuses.extend([])
    pulled = library.pull(REFERENCE, quietly)
    assert pulled.path.read_bytes() == data
    # Every byte came once, however often the connection broke.
    assert hub.sent_bytes == len(data)


def test_a_pull_that_was_ended_goes_on_where_it_was(hub: Hub, library: HubLibrary) -> None:
    data = hub.files["tiny-Q8_0.gguf"]

    class Enough(Exception):
        pass

    def stop_halfway(_label: str) -> Callable[[int, int], None]:
        def on_bytes(done: int, total: int) -> None:
            if done > total / 2:
                raise Enough

        return on_bytes

    with pytest.raises(Enough):
        library.pull(REFERENCE, stop_halfway)
    (cached,) = library.models()
    assert not cached.is_whole
    before = hub.sent_bytes
    assert library.pull(REFERENCE, quietly).path.read_bytes() == data
    assert hub.sent_bytes - before < 0.8 * len(data)


def test_what_has_another_hash_than_the_hub_says_is_not_kept(
    hub: Hub, tmp_path: Path, library: HubLibrary
) -> None:
    said = hub.files["tiny-Q8_0.gguf"]
    repository = library._read(REFERENCE)
    turned = bytearray(said)
    turned[-5] ^= 1
    hub.files["tiny-Q8_0.gguf"] = bytes(turned)
    stale = HubLibrary(tmp_path / "cache", read=lambda _reference: repository)
    with pytest.raises(HubUnavailable, match=r"tiny-Q8_0\.gguf has sha256 .* it was removed; pull it"):
        stale.pull(REFERENCE, quietly)
    assert list(library.models()) == []


def test_a_token_opens_what_is_gated_and_goes_nowhere_else(
    hub: Hub, library: HubLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_secret"
    with pytest.raises(
        HubUnavailable, match=r"refuses org/tiny-GGUF \(401\): it is private or gated, .*HF_TOKEN"
    ):
        library.pull(REFERENCE, quietly)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    library.pull(REFERENCE, quietly)
    assert set(hub.tokens_at_cdn) == {None}


def test_a_repository_that_is_not_there(hub: Hub, library: HubLibrary) -> None:
    assert hub.url
    with pytest.raises(HubUnavailable, match=r"the hub has no org/absent \(404\): check the name"):
        library.pull(HubReference("org/absent"), quietly)


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_is_asked_again(hub: Hub, library: HubLibrary, status: int) -> None:
    hub.statuses.extend([(status, "0"), (status, None)])
    assert library.pull(REFERENCE, quietly).path.exists()


def test_a_hub_that_stays_busy_is_told(hub: Hub, library: HubLibrary) -> None:
    hub.statuses.extend([(429, "0")] * 50)
    with pytest.raises(HubUnavailable, match=r"limits the request rate \(429\), 4 times; .* try again later"):
        library.pull(REFERENCE, quietly)


def test_a_hub_that_gets_busy_half_way_keeps_what_came(hub: Hub, library: HubLibrary) -> None:
    repository = library._read(REFERENCE)
    hub.statuses.extend([(429, "0")] * 50)
    path = library._root / "direct.gguf"
    file = next(file for file in repository.files if "Q8_0" in file.name)
    with pytest.raises(HubUnavailable, match=r"429\), 5 times in a row; .* bytes received so far are kept"):
        http_download.download(
            repository.url(file), file.size_bytes, file.sha256, path, on_bytes=lambda _count: None
        )


def test_a_hub_that_does_not_answer_is_not_needed_for_what_is_here(
    hub: Hub, library: HubLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = library.pull(REFERENCE, quietly)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert library.pull(REFERENCE, quietly).path == pulled.path
    with pytest.raises(HubUnavailable, match=r"does not deliver org/other: no answer .* try again later"):
        library.pull(HubReference("org/other"), quietly)


def test_a_server_that_ignores_ranges(hub: Hub, library: HubLibrary) -> None:
    hub.ignores_ranges = True
    with pytest.raises(HubUnavailable, match="ignores ranges"):
        library.pull(REFERENCE, quietly)


async def test_a_stage_comes_straight_from_the_hub(hub: Hub, library: HubLibrary, tmp_path: Path) -> None:
    pulled = library.pull(REFERENCE, quietly)
    layers = LayerRange(2, 5)
    expected = tmp_path / "expected.gguf"
    cut_stage(pulled.path, layers, expected)
    before = hub.sent_bytes
    async with head(tmp_path) as side:
        recipe = side.cache.describe(pulled.path, layers)
        source = dataclasses.replace(side.source, hub=pulled.hub, is_hub_first=True)
        store = StageStore(tmp_path / "host")
        fetched = await fetch_stage(store, recipe.sha256, source)
    assert fetched.path.read_bytes() == expected.read_bytes()
    assert fetched.transfer.hub_bytes == recipe.weight_bytes
    assert fetched.transfer.head_bytes == 0
    # Its layers and nothing else.
    assert hub.sent_bytes - before == recipe.weight_bytes


async def test_what_the_hub_sends_wrongly_comes_from_the_head(
    hub: Hub, library: HubLibrary, tmp_path: Path
) -> None:
    pulled = library.pull(REFERENCE, quietly)
    hub.files["tiny-Q8_0.gguf"] = hub.files["tiny-Q4_K_M.gguf"]
    async with head(tmp_path) as side:
        recipe = side.cache.describe(pulled.path, LayerRange(2, 5))
        source = dataclasses.replace(side.source, hub=pulled.hub, is_hub_first=True)
        fetched = await fetch_stage(StageStore(tmp_path / "host"), recipe.sha256, source)
    assert fetched.transfer.head_bytes > 0.9 * recipe.weight_bytes
    assert fetched.transfer.wrong_pieces > 0


async def test_a_host_whose_head_lost_the_model_turns_to_the_hub(
    hub: Hub, library: HubLibrary, tmp_path: Path
) -> None:
    pulled = library.pull(REFERENCE, quietly)
    async with head(tmp_path) as side:
        recipe = side.cache.describe(pulled.path, LayerRange(2, 5))
        TinyModel("llama", seed=9).write(pulled.path)
        with pytest.raises(InvalidModel, match="was changed since its layers were hashed"):
            await fetch_stage(StageStore(tmp_path / "one"), recipe.sha256, side.source)
        source = dataclasses.replace(side.source, hub=pulled.hub)
        fetched = await fetch_stage(StageStore(tmp_path / "two"), recipe.sha256, source)
    assert fetched.transfer.hub_bytes == recipe.weight_bytes


def test_models_are_listed_removed_and_pruned(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hub.url
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert run(["models", "pull", "hf:org/tiny-GGUF:Q8_0"]) == 0
    path = capsys.readouterr().out.strip()
    cache = StageCache()
    from pathlib import Path  # noqa: PLC0415

    stage = cache.cut(Path(path), LayerRange(2, 5))
    half = cache.store.partial("ab" * 32)
    half.write_bytes(bytes(10_000))
    capsys.readouterr()
    assert run(["models", "list", "--json"]) == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["models"]}
    assert {name: entry["kind"] for name, entry in listed.items()} == {
        f"hf:org/tiny-GGUF@{COMMIT[:8]}:tiny-Q8_0": "model",
        stage.sha256[:12]: "stage",
        "ab" * 6: "part of a stage",
    }
    assert listed[stage.sha256[:12]]["what"] == "Tiny llama [2, 5) of 6"
    assert run(["models", "prune"]) == 0
    assert not half.exists()
    assert stage.path.exists()
    assert run(["models", "rm", stage.sha256[:8]]) == 0
    assert not stage.path.exists()
    assert run(["models", "rm", "nothing-like-it"]) == 1
    assert "names nothing here" in capsys.readouterr().err
    assert run(["models", "rm", f"hf:org/tiny-GGUF@{COMMIT[:8]}:tiny-Q8_0"]) == 0
    assert not Path(path).exists()


def test_a_pull_that_is_ended_does_not_wait_for_the_hub(
    hub: Hub, library: HubLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Enough(Exception):
        pass

    def stop(_label: str) -> Callable[[int, int], None]:
        def on_bytes(_done: int, _total: int) -> None:
            raise Enough

        return on_bytes

    asked_to_wait_s: list[float] = []
    wait = threading.Event.wait

    def note_wait(self: threading.Event, timeout: float | None = None) -> bool:
        asked_to_wait_s.append(timeout or 0)
        return wait(self, timeout)

    repository = library._read(REFERENCE)
    hub.statuses.append((503, "30"))
    monkeypatch.setattr(threading.Event, "wait", note_wait)
    begun_s = time.monotonic()
    with pytest.raises(Enough):
        HubLibrary(library._root, read=lambda _reference: repository).pull(REFERENCE, stop)
    assert 30 in asked_to_wait_s
    assert time.monotonic() - begun_s < 25


@pytest.mark.parametrize("name", ["org/my--model", "org/model-", "org/a..b"])
def test_what_no_hub_calls_a_repository(hub: Hub, library: HubLibrary, name: str) -> None:
    assert hub.url
    with pytest.raises(HubUnavailable, match=f"'{name}' is not a valid repository name"):
        library.pull(HubReference(name), quietly)


@pytest.mark.parametrize("page", [b"<html>Log in</html>", b"[]", b'{"id": "org/tiny-GGUF"}'])
def test_an_answer_of_something_else_than_a_hub(hub: Hub, library: HubLibrary, page: bytes) -> None:
    hub.page = page
    with pytest.raises(HubUnavailable, match="does not answer like a hub: check HF_ENDPOINT"):
        library.pull(REFERENCE, quietly)


@pytest.mark.parametrize(
    "commit", ["../../../elsewhere", "..", "main", "c0ffee", "C0FFEE" + "0" * 34, "0" * 41]
)
def test_a_commit_that_is_none_becomes_no_folder(
    hub: Hub, library: HubLibrary, tmp_path: Path, commit: str
) -> None:
    hub.commit = commit
    with pytest.raises(HubUnavailable, match="does not answer like a hub"):
        library.pull(REFERENCE, quietly)
    assert hub.num_asked == 0
    assert not (tmp_path / "elsewhere").exists()
    assert not (tmp_path / "cache").exists()


def test_two_pulls_of_one_file_do_not_get_in_each_other_s_way(hub: Hub, library: HubLibrary) -> None:
    failures: list[str] = []

    def pull_again(_label: str) -> Callable[[int, int], None]:
        def on_bytes(_done: int, _total: int) -> None:
            if not failures:
                with pytest.raises(ModelError, match="being fetched by another process: wait") as raised:
                    library.pull(REFERENCE, quietly)
                failures.append(raised.value.message)

        return on_bytes

    pulled = library.pull(REFERENCE, pull_again)
    assert failures
    assert pulled.path.read_bytes() == hub.files["tiny-Q8_0.gguf"]


def test_what_is_being_fetched_or_loaded_is_not_removed(hub: Hub, library: HubLibrary) -> None:
    removed: list[bool] = []

    def remove(_label: str) -> Callable[[int, int], None]:
        return lambda _done, _total: removed.extend(library.remove(cached) for cached in library.models())

    pulled = library.pull(REFERENCE, remove)
    assert removed
    assert not any(removed)
    (cached,) = library.models()
    held = hold(pulled.path)
    assert not library.remove(cached)
    os.close(held)
    assert library.remove(cached)
    assert hub.files
    assert not pulled.path.exists()


def test_a_model_that_lacks_a_part_is_not_whole(library: HubLibrary) -> None:
    folder = library._root / "org" / "tiny-GGUF" / COMMIT
    folder.mkdir(parents=True)
    for number, is_whole in ((1, False), (2, True)):
        (folder / f"m-0000{number}-of-00002.gguf").write_bytes(b"GGUF")
        (cached,) = library.models()
        assert cached.is_whole is is_whole


def files(*names: str) -> list[RepoFile]:
    return [RepoFile(name, 1, None) for name in names]


REPO = files(
    "README.md",
    "m-Q4_K_M.gguf",
    "m-Q8_0.gguf",
    "m-IQ4_XS.gguf",
    "mmproj-m-Q8_0.gguf",
    "BF16/m-BF16-00001-of-00002.gguf",
    "BF16/m-BF16-00002-of-00002.gguf",
)


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (None, ["m-Q4_K_M.gguf"]),
        ("Q8_0", ["m-Q8_0.gguf"]),
        ("q8_0", ["m-Q8_0.gguf"]),
        ("m-IQ4_XS.gguf", ["m-IQ4_XS.gguf"]),
        ("BF16", ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]),
        (
            "m-BF16-00001-of-00002.gguf",
            ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"],
        ),
    ],
)
def test_which_files_are_meant(wanted: str | None, chosen: list[str]) -> None:
    assert [file.name for file in choose(HubReference("org/m", wanted=wanted), REPO)] == chosen


def test_files_that_are_not_there_or_not_one() -> None:
    with pytest.raises(HubUnavailable, match=r"no model fits hf:org/m:Q2_K: .* BF16, IQ4_XS, Q4_K_M, Q8_0"):
        choose(HubReference("org/m", wanted="Q2_K"), REPO)
    with pytest.raises(HubUnavailable, match=r"no GGUF file: .* org/m-GGUF"):
        choose(HubReference("org/m"), files("model.safetensors"))
    with pytest.raises(HubUnavailable, match=r"org/m lacks BF16/m-BF16-00002-of-00002\.gguf"):
        choose(HubReference("org/m", wanted="BF16"), REPO[:-1])
    with pytest.raises(HubUnavailable, match="2 models fit"):
        choose(HubReference("org/m", wanted="Q8_0"), files("a-Q8_0.gguf", "b-Q8_0.gguf"))


BESIDE: Final = ("mtp-m-Q8_0.gguf", "eagle3-m-Q4_K_M.gguf", "m-DFlash-Q8_0.gguf", "m-it-assistant.Q8_0.gguf")


def test_a_pair_of_one_repository_is_offered_and_checked(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    model = TINY_FAMILIES["glm4moe"].with_prediction_layer().write(tmp_path / "glm.gguf")
    head = own_head(read_model_facts(model))
    assert head is not None
    hub.files = {
        "glm-Q8_0.gguf": model.read_bytes(),
        "mtp-glm.gguf": loadable_file(head, model, tmp_path).read_bytes(),
    }
    served, drafter = "hf:org/tiny-GGUF", "hf:org/tiny-GGUF:mtp-glm"
    run(["doctor", served, "--advertise", "127.0.0.1"])
    told = capsys.readouterr().out
    assert f"ok   drafter mtp-glm: the name of a drafter: mesh draft check {drafter} --for {served}" in told
    assert run(["draft", "check", drafter, "--for", served]) == 0
    assert f"  command    mesh serve {served} --draft {drafter}\n" in capsys.readouterr().out
    # Both are here now: told by their headers.
    run(["doctor", served, "--advertise", "127.0.0.1"])
    told = capsys.readouterr().out
    assert "ok   drafter mtp-glm.gguf: a head for multi-token prediction for it: mesh serve " in told
    assert run(["draft", "check", drafter]) == 0
    assert "fits glm-Q8_0.gguf" in capsys.readouterr().out
    assert not HubLibrary(tmp_path).drafters(HubReference("org/none"))


def test_a_drafter_of_the_hub_is_fetched_for_the_model_that_is_served_or_loaded(
    hub: Hub,
    orders: Orders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    hub.files["eagle3-tiny.gguf"] = DRAFTER.read_bytes()
    served, loaded = orders.served, orders.loaded
    pair = ["hf:org/tiny-GGUF:Q8_0", "--draft", "hf:org/tiny-GGUF:eagle3-tiny"]
    assert run(["serve", *pair, "--advertise", "127.0.0.1"]) == 0
    assert run(["load", *pair]) == 0
    folder = tmp_path / "user" / "spanmesh" / "models" / "org" / "tiny-GGUF" / COMMIT
    (options,), (order,) = served, loaded
    assert (options.model, options.draft_path) == (folder / "tiny-Q8_0.gguf", folder / "eagle3-tiny.gguf")
    assert (order["model"], order["draft_path"]) == (str(options.model), str(options.draft_path))
    capsys.readouterr()
    # It is no model, whatever asks for it.
    for verb in ("serve", "load"):
        assert run([verb, pair[-1]]) == 1
        assert "is an EAGLE-3 drafter and drafts for another model" in capsys.readouterr().err
    assert (len(served), len(loaded)) == (1, 1)


def test_drafters_of_a_repository_are_no_models_of_it() -> None:
    repo = files("m-Q4_K_M.gguf", "m-MTP-Q8_0.gguf", *BESIDE)
    assert [file.name for file in choose(HubReference("org/m"), repo)] == ["m-Q4_K_M.gguf"]
    assert [file.name for file in choose(HubReference("org/m", wanted="Q8_0"), repo)] == ["m-MTP-Q8_0.gguf"]
    for name in BESIDE:
        assert [file.name for file in choose(HubReference("org/m", wanted=name), repo)] == [name]
    assert drafters_in(Repository("org/m", "c" * 40, tuple(repo))) == tuple(
        sorted(name.removesuffix(".gguf") for name in BESIDE)
    )
    # Of drafters alone they are what is meant.
    alone = files("m-eagle3-Q8_0.gguf")
    assert [file.name for file in choose(HubReference("org/m"), alone)] == ["m-eagle3-Q8_0.gguf"]
    assert drafters_in(Repository("org/m", "c" * 40, tuple(alone))) == ()


@pytest.mark.parametrize(
    ("names", "wanted", "chosen"),
    [
        (("m-Q4_K_M.gguf",), None, None),
        (("mmproj-F16.gguf", "mmproj-F32.gguf", "m-F16.gguf"), None, "mmproj-F16.gguf"),
        (("mmproj-m-bf16.gguf", "mmproj-m-Q4_0.gguf"), None, "mmproj-m-bf16.gguf"),
        (("m.mmproj-q8_0.gguf", "mmproj-m-f16.gguf"), None, "m.mmproj-q8_0.gguf"),
        (("mmproj-model.gguf",), None, "mmproj-model.gguf"),
        (("mmproj-F16.gguf", "mmproj-F32.gguf"), "F32", "mmproj-F32.gguf"),
        (("mmproj-F16.gguf", "mmproj-F32.gguf"), "mmproj-F32.gguf", "mmproj-F32.gguf"),
    ],
)
def test_which_projector_is_meant(names: tuple[str, ...], wanted: str | None, chosen: str | None) -> None:
    """The smallest of the usual formats; of equal sizes the first."""
    sizes = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 1, "q4_0": 0}
    repo = [
        RepoFile(name, next((size for quant, size in sizes.items() if quant in name.lower()), 3), None)
        for name in names
    ]
    found = choose_projector(HubReference("org/m", wanted=wanted), repo)
    assert (None if found is None else found.name) == chosen


def test_a_projector_that_is_not_there_is_named() -> None:
    with pytest.raises(HubUnavailable, match=r"no projector fits hf:org/m:Q2_K: .* are mmproj-F16"):
        choose_projector(HubReference("org/m", wanted="Q2_K"), files("mmproj-F16.gguf", "m-Q2_K.gguf"))


def test_the_projector_beside_a_model_of_the_hub_is_taken(
    hub: Hub,
    orders: Orders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unless another one is named, or none; one that cannot be used is no reason not to serve."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    hub.files["mmproj-F16.gguf"] = llava(tmp_path / "mmproj-F16.gguf").read_bytes()
    hub.files["mmproj-F32.gguf"] = llava(tmp_path / "mmproj-F32.gguf").read_bytes() + bytes(32)
    served, loaded = orders.served, orders.loaded
    folder = tmp_path / "user" / "spanmesh" / "models" / "org" / "tiny-GGUF" / COMMIT
    local = tmp_path / "mmproj-F16.gguf"
    wanted: dict[tuple[str, ...], Path | None] = {
        (): folder / "mmproj-F16.gguf",
        ("--mmproj", "none"): None,
        ("--mmproj", str(local)): local,
        ("--mmproj", "hf:org/tiny-GGUF:F32"): folder / "mmproj-F32.gguf",
    }
    for options, path in wanted.items():
        assert run(["serve", "hf:org/tiny-GGUF:Q8_0", *options, "--advertise", "127.0.0.1"]) == 0
        assert run(["load", "hf:org/tiny-GGUF:Q8_0", *options]) == 0
        assert served[-1].projector_path == path
        assert loaded[-1]["mmproj"] == ("none" if path is None else str(path))
    # A file of the disk is not searched for, and a projector of sound is left out.
    assert run(["serve", str(tmp_path / "tiny-Q8_0.gguf"), "--advertise", "127.0.0.1"]) == 0
    assert served[-1].projector_path is None
    deaf = llava(tmp_path / "deaf.gguf", **{"clip.has_vision_encoder": None}).read_bytes()
    hub.files = {"tiny-Q8_0.gguf": hub.files["tiny-Q8_0.gguf"], "mmproj-Q8_0.gguf": deaf}
    capsys.readouterr()
    assert run(["serve", "hf:org/tiny-GGUF:Q8_0", "--advertise", "127.0.0.1"]) == 0
    assert served[-1].projector_path is None
    told = capsys.readouterr().err
    assert "pictures_off" in told
    assert "is a projector for something else than pictures" in told


def test_references() -> None:
    assert parse_reference("hf:org/m") == HubReference("org/m")
    assert parse_reference("hf:org/m.v2:Q4_K_M") == HubReference("org/m.v2", wanted="Q4_K_M")
    assert parse_reference("hf:org/m@v1.0:a/b.gguf") == HubReference("org/m", "v1.0", "a/b.gguf")
    assert parse_reference("hf:o_r-g/_m:a--b..c.gguf").repo == "o_r-g/_m"
    refused = ["hf:", "hf:m", "hf:org/m:", "hf:org/m:a b", "hf:../m/x", "hf:../..", "hf:org/..", "hf:../m"]
    refused += [
        "hf:./m",
        "hf:org/.m",
        "hf:org/m.",
        "hf:org/a..b:Q4",
        "hf:org/a--b",
        "hf:-org/m",
        "hf:org/m\u00e4",
    ]
    for text in refused:
        with pytest.raises(ModelError, match="is not a model at the hub"):
            parse_reference(text)
