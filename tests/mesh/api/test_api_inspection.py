"""The two endpoints that look into hosts: what they take, and to whom they answer."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from stages.host.profile_request import ProfileRequest
from stages.layers import LayerRange
from stages.slicing.source_model import read_source
from stages.slicing.stage_writer import BlankStage, blank_stage
from tests.support.api_harness import ScriptedEngine, app_of, running_api, tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mesh.text.tokenizer import Tokenizer

__all__ = ["tokenizer"]

pytestmark = pytest.mark.model

ORDER = ProfileRequest(BlankStage(b"GGUF", 64), num_threads=2, is_exact=True, position=7).as_dict()
ON_GPU = ProfileRequest(BlankStage(b"GGUF", 64), gpu_layers=(("CUDA0", 3),), cpu_moe_layers=1)


class Inspection:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.wanted: Mapping[str, Sequence[Mapping[str, Any]]] = {}

    async def rehearse(self, wanted: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        self.wanted = wanted
        return [{"host": host, "timings": [], "failure": "no"} for host in wanted]

    async def examine(self) -> list[dict[str, Any]]:
        return [{"host": "attic", "look": None, "failure": "no"}]


async def test_orders_arrive_as_they_were_sent(tokenizer: Tokenizer) -> None:
    inspection = Inspection()
    async with running_api(ScriptedEngine([]), tokenizer, inspection=lambda: inspection) as api:
        orders = ([ORDER], [ORDER], [ON_GPU.as_dict()])
        body = {"hosts": [{"host": "attic", "orders": each} for each in orders]}
        answer = await api.http.post("/mesh/rehearse", json=body)
        assert answer.json() == {"hosts": [{"host": "attic", "timings": [], "failure": "no"}]}
        found = await api.http.post("/mesh/examine")
        assert found.json()["hosts"][0]["host"] == "attic"
    assert inspection.wanted.keys() == {"attic"}
    first, second, third = inspection.wanted["attic"]
    assert first == second == ORDER
    assert ProfileRequest.from_dict(first).blank == BlankStage(b"GGUF", 64)
    assert ProfileRequest.from_dict(third) == ON_GPU


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"hosts": []}, "hosts"),
        ({"hosts": [{"host": "a", "orders": []}]}, "hosts[0].orders"),
        ({"hosts": [{"host": 1, "orders": [ORDER]}]}, "hosts[0].host"),
        (
            {"hosts": [{"host": "a", "orders": [ORDER | {"num_threads": 0}]}]},
            "hosts[0].orders[0].num_threads",
        ),
        ({"hosts": [{"host": "a", "orders": [ORDER | {"pause_ms": 1e9}]}]}, "hosts[0].orders[0].pause_ms"),
        ({"hosts": [{"host": "a", "orders": [ORDER | {"more": 1}]}]}, "hosts[0].orders[0].more"),
        (
            {"hosts": [{"host": "a", "orders": [ORDER | {"blank": {"header": "", "num_bytes": 2**40}}]}]},
            "hosts[0].orders[0].blank.num_bytes",
        ),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    change: dict[str, Any], param: str, tokenizer: Tokenizer
) -> None:
    async with running_api(ScriptedEngine([]), tokenizer, inspection=Inspection) as api:
        answer = await api.http.post("/mesh/rehearse", json=change)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_nobody_is_looked_into_before_the_mesh_is_up(tokenizer: Tokenizer) -> None:
    async with running_api(ScriptedEngine([]), tokenizer) as api:
        assert (await api.http.post("/mesh/examine")).status_code == 503


async def test_only_the_heads_own_machine_may_ask(tokenizer: Tokenizer) -> None:
    async with running_api(ScriptedEngine([]), tokenizer, inspection=Inspection) as api:
        app = httpx.ASGITransport(app=_app_of(tokenizer), client=("10.0.0.66", 5))
        async with httpx.AsyncClient(transport=app, base_url="http://127.0.0.1") as elsewhere:
            for path in ("/mesh/examine", "/mesh/rehearse"):
                refused = await elsewhere.post(path, json={"hosts": [{"host": "a", "orders": [ORDER]}]})
                assert refused.status_code == 401
                assert "head's own machine" in refused.json()["error"]["message"]
        assert (await api.http.post("/mesh/examine")).status_code == 200


def _app_of(tokenizer: Tokenizer) -> Any:
    return app_of(ScriptedEngine([]), tokenizer, inspection=Inspection)


def test_a_blank_stage_is_the_header_of_the_real_one_and_a_hole(smollm2_path: Path, tmp_path: Path) -> None:
    source = read_source(smollm2_path)
    blank = blank_stage(source, LayerRange(10, 20))
    path = tmp_path / "blank.gguf"
    blank.write(path)
    assert path.stat().st_size == blank.num_bytes
    assert path.read_bytes()[: len(blank.header)] == blank.header
    # Next to nothing of it is on the disk.
    assert path.stat().st_blocks * 512 < 64 * 1024
    wanted = ProfileRequest(blank, gpu_layers=(("CUDA0", 3), ("CUDA1", 7)), cpu_moe_layers=2)
    fields = json.loads(json.dumps(wanted.as_dict()))
    assert base64.b64decode(fields["blank"]["header"]) == blank.header
    assert ProfileRequest.from_dict(fields) == wanted
