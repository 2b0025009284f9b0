"""Pictures through the HTTP API: the prompt that the engine gets, its rows, counts, limits and refusals."""

from __future__ import annotations

import base64
import json
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

import anthropic
import numpy as np
import psutil
import pytest

from mesh.api.api_keys import ApiKeys, KeyRecord, digest_of
from mesh.api.bodies import MOST_PICTURE_BODY_BYTES, max_body_bytes
from mesh.vision.pictures import ModelPictures
from spanmesh_proto.image_chunk import ImageChunk
from spanmesh_proto.row_ids import FIRST_ROW_ID
from stages.vision.library import mtmd_path
from tests.support import api_harness
from tests.support.api_harness import KEY, MODEL, NO_AUTHORITIES, Api, ScriptedEngine, running_api
from tests.support.colour_words import (
    NUM_ROWS,
    counting_encoder,
    data_url,
    image_url,
    png,
    write_colours,
)
from tests.support.hostile_pictures import REFUSED, changed
from tests.support.tiny_projectors import embeddings_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator
    from pathlib import Path

    from mesh.text.tokenizer import Tokenizer
    from tests.support.colour_words import CountingEncoder

pytestmark = [pytest.mark.model]

tokenizer = api_harness.tokenizer
RED = png(" red")
ASK = {"type": "text", "text": "Which color is it?"}
CALL: Any = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.fixture(scope="module")
def encoder(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingEncoder]:
    mtmd_path()
    projector = write_colours(tmp_path_factory.mktemp("colours") / "mmproj.gguf", smollm2_path)
    with counting_encoder(projector, smollm2_path) as found:
        yield found


@pytest.fixture(scope="module")
def pictures(encoder: CountingEncoder) -> ModelPictures:
    return ModelPictures(encoder)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine([(300,), (301, 302)], context_length=512)


@pytest.fixture
async def api(engine: ScriptedEngine, tokenizer: Tokenizer, pictures: ModelPictures) -> AsyncIterator[Api]:
    async with running_api(engine, tokenizer, pictures=pictures) as api:
        yield api


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


async def test_a_picture_is_rows_within_the_prompt(
    api: Api, engine: ScriptedEngine, tokenizer: Tokenizer, smollm2_path: Path
) -> None:
    parts = ({"type": "text", "text": "It is "}, image_url(" red"), ASK)
    asked = {"messages": user(*parts), "return_token_ids": True}
    answer = (await api.http.post("/v1/chat/completions", json=asked)).raise_for_status().json()
    (request,) = engine.requests
    (rows,) = request.inputs
    chunk = rows.chunk
    assert chunk == ImageChunk(chunk.first_row, NUM_ROWS)
    place = range(chunk.first_row, chunk.stop)
    ids = request.prompt
    assert [index for index, each in enumerate(ids) if each >= FIRST_ROW_ID] == list(place)
    assert len(set(ids[place.start : place.stop])) == NUM_ROWS

    def text_of(tokens: tuple[int, ...]) -> str:
        return "".join(map(tokenizer.name, tokens))

    # No line break beside the picture, and each side tokenized by itself.
    ahead, behind = text_of(ids[: place.start]), text_of(ids[place.stop :])
    assert ahead.endswith("<|im_start|>user\nIt is ")
    assert behind == "Which color is it?<|im_end|>\n<|im_start|>assistant\n"
    for text, tokens in ((ahead, ids[: place.start]), (behind, ids[place.stop :])):
        assert tuple(tokenizer.encode(text, add_special=False, parse_special=True)) == tokens
    (red,) = tokenizer.encode(" red", add_special=False, parse_special=False)
    assert np.array_equal(await rows.load(), embeddings_of(smollm2_path, [red] * NUM_ROWS))
    # What clients are told of it.
    assert answer["prompt_token_ids"] == [-1 if each >= FIRST_ROW_ID else each for each in ids]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(ids)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": NUM_ROWS}


async def test_all_apis_put_the_same_prompt_to_the_model(
    api: Api, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    url = data_url(RED)
    chat = await api.openai.chat.completions.create(model=MODEL, messages=user(image_url(" red"), ASK))
    parts = [{"type": "input_image", "image_url": url}, {**ASK, "type": "input_text"}]
    item: Any = {"role": "user", "content": parts}
    response = await api.openai.responses.create(model=MODEL, input=[item])
    source: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(RED).decode()}
    turn: Any = user({"type": "image", "source": source}, ASK)
    async with anthropic.AsyncAnthropic(
        base_url=api.url,
        api_key=KEY,
        max_retries=0,
        http_client=anthropic.DefaultAsyncHttpxClient(verify=NO_AUTHORITIES),
    ) as client:
        message = await client.messages.create(model=MODEL, max_tokens=9, messages=turn)
        count = await client.messages.count_tokens(model=MODEL, messages=turn)
    prompts = {request.prompt for request in engine.requests}
    assert len(engine.requests) == 3
    (prompt,) = prompts
    assert chat.usage is not None
    assert response.usage is not None
    counts = {chat.usage.prompt_tokens, response.usage.input_tokens, message.usage.input_tokens}
    assert counts | {count.input_tokens} == {len(prompt)}
    # Endpoints that only count.
    asked = {"messages": user(image_url(" red"), ASK)}
    for path, body in (
        ("/v1/chat/completions/input_tokens", asked),
        ("/v1/responses/input_tokens", {"input": [item]}),
    ):
        told = (await api.http.post(path, json=body)).raise_for_status().json()
        assert told["input_tokens"] == len(prompt)
    listed = (await api.http.post("/tokenize", json={**asked, "return_token_strs": True})).json()
    assert listed["tokens"] == [-1 if each >= FIRST_ROW_ID else each for each in prompt]
    assert listed["token_strs"].count("") >= NUM_ROWS


async def test_another_picture_under_the_same_words_has_other_ids(api: Api, engine: ScriptedEngine) -> None:
    for words in ((" red",), (" blue",), (" red",)):
        await api.openai.chat.completions.create(model=MODEL, messages=user(image_url(*words), ASK))
    first, other, again = (request.prompt for request in engine.requests)
    assert first == again != other
    differ = [index for index, (one, two) in enumerate(zip(first, other, strict=True)) if one != two]
    assert len(differ) == NUM_ROWS


async def test_a_later_turn_goes_on_from_a_stored_response_with_its_picture(
    api: Api, engine: ScriptedEngine, encoder: CountingEncoder
) -> None:
    before = encoder.num_encoded
    item: Any = {"role": "user", "content": [{"type": "input_image", "image_url": data_url(RED)}]}
    first = await api.openai.responses.create(model=MODEL, input=[item])
    second = await api.openai.responses.create(model=MODEL, input="And now?", previous_response_id=first.id)
    shown, later = (request.prompt for request in engine.requests)
    (rows,) = engine.requests[1].inputs
    assert rows.chunk == engine.requests[0].inputs[0].chunk
    assert later[: rows.chunk.stop] == shown[: rows.chunk.stop]
    assert second.usage is not None
    assert second.usage.input_tokens_details.model_dump()["image_tokens"] == NUM_ROWS
    listed = (await api.http.get(f"/v1/responses/{first.id}/input_items")).json()
    assert listed["data"][0]["content"] == item["content"]
    # Nothing asked for its rows.
    assert encoder.num_encoded == before


async def test_screenshots_of_tools_are_read_and_damaged_ones_are_noted(
    api: Api, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    cut = {"type": "image_url", "image_url": data_url(RED[:60])}
    messages: list[Any] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [image_url(" red"), cut]},
    ]
    await api.openai.chat.completions.create(model=MODEL, messages=messages)
    (request,) = engine.requests
    assert len(request.inputs) == 1
    text = b"".join(tokenizer.piece(each) for each in request.prompt if each < FIRST_ROW_ID).decode()
    assert "[image_url left out: the picture is" in text


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (RED[:60], "the picture is"),
        (b"GIF8 but no picture", "is no PNG, JPEG, WebP or GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no PNG, JPEG, WebP or GIF"),
        (b"", "is no PNG, JPEG, WebP or GIF"),
    ],
    ids=["cut", "no GIF", "SVG", "nothing"],
)
async def test_a_picture_that_is_not_read_is_named(
    api: Api, engine: ScriptedEngine, data: bytes, reason: str
) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(data)}}
    asked = {"messages": user(ASK, image_url(" red"), part)}
    refused = await api.http.post("/v1/chat/completions", json=asked)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert reason in error["message"]
    assert error["param"] == "messages[0].content[2]"
    assert not engine.requests


async def test_a_mark_in_a_client_s_text_is_text(
    engine: ScriptedEngine, tokenizer: Tokenizer, pictures: ModelPictures
) -> None:
    """Whoever guessed the mark of another picture would show it twice."""
    bits = iter(range(10**6))

    def random_bits(_count: int) -> int:
        return next(bits)

    async with running_api(engine, tokenizer, pictures=pictures, random_bits=random_bits) as api:
        guess = "".join(f"picture{number:032x}" for number in range(30))
        asked = {"messages": user({"type": "text", "text": guess}, image_url(" red"))}
        refused = await api.http.post("/v1/chat/completions", json=asked)
    assert refused.status_code == 400
    assert "does not show each picture once" in refused.json()["error"]["message"]


async def test_rows_count_against_the_limit_of_a_key(
    engine: ScriptedEngine, tokenizer: Tokenizer, pictures: ModelPictures
) -> None:
    keys = ApiKeys([KeyRecord("alice", digest_of(KEY), tokens_per_minute=NUM_ROWS + 20)])
    async with running_api(engine, tokenizer, pictures=pictures, keys=keys) as api:
        api.http.headers["Authorization"] = f"Bearer {KEY}"
        asked = {"max_tokens": 3, "messages": user({"type": "text", "text": "?"})}
        fits = await api.http.post("/v1/chat/completions", json=asked)
        asked["messages"] = user(image_url(" red"), image_url(" blue"), {"type": "text", "text": "?"})
        refused = await api.http.post("/v1/chat/completions", json=asked)
    assert (fits.status_code, refused.status_code) == (200, 429), refused.text


async def test_the_list_of_models_says_what_each_reads(
    api: Api, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    (card,) = (await api.http.get("/v1/models")).json()["data"]
    assert card["capabilities"] == ["completion", "multimodal"]
    assert card["architecture"] == {"input_modalities": ["text", "image"], "output_modalities": ["text"]}
    async with running_api(engine, tokenizer) as other:
        (card,) = (await other.http.get("/v1/models")).json()["data"]
        assert (card["capabilities"], card["architecture"]["input_modalities"]) == (["completion"], ["text"])


async def test_bodies_may_be_larger_where_pictures_are_read(
    api: Api, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    """Of text alone only as much as a context holds."""
    noise = "A" * (max_body_bytes(engine.context_length) + 2**20)
    body = json.dumps({"messages": user({"type": "image_url", "image_url": f"data:;base64,{noise}"})})
    read = await api.http.post(
        "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert read.json()["error"]["message"].endswith("is no PNG, JPEG, WebP or GIF"), read.text
    async with running_api(engine, tokenizer) as other:
        refused = await other.http.post(
            "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
        )
        assert refused.status_code == 413
    assert max_body_bytes(2**20, has_pictures=True) == MOST_PICTURE_BODY_BYTES


def asked_of_each(data: bytes) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Paths, bodies that only count tokens, and where the picture is in each."""
    text = base64.b64encode(data).decode()
    parts: dict[str, Any] = {
        "/v1/chat/completions/input_tokens": {"type": "image_url", "image_url": f"data:;base64,{text}"},
        "/v1/responses/input_tokens": {"type": "input_image", "image_url": f"data:image/png;base64,{text}"},
        "/v1/messages/count_tokens": {"type": "image", "source": {"type": "base64", "data": text}},
    }
    for path, part in parts.items():
        name = "input" if "responses" in path else "messages"
        yield path, {name: user(part)}, f"{name}[0].content[0]"


async def ask_of_each(api: Api, pictures: Iterable[bytes]) -> Counter[int]:
    found: Counter[int] = Counter()
    for data in pictures:
        for path, body, where in asked_of_each(data):
            answer = await api.http.post(path, json=body)
            found[answer.status_code] += 1
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert answer.status_code == 400, answer.text
                assert (error.get("param") or where) == where
                assert "the picture " in error["message"]
                assert "\n" not in error["message"]
    # It reads as ever.
    for path, body, _ in asked_of_each(RED):
        assert (await api.http.post(path, json=body)).status_code == 200
    return found


async def test_hostile_pictures_have_a_reason_each_in_all_apis(api: Api, encoder: CountingEncoder) -> None:
    found = await ask_of_each(api, islice(changed(57), 25))
    assert found[200] > 0 < found[400]
    pid = encoder_pid()
    named = [make() for make, _ in REFUSED.values()]
    refused = await ask_of_each(api, (data for data in named if len(data) < 2**20))
    assert set(refused) == {400}
    assert encoder_pid() == pid


def encoder_pid() -> int:
    children = psutil.Process().children(recursive=True)
    (pid,) = [child.pid for child in children if "mesh.vision.encoder_worker" in child.cmdline()]
    return int(pid)


@pytest.mark.sweep
async def test_a_thousand_hostile_pictures_have_a_reason_each_in_all_apis(api: Api) -> None:
    found = await ask_of_each(api, islice(changed(58), 1000))
    assert found[400] > 900
