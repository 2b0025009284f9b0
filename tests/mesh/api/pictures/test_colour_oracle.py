"""Pictures end to end: a real model over three stages answers to a picture as to the words in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil
import pytest
import pytest_asyncio

from mesh.serve.pictures import ServedPictures
from tests.support.api_harness import MODEL
from tests.support.colour_words import NUM_ROWS, counting_encoder, image_url, write_colours
from tests.support.mesh_in_process import mesh_in_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.support.colour_words import CountingEncoder
    from tests.support.mesh_in_process import MeshInProcess

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

SHOWS: Any = {"type": "text", "text": "The picture shows:"}
ASK: Any = {"type": "text", "text": ".\nWhich color is it? Answer with one word."}
GREEDY: Any = {"model": MODEL, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def encoder(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingEncoder]:
    projector = write_colours(tmp_path_factory.mktemp("colours") / "mmproj.gguf", smollm2_path)
    with counting_encoder(projector, smollm2_path) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    smollm2_path: Path, cut_stages: None, encoder: CountingEncoder
) -> AsyncIterator[MeshInProcess]:
    pictures = ServedPictures.of(encoder)
    async with mesh_in_process(smollm2_path, pictures=pictures) as served:
        yield served


def shown(*words: str) -> list[Any]:
    return [{"role": "user", "content": [SHOWS, image_url(*words), ASK]}]


async def answered(served: MeshInProcess, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    asked = {**GREEDY, "return_token_ids": True, **body}
    found: dict[str, Any] = (await served.api.http.post(path, json=asked)).raise_for_status().json()
    return found


async def token_of(served: MeshInProcess, word: str) -> int:
    asked = {"prompt": word, "add_special_tokens": False}
    (token,) = (await served.api.http.post("/tokenize", json=asked)).raise_for_status().json()["tokens"]
    return int(token)


async def test_the_answer_is_that_to_the_words_in_place_of_the_picture(served: MeshInProcess) -> None:
    said = {}
    for word in (" red", " blue"):
        answer = await answered(served, messages=shown(word))
        token = await token_of(served, word)
        ids = [token if each == -1 else each for each in answer["prompt_token_ids"]]
        assert answer["prompt_token_ids"].count(-1) == NUM_ROWS
        same = await answered(served, "/v1/completions", prompt=ids)
        (choice,), (wanted,) = answer["choices"], same["choices"]
        assert choice["token_ids"] == wanted["token_ids"]
        said[word] = choice["message"]["content"]
        assert word.strip() in said[word].lower()
    assert said[" red"] != said[" blue"]


async def test_a_second_turn_encodes_nothing(served: MeshInProcess, encoder: CountingEncoder) -> None:
    """Its rows are in the KV caches of the stages; another picture under the same words is read anew."""
    first = shown(" green")
    answer = await answered(served, messages=first)
    encoded = encoder.num_encoded
    turns = [
        *first,
        {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
        {"role": "user", "content": "Thank you."},
    ]
    usage = (await answered(served, messages=turns))["usage"]
    assert encoder.num_encoded == encoded
    details = usage["prompt_tokens_details"]
    assert details["image_tokens"] == NUM_ROWS
    num_shown = answer["usage"]["prompt_tokens"]
    assert details["cached_tokens"] >= num_shown - 1
    turns[:1] = shown(" yellow")
    usage = (await answered(served, messages=turns))["usage"]
    assert encoder.num_encoded == encoded + 1
    # No further than to the picture.
    (place,) = {answer["prompt_token_ids"].index(-1)}
    assert usage["prompt_tokens_details"]["cached_tokens"] <= place


async def test_pictures_of_one_request_are_told_apart(served: MeshInProcess) -> None:
    two: Any = [{"role": "user", "content": [image_url(" red"), image_url(" blue"), ASK]}]
    answer = await answered(served, messages=two)
    tokens = [await token_of(served, word) for word in (" red", " blue")]
    place = answer["prompt_token_ids"].index(-1)
    ids = list(answer["prompt_token_ids"])
    ids[place : place + 2 * NUM_ROWS] = [token for token in tokens for _ in range(NUM_ROWS)]
    same = await answered(served, "/v1/completions", prompt=ids)
    assert same["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]


async def test_a_projector_whose_process_was_killed_is_loaded_again(served: MeshInProcess) -> None:
    before = await answered(served, messages=shown(" cyan"))
    for child in psutil.Process().children(recursive=True):
        if "mesh.vision.encoder_worker" in child.cmdline():
            child.kill()
    # The picture is known, its rows are not any more.
    again = await answered(served, messages=shown(" cyan"), cache_prompt=False)
    assert again["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
    assert again["prompt_token_ids"] == before["prompt_token_ids"]
