"""Several models behind one API: requests are routed by `model`, and orders come from this machine only."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from mesh.api.api_keys import ApiKeys, KeyRecord, digest_of
from mesh.api.http_server import serve_api
from mesh.cli.main import run
from mesh.status import MeshStatus, RepairStatus
from spanmesh_proto.errors import ModelDoesNotFit, ModelNotFound
from tests.mesh.metrics.test_metrics import samples_of
from tests.support.api_harness import (
    KEY,
    MODEL,
    Api,
    ScriptedEngine,
    app_of,
    backend_of,
    running_api,
    tokenizer,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from mesh.api.backend import Backends
    from mesh.options.model import LoadRequest
    from mesh.text.tokenizer import Tokenizer

__all__ = ["tokenizer"]

pytestmark = pytest.mark.model

HELLO: Any = [{"role": "user", "content": "Hello"}]
OTHER = "acme/tiny"


@asynccontextmanager
async def two_models(
    tokenizer: Tokenizer, *, ready: bool = True, keys: ApiKeys | None = None, **hosts: Any
) -> AsyncIterator[tuple[Api, Backends]]:
    """The first says 300, the other 400 and has a longer context."""
    app = app_of(
        ScriptedEngine([(300,)]),
        tokenizer,
        keys=keys,
        status=lambda: MeshStatus(ready=True, phase="serving"),
        **hosts,
    )
    backends: Backends = app.state.backends
    backends.add(
        backend_of(
            ScriptedEngine([(400,)], context_length=128),
            tokenizer,
            api=backends.first.api,
            model_id=OTHER,
            status=lambda: MeshStatus(ready=ready, phase="loading", repairs=REPAIRS),
            ready=lambda: ready,
        )
    )
    async with (
        serve_api(app, "127.0.0.1", 0) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client,
    ):
        yield Api(url, http, client), backends


REPAIRS = RepairStatus(losses=2, count=1, last_s=1.5)


@pytest.mark.parametrize(
    ("named", "served", "token"),
    [(None, MODEL, 300), ("default", MODEL, 300), (MODEL, MODEL, 300), (OTHER, OTHER, 400)],
)
async def test_each_endpoint_goes_by_the_model(
    tokenizer: Tokenizer, named: str | None, served: str, token: int
) -> None:
    model = {} if named is None else {"model": named}
    text = tokenizer.piece(token).decode()
    async with two_models(tokenizer) as (api, _):
        for path, body in (
            ("/v1/chat/completions", {"messages": HELLO}),
            ("/v1/completions", {"prompt": "Hello"}),
        ):
            answer = (await api.http.post(path, json={**body, **model})).json()
            assert answer["model"] == served
            choice = answer["choices"][0]
            assert choice.get("text", choice.get("message", {}).get("content")) == text
        made = (await api.http.post("/v1/responses", json={"input": "Hello", **model})).json()
        assert (made["model"], made["output"][0]["content"][0]["text"]) == (served, text)
        counted = (await api.http.post("/tokenize", json={"prompt": "Hello", **model})).json()
        assert counted["max_model_len"] == (128 if served == OTHER else 64)
        spelt = (await api.http.post("/detokenize", json={"tokens": [token], **model})).json()
        assert spelt["prompt"] == text


async def test_a_conversation_goes_on_with_another_model(tokenizer: Tokenizer) -> None:
    async with two_models(tokenizer) as (api, _):
        first = await api.openai.responses.create(model=OTHER, input="Hello")
        second = await api.openai.responses.create(
            model=MODEL, input="And you?", previous_response_id=first.id
        )
        assert second.usage is not None
        assert first.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens + 1
        assert (await api.openai.responses.retrieve(first.id)).model == OTHER


async def test_models_are_listed_and_the_unknown_are_refused_by_name(tokenizer: Tokenizer) -> None:
    async with two_models(tokenizer) as (api, backends):
        listed = [model.id async for model in api.openai.models.list()]
        assert listed == [MODEL, OTHER]
        cards = (await api.http.get("/v1/models")).json()["data"]
        assert [card["kind"] for card in cards] == ["chat", "chat"]
        assert (await api.http.get(f"/v1/models/{OTHER}")).json()["max_model_len"] == 128
        refused = await api.http.post("/v1/chat/completions", json={"model": "else", "messages": HELLO})
        assert refused.status_code == 404
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert f"use `{MODEL}`, `{OTHER}` or `default`" in error["message"]
        backends.remove(OTHER)
        backends.remove(OTHER)
        backends.remove(MODEL)
        assert [model.id async for model in api.openai.models.list()] == [MODEL]
        assert (await api.http.get(f"/v1/models/{OTHER}")).status_code == 404


async def test_one_that_loads_is_503_and_the_first_goes_on(tokenizer: Tokenizer) -> None:
    async with two_models(tokenizer, ready=False) as (api, _):
        waits = await api.http.post("/v1/chat/completions", json={"model": OTHER, "messages": HELLO})
        assert (waits.status_code, waits.headers["retry-after"]) == (503, "2")
        assert (await api.http.get("/health")).status_code == 200
        assert (await api.http.post("/v1/completions", json={"prompt": "Hello"})).status_code == 200


async def test_status_and_metrics_tell_of_each(tokenizer: Tokenizer) -> None:
    async with two_models(tokenizer) as (api, _):
        await api.openai.completions.create(model=OTHER, prompt="Hello")
        status = (await api.http.get("/mesh/status")).json()
        assert (status["phase"], status["tokens"]["generated"]) == ("serving", 0)
        assert [(each["name"], each["phase"], each["tokens"]["generated"]) for each in status["models"]] == [
            (MODEL, "serving", 0),
            (OTHER, "loading", 1),
        ]
        samples = samples_of((await api.http.get("/metrics")).text)
    for name, first, other in (
        ("mesh_generation_tokens_total", 0, 1),
        ("mesh_time_to_first_token_seconds_count", 0, 1),
        ("mesh_ready", 1, 1),
    ):
        found = {dict(labels)["model_name"]: value for labels, value in samples[name].items()}
        assert found == {MODEL: first, OTHER: other}
    assert samples["mesh_repairs_total"] == {(("model_name", MODEL),): 0, (("model_name", OTHER),): 1}
    # What is of the hosts is there once.
    assert all(dict(labels)["model_name"] == MODEL for labels in samples["mesh_hosts"])


async def test_a_keys_limits_count_over_all_models(tokenizer: Tokenizer) -> None:
    keys = ApiKeys([KeyRecord("poor", digest_of(KEY), 1)])
    async with two_models(tokenizer, keys=keys) as (api, _):
        await api.openai.completions.create(model=OTHER, prompt="Hello")
        with pytest.raises(openai.RateLimitError):
            await api.openai.completions.create(model=MODEL, prompt="Hello")


class Orders:
    """Loads whatever fits."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def load(self, load_request: LoadRequest) -> Mapping[str, Any]:
        fields = load_request.model_dump(mode="json")
        self.asked.append(fields)
        if "huge" in fields["model"]:
            raise ModelDoesNotFit("huge does not fit: it needs 9.0 GiB; free are 1.0 GiB on a")
        stage = {"host": "a", "layers": "[0, 6)", "threads": 1, "bytes": 2**20}
        return {"model": "tiny", "plan": "host a can hold the whole model", "stages": [stage]}

    async def unload(self, name: str, wait_s: float) -> Mapping[str, Any]:
        self.asked.append((name, wait_s))
        if name != "tiny":
            raise ModelNotFound(f"no model was loaded as {name!r}; loaded are: tiny", param="model")
        return {"model": name, "unloaded": True, "ended": 2}


async def test_the_commands_load_and_unload(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = Orders()
    monkeypatch.chdir(tmp_path)
    async with running_api(ScriptedEngine([]), tokenizer, model_admin=lambda: orders) as api:

        async def mesh(*arguments: str) -> tuple[int, str]:
            code = await asyncio.to_thread(run, [*arguments, "--url", api.url])
            said = capsys.readouterr()
            return code, said.out + said.err

        code, said = await mesh("load", "tiny.gguf", "--split", "2,4", "--exact", "--speculate", "off")
        assert (code, orders.asked[-1]["model"]) == (0, str(tmp_path / "tiny.gguf"))
        assert (orders.asked[-1]["split"], orders.asked[-1]["exact"], orders.asked[-1]["speculate"]) == (
            [2, 4],
            True,
            "off",
        )
        assert "  a: layers [0, 6), 1.0 MiB, one thread\n" in said
        assert (
            f'tiny is served at {api.url}/v1 (host a can hold the whole model): send "model": "tiny".' in said
        )
        assert orders.asked[-1]["embeddings"] is False
        code, said = await mesh("load", "tiny.gguf", "--embeddings", "--ctx-size", "128")
        assert (code, orders.asked[-1]["embeddings"], orders.asked[-1]["ctx_size"]) == (0, True, 128)
        assert f"tiny is served at {api.url}/v1/embeddings (" in said
        code, said = await mesh("load", "huge.gguf")
        assert (code, "error: huge does not fit: it needs 9.0 GiB" in said) == (1, True)
        assert (await mesh("load", "x.gguf", "--split", "2,4", "--stages", "2"))[0] == 2
        code, said = await mesh("unload", "tiny", "--wait", "2.5")
        assert (code, orders.asked[-1]) == (0, ("tiny", 2.5))
        assert "tiny was unloaded" in said
        assert "2 requests were ended" in said
        code, said = await mesh("unload", "acme/other")
        assert (code, orders.asked[-1]) == (1, ("acme/other", 30.0))
        assert "loaded are: tiny" in said


async def test_wrong_orders_are_refused_with_the_field(tokenizer: Tokenizer) -> None:
    orders = Orders()
    async with running_api(ScriptedEngine([]), tokenizer, model_admin=lambda: orders) as api:
        for fields, param in (
            ({}, "model"),
            ({"model": "tiny.gguf"}, "model"),
            ({"model": "/t.gguf", "kv_type": "q9"}, "kv_type"),
            ({"model": "/t.gguf", "parallel": 0}, "parallel"),
            ({"model": "/t.gguf", "split": [2, 0]}, "split[1]"),
            ({"model": "/t.gguf", "stages": 2, "split": [2, 2]}, "stages"),
            ({"model": "/t.gguf", "draft_path": "d.gguf"}, "draft_path"),
            ({"model": "/t.gguf", "temperature": 1}, "temperature"),
            ({"model": "/t.gguf", "embeddings": True, "exact": True}, "exact"),
            ({"model": "/t.gguf", "embeddings": True, "split": [2, 2]}, "split"),
            ({"model": "/t.gguf", "embeddings": 1}, "embeddings"),
        ):
            refused = await api.http.post("/mesh/load", json=fields)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
        for query, param in (
            ("", "model"),
            ("?model=x&wait_s=-1", "wait_s"),
            ("?model=x&wait_s=nan", "wait_s"),
        ):
            refused = await api.http.post(f"/mesh/unload{query}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert orders.asked == []
    async with running_api(ScriptedEngine([]), tokenizer) as api:
        assert (await api.http.post("/mesh/load", json={"model": "/t.gguf"})).status_code == 503
