"""The official client, unmodified and blocking, against a real mesh: tools, responses, several answers."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.support import mesh_in_process
from tests.support.api_harness import KEY
from tests.support.mesh_in_process import POOR_KEY

pytestmark = pytest.mark.model

mesh_url = mesh_in_process.mesh_url

ASKED: Any = {
    "model": "default",
    "temperature": 0,
    "messages": [{"role": "user", "content": "Name three fruits."}],
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORECAST: Any = {"type": "function", "function": {"name": "forecast", "parameters": PARAMETERS}}
NOTHING: Any = {"type": "function", "function": {"name": "nothing"}}


@pytest.fixture
def client(mesh_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh_url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


def test_several_answers_share_their_prompt(client: openai.OpenAI) -> None:
    asked: Any = {**ASKED, "temperature": 1.2, "seed": 3, "max_tokens": 16}
    answers = client.chat.completions.create(**asked, n=3)
    again = client.chat.completions.create(**{**asked, "seed": 4})
    texts = [choice.message.content for choice in answers.choices]
    assert len(set(texts)) == 3
    assert texts[1] == again.choices[0].message.content
    assert answers.usage is not None
    assert again.usage is not None
    assert answers.usage.prompt_tokens == again.usage.prompt_tokens


def test_a_response_says_what_a_chat_says(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(**ASKED, max_tokens=32)
    asked: Any = {
        "model": "default",
        "temperature": 0,
        "max_output_tokens": 32,
        "input": "Name three fruits.",
    }
    whole = client.responses.create(**asked)
    assert whole.output_text == chat.choices[0].message.content
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert streamed.output_text == whole.output_text
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{streamed.status}"
    follow_up = client.responses.create(**{**asked, "input": "More."}, previous_response_id=whole.id)
    assert follow_up.usage is not None
    assert whole.usage is not None
    # What the first turn left in the caches is where the second begins.
    assert follow_up.usage.input_tokens_details.cached_tokens > whole.usage.input_tokens


def test_an_answer_goes_on_where_it_stopped(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASKED, max_tokens=24).choices[0].message.content
    begun = client.chat.completions.create(**ASKED, max_tokens=12).choices[0].message.content
    assert whole is not None
    assert begun is not None
    messages = [*ASKED["messages"], {"role": "assistant", "content": begun}]
    rest = client.chat.completions.create(
        **{**ASKED, "messages": messages}, max_tokens=12, extra_body={"continue_final_message": True}
    )
    assert whole.startswith(begun + (rest.choices[0].message.content or "")[:8])


def test_the_server_counts_as_it_computes(client: openai.OpenAI, mesh_url: str) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    counted = httpx.post(f"{mesh_url}/tokenize", json={"messages": ASKED["messages"]}, headers=headers).json()
    answer = client.chat.completions.create(**ASKED, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == counted["count"]
    ids = {"tokens": counted["tokens"]}
    text = httpx.post(f"{mesh_url}/detokenize", json=ids, headers=headers).json()["prompt"]
    assert "Name three fruits." in text


def test_errors_come_as_the_clients_own(client: openai.OpenAI, mesh_url: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            **ASKED, tools=[FORECAST], tool_choice={"type": "function", "function": {"name": "x"}}
        )
    assert refused.value.param == "tool_choice"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-9", input="x")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_none")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{mesh_url}/v1", api_key="wrong").responses.create(model="default", input="x")
    with pytest.raises(openai.BadRequestError, match="vectors come from an embedding model"):
        client.embeddings.create(model="default", input="x")


def test_searching_the_web_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="web_search_options is not supported") as refused:
        client.chat.completions.create(**ASKED, web_search_options={})
    assert refused.value.param == "web_search_options"


def test_a_key_in_its_own_header_opens_endpoints_without_their_prefix(mesh_url: str) -> None:
    headers = {"X-Api-Key": KEY, "Authorization": ""}
    asked: Any = {"model": "default", "temperature": 0}
    with openai.OpenAI(
        base_url=mesh_url, api_key="unsent", default_headers=headers, max_retries=0, timeout=120
    ) as client:
        assert client.models.retrieve("default") == client.models.list().data[0]
        assert client.chat.completions.create(**ASKED, max_tokens=2).choices
        assert client.completions.create(**asked, prompt="The sea", max_tokens=2).choices
        stored = client.responses.create(**asked, input="Hello.", max_output_tokens=2)
        assert client.responses.retrieve(stored.id).output_text == stored.output_text
        assert len(client.responses.input_items.list(stored.id).data) == 1
        assert client.responses.input_tokens.count(model="default", input="Hello.").input_tokens
        client.responses.delete(stored.id)
        with pytest.raises(openai.BadRequestError, match="vectors come from an embedding model"):
            client.embeddings.create(model="default", input="x")
        with pytest.raises(openai.AuthenticationError):
            client.with_options(default_headers={"X-Api-Key": "wrong"}).models.list()
    # Whoever only asks whether it is up needs no key.
    assert httpx.head(f"{mesh_url}/health").status_code == 200


def test_a_client_that_may_try_again_does_when_told(mesh_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bob has one request a minute: the second is refused with how long to wait, which the client heeds."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with openai.OpenAI(base_url=f"{mesh_url}/v1", api_key=POOR_KEY, max_retries=2) as client:
        assert client.models.list().data
        with pytest.raises(openai.RateLimitError) as refused:
            client.models.list()
    assert len(waits) == 2
    assert all(wait >= 1 for wait in waits)
    assert refused.value.code == "rate_limit_exceeded"
    assert int(refused.value.response.headers["retry-after"]) > 50


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_keep_to_their_schema(client: openai.OpenAI, *, parallel: bool) -> None:
    asked: Any = {**ASKED, "max_tokens": 160, "parallel_tool_calls": parallel, "tools": [FORECAST, NOTHING]}
    answer = client.chat.completions.create(**asked, tool_choice="required").choices[0]
    calls: Any = answer.message.tool_calls
    assert calls
    assert len(calls) == 1 or parallel
    assert answer.finish_reason in ({"tool_calls", "length"} if parallel else {"tool_calls"})
    assert not answer.message.content
    assert {call.function.name for call in calls} <= {"forecast", "nothing"}


def test_a_named_function_is_called(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "forecast"}}
    asked: Any = {**ASKED, "max_tokens": 96, "tools": [FORECAST, NOTHING], "tool_choice": choice}
    answer = client.chat.completions.create(**asked).choices[0]
    calls: Any = answer.message.tool_calls
    [call] = calls
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "days"}
    assert 1 <= arguments["days"] <= 9
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        streamed: Any = stream.get_final_completion().choices[0].message.tool_calls
    assert [each.function.arguments for each in streamed] == [call.function.arguments]


def test_a_response_calls_a_named_function(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "forecast", "parameters": PARAMETERS}
    asked: Any = {"model": "default", "input": "Weather in Oslo?", "tools": [tool], "temperature": 0}
    first = client.responses.create(**asked, tool_choice={"type": "function", "name": "forecast"})
    [call] = first.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"city", "days"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(
        **{**asked, "input": [result]},
        previous_response_id=first.id,
        tool_choice="none",
        max_output_tokens=24,
    )
    assert second.output_text


MISSING: Any = object()


@pytest.mark.parametrize(
    "parameters",
    [
        MISSING,
        None,
        {},
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {}, "additionalProperties": False},
    ],
    ids=["missing", "null", "empty", "no properties", "no others"],
)
def test_a_function_without_parameters_is_called_without_any(client: openai.OpenAI, parameters: Any) -> None:
    function = {"name": "clock", **({} if parameters is MISSING else {"parameters": parameters})}
    chat: Any = {**ASKED, "max_tokens": 64, "tools": [{"type": "function", "function": function}]}
    named: Any = {"type": "function", "function": {"name": "clock"}}
    whole: Any = client.chat.completions.create(**chat, tool_choice="required").choices[0]
    with client.chat.completions.stream(**chat, tool_choice=named) as stream:
        streamed: Any = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        [call] = choice.message.tool_calls
        found = (choice.finish_reason, call.function.name, call.function.arguments)
        assert found == ("tool_calls", "clock", "{}")
    tools: Any = [{"type": "function", **function}]
    response: Any = {"model": "default", "input": "What time is it?", "max_output_tokens": 64, "tools": tools}
    with client.responses.stream(**response, tool_choice="required") as events:
        final: Any = events.get_final_response()
    answer: Any = client.responses.create(**response, tool_choice={"type": "function", "name": "clock"})
    for each in (final, answer):
        [item] = each.output
        assert (each.status, item.name, item.arguments) == ("completed", "clock", "{}")


HOST = {
    "type": "object",
    "properties": {"host": {"type": "string", "pattern": "^[a-z]{1,5}$", "format": "hostname"}},
    "required": ["host"],
}


def test_a_tool_that_cannot_be_enforced_stops_no_forced_call(client: openai.OpenAI) -> None:
    connect: Any = {"type": "function", "function": {"name": "connect", "parameters": HOST}}
    named: Any = {"type": "function", "function": {"name": "connect"}}
    asked: Any = {**ASKED, "max_tokens": 96, "parallel_tool_calls": False}
    for choice in ("required", named):
        answer: Any = client.chat.completions.create(
            **asked, tools=[NOTHING, connect, FORECAST], tool_choice=choice
        )
        assert answer.choices[0].finish_reason == "tool_calls"
        [warning] = answer.model_extra["warnings"]
        assert "connect, properties/host: pattern and format cannot be enforced together" in warning
    [call] = answer.choices[0].message.tool_calls
    assert re.fullmatch("[a-z]{1,5}", json.loads(call.function.arguments)["host"])
    flat: Any = {"type": "function", **connect["function"]}
    response: Any = {"model": "default", "input": "Where?", "max_output_tokens": 96, "tools": [flat]}
    with client.responses.stream(**response, tool_choice="required", parallel_tool_calls=False) as events:
        final: Any = events.get_final_response()
    assert final.model_extra["warnings"] == [warning]
    strict: Any = {"type": "function", "function": {**connect["function"], "strict": True}}
    with pytest.raises(openai.BadRequestError, match="pattern and format") as refused:
        client.chat.completions.create(**asked, tools=[FORECAST, strict], tool_choice="required")
    assert refused.value.param == "tools"
    form: Any = {"type": "json_schema", "json_schema": {"name": "host", "schema": HOST}}
    with pytest.raises(openai.BadRequestError, match="pattern and format") as refused:
        client.chat.completions.create(**asked, response_format=form)
    assert refused.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_shown_and_called(client: openai.OpenAI, mode: Any) -> None:
    asked: Any = {**ASKED, "max_tokens": 32}
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "nothing"}}]}
    some: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = client.chat.completions.create(**asked, tools=[FORECAST, NOTHING], tool_choice=some)
    alone: Any = client.chat.completions.create(**asked, tools=[NOTHING], tool_choice=mode)
    message: Any = answer.choices[0].message
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens
    assert message.content == alone.choices[0].message.content
    called = [call.function.name for call in message.tool_calls or ()]
    assert called == (["nothing"] if mode == "required" else [])
    flat: Any = [{"type": "function", **tool["function"]} for tool in (FORECAST, NOTHING)]
    choice: Any = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "nothing"}]}
    response = client.responses.create(
        model="default", input="Well?", tools=flat, tool_choice=choice, max_output_tokens=32
    )
    kinds = [item.type for item in response.output]
    assert kinds == (["function_call"] if mode == "required" else ["message"])


class Forecast(BaseModel):
    """Weather of some days."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


def test_answers_are_parsed_into_models(client: openai.OpenAI) -> None:
    asked: Any = {**ASKED, "max_tokens": 64, "response_format": Forecast}
    parsed = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(parsed, Forecast)
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed
    assert {"chunk", "content.delta", "content.done"} <= kinds
    response = client.responses.parse(
        model="default", input="Name three fruits.", temperature=0, max_output_tokens=64, text_format=Forecast
    )
    assert response.output_parsed == parsed


def test_calls_are_parsed_into_models(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Forecast, name="forecast")
    # A small model that may call several times goes on up to `max_tokens`; the client parses no cut answer.
    asked: Any = {**ASKED, "max_tokens": 96, "parallel_tool_calls": False}
    answer = client.chat.completions.parse(**asked, tools=[tool], tool_choice="required")
    calls: Any = answer.choices[0].message.tool_calls
    assert calls
    assert all(isinstance(call.function.parsed_arguments, Forecast) for call in calls)


def test_a_stored_response_is_retrieved_and_deleted(client: openai.OpenAI) -> None:
    stored = client.responses.create(model="default", input="Hello.", temperature=0, max_output_tokens=8)
    assert client.responses.retrieve(stored.id).output_text == stored.output_text
    [item] = client.responses.input_items.list(stored.id).data
    content: Any = item.content  # type: ignore[union-attr]
    assert content[0].text == "Hello."
    client.responses.delete(stored.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(stored.id)


def test_a_prompt_is_scored(client: openai.OpenAI) -> None:
    def scores(prompt: str) -> list[float]:
        answer = client.completions.create(
            model="default", prompt=prompt, max_tokens=0, echo=True, logprobs=0
        )
        choice = answer.choices[0]
        assert choice.text == prompt
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        return choice.logprobs.token_logprobs[1:]

    begun = "The capital of France is"
    right, wrong = scores(f"{begun} Paris"), scores(f"{begun} Lyon")
    shared = len(scores(begun))
    assert right[:shared] == pytest.approx(wrong[:shared], abs=1e-4)
    assert sum(right[shared:]) > sum(wrong[shared:])


def test_prompts_are_scored_as_texts_and_as_ids_whole_and_streamed(
    client: openai.OpenAI, mesh_url: str
) -> None:
    texts = ["The capital of France is Paris", "A"]
    headers = {"authorization": f"Bearer {KEY}"}
    ids = [
        httpx.post(f"{mesh_url}/tokenize", json={"prompt": text}, headers=headers).json()["tokens"]
        for text in texts
    ]
    asked: Any = {"model": "default", "max_tokens": 0, "echo": True, "logprobs": 2}
    whole = client.completions.create(**asked, prompt=texts)
    assert [choice.text for choice in whole.choices] == texts
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 0
    scored = [choice.logprobs for choice in whole.choices]
    assert [each and each.token_logprobs and len(each.token_logprobs) for each in scored] == [*map(len, ids)]
    assert client.completions.create(**asked, prompt=ids).choices == whole.choices
    for prompt in (texts, ids):
        found = ["", ""]
        parts: list[list[float | None]] = [[], []]
        for chunk in client.completions.create(**asked, prompt=prompt, stream=True):
            for choice in chunk.choices:
                found[choice.index] += choice.text
                if choice.logprobs is not None:
                    parts[choice.index] += choice.logprobs.token_logprobs or ()
        assert found == texts
        assert parts == [each and each.token_logprobs for each in scored]


def test_a_score_is_what_the_answer_had(client: openai.OpenAI) -> None:
    asked: Any = {"model": "default", "temperature": 0, "logprobs": 0}
    answer = client.completions.create(**asked, prompt="The sea", max_tokens=8).choices[0]
    again = client.completions.create(
        **asked, prompt=f"The sea{answer.text}", max_tokens=0, echo=True
    ).choices[0]
    assert answer.logprobs is not None
    assert again.logprobs is not None
    assert answer.logprobs.token_logprobs is not None
    assert again.logprobs.token_logprobs is not None
    # In exact mode they are the same bits.
    assert again.logprobs.token_logprobs[-8:] == answer.logprobs.token_logprobs


def test_a_limit_may_have_llama_cpps_name(client: openai.OpenAI) -> None:
    more = {"n_predict": 33, "ignore_eos": True}
    answer = client.completions.create(model="default", prompt="The sea", extra_body=more)
    assert answer.usage is not None
    # The default of completions is 16.
    assert answer.usage.completion_tokens == 33
    chat = client.chat.completions.create(**ASKED, extra_body=more)
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 33


def test_tokens_are_counted_as_answers_count_them(client: openai.OpenAI) -> None:
    first = client.responses.create(model="default", input="Hello.", max_output_tokens=2)
    tool: Any = {"type": "function", "name": "forecast", "parameters": PARAMETERS}
    asked: Any = {"model": "default", "input": "And?", "previous_response_id": first.id, "tools": [tool]}
    counted = client.responses.input_tokens.count(**asked)
    answer = client.responses.create(**asked, max_output_tokens=2)
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens
    chat: Any = {**ASKED, "tools": [FORECAST]}
    found: Any = client.post("/chat/completions/input_tokens", body=chat, cast_to=object)
    whole = client.chat.completions.create(**chat, max_tokens=2)
    assert whole.usage is not None
    assert found["input_tokens"] == whole.usage.prompt_tokens
