"""What the API tells of a mesh's hosts: counts of the stages, links between hosts."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from mesh.api import auth
from mesh.api.api_keys import ApiKeys
from mesh.api.head_services import LinkMeasurement, LinkRuns
from mesh.cli.main import run
from mesh.placement.link_choices import WireChoice
from mesh.placement.links import Link
from mesh.status import MeshStatus, StageCounts, StageStatus, as_json
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import ClusterError, JoinError
from stages.transport.hidden_codec import HiddenType
from tests.support.api_harness import ScriptedEngine, running_api, tokenizer
from tests.support.raw_client import RawClient, request_bytes

__all__ = ["tokenizer"]

pytestmark = pytest.mark.model

NEAR = Link("head", "attic", (1.0, 2.0, 3.0), (2.0, 3.0, 4.0), 12.5e6)
GONE = Link("attic", "head", failure="host attic left the mesh")
ROUND = {"order": ["b", "a"], "order_ms": 30.5, "best": ["a", "b"], "best_ms": 20.25}
SLOW = WireChoice("head", "attic", 18.43, 4.5, HiddenType.Q8)
QUICK = WireChoice("attic", "b", 0.2, 4.5, HiddenType.F32)


def measuring(*links: Link) -> LinkMeasurement:
    async def measure(num_probes: int, bulk_bytes: int, *, checks_ports: bool = False) -> Mapping[str, Any]:
        return {
            "head": "head",
            "hidden_bytes": 2304,
            "asked": [num_probes, bulk_bytes],
            "asked_for_ports": checks_ports,
            "links": [link.as_dict() for link in links],
            "round": ROUND,
            "wires": [SLOW.as_dict(), QUICK.as_dict()],
        }

    return measure


async def test_the_status_has_what_the_stages_count_themselves(tokenizer: Tokenizer) -> None:
    async def counts() -> list[StageCounts]:
        return [StageCounts(open_sessions=2)]

    status = MeshStatus(stages=(StageStatus(host="attic"),))
    async with running_api(ScriptedEngine([]), tokenizer, status=lambda: status, stage_counts=counts) as api:
        found = (await api.http.get("/mesh/status")).json()
    assert found["stages"] == [as_json(StageStatus(host="attic", open_sessions=2))]


async def test_links_are_measured_as_asked_for(tokenizer: Tokenizer) -> None:
    async with running_api(ScriptedEngine([]), tokenizer, link_runs=LinkRuns(measuring(NEAR))) as api:
        found = (await api.http.post("/mesh/links?probes=7&bulk_bytes=5")).json()
        assert (found["asked"], found["asked_for_ports"]) == ([7, 5], False)
        assert (await api.http.post("/mesh/links?ports=1")).json()["asked_for_ports"] is True
        for query in (
            "probes=0",
            "probes=x",
            "probes=1001",
            "bulk_bytes=-1",
            f"bulk_bytes={2**40}",
            "ports=2",
            "probes=" + "9" * 5000,
        ):
            refused = await api.http.post(f"/mesh/links?{query}")
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == query.partition("=")[0]
    async with running_api(ScriptedEngine([]), tokenizer) as api:
        assert (await api.http.post("/mesh/links")).status_code == 503


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("bulk_bytes=1", "bandwidths are measured (bulk_bytes) from the head's own machine only"),
        ("ports=1", "ports are tried (ports) from the head's own machine only"),
        ("probes=51", "more than 50 probes are sent from the head's own machine only"),
    ],
)
async def test_from_elsewhere_only_a_few_probes_are_sent(tokenizer: Tokenizer, query: str, says: str) -> None:
    async with running_api(ScriptedEngine([]), tokenizer, link_runs=LinkRuns(measuring(NEAR))) as api:
        elsewhere = {"X-Forwarded-For": "10.0.0.66"}
        refused = await api.http.post(f"/mesh/links?{query}", headers=elsewhere)
        assert refused.status_code == 401
        assert says in refused.json()["error"]["message"]
        assert (await api.http.post(f"/mesh/links?{query}")).status_code == 200
        for few in ("", "?probes=50&bulk_bytes=0"):
            assert (await api.http.post(f"/mesh/links{few}", headers=elsewhere)).status_code == 200


class Slow:
    """Measures until it is let."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.begun, self.gate = asyncio.Event(), asyncio.Event()

    async def __call__(
        self, num_probes: int, bulk_bytes: int, *, checks_ports: bool = False
    ) -> Mapping[str, Any]:
        self.begun.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.outcomes.append("cancelled")
            raise
        self.outcomes.append("measured")
        return {}


async def test_one_client_at_a_time_measures(tokenizer: Tokenizer) -> None:
    slow = Slow()
    async with running_api(ScriptedEngine([]), tokenizer, link_runs=LinkRuns(slow)) as api:
        first = asyncio.create_task(api.http.post("/mesh/links"))
        await slow.begun.wait()
        refused = await api.http.post("/mesh/links")
        assert refused.status_code == 429
        assert "another client is measuring the links" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) == 5
        slow.gate.set()
        assert (await first).status_code == 200
        assert (await api.http.post("/mesh/links")).status_code == 200
    assert slow.outcomes == ["measured"] * 2


async def test_no_key_keeps_another_from_measuring(tokenizer: Tokenizer) -> None:
    """A loop of one key, whose next request follows at once, has another one measure in between."""
    slow = Slow()
    alice, bob = ({"authorization": f"Bearer sk-{name}"} for name in ("alice", "bob"))
    keys = ApiKeys.from_plain({"alice": "sk-alice", "bob": "sk-bob"})
    async with running_api(ScriptedEngine([]), tokenizer, link_runs=LinkRuns(slow), keys=keys) as api:
        first = asyncio.create_task(api.http.post("/mesh/links", headers=bob))
        await slow.begun.wait()
        operator = asyncio.create_task(api.http.post("/mesh/links?probes=1000&bulk_bytes=5", headers=alice))
        await asyncio.sleep(0.05)
        for headers in (alice, bob):
            assert (await api.http.post("/mesh/links", headers=headers)).status_code == 429
        assert not operator.done()
        slow.gate.set()
        again = asyncio.create_task(api.http.post("/mesh/links", headers=bob))
        assert [(await each).status_code for each in (first, operator)] == [200, 200]
        assert (await again).status_code in {200, 429}
    assert set(slow.outcomes) == {"measured"}


async def test_the_wait_for_others_is_bounded_and_leaves_nothing(tokenizer: Tokenizer) -> None:
    slow = Slow()
    runs = LinkRuns(slow, patience_s=0.05)
    keys = ApiKeys.from_plain({"alice": "sk-alice", "bob": "sk-bob"})
    alice, bob = ({"authorization": f"Bearer sk-{name}"} for name in ("alice", "bob"))
    async with running_api(ScriptedEngine([]), tokenizer, link_runs=runs, keys=keys) as api:
        first = asyncio.create_task(api.http.post("/mesh/links", headers=bob))
        await slow.begun.wait()
        assert (await api.http.post("/mesh/links", headers=alice)).status_code == 429
        slow.gate.set()
        assert (await first).status_code == 200
        assert (await api.http.post("/mesh/links", headers=alice)).status_code == 200
    assert runs._clients == set()


async def test_a_client_that_hangs_up_ends_its_run(tokenizer: Tokenizer) -> None:
    slow = Slow()
    async with running_api(ScriptedEngine([]), tokenizer, link_runs=LinkRuns(slow)) as api:
        client = await RawClient.connect(api)
        await client.send(request_bytes({}, "/mesh/links?probes=50&bulk_bytes=5"))
        await slow.begun.wait()
        client.hang_up()
        async with asyncio.timeout(20):
            while not slow.outcomes:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        slow.gate.set()
        assert (await api.http.post("/mesh/links")).status_code == 200
    assert slow.outcomes == ["cancelled", "measured"]


async def test_the_command_says_where_bandwidths_are_measured(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_api(ScriptedEngine([]), tokenizer, link_runs=LinkRuns(measuring(NEAR))) as api:
        # As if the command ran on another machine.
        monkeypatch.setattr(auth, "_comes_from_here", lambda _request: False)
        assert await asyncio.to_thread(run, ["bench", "net", "--url", api.url]) == 1
        said = capsys.readouterr().err
        assert "error: bandwidths are measured (bulk_bytes) from the head's own machine only" in said
        assert await asyncio.to_thread(run, ["bench", "net", "--url", api.url, "--megabytes", "0"]) == 0


async def test_the_command_shows_every_link_and_the_better_order(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    async with running_api(ScriptedEngine([]), tokenizer, link_runs=LinkRuns(measuring(NEAR, GONE))) as api:
        # One link could not be measured: that is a failure, and the others are shown.
        assert await asyncio.to_thread(run, ["bench", "net", "--url", api.url]) == 1
        said = capsys.readouterr().out
        assert (
            await asyncio.to_thread(run, ["bench", "net", "--url", api.url, "--json", "--megabytes", "3"])
            == 1
        )
        found = json.loads(capsys.readouterr().out)
    assert found["asked"] == [50, 3_000_000]
    (row,) = [line for line in said.splitlines() if "12.5" in line]
    assert row.replace("│", " ").split() == ["head", "attic", "2.00", "2.98", "3.00", "3.98", "1.50", "12.5"]
    assert "attic to head: host attic left the mesh" in said
    assert "a token's round: head - b - a - head: 30.50 ms" in said
    (proposed,) = [line for line in said.splitlines() if "--wire" in line]
    assert proposed.startswith("head to attic: a row takes 18.43 ms on the wire, 4.50 ms at a stage")
    assert "`mesh serve --wire q8` would help" in proposed
    assert "shorter: head - a - b - head: 20.25 ms" in said


async def test_without_joined_hosts_there_is_nothing_to_show(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_api(ScriptedEngine([]), tokenizer, link_runs=LinkRuns(measuring())) as api:
        assert await asyncio.to_thread(run, ["bench", "net", "--url", api.url]) == 0
        assert "no other host has joined" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--probes", "0"], ["--megabytes", "201"], ["--url", "ftp://x"]])
def test_bad_options_are_refused(arguments: list[str]) -> None:
    assert run(["bench", "net", *arguments]) == 2


class Orders:
    """Sends away `attic`, and nobody else."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []
        self.is_there = True

    async def drain(self, name: str) -> Mapping[str, Any]:
        return self._note("drain", name)

    async def evict(self, name: str) -> Mapping[str, Any]:
        return self._note("evict", name)

    def _note(self, what: str, name: str) -> Mapping[str, Any]:
        if name == "full":
            raise ClusterError("full cannot be drained: nobody else has room")
        if name != "attic":
            raise JoinError(f"no host is named {name!r}")
        self.done.append((what, name))
        return {"host": name} | ({"drained": self.is_there} if what == "drain" else {})


async def test_hosts_are_sent_away_by_name(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    orders = Orders()
    async with running_api(ScriptedEngine([]), tokenizer, host_admin=lambda: orders) as api:
        for command in ("drain", "evict"):
            for query in ("", "?host=", "?host=nobody"):
                refused = await api.http.post(f"/mesh/{command}{query}")
                assert refused.status_code == 400
                assert refused.json()["error"]["param"] == "host"
        assert await asyncio.to_thread(run, ["drain", "attic", "--url", api.url]) == 0
        assert "has left the mesh" in capsys.readouterr().out
        orders.is_there = False
        assert await asyncio.to_thread(run, ["drain", "attic", "--url", api.url]) == 0
        assert "attic was lost before its layers had moved" in capsys.readouterr().out
        assert await asyncio.to_thread(run, ["evict", "attic", "--url", api.url]) == 0
        assert await asyncio.to_thread(run, ["drain", "full", "--url", api.url]) == 1
        assert "\nerror: full cannot be drained: nobody else has room\n" in capsys.readouterr().err
        assert await asyncio.to_thread(run, ["evict", "nobody", "--url", api.url]) == 1
        assert "no host is named 'nobody'" in capsys.readouterr().err
    assert orders.done == [("drain", "attic"), ("drain", "attic"), ("evict", "attic")]


async def test_nobody_is_sent_away_before_the_mesh_is_up(tokenizer: Tokenizer) -> None:
    async with running_api(ScriptedEngine([]), tokenizer) as api:
        assert (await api.http.post("/mesh/evict?host=attic")).status_code == 503
