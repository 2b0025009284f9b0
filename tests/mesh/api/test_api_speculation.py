"""The field `speculation`: how a request narrows what the server may propose."""

from typing import Any

import pytest

from mesh.engine import SpeculationLimits
from tests.support import api_harness
from tests.support.api_harness import Api, ScriptedEngine

pytestmark = pytest.mark.model

tokenizer, engine, api = api_harness.tokenizer, api_harness.engine, api_harness.api

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(
    ("value", "limits"),
    [
        (None, SpeculationLimits()),
        ({}, SpeculationLimits()),
        ({"mode": "off"}, SpeculationLimits(mode="off")),
        ({"mode": "auto", "max_width": 4, "depth": 1}, SpeculationLimits("auto", 4, 1)),
        ({"max_width": 0}, SpeculationLimits(max_width=0)),
    ],
)
async def test_the_engine_hears_of_the_limits(
    api: Api, engine: ScriptedEngine, value: Any, limits: SpeculationLimits
) -> None:
    for path, body in (("/v1/chat/completions", HELLO), ("/v1/completions", {"prompt": "Hello"})):
        response = await api.http.post(path, json={**body, "speculation": value})
        assert response.status_code == 200, response.text
        assert engine.requests.pop().speculation == limits


async def test_without_the_field_nothing_is_narrowed(api: Api, engine: ScriptedEngine) -> None:
    assert (await api.http.post("/v1/chat/completions", json=HELLO)).status_code == 200
    assert engine.requests[0].speculation == SpeculationLimits()


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("off", "speculation"),
        ({"mode": "fast"}, "speculation.mode"),
        ({"max_width": -1}, "speculation.max_width"),
        ({"max_width": 2.5}, "speculation.max_width"),
        ({"max_width": True}, "speculation.max_width"),
        ({"depth": 0}, "speculation.depth"),
        ({"draft_max": 4}, "speculation.draft_max"),
    ],
)
async def test_wrong_limits_name_the_field(api: Api, engine: ScriptedEngine, value: Any, param: str) -> None:
    response = await api.http.post("/v1/chat/completions", json={**HELLO, "speculation": value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["code"] == "invalid_request_error"
    assert not engine.requests
