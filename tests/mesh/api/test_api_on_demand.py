"""Requests for models that are not loaded: they wait, in turn, or are told why not."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mesh.api import auth
from mesh.api.api_keys import ApiKeys, KeyRecord, add_key, digest_of, remove_key
from mesh.api.bodies import MOST_BODY_BYTES, MOST_PICTURE_BODY_BYTES
from mesh.options.model import LoadRequest
from mesh.serve.on_demand.policy import DemandRules
from spanmesh_proto.errors import InvalidModel, ModelDoesNotFit, StageFailed
from tests.support.api_harness import KEY, MODEL, ScriptedEngine, tokenizer
from tests.support.on_demand import SIZES, OnDemandApi, on_demand_api

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import httpx

    from mesh.text.tokenizer import Tokenizer

__all__ = ["tokenizer"]

pytestmark = pytest.mark.model

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 8},
    "/v1/chat/completions/input_tokens": {"messages": HELLO},
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1]},
}
STREAMED = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages")
MAY, MAY_NOT = {"authorization": f"Bearer {KEY}"}, {"authorization": "Bearer sk-of-bob"}


async def ask(mesh: OnDemandApi, model: str, **fields: Any) -> httpx.Response:
    return await mesh.api.http.post(CHAT, json={"messages": HELLO, "model": model, **fields})


async def until(is_so: Callable[[], object], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def num_waiting(mesh: OnDemandApi, model: str) -> int:
    use = mesh.loader._uses.get(model)
    return 0 if use is None else len(use.waiting)


@asynccontextmanager
async def open_stream(mesh: OnDemandApi, model: str) -> AsyncIterator[AsyncIterator[str]]:
    """A chat that says one token and then nothing, until it is left."""
    mesh.models.engines[model] = ScriptedEngine([(400,), 60.0, (401,)])
    body = {"messages": HELLO, "model": model, "stream": True}
    async with mesh.api.http.stream("POST", CHAT, json=body) as response:
        lines = response.aiter_lines()
        async for line in lines:
            if line.startswith("data: "):
                break
        yield lines


async def test_what_could_be_served_is_listed_and_says_whether_it_is_loaded(tokenizer: Tokenizer) -> None:
    async with on_demand_api(tokenizer) as mesh:
        listed = (await mesh.api.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == [MODEL, *sorted(SIZES)]
        assert [card["loaded"] for card in listed] == [True, False, False, False, False]
        assert {card["status"]["value"] for card in listed[1:]} == {"unloaded"}
        # With the server's default for the context, or what the model was trained for.
        assert listed[1]["max_model_len"] == 4096
        assert listed[1]["meta"] == {"n_vocab": 49152, "n_ctx_train": 8192, "size": 10**9}
        card = (await mesh.api.http.get("/v1/models/small")).json()
        assert card == listed[3]
        assert (await mesh.api.http.get("/v1/models/other")).status_code == 404
        assert (await ask(mesh, "small")).status_code == 200
        assert (await mesh.api.http.get("/v1/models/small")).json()["loaded"] is True
        listed = (await mesh.api.http.get("/v1/models")).json()["data"]
        assert sorted(card["id"] for card in listed) == sorted([MODEL, *SIZES])
        unknown = await ask(mesh, "other")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_model_with_a_projector_permits_larger_bodies_before_it_is_loaded(
    tokenizer: Tokenizer,
) -> None:
    async with on_demand_api(tokenizer) as mesh:
        assert mesh.api.backends is not None
        most = [mesh.api.backends.most_body_bytes()]
        entry = mesh.library.entries["small"]
        projector = Path("/library/mmproj-small.gguf")
        mesh.library.entries = {**mesh.library.entries, "small": replace(entry, projector=projector)}
        card = (await mesh.api.http.get("/v1/models/small")).json()
        assert card["capabilities"] == ["completion", "multimodal"]
        (told,) = [
            each
            for each in (await mesh.api.http.get("/mesh/status")).json()["library"]
            if each["projector"] is not None
        ]
        assert (told["name"], told["projector"]) == ("small", projector.name)
        assert [*most, mesh.api.backends.most_body_bytes()] == [MOST_BODY_BYTES, MOST_PICTURE_BODY_BYTES]


async def test_every_endpoint_has_its_model_loaded(tokenizer: Tokenizer) -> None:
    async with on_demand_api(tokenizer) as mesh:
        for path, body in BODIES.items():
            mesh.models.orders.clear()
            response = await mesh.api.http.post(path, json={**body, "model": "small"})
            assert response.status_code == 200, (path, response.text)
            # Once loaded it is used as it is; the first needs no loading, whatever it is called.
            for model in ("small", MODEL, "default"):
                again = await mesh.api.http.post(path, json={**body, "model": model})
                assert again.status_code == 200
            assert mesh.models.orders == ["load small"]
            await mesh.models.unload("small", 0.0)


@pytest.mark.parametrize("path", STREAMED)
async def test_a_stream_is_kept_alive_while_its_model_loads(
    tokenizer: Tokenizer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.api.event_stream._LONGEST_GRACE_S", 0.1)
    async with on_demand_api(tokenizer, ping_interval_s=0.02) as mesh:
        mesh.models.may_finish.clear()
        lines: list[str] = []
        body = {**BODIES[path], "model": "small", "stream": True}
        async with mesh.api.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                lines.append(line)
                if lines.count(": ping") == 4:
                    mesh.models.may_finish.set()
        events = [line for line in lines if line.startswith("data: ")]
        assert tokenizer.piece(400).decode().strip() in "".join(events)
        assert not any("error" in json.loads(line[6:]) for line in events if line != "data: [DONE]")
        # It ends as a stream of a loaded model does.
        plain = (await mesh.api.http.post(path, json=body)).text.strip().split("\n")
        assert (lines[-1] or lines[-2]).startswith(plain[-1][:20])


@pytest.mark.parametrize("path", STREAMED)
async def test_a_stream_whose_model_does_not_come_ends_with_an_error(
    tokenizer: Tokenizer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.api.event_stream._LONGEST_GRACE_S", 0.1)
    async with on_demand_api(tokenizer, ping_interval_s=0.02) as mesh:
        mesh.models.may_finish.clear()
        mesh.models.errors["small"] = StageFailed("stage [0, 6) on attic: its process ended")
        lines: list[str] = []
        body = {**BODIES[path], "model": "small", "stream": True}
        async with mesh.api.http.stream("POST", path, json=body) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                if lines.count(": ping") == 1:
                    mesh.models.may_finish.set()
        last = json.loads([line for line in lines if line.startswith("data: ")][-1][6:])
        assert "its process ended" in json.dumps(last)
        assert last.get("type") == ("error" if path in {"/v1/responses", "/v1/messages"} else None)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_fails_at_once_is_a_status(tokenizer: Tokenizer, *, is_stream: bool) -> None:
    async with on_demand_api(tokenizer) as mesh:
        refused = await ask(mesh, "whale", stream=is_stream)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "60")
        assert "it needs 99 GiB; free are 6 GiB" in refused.json()["error"]["message"]
        mesh.memory.broken["small"] = InvalidModel("/library/small.gguf is truncated; fetch it again")
        broken = await ask(mesh, "small", stream=is_stream)
        assert (broken.status_code, broken.json()["error"]["code"]) == (500, "invalid_model")
        # Clients are not told where the head keeps its files.
        assert broken.json()["error"]["message"] == "small.gguf is truncated; fetch it again"
        assert mesh.models.orders == []


async def test_a_model_that_could_not_be_loaded_is_not_tried_at_once_again(tokenizer: Tokenizer) -> None:
    async with on_demand_api(tokenizer) as mesh:
        mesh.models.errors["small"] = StageFailed("its process ended")
        for _ in range(3):
            assert (await ask(mesh, "small")).status_code == 503
        assert mesh.models.orders == ["load small"]
        del mesh.models.errors["small"]
        mesh.later(61)
        assert (await ask(mesh, "small")).status_code == 200


async def test_a_file_that_was_replaced_is_tried_at_once(tokenizer: Tokenizer) -> None:
    async with on_demand_api(tokenizer) as mesh:
        mesh.models.errors["small"] = InvalidModel("/library/small.gguf is truncated; fetch it again")
        assert (await ask(mesh, "small")).status_code == 500
        del mesh.models.errors["small"]
        assert (await ask(mesh, "small")).status_code == 500
        mesh.library.replace("small")
        assert (await ask(mesh, "small")).status_code == 200
        assert mesh.models.orders == ["load small", "load small"]


async def test_what_an_operator_stopped_may_be_loaded_again(tokenizer: Tokenizer) -> None:
    async with on_demand_api(tokenizer) as mesh:
        mesh.models.may_finish.clear()
        waiting = asyncio.create_task(ask(mesh, "small"))
        await until(lambda: "load small" in mesh.models.orders)
        assert (await mesh.api.http.post("/mesh/unload?model=small")).status_code == 200
        stopped = await waiting
        assert (stopped.status_code, "unloaded before it was ready" in stopped.text) == (503, True)
        mesh.models.may_finish.set()
        assert (await mesh.api.http.post("/mesh/load", json={"model": "small"})).status_code == 200


async def test_two_that_do_not_fit_together_answer_in_turn(tokenizer: Tokenizer) -> None:
    async with on_demand_api(tokenizer) as mesh:
        assert (await ask(mesh, "large")).json()["model"] == "large"
        waiting = [asyncio.create_task(ask(mesh, "middle")) for _ in range(3)]
        await until(lambda: num_waiting(mesh, "middle") == 3)
        assert (await mesh.api.http.get("/v1/models/middle")).json()["status"] == {"value": "waiting"}
        # The other stays for its time, and answers meanwhile.
        mesh.later(30)
        assert (await ask(mesh, "large")).status_code == 200
        assert mesh.models.orders == ["load large"]
        mesh.later(31)
        assert {(await each).json()["model"] for each in waiting} == {"middle"}
        assert mesh.models.orders == ["load large", "unload large", "load middle"]
        # The small one fits beside.
        assert (await ask(mesh, "small")).status_code == 200
        assert mesh.models.loaded == {"middle", "small"}


async def test_a_model_with_a_request_is_not_unloaded(tokenizer: Tokenizer) -> None:
    async with on_demand_api(tokenizer, ping_interval_s=0.05) as mesh:
        async with open_stream(mesh, "large"):
            waiting = asyncio.create_task(ask(mesh, "middle"))
            await until(lambda: num_waiting(mesh, "middle"))
            mesh.later(1000)
            await asyncio.sleep(0.1)
            assert mesh.models.loaded == {"large"}
            # One that fits beside what is there need not wait for it.
            mesh.memory.free += 1
            assert (await ask(mesh, "small")).status_code == 200
        assert (await waiting).json()["model"] == "middle"
        assert mesh.models.orders.index("unload large") < mesh.models.orders.index("load middle")


async def test_idle_models_are_unloaded_and_loaded_again(tokenizer: Tokenizer) -> None:
    async with on_demand_api(tokenizer, rules=DemandRules(60.0, 600.0)) as mesh:
        await ask(mesh, "small")
        mesh.later(599)
        await ask(mesh, "small")
        mesh.later(599)
        await asyncio.sleep(0.05)
        assert mesh.models.loaded == {"small"}
        mesh.later(1)
        await until(lambda: not mesh.models.registered)
        assert (await ask(mesh, "small")).status_code == 200
        assert mesh.models.orders == ["load small", "unload small", "load small"]


async def test_what_an_operator_loaded_stays(tokenizer: Tokenizer) -> None:
    async with on_demand_api(tokenizer) as mesh:
        loaded = await mesh.api.http.post("/mesh/load", json={"model": "/elsewhere/middle.gguf"})
        assert loaded.status_code == 200, loaded.text
        mesh.later(1000)
        refused = await ask(mesh, "large")
        assert (refused.status_code, "free are 1 GiB" in refused.text) == (503, True)
        assert (await ask(mesh, "middle")).status_code == 200
        assert (await mesh.api.http.post("/mesh/unload?model=middle")).status_code == 200
        assert (await ask(mesh, "large")).status_code == 200


async def test_a_whole_answer_waits_for_so_long_and_the_loading_goes_on(tokenizer: Tokenizer) -> None:
    async with on_demand_api(tokenizer, load_wait_s=0.1) as mesh:
        mesh.models.may_finish.clear()
        late = await ask(mesh, "small")
        assert (late.status_code, late.headers["retry-after"]) == (503, "10")
        assert "is still loading" in late.json()["error"]["message"]
        mesh.models.may_finish.set()
        await until(lambda: mesh.models.loaded)
        assert (await ask(mesh, "small")).status_code == 200
        assert mesh.models.orders == ["load small"]
        # What waits for the stay of another is told when that is over.
        late = await ask(mesh, "large")
        assert (late.status_code, late.headers["retry-after"]) == (503, "61")
        assert "make room" in late.json()["error"]["message"]
        assert mesh.models.orders == ["load small"]


async def test_only_so_many_wait(tokenizer: Tokenizer) -> None:
    async with on_demand_api(tokenizer, max_waiting=2) as mesh:
        mesh.models.may_finish.clear()
        waiting = [asyncio.create_task(ask(mesh, "small")) for _ in range(2)]
        await until(lambda: num_waiting(mesh, "small") == 2)
        refused = await ask(mesh, "small")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        mesh.models.may_finish.set()
        assert [(await each).status_code for each in waiting] == [200, 200]


async def test_who_leaves_wants_nothing_any_more(tokenizer: Tokenizer) -> None:
    async with on_demand_api(tokenizer) as mesh:
        await ask(mesh, "large")
        leaving = asyncio.create_task(ask(mesh, "middle"))
        await until(lambda: num_waiting(mesh, "middle"))
        leaving.cancel()
        await until(lambda: "middle" not in mesh.loader._uses)
        mesh.later(1000)
        await asyncio.sleep(0.05)
        assert mesh.models.loaded == {"large"}


def load_request(model: str) -> LoadRequest:
    """Order of an operator, for a file of the head's host."""
    return LoadRequest.model_validate({"model": f"/elsewhere/{model}.gguf", "threads": 1})


def two_keys() -> ApiKeys:
    return ApiKeys(
        [
            KeyRecord("alice", digest_of(KEY), may_load=True),
            KeyRecord("bob", digest_of("sk-of-bob")),
        ]
    )


async def test_a_key_that_may_not_load_is_told_so(tokenizer: Tokenizer) -> None:
    async with on_demand_api(tokenizer, keys=two_keys()) as mesh:
        http = mesh.api.http
        for path, fields in BODIES.items():
            refused = await http.post(path, json={**fields, "model": "small"}, headers=MAY_NOT)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["param"]) == (403, "permission_denied", "model")
            for word in ("`small`", "bob", "may-load=yes", "mesh keys add --may-load", "/v1/models"):
                assert word in error["message"]
        assert mesh.models.orders == []
        body = {"messages": HELLO, "model": "small"}
        assert (await http.post(CHAT, json=body, headers=MAY)).status_code == 200
        # What is loaded, and what is loading for somebody else, is for everybody.
        assert (await http.post(CHAT, json=body, headers=MAY_NOT)).status_code == 200
        assert (await http.get("/v1/models", headers=MAY_NOT)).status_code == 200
        mesh.memory.free += 99
        mesh.models.may_finish.clear()
        asked = {**body, "model": "large"}
        first = asyncio.create_task(http.post(CHAT, json=asked, headers=MAY))
        await until(lambda: "load large" in mesh.models.orders)
        second = asyncio.create_task(http.post(CHAT, json=asked, headers=MAY_NOT))
        await until(lambda: num_waiting(mesh, "large") == 2)
        mesh.models.may_finish.set()
        assert [(await each).status_code for each in (first, second)] == [200, 200]


@pytest.mark.parametrize("ends", ["fails", "stops", "succeeds"])
async def test_a_request_that_may_only_wait_is_refused_when_the_loading_ends_without_the_model(
    tokenizer: Tokenizer, ends: str
) -> None:
    async with on_demand_api(tokenizer, keys=two_keys()) as mesh:
        http = mesh.api.http
        await http.post(CHAT, json={"messages": HELLO, "model": "large"}, headers=MAY)
        mesh.later(1000)
        mesh.models.may_finish.clear()
        if ends == "fails":
            mesh.models.errors["middle"] = ModelDoesNotFit("it needs more than there is")
        order = asyncio.create_task(mesh.models.load(load_request("middle")))
        await until(lambda: "load middle" in mesh.models.orders)
        bob = asyncio.create_task(
            http.post(CHAT, json={"messages": HELLO, "model": "middle"}, headers=MAY_NOT)
        )
        await until(lambda: num_waiting(mesh, "middle"))
        if ends == "stops":
            await mesh.models.unload("middle", 0.0)
        mesh.models.may_finish.set()
        await asyncio.gather(order, return_exceptions=True)
        refused = await bob
        if ends == "succeeds":
            assert refused.status_code == 200
            return
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        assert mesh.models.loaded == {"large"}
        # Those with the right have it loaded all the same.
        mesh.models.errors.clear()
        assert (
            await http.post(CHAT, json={"messages": HELLO, "model": "middle"}, headers=MAY)
        ).status_code == 200


async def test_a_right_counts_for_the_request_that_has_it(tokenizer: Tokenizer) -> None:
    async with on_demand_api(tokenizer, keys=two_keys()) as mesh:
        http, body = mesh.api.http, {"messages": HELLO, "model": "middle"}
        mesh.models.may_finish.clear()
        mesh.models.errors["middle"] = ModelDoesNotFit("it needs more than there is")
        order = asyncio.create_task(mesh.models.load(load_request("middle")))
        await until(lambda: "load middle" in mesh.models.orders)
        alice, bob = (asyncio.create_task(http.post(CHAT, json=body, headers=who)) for who in (MAY, MAY_NOT))
        await until(lambda: num_waiting(mesh, "middle") == 2)
        del mesh.models.errors["middle"]
        await mesh.models.unload("middle", 0.0)
        mesh.models.may_finish.set()
        await asyncio.gather(order, return_exceptions=True)
        assert [(await each).status_code for each in (alice, bob)] == [200, 403]
        assert mesh.models.orders == ["load middle", "unload middle", "load middle"]


async def test_no_key_keeps_the_places_of_others_while_a_model_loads(tokenizer: Tokenizer) -> None:
    async with on_demand_api(tokenizer, keys=two_keys(), max_waiting=2) as mesh:
        http, body = mesh.api.http, {"messages": HELLO, "model": "small"}
        mesh.models.may_finish.clear()
        order = asyncio.create_task(mesh.models.load(load_request("small")))
        await until(lambda: "load small" in mesh.models.orders)
        waiting = [asyncio.create_task(http.post(CHAT, json=body, headers=MAY_NOT)) for _ in range(2)]
        await until(lambda: num_waiting(mesh, "small") == 2)
        refused = await http.post(CHAT, json=body, headers=MAY_NOT)
        assert (refused.status_code, "2 of them with this API key" in refused.text) == (429, True)
        waiting.append(asyncio.create_task(http.post(CHAT, json=body, headers=MAY)))
        await until(lambda: num_waiting(mesh, "small") == 3)
        mesh.models.may_finish.set()
        assert [(await each).status_code for each in waiting] == [200, 200, 200]
        await order


async def test_no_model_is_loaded_for_a_key_that_was_removed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    add_key(path, KeyRecord("bob", digest_of("sk-of-bob")))
    add_key(path, KeyRecord("alice", digest_of(KEY), may_load=True))
    async with on_demand_api(tokenizer, keys=ApiKeys.from_file(path)) as mesh:
        http = mesh.api.http
        await http.post(CHAT, json={"messages": HELLO, "model": "large"}, headers=MAY)
        body = {"messages": HELLO, "model": "middle"}
        waiting = asyncio.create_task(http.post(CHAT, json=body, headers=MAY))
        await until(lambda: num_waiting(mesh, "middle"))
        remove_key(path, "alice")
        assert (await http.get("/v1/models", headers=MAY_NOT)).status_code == 200
        assert (await waiting).status_code == 401
        mesh.later(1000)
        await asyncio.sleep(0.05)
        assert mesh.models.orders == ["load large"]
        assert "middle" not in mesh.loader._uses


async def test_without_keys_only_the_heads_machine_has_models_loaded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_demand_api(tokenizer) as mesh:
        behind_a_proxy = {"x-forwarded-for": "10.0.0.66"}
        body = {"messages": HELLO, "model": "small"}
        refused = await mesh.api.http.post(CHAT, json=body, headers=behind_a_proxy)
        assert (refused.status_code, "the head's own machine" in refused.text) == (403, True)
        monkeypatch.setattr(auth, "_comes_from_here", lambda _request: False)
        assert (await ask(mesh, "small")).status_code == 403
        status = (await mesh.api.http.get("/mesh/status")).json()
        assert status["rights"] == {"load": False, "unload": False}
        monkeypatch.undo()
        assert (await ask(mesh, "small")).status_code == 200


async def test_a_key_that_may_load_does_so_by_name_and_from_anywhere(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_demand_api(tokenizer, keys=two_keys()) as mesh:
        http = mesh.api.http
        monkeypatch.setattr(auth, "_comes_from_here", lambda _request: False)
        assert (await http.get("/mesh/status", headers=MAY)).json()["rights"] == {
            "load": True,
            "unload": False,
        }
        loaded = await http.post("/mesh/load", json={"model": "small"}, headers=MAY)
        assert (loaded.status_code, loaded.json()["model"]) == (200, "small")
        assert loaded.json()["stages"][0]["host"] == "attic"
        # Files of the head, and unloading, are for its own machine.
        for request in (
            http.post("/mesh/load", json={"model": "/elsewhere/x.gguf"}, headers=MAY),
            http.post("/mesh/load", json={"model": "small"}, headers=MAY_NOT),
            http.post("/mesh/unload?model=small", headers=MAY),
        ):
            refused = await request
            assert (refused.status_code, "head's own machine" in refused.text) == (401, True)
        assert mesh.models.orders == ["load small"]


async def test_orders_by_name_take_no_options(tokenizer: Tokenizer) -> None:
    async with on_demand_api(tokenizer) as mesh:
        for fields, param in (
            ({"model": "small", "ctx_size": 512}, "ctx_size"),
            ({"model": "small", "name": "tiny"}, "name"),
            ({"model": "other"}, "model"),
            ({"model": MODEL}, "model"),
        ):
            refused = await mesh.api.http.post("/mesh/load", json=fields)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
        assert "name of a model of the library" in refused.json()["error"]["message"]
        assert (await mesh.api.http.post("/mesh/load", json={"model": "whale"})).status_code == 503
        # It goes when another is wanted, as what a request loaded.
        assert (await mesh.api.http.post("/mesh/load", json={"model": "large"})).status_code == 200
        mesh.later(61)
        assert (await ask(mesh, "middle")).status_code == 200
        assert mesh.models.loaded == {"middle"}
