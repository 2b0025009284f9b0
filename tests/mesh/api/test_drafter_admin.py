"""`POST /mesh/drafter`: from the head's own machine, where a drafter is tuned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mesh.status import TuningStatus
from spanmesh_proto.errors import InvalidRequest
from tests.support.api_harness import ScriptedEngine, running_api, tokenizer

if TYPE_CHECKING:
    from mesh.text.tokenizer import Tokenizer

__all__ = ["tokenizer"]

pytestmark = pytest.mark.model

BACK = {"action": "back"}


class Drafters:
    """Has one drafter to go back from."""

    def __init__(self) -> None:
        self.is_base = False

    async def go_back(self) -> TuningStatus:
        if self.is_base:
            raise InvalidRequest("before which there is none")
        self.is_base = True
        return TuningStatus(group="staff", gone_back=1)


async def test_an_operator_goes_back(tokenizer: Tokenizer) -> None:
    drafters = Drafters()
    async with running_api(ScriptedEngine([]), tokenizer, drafter_admin=lambda: drafters) as api:
        for wrong in ({}, {"action": "on"}, {**BACK, "number": 1}):
            assert (await api.http.post("/mesh/drafter", json=wrong)).status_code == 400
        api.http.headers["x-forwarded-for"] = "192.0.2.7"
        elsewhere = await api.http.post("/mesh/drafter", json=BACK)
        assert elsewhere.status_code == 401
        assert "drafters are changed" in elsewhere.text
        del api.http.headers["x-forwarded-for"]
        assert not drafters.is_base
        answer = await api.http.post("/mesh/drafter", json=BACK)
        assert answer.status_code == 200
        assert answer.json()["gone_back"] == 1
        again = await api.http.post("/mesh/drafter", json=BACK)
        assert again.status_code == 400
        assert "before which there is none" in again.text


async def test_a_mesh_that_tunes_nothing_says_so(tokenizer: Tokenizer) -> None:
    async with running_api(ScriptedEngine([]), tokenizer) as api:
        answer = await api.http.post("/mesh/drafter", json=BACK)
        assert answer.status_code == 400
        assert "for a group of API keys that it is given" in answer.text
