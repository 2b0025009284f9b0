"""What benchmarks make of a running mesh: its status, its links, its proposers."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh.api import auth
from mesh.api.head_services import LinkRuns
from mesh.engine import SpeculationMode
from mesh.placement.links import Link
from mesh.status import (
    ChatModelStatus,
    MeshStatus,
    ModelDescription,
    RoundTripStatus,
    SessionsStatus,
    SpeculationStatus,
    StageStatus,
    as_json,
)
from mesh.text.tokenizer import Tokenizer
from meshbench.http_client import parse_url
from meshbench.speculation_plan import remote_plan
from meshbench.speculation_workloads import all_workloads
from meshbench.stress.checks import leak_check
from meshbench.under_test.links import KnownLinks, hop_ms, known_links, links_section, read_links
from meshbench.under_test.mesh import ServedModel, reach_mesh, status_of_model, tokenizer_of
from meshbench.under_test.options import RemoteTarget
from meshbench.under_test.status_figures import RingLink, ring_links_between, stages_between
from spanmesh_proto.errors import ClusterError, InvalidModel, InvalidRequest, ModelNotFound
from tests.mesh.cli.test_ask_head import answering
from tests.support.api_harness import KEY, MODEL, ScriptedEngine, running_api, tokenizer

__all__ = ["tokenizer"]


def stage(index: int, num_windows: int) -> StageStatus:
    return StageStatus(
        index=index,
        host=f"host{index + 1}",
        address=f"10.0.0.{index}:9",
        layers=(15 * index, 15 * index + 15),
        windows=num_windows,
        compute_ms=4.0 * num_windows,
        queue_ms=1.0 * num_windows,
        mean_compute_ms=4.0,
        mean_queue_ms=1.0,
        open_sessions=0,
        rows=3 * num_windows,
        decodes=2 * num_windows,
    )


def status(num_windows: int, wire_ms: tuple[float, ...] = ()) -> MeshStatus:
    return MeshStatus(
        version="0.2",
        ready=True,
        model=ModelDescription(name="Small", architecture="llama", numeric_mode="exact"),
        sessions=SessionsStatus(slots=4, context=2048),
        speculation=SpeculationStatus(mode="ngram"),
        stages=(stage(0, num_windows), stage(1, num_windows)),
        round_trips=RoundTripStatus(windows=num_windows, wire_ms=wire_ms),
    )


def test_counts_of_a_run_are_what_two_answers_differ_by() -> None:
    before, now = status(10, (1.0, 2.0, 3.0)), status(30, (21.0, 42.0, 63.0))
    # The first ten windows took longer.
    before.stages[0].compute_ms = 60.0
    first, second = stages_between(before, now)
    assert (first.windows, first.rows, first.decodes) == (20, 60, 40)
    assert (first.mean_compute_ms, second.mean_compute_ms) == (3.0, 4.0)
    assert first.open_sessions == 0
    assert ring_links_between(before, now) == (
        RingLink("head", "host1", 1.0, 20),
        RingLink("host1", "host2", 2.0, 20),
        RingLink("host2", "head", 3.0, 20),
    )
    assert stages_between(now, now)[0].mean_compute_ms == 0.0
    assert ring_links_between(now, now) == ()


def test_counts_of_a_ring_that_was_made_anew_are_all_of_the_run() -> None:
    before, now = status(30, (30.0, 30.0, 30.0)), status(10, (5.0, 10.0, 15.0))
    assert [each.windows for each in stages_between(before, now)] == [10, 10]
    assert [link.wire_ms for link in ring_links_between(before, now)] == [0.5, 1.0, 1.5]


def test_counts_that_one_answer_lacks_are_not_told() -> None:
    """A stage that answers late has none; those since its start are not those of the run."""
    before, now = status(10, (0.0,) * 3), status(30, (0.0,) * 3)
    before.stages[1].rows = None
    first, second = stages_between(before, now)
    assert (first.rows, second.rows, second.windows) == (60, None, 20)
    assert "rows" not in as_json(second)
    # Of a model beside the first the mesh tells no round trips.
    now.round_trips = None
    assert ring_links_between(before, now) == ()


def test_sessions_of_others_are_no_leak_of_ours() -> None:
    idle = status(1)
    running = replace(idle, sessions=SessionsStatus(running=1))
    assert leak_check(running).holds is False
    assert leak_check(running, num_before=1).holds is None
    assert "1 of other clients" in leak_check(running, num_before=1).detail
    assert leak_check(idle, num_before=1).holds is True


def test_a_model_beside_the_first_has_a_status_of_its_own() -> None:
    other = ChatModelStatus(name="b", ready=True, model=ModelDescription(name="Other"))
    found = replace(status(3), models=(ChatModelStatus(name="a"), other))
    assert status_of_model(found, "a") == found
    own = status_of_model(found, "b")
    assert own == MeshStatus(version="0.2", name="b", ready=True, model=other.model)
    with pytest.raises(ModelNotFound, match="'c'"):
        status_of_model(found, "c")


def test_a_key_has_all_slots_but_one_unless_it_is_allowed_more() -> None:
    served = ServedModel.from_status(status(3))
    assert served.is_exact
    assert (served.num_places(has_key=False), served.num_places(has_key=True)) == (4, 3)
    assert served.stages == ("host1 [0, 15)", "host2 [15, 30)")
    assert served.as_conditions()["speculation_of_the_server"] == "ngram"


NEAR = Link("head", "attic", small_ms=(2.0,), hidden_ms=(3.0,), bytes_per_s=12.5e6)
GONE = Link("attic", "head", failure="host attic left the mesh")


async def measured(num_probes: int, bulk_bytes: int, *, checks_ports: bool = False) -> Mapping[str, Any]:
    return {
        "head": "head",
        "hidden_bytes": 2304,
        "bulk_bytes": bulk_bytes,
        "asked": [num_probes, bulk_bytes],
        "links": [NEAR.as_dict(), GONE.as_dict()],
        "round": {"order": ["b", "a"], "order_ms": 30.0, "best": ["a", "b"], "best_ms": 20.0},
        "wires": [],
    }


async def test_links_are_measured_by_the_head_before_the_load(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_api(ScriptedEngine([]), tokenizer, link_runs=LinkRuns(measured)) as api:
        target = RemoteTarget(parse_url(f"{api.url}/v1"), None)
        near = await asyncio.to_thread(known_links, target)
        # As if the benchmark ran on another machine than the head's.
        monkeypatch.setattr(auth, "_comes_from_here", lambda _request: False)
        far = await asyncio.to_thread(known_links, target)
    assert near.found is not None
    assert far.found is not None
    assert (near.found["asked"], near.missing) == ([50, 8_000_000], ())
    assert far.found["asked"] == [50, 0]
    (missing,) = far.missing
    assert "from the head's own machine only" in missing
    assert "--net" in missing
    section = links_section(near)
    body = section.body
    assert section.heading == "## Links between the hosts"
    assert "| head | attic | 2.00 | 2.00 | 3.00 | 3.00 |" in body
    assert "| attic | head | - | - |" in body
    assert "attic to head: host attic left the mesh" in body
    assert "a token's round: head - b - a - head: 30.00 ms" in body
    assert "shorter: head - a - b - head: 20.00 ms" in body
    assert hop_ms(near.found) == 10.0


async def test_without_links_the_report_says_why(tokenizer: Tokenizer) -> None:
    async with running_api(ScriptedEngine([]), tokenizer) as api:
        found = await asyncio.to_thread(known_links, RemoteTarget(parse_url(api.url), None))
    assert found.found is None
    assert "there are no hosts here whose links could be measured" in found.missing[0]
    assert links_section(found).body == ""
    assert hop_ms(None) is None


def test_links_may_come_from_a_file_of_bench_net(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text(json.dumps(asyncio.run(measured(5, 0))))
    target = RemoteTarget(parse_url("http://127.0.0.1:9"), None, links_file=path)
    assert known_links(target) == KnownLinks(read_links(path), "from net.json")
    for other in ("{}", "[1]", "not JSON"):
        path.write_text(other)
        with pytest.raises(InvalidRequest, match=r"net\.json is not what `mesh bench net --json` prints"):
            known_links(target)


async def test_what_is_no_mesh_or_not_ready_is_refused(tokenizer: Tokenizer, smollm2_path: Path) -> None:
    shown = MeshStatus()
    async with running_api(ScriptedEngine([]), tokenizer, status=lambda: shown) as api:
        server = parse_url(api.url)

        async def reach(model: str | None = None) -> Any:
            return await asyncio.to_thread(reach_mesh, RemoteTarget(server, KEY, model), {"seed": 1})

        with pytest.raises(ClusterError, match="are measured by `mesh bench serve`"):
            await reach()
        shown = MeshStatus(ready=False, phase="loading")
        with pytest.raises(ClusterError, match=r"cannot answer yet \(loading\): wait until"):
            await reach()
        shown = status(3)
        with pytest.raises(ModelNotFound, match=f"no model 'other'; there are {MODEL}"):
            await reach("other")
        mesh, served = await reach()
        assert (mesh.model, mesh.fields, mesh.api_keys) == (MODEL, {"seed": 1, "model": MODEL}, (KEY,))
        assert (served.ctx_size, served.num_slots) == (2048, 4)
        assert (await asyncio.to_thread(mesh.status)).sessions == status(3).sessions
        target = RemoteTarget(server, KEY, model_file=smollm2_path)
        same = await asyncio.to_thread(tokenizer_of, target, mesh)
        assert same is not None
        assert same.n_vocab == tokenizer.n_vocab
    with pytest.raises(ClusterError, match="no mesh answers at"):
        await reach()


async def test_a_file_of_another_vocabulary_is_refused(tokenizer: Tokenizer, gemma3_path: Path) -> None:
    async with running_api(ScriptedEngine([]), tokenizer, status=lambda: status(3)) as api:
        target = RemoteTarget(parse_url(api.url), None, model_file=gemma3_path)
        mesh, _served = await asyncio.to_thread(reach_mesh, target)
        with pytest.raises(InvalidModel, match="name the file of the served model, or leave it out"):
            await asyncio.to_thread(tokenizer_of, target, mesh)


def test_a_running_mesh_is_asked_what_needs_no_other_server() -> None:
    workloads = all_workloads(None, spec_bench=None, per_workload=2, seed=1)
    assert "random-token" not in workloads
    phase = remote_plan(
        workloads, (), modes=("ngram", "auto"), widths=(2, 4), delay_ms=0.3, num_places=3, is_quick=False
    )
    assert [setting.name for setting in phase.trials[0].settings] == [
        *("ngram/2", "ngram/4", "auto/2", "auto/4", "auto")
    ]
    names = [trial.workload.name for trial in phase.trials]
    assert names == ["built-in", "repository-edit", "tool-call", "built-in-raw"]
    assert {trial.delay_ms for trial in phase.trials} == {0.3}
    assert (phase.options, phase.replays, phase.concurrent_trials) == ((), False, ())


AUTO: tuple[SpeculationMode, ...] = ("auto",)


@pytest.mark.parametrize(("num_places", "at_once"), [(8, [4]), (3, [3]), (1, [])])
def test_a_quick_look_asks_no_more_at_once_than_the_mesh_answers(num_places: int, at_once: list[int]) -> None:
    workloads = all_workloads(None, spec_bench=None, per_workload=2, seed=1)
    phase = remote_plan(
        workloads,
        ("warm-repeat", "built-in"),
        modes=AUTO,
        widths=(2,),
        delay_ms=0.0,
        num_places=num_places,
        is_quick=True,
    )
    assert [trial.workload.name for trial in phase.trials] == ["warm-repeat", "built-in"]
    assert [[setting.name for setting in trial.settings] for trial in phase.trials] == [["auto"]] * 2
    assert [len(trial.workload.questions) for trial in phase.trials] == [1, 1]
    assert [trial.num_at_once for trial in phase.concurrent_trials] == at_once


@pytest.mark.parametrize("models", [["x"], [{"name": "a"}, "x"], "x", {"x": 1}, [{"id": "x"}], 1])
def test_a_server_whose_state_has_another_shape_is_refused(models: Any) -> None:
    body = json.dumps({"ready": True, "models": models})
    with (
        answering(f"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{body}".encode()) as url,
        pytest.raises(ClusterError, match="does not tell its state as a mesh does"),
    ):
        reach_mesh(RemoteTarget(parse_url(url), None))
