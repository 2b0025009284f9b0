"""What a head leaves for the next: read back as written, for nobody else's eyes, one head at a time."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, cast

import pytest

from mesh.api.load_request import LoadRequest
from mesh.cluster.ray_node import RayNodeRecord
from mesh.serve.head_failover import kill_unrecorded_actors
from mesh.serve.head_state import (
    HeadState,
    HeadStateFile,
    SavedModel,
    SavedStage,
    default_state_path,
    fingerprint,
)
from spanmesh_proto.errors import InvalidRequest, StageFailed

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.cluster.ray_driver import RayDriver

STATE = HeadState(
    term=3,
    ray=RayNodeRecord("10.0.0.1", "head.1", "/somewhere", 77, 12.5),
    secret="s" * 43,
    expires_at_s=2_000_000_000,
    join_port=7946,
    certificate_pem="-----BEGIN…",
    private_key_pem="-----BEGIN…",
    setup=fingerprint(model="abc", slots=8),
    stages=(SavedStage("stage-1", "b", "b.2", 0, 10, 2, "f32", "10.0.0.2:4000"),),
    copies=(SavedStage("stage-2", "c", "c.1", 0, 10, 1, "f32", None, ctx_size=32_768),),
    models=(
        SavedModel(
            LoadRequest.model_validate({"model": "/models/tiny.gguf", "ctx_size": 512}).model_dump(),
            fingerprint(model="tiny"),
            stages=(SavedStage("stage-3", "b", "b.2", 0, 6, 1, "f32", "10.0.0.2:4001"),),
        ),
    ),
    rejoin_secrets={"b": "r" * 43, "c": "q" * 43},
    evicted=("d", "e"),
)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "head.json"
    with HeadStateFile(path) as file:
        assert file.load() is None
        file.save(STATE)
        assert file.load() == STATE
        file.save(dataclasses.replace(STATE, term=4))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with HeadStateFile(path) as file:
        assert file.load() == dataclasses.replace(STATE, term=4)
        file.clear()
        file.clear()
        assert file.load() is None


def test_two_heads_do_not_share_it(tmp_path: Path) -> None:
    with HeadStateFile(tmp_path / "head.json"), pytest.raises(BlockingIOError):
        HeadStateFile(tmp_path / "head.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', json.dumps({"format": 1, "term": 1})])
def test_what_cannot_be_read_is_not_taken_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "head.json").write_text(text)
    with HeadStateFile(tmp_path / "head.json") as file:
        assert file.load() is None
        file.save(STATE)
        assert file.load() == STATE


def test_heads_of_other_names_and_places_have_other_files() -> None:
    paths = {
        default_state_path(*head)
        for head in [("a", "10.0.0.1", 0), ("b", "10.0.0.1", 0), ("a", "10.0.0.2", 0), ("a", "10.0.0.1", 1)]
    }
    assert len(paths) == 4


def test_what_was_written_before_there_were_several_models_is_read(tmp_path: Path) -> None:
    with HeadStateFile(tmp_path / "head.json") as file:
        file.save(STATE)
        fields = json.loads((tmp_path / "head.json").read_text())
        del fields["models"]
        (tmp_path / "head.json").write_text(json.dumps(fields))
        assert file.load() == dataclasses.replace(STATE, models=())


def test_what_was_written_before_contexts_were_chosen_is_read(tmp_path: Path) -> None:
    with HeadStateFile(tmp_path / "head.json") as file:
        file.save(STATE)
        fields = json.loads((tmp_path / "head.json").read_text())
        del fields["copies"][0]["ctx_size"]
        (tmp_path / "head.json").write_text(json.dumps(fields))
        without = dataclasses.replace(STATE.copies[0], ctx_size=0)
        assert file.load() == dataclasses.replace(STATE, copies=(without,))


def test_what_was_written_before_hosts_had_secrets_is_read(tmp_path: Path) -> None:
    with HeadStateFile(tmp_path / "head.json") as file:
        file.save(STATE)
        fields = json.loads((tmp_path / "head.json").read_text())
        del fields["rejoin_secrets"], fields["evicted"]
        (tmp_path / "head.json").write_text(json.dumps(fields))
        assert file.load() == dataclasses.replace(STATE, rejoin_secrets={}, evicted=())


def test_what_nobody_wrote_down_is_ended() -> None:
    killed: list[str] = []

    class Driver:
        def names(self) -> list[str]:
            return ["stage-1", "half-loaded", "stage-3", "gone", "stage-2"]

        def find(self, name: str) -> str:
            if name == "gone":
                raise StageFailed("it has ended")
            return name

        def kill(self, actor: str) -> None:
            killed.append(actor)

    kill_unrecorded_actors(cast("RayDriver", Driver()), STATE)
    assert killed == ["half-loaded"]


def test_an_order_is_the_same_behind_json() -> None:
    load_request = LoadRequest.model_validate(
        {
            "model": "/models/tiny-00001-of-00002.gguf",
            "split": [2, 4],
            "exact": True,
            "draft_path": "/d.gguf",
        }
    )
    assert LoadRequest.model_validate(json.loads(json.dumps(load_request.model_dump()))) == load_request
    assert load_request.served_name == "tiny"
    assert load_request.model_copy(update={"name": "acme/tiny:Q4"}).served_name == "acme/tiny:Q4"
    for name in ("default", "", "a b", "x" * 129, "-x"):
        with pytest.raises(InvalidRequest, match="choose one with --name"):
            _ = load_request.model_copy(update={"name": name}).served_name
