"""Vectors as clients get them: the real API and engine around vectors that need no model."""

from __future__ import annotations

import asyncio
import base64
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest

from mesh.api.api_keys import ApiKeys, KeyRecord, digest_of
from spanmesh_proto.errors import StageFailed
from stages.embedding.vectors import shortened
from tests.mesh.metrics.test_metrics import samples_of
from tests.support import api_harness
from tests.support.api_harness import KEY, MODEL, ScriptedEngine, running_api
from tests.support.embedders import (
    EMBEDDER,
    LONGEST,
    WIDTH,
    ScriptedLink,
    embedding_backend,
    running_engine,
    vector_of,
)
from tests.support.raw_client import RawClient, request_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import httpx

    from mesh.embedding.engine import EmbeddingEngine
    from mesh.text.tokenizer import Tokenizer
    from tests.support.api_harness import Api

pytestmark = pytest.mark.model
tokenizer = api_harness.tokenizer

PATH = "/v1/embeddings"
HEADERS = {"authorization": f"Bearer {KEY}"}
TEXTS = ["Hello", "Rivers reach the sea, and the sea does not fill."]


@dataclass
class Served:
    """A chat model and, beside it, an embedding model."""

    api: Api
    engine: EmbeddingEngine
    link: ScriptedLink
    """The host of the embedding model."""

    async def post(self, **fields: object) -> httpx.Response:
        return await self.api.http.post(PATH, json={"input": "Hello", **fields}, headers=HEADERS)


@asynccontextmanager
async def serving(
    tokenizer: Tokenizer, *, is_loaded: bool = True, keys: ApiKeys | None = None, **options: Any
) -> AsyncIterator[Served]:
    link = ScriptedLink()
    async with (
        running_engine() as engine,
        running_api(ScriptedEngine([(300,)]), tokenizer, keys=keys, **options) as api,
    ):
        assert api.backends is not None
        api.backends.embeddings.add(embedding_backend(engine, tokenizer))
        if is_loaded:
            engine.resume(link)
        yield Served(api, engine, link)


def ids_of(tokenizer: Tokenizer, *texts: str) -> list[list[int]]:
    return [tokenizer.encode(text, add_special=True, parse_special=True) for text in texts]


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_texts_and_token_ids_one_or_several(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, *TEXTS)
    cases: list[tuple[Any, list[list[int]]]] = [
        (TEXTS[0], ids[:1]),
        (TEXTS, ids),
        (ids[0], ids[:1]),
        (ids, ids),
    ]
    async with serving(tokenizer) as served:
        for given, wanted in cases:
            answer = await served.api.openai.embeddings.create(
                model=EMBEDDER, input=given, encoding_format="float", user="somebody"
            )
            assert (answer.object, answer.model) == ("list", EMBEDDER)
            assert [each.index for each in answer.data] == list(range(len(wanted)))
            assert [each.embedding for each in answer.data] == [vector_of(each).tolist() for each in wanted]
            num_tokens = sum(map(len, wanted))
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)


async def test_base64_holds_the_same_numbers(tokenizer: Tokenizer) -> None:
    expected = np.stack([vector_of(tokens) for tokens in ids_of(tokenizer, *TEXTS)])
    async with serving(tokenizer) as served:
        answer = (await served.post(input=TEXTS, encoding_format="base64")).json()
        for item, row in zip(answer["data"], expected, strict=True):
            assert base64.b64decode(item["embedding"], validate=True) == row.astype("<f4").tobytes()
        # The client asks for base64 by itself, and decodes it.
        decoded = await served.api.openai.embeddings.create(model=EMBEDDER, input=TEXTS)
        assert np.array_equal(np.array([each.embedding for each in decoded.data], np.float32), expected)


async def test_dimensions_are_the_first_numbers_with_length_one(tokenizer: Tokenizer) -> None:
    whole = np.stack([vector_of(tokens) for tokens in ids_of(tokenizer, *TEXTS)])
    async with serving(tokenizer) as served:
        for dimensions in (1, 3, WIDTH):
            answer = (await served.post(input=TEXTS, dimensions=dimensions)).json()
            rows = np.array([item["embedding"] for item in answer["data"]], np.float32)
            assert np.array_equal(rows, shortened(whole, dimensions))
            assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(2), abs=1e-6)
        with pytest.raises(
            openai.BadRequestError, match="makes vectors of 8 numbers: send 1 to 8"
        ) as refused:
            await served.api.openai.embeddings.create(model=EMBEDDER, input="x", dimensions=WIDTH + 1)
        assert refused.value.param == "dimensions"


async def test_what_is_wrong_is_refused_with_its_place(tokenizer: Tokenizer) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"input": []}, "input", "list of 1 to 2048"),
        ({"input": ["x"] * 2049}, "input", "list of 1 to 2048"),
        ({"input": {"text": "x"}}, "input", "must be a string"),
        ({"input": ["x", 5]}, "input", "must be a string"),
        ({"input": ""}, "input", "input holds no token"),
        ({"input": ["x", ""]}, "input[1]", "input[1] holds no token"),
        ({"input": [[5], [tokenizer.n_vocab]]}, "input[1]", f"the token id {tokenizer.n_vocab}"),
        ({"input": [[5], [5] * (LONGEST + 1)]}, "input[1]", "input[1] resulted in 33 tokens"),
        ({"input": ["x", "Hello " * 50]}, "input[1]", "divide the text"),
        ({"input": "Hello " * 100_000}, "input", "input resulted in at least "),
        ({"input": ["x", "\ud800"]}, "input[1]", "half a surrogate pair"),
        ({"dimensions": 0}, "dimensions", "1"),
        ({"dimensions": "8"}, "dimensions", "integer"),
        ({"encoding_format": "hex"}, "encoding_format", "base64"),
    ]
    async with serving(tokenizer) as served:
        for fields, param, says in cases:
            response = await served.api.http.post(
                PATH,
                content=request_bytes({"input": "Hello", **fields}).partition(b"\r\n\r\n")[2],
                headers={"content-type": "application/json"},
            )
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), error
            assert says in error["message"], error
            assert (error["code"] == "context_length_exceeded") == ("prompt is too long" in error["message"])
        assert served.link.batches == []
        assert (await served.post(input=[[5] * LONGEST, [6]])).status_code == 200


async def test_models_that_are_not_for_this_say_what_they_are_for(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as served:
        for model in (None, "default", EMBEDDER):
            named = {} if model is None else {"model": model}
            assert (await served.post(**named)).json()["model"] == EMBEDDER
        chat = (await served.post(model=MODEL)).json()["error"]
        assert chat["param"] == "model"
        assert chat["message"].endswith(
            f"`{MODEL}` is a chat model, and vectors come from an embedding model: name `{EMBEDDER}`"
        )
        unknown = await served.post(model="else")
        assert unknown.status_code == 404
        assert f"use `{MODEL}`, `{EMBEDDER}` or `default`" in unknown.json()["error"]["message"]
        hello = [{"role": "user", "content": "Hello"}]
        for path, body in (
            ("/v1/chat/completions", {"messages": hello}),
            ("/v1/completions", {"prompt": "Hello"}),
            ("/v1/responses", {"input": "Hello"}),
            ("/v1/messages", {"messages": hello, "max_tokens": 8}),
            ("/tokenize", {"prompt": "Hello"}),
        ):
            refused = await served.api.http.post(path, json={**body, "model": EMBEDDER})
            assert refused.status_code == 400, (path, refused.text)
            assert "is an embedding model: it makes vectors at /v1/embeddings" in refused.text, path
            # The first chat model is still meant where none is named.
            assert (await served.api.http.post(path, json=body)).status_code == 200, path


async def test_lists_status_and_metrics_tell_of_it(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as served:
        assert (await served.post(input=TEXTS)).status_code == 200
        cards = (await served.api.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["kind"]) for card in cards] == [(MODEL, "chat"), (EMBEDDER, "embeddings")]
        card = (await served.api.http.get(f"/v1/models/{EMBEDDER}")).json()
        assert (card["max_model_len"], card["meta"]["n_embd"]) == (LONGEST, WIDTH)
        status = (await served.api.http.get("/mesh/status")).json()["models"][1]
        assert (status["name"], status["kind"], status["phase"]) == (EMBEDDER, "embeddings", "serving")
        assert (status["embeddings"]["requests"], status["embeddings"]["texts"]) == (1, 2)
        samples = samples_of((await served.api.http.get("/metrics")).text)
        of_model = (("model_name", EMBEDDER),)
        num_tokens = sum(map(len, ids_of(tokenizer, *TEXTS)))
        for name, value in (("texts", 2), ("tokens", num_tokens), ("batches", 1)):
            assert samples[f"mesh_embedding_{name}_total"] == {of_model: value}
        assert samples["mesh_embedding_request_seconds_count"] == {of_model: 1}
        assert samples["mesh_ready"][of_model] == 1


async def test_a_model_without_a_host_is_503(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, is_loaded=False) as served:
        loading = await served.post()
        assert (loading.status_code, loading.headers["retry-after"]) == (503, "2")
        served.engine.resume(served.link)
        assert (await served.post()).status_code == 200
        served.engine.give_up(StageFailed("no host can hold it", retry_after_s=10))
        lost = await served.post()
        assert (lost.status_code, lost.headers["retry-after"]) == (503, "10")
        assert lost.json()["error"]["message"] == "no host can hold it"


async def test_a_client_that_hangs_up_is_not_computed_for(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as served:
        served.link.gate.clear()
        client = await RawClient.connect(served.api)
        await client.send(request_bytes({"input": TEXTS}, PATH))
        await until(lambda: served.link.batches)
        client.hang_up()
        await until(lambda: not served.engine.num_requests)
        await until(lambda: served.link.num_cancelled == 1)
        assert served.engine.statistics.finished == {"abort": 1}
        served.link.gate.set()
        assert (await served.post()).status_code == 200


async def test_a_keys_tokens_and_places_are_counted(tokenizer: Tokenizer) -> None:
    (tokens,) = ids_of(tokenizer, TEXTS[1])
    limit = 3 * len(tokens)
    keys = ApiKeys([KeyRecord("alice", digest_of(KEY), tokens_per_minute=limit, max_concurrent=1)])
    async with serving(tokenizer, keys=keys, steady_s=lambda: 0.0) as served:
        assert (await served.post(input=[TEXTS[1]] * 2)).status_code == 200
        listed = await served.api.http.get("/v1/models", headers=HEADERS)
        assert int(listed.headers["x-ratelimit-remaining-tokens"]) == len(tokens)
        refused = await served.post(input=[TEXTS[1]] * 2)
        assert refused.status_code == 429
        assert f"{limit} tokens a minute" in refused.json()["error"]["message"]
        assert len(served.link.batches) == 1
        # One answer at a time.
        served.link.gate.clear()
        first = asyncio.create_task(served.post(input=[[5]]))
        await until(lambda: len(served.link.batches) == 2)
        assert (await served.post(input=[[6]])).status_code == 429
        served.link.gate.set()
        assert (await first).status_code == 200
        assert (await served.post(input=[[6]])).status_code == 200
