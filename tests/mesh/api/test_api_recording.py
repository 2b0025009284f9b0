"""Whose answers are recorded: of keys that agreed, or on this machine without keys; a request may say no."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mesh.api.api_keys import ApiKeys, KeyRecord, digest_of
from mesh.engine import RecordedPrompt
from tests.support.api_harness import KEY, ScriptedEngine, running_api, tokenizer

if TYPE_CHECKING:
    from mesh.text.tokenizer import Tokenizer
    from tests.support.api_harness import Api

__all__ = ["tokenizer"]

pytestmark = pytest.mark.model

HELLO: Any = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4},
}
CHAT = "/v1/chat/completions"
BOB = "sk-of-bob"
KEYS = (KeyRecord("alice", digest_of(KEY), may_record=True), KeyRecord("bob", digest_of(BOB)))


class Asking:
    """A server whose engine says what of a request is recorded."""

    def __init__(self, api: Api, engine: ScriptedEngine) -> None:
        self._api = api
        self._engine = engine

    async def recorded(self, path: str, key: str | None = None, **fields: Any) -> RecordedPrompt | None:
        """How the answer to a request is filed."""
        self._engine.requests.clear()
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        response = await self._api.http.post(path, json=BODIES[path] | fields, headers=headers)
        assert response.status_code == 200, response.text
        return self._engine.requests[-1].recording

    async def refusal(self, path: str, key: str | None = None, **fields: Any) -> str:
        """Why a request is refused that wants to be recorded."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        response = await self._api.http.post(path, json=BODIES[path] | fields, headers=headers)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error.get("param", "record") == "record"
        return str(error["message"])


def engine() -> ScriptedEngine:
    return ScriptedEngine([(300,), (301,)])


@pytest.mark.parametrize("path", BODIES)
async def test_a_key_that_agreed_is_recorded_unless_a_request_says_no(
    tokenizer: Tokenizer, path: str
) -> None:
    scripted = engine()
    async with running_api(scripted, tokenizer, keys=ApiKeys(KEYS), records=True) as api:
        asking = Asking(api, scripted)
        found = await asking.recorded(path, KEY)
        assert found is not None
        assert found.api == ("raw" if path == "/v1/completions" else "chat")
        assert await asking.recorded(path, KEY) == found
        assert await asking.recorded(path, KEY, record=True) == found
        assert await asking.recorded(path, KEY, record="own-7") == RecordedPrompt(found.api, "own-7")
        for no in ({"record": False}, {"store": False}, {"record": True, "store": False}):
            assert await asking.recorded(path, KEY, **no) is None
        assert await asking.recorded(path, BOB) is None
        assert await asking.recorded(path, BOB, record=False) is None
        for yes in (True, "own-7"):
            assert "`mesh keys add --may-record`" in await asking.refusal(path, BOB, record=yes)


async def test_turns_of_a_chat_have_one_name_and_other_chats_others(tokenizer: Tokenizer) -> None:
    scripted = engine()
    async with running_api(scripted, tokenizer, records=True) as api:
        asking = Asking(api, scripted)
        more = [*HELLO, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Bye"}]
        first, second = [await asking.recorded(CHAT, messages=messages) for messages in (HELLO, more)]
        assert first == second
        others = [[{"role": "user", "content": "Bye"}], [{"role": "system", "content": "Be kind."}, *HELLO]]
        names = {await asking.recorded(CHAT, messages=messages) for messages in others}
        assert len({first, *names}) == 3
        raw = [await asking.recorded("/v1/completions", prompt=prompt) for prompt in "AAB"]
        assert raw[0] == raw[1] != raw[2]
        assert await asking.recorded(CHAT, n=2) == first
        assert [request.recording for request in scripted.requests] == [first, first]


async def test_what_goes_on_from_an_answer_that_must_not_be_recorded_is_not(tokenizer: Tokenizer) -> None:
    scripted, path = engine(), "/v1/responses"
    async with running_api(scripted, tokenizer, records=True) as api:
        asking = Asking(api, scripted)
        answer = await api.http.post(path, json={**BODIES[path], "record": False})
        for _ in range(2):
            former = answer.json()["id"]
            answer = await api.http.post(path, json={**BODIES[path], "previous_response_id": former})
            assert scripted.requests[-1].recording is None
        # The latest word counts.
        assert await asking.recorded(path, previous_response_id=former, record=True) is not None
        answer = await api.http.post(path, json=BODIES[path])
        assert await asking.recorded(path, previous_response_id=answer.json()["id"]) is not None


async def test_without_keys_this_machine_alone_is_recorded(tokenizer: Tokenizer) -> None:
    scripted = engine()
    async with running_api(scripted, tokenizer, records=True) as api:
        asking = Asking(api, scripted)
        assert await asking.recorded(CHAT) is not None
        api.http.headers["x-forwarded-for"] = "192.0.2.7"
        assert await asking.recorded(CHAT) is None
        assert "only requests of the head's own machine" in await asking.refusal(CHAT, record=True)


async def test_a_mesh_that_records_nothing_says_so(tokenizer: Tokenizer) -> None:
    scripted = engine()
    async with running_api(scripted, tokenizer, keys=ApiKeys(KEYS)) as api:
        asking = Asking(api, scripted)
        assert await asking.recorded(CHAT, KEY) is None
        assert await asking.recorded(CHAT, KEY, record=False) is None
        assert "mesh serve --record FOLDER" in await asking.refusal(CHAT, KEY, record=True)


async def test_a_name_of_a_prompt_is_bounded(tokenizer: Tokenizer) -> None:
    scripted = engine()
    async with running_api(scripted, tokenizer, records=True) as api:
        assert await Asking(api, scripted).recorded(CHAT, record="x" * 64) is not None
        for wrong in ("x" * 65, 1, ["x"]):
            response = await api.http.post(CHAT, json={**BODIES[CHAT], "record": wrong})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "record"
