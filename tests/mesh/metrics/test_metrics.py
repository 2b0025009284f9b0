"""What `/metrics` tells: names, values that move under real requests, and who may read it."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from mesh.api.api_keys import ApiKeys
from mesh.coordinator.feature_store import FeatureNeeds
from mesh.draft.drafter import read_drafter
from mesh.draft.loading import load_drafter
from mesh.engine import Committed, GenerationRequest, GenerationStats
from mesh.metrics.prometheus import ModelFigures, exposition
from mesh.metrics.request_metrics import Histogram, ObservedEngine, RequestStatistics
from mesh.serve.proposers import Proposers
from mesh.status import MeshStatus, RecordingStatus, TuningStatus
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import StageFailed
from speculative.draft.context import DraftOptions
from stages.slicing.model_facts import read_model_facts
from tests.support import api_harness
from tests.support.api_harness import KEY, ScriptedEngine, running_api
from tests.support.eagle3 import DRAFTER
from tests.support.embedders import ScriptedLink, embedding_backend, running_engine
from tests.support.mesh_in_process import mesh_in_process
from tests.support.serve_harness import WORKLOAD, host
from tests.support.status_parts import sessions_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import httpx

tokenizer = api_harness.tokenizer
ROOT = Path(__file__).parents[3]
NAME = re.compile(r"\bmesh_[a-z0-9_]+\b")
CHAT = "/v1/chat/completions"
# What n-grams find again.
REPEATS: Any = [{"role": "user", "content": "Repeat: red green blue red green blue red green blue red green"}]


def samples_of(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Values by name and labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in parse_text(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def names_in(*paths: Path) -> set[str]:
    return {name for path in paths for name in NAME.findall(path.read_text())} - {"mesh_key", "mesh_model"}


def is_there(name: str, samples: dict[str, Any]) -> bool:
    return any(f"{name}{end}" in samples for end in ("", "_total", "_bucket"))


class TestHistogram:
    def test_a_value_on_a_bound_is_counted_there(self) -> None:
        histogram = Histogram((1, 2))
        for value in (0.5, 1, 1.5, 2, 9):
            histogram.observe(value)
        histogram.observe(2, 3)
        assert list(histogram.cumulative()) == [(1, 2), (2, 7), (float("inf"), 8)]
        assert (histogram.count, histogram.total) == (8, 20)


class TestObservedEngine:
    """With a clock of its own, so that times are exact."""

    class Steps:
        context_length = 64

        def __init__(self, clock: list[float], steps: list[tuple[float, Any]]) -> None:
            self._clock, self._steps = clock, steps

        async def generate(self, _request: GenerationRequest) -> AsyncGenerator[Committed, None]:
            for seconds, step in self._steps:
                self._clock[0] += seconds
                if isinstance(step, Exception):
                    raise step
                yield step

    def engine(self, *steps: tuple[float, Any]) -> tuple[ObservedEngine, RequestStatistics]:
        clock, statistics = [100.0], RequestStatistics()
        return ObservedEngine(self.Steps(clock, list(steps)), statistics, lambda: clock[0]), statistics

    async def test_times_tokens_and_cache(self) -> None:
        stats = GenerationStats(num_cached=2, prefill_ms=1500)
        engine, statistics = self.engine(
            (2.0, Committed((5,), None, stats)),
            (0.3, Committed((6, 7, 8), None, stats)),
            (0.1, Committed((9,), "length", GenerationStats(num_replays=2))),
        )
        answers = [step async for step in engine.generate(GenerationRequest((1, 2, 3), 5))]
        assert len(answers) == 3
        assert statistics.time_to_first_token_s.total == pytest.approx(2.0)
        assert statistics.queue_s.total == pytest.approx(0.5)
        assert statistics.prefill_s.total == pytest.approx(1.5)
        assert statistics.inter_token_s.total == pytest.approx(0.4)
        assert statistics.inter_token_s.count == 4
        assert statistics.decode_s.total == pytest.approx(0.4)
        assert statistics.whole_s.total == pytest.approx(2.4)
        assert (statistics.num_prompt_tokens, statistics.num_generated_tokens) == (3, 5)
        assert (statistics.num_cache_queries, statistics.num_cache_hits) == (3, 2)
        assert statistics.num_replays == 2
        assert statistics.finished == {"length": 1}

    async def test_whoever_has_enough_stopped_it(self) -> None:
        engine, statistics = self.engine(
            (1.0, Committed((5,), None, GenerationStats())), (1.0, Committed((6,), "stop", GenerationStats()))
        )
        steps = engine.generate(GenerationRequest((1,), 5))
        await anext(steps)
        await steps.aclose()
        assert statistics.finished == {"stop": 1}

    async def test_a_client_that_leaves_aborted_it(self) -> None:
        engine, statistics = self.engine(*[(1.0, Committed((5,), None, GenerationStats()))] * 2)

        async def read() -> None:
            async with aclosing(engine.generate(GenerationRequest((1,), 5))) as steps:
                async for _ in steps:
                    await asyncio.sleep(60)

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert statistics.finished == {"abort": 1}
        assert statistics.whole_s.count == 0

    async def test_an_error_is_none_of_these(self) -> None:
        engine, statistics = self.engine((1.0, StageFailed("gone")))
        with pytest.raises(StageFailed):
            await anext(engine.generate(GenerationRequest((1,), 5)))
        assert statistics.finished == {"error": 1}
        assert statistics.time_to_first_token_s.count == 0


@pytest.mark.model
class TestRoute:
    async def test_a_mesh_that_loads_has_metrics_too(self, tokenizer: Tokenizer) -> None:
        async with running_api(ScriptedEngine([(300,), (301,)]), tokenizer, ready=lambda: False) as api:
            response = await api.http.get("/metrics")
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/plain")
            samples = samples_of(response.text)
            assert samples["mesh_generation_tokens_total"] == {(("model_name", "smollm2"),): 0}

    async def test_openmetrics_is_spoken_to_those_who_ask(self, tokenizer: Tokenizer) -> None:
        async with running_api(ScriptedEngine([(300,), (301,)]), tokenizer) as api:
            await api.http.post(CHAT, json={"messages": REPEATS, "max_tokens": 2})
            headers = {"accept": "application/openmetrics-text; version=1.0.0"}
            response = await api.http.get("/metrics", headers=headers)
            assert response.headers["content-type"].startswith("application/openmetrics-text")
            names = {family.name for family in parse_openmetrics(response.text)}
            assert {"mesh_prompt_tokens", "mesh_time_to_first_token_seconds"} <= names

    async def test_both_are_for_those_with_a_key_and_the_targets_lead_back(
        self, tokenizer: Tokenizer
    ) -> None:
        keys = ApiKeys.from_plain({"prometheus": KEY})
        async with running_api(ScriptedEngine([(300,)]), tokenizer, keys=keys) as api:
            for path in ("/metrics", "/metrics/targets"):
                assert (await api.http.get(path)).status_code == 401
            headers = {"authorization": f"Bearer {KEY}"}
            (group,) = (await api.http.get("/metrics/targets", headers=headers)).json()
            (target,) = group["targets"]
            labels = group["labels"]
            url = f"{labels['__scheme__']}://{target}{labels['__metrics_path__']}"
            assert url == f"{api.url}/metrics"
            assert (await api.http.get(url, headers=headers)).status_code == 200
            assert all(isinstance(value, str) for value in labels.values())

    async def test_a_request_with_a_key_counts_once(self, tokenizer: Tokenizer) -> None:
        keys = ApiKeys.from_plain({"alice": KEY})
        async with running_api(ScriptedEngine([(300,), (301,)]), tokenizer, keys=keys) as api:
            headers = {"authorization": f"Bearer {KEY}"}
            asked = {"messages": REPEATS, "max_tokens": 2}
            assert (await api.http.post(CHAT, json=asked, headers=headers)).status_code == 200
            samples = samples_of((await api.http.get("/metrics", headers=headers)).text)
            (tokens,) = samples["mesh_generation_tokens_total"].values()
            assert tokens == 2
            assert sum(samples["mesh_request_success_total"].values()) == 1


@pytest.mark.model
async def test_every_metric_named_in_the_documents_and_the_dashboard_exists_and_moves(
    smollm2_path: Path, stage_cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under real requests to a real mesh that loses a stage and gets a host."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(stage_cache_dir))
    documents = names_in(ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    # This mesh has no disks: see tests/end_to_end/ring/test_disk_in_flight.py. It records nothing, see below.
    elsewhere = ("mesh_kv_disk", "mesh_recording", "mesh_tuning")
    documents = {name for name in documents if not name.startswith(elsewhere)}
    dashboard = names_in(ROOT / "examples" / "grafana_dashboard.json")
    assert len(documents) > 25
    assert len(dashboard) > 25
    drafter = read_drafter(DRAFTER, read_model_facts(smollm2_path))
    limits = DraftOptions(ctx_size=WORKLOAD.ctx_size, num_sessions=WORKLOAD.num_slots)
    async with AsyncExitStack() as stack:
        draft = load_drafter(drafter, Tokenizer(smollm2_path), limits)
        stack.callback(draft.close)
        needs = FeatureNeeds(drafter.layers, 30, drafter.n_embd)
        proposers = Proposers("auto", draft=draft, feature_needs=needs)
        hosts = ("attic", "cellar", "desk", "shed")
        served = await stack.enter_async_context(
            mesh_in_process(smollm2_path, hosts=hosts, proposers=proposers)
        )
        http, mesh = served.api.http, served.mesh
        embedder = await stack.enter_async_context(running_engine())
        assert served.api.backends is not None
        served.api.backends.embeddings.add(embedding_backend(embedder, Tokenizer(smollm2_path)))
        link = ScriptedLink()
        embedder.resume(link)
        seen = [await scrape(http)]
        for _ in range(2):
            await ask(http, max_tokens=60)
        await ask(http, max_tokens=60, speculation={"mode": "draft"})
        link.gate.clear()
        texts = []
        # One after the other, so that each of the first two is a batch of its own and the third one waits.
        for state in ((1, 0), (2, 0), (3, 1)):
            texts.append(asyncio.create_task(http.post("/v1/embeddings", json={"input": "Hello"})))
            await mesh.until(lambda state=state: (embedder.num_requests, embedder.num_waiting) == state)  # type: ignore[misc]
        seen.append(await scrape(http))
        link.gate.set()
        assert [each.status_code for each in await asyncio.gather(*texts)] == [200] * 3
        # A slot loses what the coordinator believes that it holds.
        handle = mesh.pipeline.stages[1].handle
        assert handle is not None
        path = handle._actor.stage._service._engine
        await path.in_worker(lambda: [path.slots.trim(slot, 0) for slot in range(2)])
        await ask(http, max_tokens=4)
        seen.append(await scrape(http))
        await mesh.until(lambda: len(mesh.pipeline.replicas) == 3)
        # Three want one of two slots.
        asked = [asyncio.create_task(ask(http, max_tokens=100)) for _ in range(3)]
        await mesh.until(lambda: sessions_of(mesh.coordinator).waiting == 1)
        await mesh.until(lambda: sessions_of(mesh.coordinator).positions > 100)
        seen.append(await scrape(http))
        mesh.kill(1)
        await mesh.until(lambda: not mesh.coordinator.is_ready)
        seen.append(await scrape(http))
        await asyncio.gather(*asked)
        mesh.members.admit(host("garage", 1))
        await mesh.until(lambda: mesh.incidents.repairs.count == 1)
        seen.append(await scrape(http))
    assert not {name for name in documents | dashboard if not is_there(bare(name), seen[-1])}
    still = {name for name in documents if not moves(bare(name), seen)}
    assert not still


async def test_the_dashboard_is_one_that_grafana_takes() -> None:
    dashboard = json.loads((ROOT / "examples" / "grafana_dashboard.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels:
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            assert NAME.search(target["expr"])


def bare(name: str) -> str:
    """A name as a scrape has it: rates and quantiles name samples of a family."""
    return re.sub(r"_(bucket|total)$", "", name)


def moves(name: str, seen: list[dict[str, Any]]) -> bool:
    values = [[samples.get(f"{name}{end}") for end in ("", "_total", "_sum")] for samples in seen]
    return any(value != values[0] for value in values[1:])


async def ask(http: httpx.AsyncClient, *, max_tokens: int, **more: object) -> None:
    body = {"messages": REPEATS, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
    response = await http.post(CHAT, json=body)
    assert response.status_code == 200, response.text


async def scrape(http: httpx.AsyncClient) -> dict[str, Any]:
    return samples_of((await http.get("/metrics")).text)


def test_metrics_of_a_recording() -> None:
    documents = {name for name in names_in(ROOT / "docs" / "operating.md") if "mesh_recording" in name}
    assert len(documents) == 6
    recording = RecordingStatus(conversations=1, tokens=2, bytes=3, written=4, left_out=5, erased=6)
    figures = ModelFigures("smollm2", RequestStatistics(), MeshStatus(recording=recording))
    samples = samples_of(exposition([figures])[0].decode())
    found = {name: sum(samples[name].values()) for name in documents}
    assert sorted(found.values()) == [1, 2, 3, 4, 5, 6]
    assert found["mesh_recording_left_out_total"] == 5
    none = ModelFigures("smollm2", RequestStatistics(), MeshStatus())
    assert not documents & samples_of(exposition([none])[0].decode()).keys()


def test_metrics_of_tuning() -> None:
    documents = {name for name in names_in(ROOT / "docs" / "operating.md") if "mesh_tuning" in name}
    assert len(documents) == 6
    tuning = TuningStatus(state="tuning", drafter="0001.gguf", new_tokens=4, chosen=2, refused=3, gone_back=5)
    figures = ModelFigures("smollm2", RequestStatistics(), MeshStatus(tuning=tuning))
    samples = samples_of(exposition([figures])[0].decode())
    found = {name: sum(samples[name].values()) for name in documents}
    assert sorted(found.values()) == [1, 1, 2, 3, 4, 5]
    assert found["mesh_tuning_refused_total"] == 3
    tuning.state, tuning.drafter = "paused", None
    samples = samples_of(exposition([figures])[0].decode())
    assert sum(samples["mesh_tuning_running"].values()) == sum(samples["mesh_tuning_served"].values()) == 0
    none = ModelFigures("smollm2", RequestStatistics(), MeshStatus())
    assert not documents & samples_of(exposition([none])[0].decode()).keys()
