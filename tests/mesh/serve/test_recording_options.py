"""What `mesh serve --record` records, of which keys, and what it refuses before any host is asked."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from mesh.api.api_keys import ApiKeys, KeyRecord, add_key, digest_of, remove_key
from mesh.cli.main import run
from mesh.cluster.host_facts import HostFacts, read_versions
from mesh.draft.drafter import Drafter
from mesh.options.host import HeadOptions
from mesh.options.model import LoadRequest
from mesh.serve.options import options_of_load
from mesh.serve.preflight import check_model
from mesh.serve.recording import AgreedKeys, open_recorder
from mesh.tuning.recording import read_recording_header
from spanmesh_proto.errors import ClusterError, ModelError
from speculative.proposer import DrafterKind
from stages.gguf import read_header
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.serve.preflight import Preflight

ALICE, BOB = KeyRecord("alice", digest_of("a"), may_record=True), KeyRecord("bob", digest_of("b"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel("llama", n_layers=8, head_size=16).write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def options(tiny: Path, tmp_path: Path) -> HeadOptions:
    return HeadOptions(model=tiny, ctx_size=64, parallel=2, record_path=tmp_path / "of", record_bytes=1 << 20)


@pytest.fixture
def known(options: HeadOptions) -> Preflight:
    return check_model(options, lambda: HostFacts(2**30, 1, 20.0, read_versions()))


def recorded_layers(options: HeadOptions, known: Preflight) -> tuple[int, ...]:
    """Layers whose inputs are recorded, as the folder says."""
    with open_recorder(options, known) as opened:
        assert opened is not None
        assert options.record_path is not None
        layers = read_recording_header(options.record_path).layers
        assert layers == tuple(layer + 1 for layer in opened.needs.layers)
        return layers


def test_layers_are_those_that_the_drafter_reads_or_that_are_named(
    options: HeadOptions, known: Preflight, tmp_path: Path
) -> None:
    assert recorded_layers(options, known) == (2, 4, 5)
    other = options.changed(record_path=tmp_path / "others", tap_layers=(1, 3))
    assert recorded_layers(other, known) == (1, 3)
    with pytest.raises(ModelError, match="records the inputs of layers 1, 3, the drafter reads those of 2"):
        recorded_layers(options.changed(record_path=tmp_path / "others"), known)
    drafter = Drafter(DrafterKind.EAGLE3, read_header(options.model), (0, 2, 6), known.model.n_embd)
    reading = replace(known, drafter=drafter)
    of_drafter = options.changed(record_path=tmp_path / "drafter's")
    assert recorded_layers(of_drafter, reading) == (1, 3, 7)
    assert recorded_layers(of_drafter.changed(tap_layers=(1, 3, 7)), reading) == (1, 3, 7)
    with pytest.raises(ClusterError, match=r"--tap-layers names other layers than .* which are 1,3,7"):
        recorded_layers(of_drafter.changed(tap_layers=(2, 4, 5)), reading)
    # A small model reads none.
    small = Drafter(DrafterKind.MODEL, read_header(options.model))
    assert recorded_layers(options, replace(known, drafter=small)) == (2, 4, 5)


@pytest.mark.parametrize("layers", [(0, 2), (2, 8), (4, 2), (2, 2)])
def test_layers_that_a_model_does_not_have_are_refused(
    options: HeadOptions, known: Preflight, layers: tuple[int, ...]
) -> None:
    with pytest.raises(ClusterError, match="name layers from 1 to 7 with --tap-layers"):
        recorded_layers(options.changed(tap_layers=layers), known)


def test_what_no_drafter_can_learn_from_is_refused(options: HeadOptions, known: Preflight) -> None:
    head = Drafter(DrafterKind.MTP, read_header(options.model), (8,), known.model.n_embd)
    with pytest.raises(ClusterError, match=r"heads for multi-token prediction .* are not tuned"):
        recorded_layers(options, replace(known, drafter=head))
    streams = replace(known, model=replace(known.model, n_streams=4))
    with pytest.raises(ClusterError, match="have 4 streams"):
        recorded_layers(options, streams)


def test_others_machines_are_recorded_by_their_keys_only(options: HeadOptions, known: Preflight) -> None:
    beyond = options.changed(host="0.0.0.0", insecure=True)
    with pytest.raises(ClusterError, match=r"needs API keys.*`mesh keys add NAME --may-record`"):
        recorded_layers(beyond, known)
    assert recorded_layers(beyond, replace(known, api_keys=ApiKeys([ALICE])))


def test_without_record_there_is_no_recorder(options: HeadOptions, known: Preflight, tmp_path: Path) -> None:
    with open_recorder(options.changed(record_path=None), known) as opened:
        assert opened is None
    # The folder is of the first model.
    assert options_of_load(LoadRequest(model="other.gguf"), options).record_path is None
    assert not (tmp_path / "of").exists()


def test_keys_that_agree_are_those_of_the_file_now(tmp_path: Path) -> None:
    assert AgreedKeys(None)() is None
    path = tmp_path / "keys"
    agreed = AgreedKeys(path, lambda: time.time() + 10.0)
    assert agreed() is None
    for record in (ALICE, BOB):
        add_key(path, record)
    alone = {ALICE.digest.hex(): None}
    assert agreed() == alone
    path.write_text(path.read_text().replace(" may-record=yes", " may-record=no"))
    assert agreed() == {}
    path.write_text(path.read_text().replace("may-record=no", "may-record=yes group=staff"))
    assert agreed() == {ALICE.digest.hex(): "staff"}
    path.write_text(path.read_text().replace(" group=staff", ""))
    assert agreed() == alone
    # While the file cannot be read no key counts as removed.
    whole = path.read_text()
    path.write_text("alice sha256:00\n")
    assert agreed() == alone
    path.unlink()
    assert agreed() == alone
    path.write_text(whole)
    remove_key(path, "alice")
    assert agreed() == {}


def test_no_key_is_gone_while_its_file_is_being_written(tmp_path: Path) -> None:
    path, now_s = tmp_path / "keys", time.time()
    agreed = AgreedKeys(path, lambda: now_s)
    add_key(path, ALICE)
    whole, alone = path.read_text(), {ALICE.digest.hex(): None}
    assert agreed() == alone
    path.write_text("")
    os.utime(path, (now_s, now_s))
    assert agreed() == alone
    path.write_text(whole.replace("alice", "alicia"))
    os.utime(path, (now_s, now_s))
    assert agreed() == alone
    path.write_text("")
    os.utime(path, (now_s, now_s))
    now_s += 1.5
    assert agreed() == {}


@pytest.mark.parametrize("option", [("--record-limit", "1G"), ("--tap-layers", "2,4,5")])
def test_options_of_a_recording_need_its_folder(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", *option]) == 2
    assert "are for recordings: name a folder by --record" in capsys.readouterr().err
