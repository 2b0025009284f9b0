"""What `mesh serve --tune` refuses before any host is asked, whom it serves, and what memory it counts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from mesh.api.api_keys import KeyRecord, add_key, digest_of
from mesh.cli.main import run
from mesh.cluster.host_facts import HostFacts, read_versions
from mesh.engine import GenerationRequest, RecordedPrompt
from mesh.options.host import HeadOptions
from mesh.options.model import LoadRequest
from mesh.serve.options import options_of_load
from mesh.serve.preflight import check_model
from mesh.serve.tuning_room import tuning_room
from spanmesh_proto.errors import ClusterError, ModelDoesNotFit, ModelError, UncuttableModel
from tests.support.block_drafters import BlockDrafter
from tests.support.tiny_eagle3 import TinyEagle3
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.serve.preflight import Preflight

ROOM = 1 << 34
ALICE = KeyRecord("alice", digest_of("a"), may_record=True, group="staff")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tuning")
    target = TinyModel("llama", is_float=True).write(folder / "target.gguf")
    return target, TinyEagle3().write(target, folder / "drafter.gguf")


@pytest.fixture
def options(files: tuple[Path, Path], tmp_path: Path) -> HeadOptions:
    target, drafter = files
    return HeadOptions(
        model=target,
        draft_path=drafter,
        ctx_size=64,
        parallel=2,
        record_path=tmp_path / "of",
        tune_group="staff",
    )


def known_of(options: HeadOptions, memory_bytes: int = ROOM) -> Preflight:
    return check_model(options, lambda: HostFacts(memory_bytes, 1, 20.0, read_versions()))


def test_a_drafter_of_another_kind_and_none_are_refused(
    options: HeadOptions, files: tuple[Path, Path], tmp_path: Path
) -> None:
    for without in (options.changed(draft_path=None), options.changed(speculate="ngram")):
        with pytest.raises(ClusterError, match="needs an EAGLE-3 drafter to begin with, and none is named"):
            tuning_room(without, known_of(without))
    blocks = BlockDrafter(is_complete=False).write(files[0], tmp_path / "blocks.gguf")
    other = options.changed(draft_path=blocks)
    with pytest.raises(UncuttableModel, match="EAGLE-3 drafters alone can be tuned"):
        tuning_room(other, known_of(other))
    assert tuning_room(options.changed(tune_group=None), known_of(options)) is None
    assert options_of_load(LoadRequest(model="other.gguf"), options).tune_group is None


def test_without_torch_it_is_refused(options: HeadOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ModelError, match=r"pip install 'spanmesh\[tune\]'"):
        tuning_room(options, known_of(options))


def test_it_needs_a_recording(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--tune", "staff"]) == 2
    assert "--tune learns from recorded answers: name a folder by --record" in capsys.readouterr().err


def test_three_drafters_and_a_training_have_to_fit(options: HeadOptions) -> None:
    lone = known_of(options.changed(tune_group=None)).draft_bytes
    needed = known_of(options).draft_bytes
    assert needed > 3 * lone + (1 << 30)
    with pytest.raises(ModelDoesNotFit, match=r"3 times for --tune and once in training.* leave out --tune"):
        known_of(options, needed - 1)


def test_members_are_keys_of_the_group_as_their_file_has_them_now(
    options: HeadOptions, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make environment")
    path = tmp_path / "keys"
    add_key(path, replace(ALICE, name="carol", digest=digest_of("c"), group=None))
    keyed = options.changed(api_key_path=path)
    with capture_logs() as logs:
        room = tuning_room(keyed, known_of(keyed))
    assert room is not None
    assert [each["event"] for each in logs] == ["tuning_group_empty"]
    alice = GenerationRequest((1,), 1, client=ALICE.digest.hex())
    assert not room.is_member(alice)
    add_key(path, ALICE)
    assert room.members() == {ALICE.digest.hex()}
    assert room.is_member(alice)
    # A key that was removed and came back has another identity.
    assert room.is_member(replace(alice, client=f"{ALICE.digest.hex()}-1"))
    for other in (None, digest_of("c").hex(), digest_of("b").hex()):
        assert not room.is_member(replace(alice, client=other))
    path.write_text(path.read_text().replace("group=staff", "group=others"))
    assert not room.is_member(alice)
    # Without keys the recorded requests are the group.
    room = tuning_room(options, known_of(options))
    assert room is not None
    assert not room.is_member(replace(alice, client=None))
    assert room.is_member(replace(alice, client=None, recording=RecordedPrompt("chat", "one")))
