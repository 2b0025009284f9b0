"""What a head leaves for the next: read back as written, for nobody else's eyes, one head at a time."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import TYPE_CHECKING, Any, cast

import pytest
from structlog.testing import capture_logs

from mesh.cluster.ray_node import RayNodeRecord
from mesh.options.model import LoadRequest
from mesh.serve.head_failover import kill_unrecorded_actors, ring_fault
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
            LoadRequest.model_validate({"model": "/models/tiny.gguf", "ctx_size": 512}).model_dump(
                mode="json"
            ),
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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        "7",
        '{"format": 2}',
        json.dumps({"format": 1, "term": 1}),
        "[" * 100_000,
        "\0\xff",
    ],
)
def test_what_cannot_be_read_is_not_taken_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "head.json").write_text(text)
    with HeadStateFile(tmp_path / "head.json") as file:
        assert file.load() is None
        file.save(STATE)
        assert file.load() == STATE


def test_half_a_file_is_none_and_no_secret_is_logged(tmp_path: Path) -> None:
    with HeadStateFile(tmp_path / "head.json") as file:
        file.save(STATE)
        whole = (tmp_path / "head.json").read_bytes()
        fields = json.loads(whole)
        damaged = [whole[: len(whole) * part // 16] for part in range(16)]
        damaged += [json.dumps(fields | {name: None}).encode() for name in fields]
        stage = fields["stages"][0]
        damaged += [json.dumps(fields | {"stages": [stage | {name: [name]}]}).encode() for name in stage]
        damaged.append(json.dumps({**fields, "secret": 5}).encode())
        for content in damaged:
            (tmp_path / "head.json").write_bytes(content)
            with capture_logs() as logs:
                assert file.load() is None
            assert [entry["event"] for entry in logs] == ["head_state_unreadable"]
            assert STATE.secret not in str(logs)
            assert STATE.private_key_pem not in str(logs)


def test_what_a_newer_version_adds_is_left_out(tmp_path: Path) -> None:
    with HeadStateFile(tmp_path / "head.json") as file:
        file.save(STATE)
        fields = json.loads((tmp_path / "head.json").read_text())
        fields["moon"] = fields["ray"]["moon"] = fields["stages"][0]["moon"] = "full"
        (tmp_path / "head.json").write_text(json.dumps(fields))
        assert file.load() == STATE
        # A model whose options are not known here is not restored; the mesh keeps its identity.
        fields["models"][0]["order"]["moon"] = "full"
        (tmp_path / "head.json").write_text(json.dumps(fields))
        assert file.load() == dataclasses.replace(STATE, models=())


def test_a_link_is_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "head.json")
    with HeadStateFile(tmp_path / "link.json") as file:
        with pytest.raises(BlockingIOError):
            HeadStateFile(tmp_path / "head.json")
        file.save(STATE)
    assert (tmp_path / "link.json").is_symlink()
    with HeadStateFile(tmp_path / "head.json") as file:
        assert file.load() == STATE


def stages(*layers: tuple[int, int]) -> tuple[SavedStage, ...]:
    return tuple(
        SavedStage(f"stage-{index}", "b", "b.2", start, stop, 2, "f32", f"10.0.0.2:{4000 + index}", 512)
        for index, (start, stop) in enumerate(layers)
    )


WHOLE = stages((0, 10), (10, 20), (20, 30))


def changed(index: int, **changes: Any) -> tuple[SavedStage, ...]:
    return (*WHOLE[:index], dataclasses.replace(WHOLE[index], **changes), *WHOLE[index + 1 :])


@pytest.mark.parametrize(
    ("recorded", "fault"),
    [
        (WHOLE, None),
        (stages((0, 30)), None),
        ((), "no stage holds layer 0 of 30"),
        (WHOLE[1:], "no stage holds layer 0 of 30"),
        ((WHOLE[0], WHOLE[2]), "no stage holds layer 10 of 30"),
        (WHOLE[:2], "no stage holds layer 20 of 30"),
        (stages((0, 10), (9, 30)), "follows layer 10 and holds [9, 30)"),
        ((WHOLE[0], *WHOLE), "follows layer 10 and holds [0, 10)"),
        ((WHOLE[1], WHOLE[0], WHOLE[2]), "no stage holds layer 0"),
        (stages((0, 10), (10, 10), (10, 30)), "holds [10, 10)"),
        (stages((0, 10), (10, 31)), "they hold 31 layers, and the model has 30"),
        (changed(1, address=None), "does not serve"),
        (changed(2, wire="f4"), "does not serve in a way that is known here"),
        (changed(1, actor="stage-0"), "a process is named twice"),
        (changed(2, ctx_size=1024), "their sessions differ in length"),
    ],
)
def test_a_ring_is_whole_or_none(recorded: tuple[SavedStage, ...], fault: str | None) -> None:
    found = ring_fault(recorded, 30)
    assert found is None if fault is None else fault in (found or "")


def test_no_part_of_a_ring_is_whole() -> None:
    cuts = [(0, 4), (4, 9), (9, 10), (10, 22), (22, 30)]
    for size in range(len(cuts) + 1):
        for part in itertools.combinations(stages(*cuts), size):
            assert (ring_fault(part, 30) is None) == (size == len(cuts))


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
    assert LoadRequest.model_validate(json.loads(load_request.model_dump_json())) == load_request
    assert load_request.served_name == "tiny"
    assert load_request.model_copy(update={"name": "acme/tiny:Q4"}).served_name == "acme/tiny:Q4"
    for name in ("default", "", "a b", "x" * 129, "-x"):
        with pytest.raises(InvalidRequest, match="choose one with --name"):
            _ = load_request.model_copy(update={"name": name}).served_name
