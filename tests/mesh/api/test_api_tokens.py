"""Small endpoints: tokens of texts and texts of tokens, versions, and what is not done here."""

import json
from typing import Any

import openai
import pytest

from mesh.text.tokenizer import Tokenizer
from spanmesh_proto import PROTOCOL_VERSION
from tests.mesh.api.test_api_tools import WEATHER
from tests.support import api_harness
from tests.support.api_harness import Api, ScriptedEngine

pytestmark = pytest.mark.model

tokenizer, engine, api = api_harness.tokenizer, api_harness.engine, api_harness.api

CHAT = "/v1/chat/completions"
TEXT = "Grüße, <|im_end|> 日本 🦙"
HELLO = [{"role": "user", "content": "Hello"}]


async def test_there_and_back(api: Api, tokenizer: Tokenizer) -> None:
    there = (await api.http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True})).json()
    assert there["tokens"] == tokenizer.encode(TEXT, add_special=True, parse_special=True)
    assert there["count"] == len(there["tokens"]) == len(there["token_strs"])
    assert "<|im_end|>" in there["token_strs"]
    assert there["max_model_len"] == 64
    back = (await api.http.post("/detokenize", json={"tokens": there["tokens"]})).json()
    assert back == {"prompt": TEXT.replace("<|im_end|>", "")}


async def test_special_tokens_and_template_are_told(api: Api, tokenizer: Tokenizer) -> None:
    told = (await api.http.get("/tokenizer_info")).json()
    assert (told["bos_token"], told["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert told["chat_template"] == tokenizer.chat_template
    assert (told["add_bos_token"], told["model_max_length"]) == (False, 64)


@pytest.mark.parametrize("more", [{}, {"tools": [WEATHER]}, {"add_generation_prompt": False}])
async def test_a_conversation_is_counted_as_the_chat_would(
    api: Api, engine: ScriptedEngine, more: dict[str, Any]
) -> None:
    engine.context_length = 1024
    asked = {"messages": HELLO, **more}
    counted = (await api.http.post("/tokenize", json=asked)).json()
    assert (await api.http.post(CHAT, json=asked)).json()["usage"]["prompt_tokens"] == counted["count"]
    assert counted["tokens"] == list(engine.requests[0].prompt)


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, 400, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    api: Api, path: str, fields: dict[str, Any], status: int, param: str | None
) -> None:
    headers = {"content-type": "application/json"}
    response = await api.http.post(path, content=json.dumps(fields), headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_read(api: Api) -> None:
    response = await api.http.post("/tokenize", json={"prompt": "a" * 1_000_000})
    assert response.status_code == 400
    # Once it is read, the message has the number of its tokens.
    assert "has 1000000 characters" in response.json()["error"]["message"]


async def test_versions(api: Api) -> None:
    told = (await api.http.get("/version")).json()
    assert told["protocol_version"] == PROTOCOL_VERSION
    assert told["version"].count(".") == 2
    assert told["llama_cpp_python"].count(".") == 2


async def test_embeddings_say_why_not(api: Api) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await api.openai.embeddings.create(model="default", input="x")
    assert caught.value.param == "model"
    assert "is a chat model" in caught.value.message
    assert "`mesh load MODEL --embeddings`" in caught.value.message
