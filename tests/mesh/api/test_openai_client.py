"""The real openai client against a real `mesh serve`: two stage actors, exact mode, n-gram speculation."""

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mesh.engine import GenerationRequest
from mesh.text.chat_template import template_source_of
from mesh.text.detokenizer import AnswerText
from mesh.text.text_jobs import TextModel
from mesh.text.text_worker import ModelTexts
from mesh.text.tokenizer import Tokenizer
from stages.sampling.sampler import SamplingParams
from tests.support.whole_model_engine import WholeModelEngine

pytestmark = [pytest.mark.cluster, pytest.mark.sociable, pytest.mark.model]

KEY = "sk-of-the-test"
CONTEXT_LENGTH = 512
MAX_TOKENS = 48
QUESTIONS = (
    "Name three colours.",
    "Repeat this list twice: apple, pear, plum, apple, pear, plum.",
    "Write a Python function that adds two numbers.",
)


def _messages(question: str) -> Any:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def url(smollm2_path: Path, stage_cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("serve")
    keys, out, err = folder / "keys", folder / "out", folder / "err"
    keys.write_text(f"tester {KEY}\n")
    command = [
        str(Path(sys.executable).with_name("mesh")), "serve", str(smollm2_path), "--port", "0",
        "--advertise", "127.0.0.1", "--stages", "2", "--exact", "--ctx-size", str(CONTEXT_LENGTH),
        "--api-key-file", str(keys), "--threads", "1",
    ]  # fmt: skip
    environment = os.environ | {"XDG_CACHE_HOME": str(stage_cache_dir)}
    with out.open("w") as stdout, err.open("w") as stderr:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment
        )
    try:
        deadline_s = time.monotonic() + 90
        while (served := re.search(r"served at (http://\S+)/v1", out.read_text())) is None:
            assert server.poll() is None, err.read_text()
            assert time.monotonic() < deadline_s, err.read_text()
            time.sleep(0.1)
        yield served[1]
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(120)
    assert KEY not in out.read_text() + err.read_text()
    assert not any(question in err.read_text() for question in QUESTIONS)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


def _status(url: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {KEY}"}
    status: dict[str, Any] = httpx.get(f"{url}/mesh/status", headers=headers).json()
    return status


@pytest.fixture(scope="module")
def whole(smollm2_path: Path) -> Iterator["Whole"]:
    engine = WholeModelEngine(smollm2_path, context_length=CONTEXT_LENGTH, num_slots=1)
    yield Whole(engine, Tokenizer(smollm2_path))
    engine.close()


class Whole:
    """What the model says when nothing is cut or proposed; asked once, as that is always the same."""

    def __init__(self, engine: WholeModelEngine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._said: dict[tuple[str, SamplingParams], list[int]] = {}
        self.tokenizer = tokenizer

    def tokens(self, question: str, sampling: SamplingParams) -> list[int]:
        if (question, sampling) not in self._said:
            self._said[question, sampling] = self._ask(question, sampling)
        return self._said[question, sampling]

    def _ask(self, question: str, sampling: SamplingParams) -> list[int]:
        source = template_source_of(self.tokenizer)
        texts = ModelTexts(TextModel(str(self.tokenizer.path), self.tokenizer.stamp, source))
        prompt = texts.prompt_ids(texts.template(datetime.now(UTC)).render(_messages(question)))
        ends = self.tokenizer.end_tokens
        request = GenerationRequest(tuple(prompt), MAX_TOKENS, ends, sampling)

        async def collect() -> list[int]:
            return [token async for step in self._engine.generate(request) for token in step.tokens]

        return [token for token in asyncio.run(collect()) if token not in ends]

    def text(self, question: str, sampling: SamplingParams) -> str:
        text = AnswerText(self.tokenizer.piece)
        return "".join(map(text.push, self.tokens(question, sampling))) + text.flush()


def _ask(client: openai.OpenAI, question: str, **fields: Any) -> Any:
    fields = {"model": "default", "max_tokens": MAX_TOKENS, "temperature": 0, **fields}
    return client.chat.completions.create(messages=_messages(question), **fields)


def _ask_streaming(client: openai.OpenAI, question: str, **fields: Any) -> str:
    with _ask(client, question, stream=True, **fields) as stream:
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_lists_its_model(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "SmolLM2-135M-Instruct.Q4_1"
    assert client.models.retrieve(model.id) == model


@pytest.mark.parametrize("question", QUESTIONS)
def test_says_what_the_whole_model_says(client: openai.OpenAI, whole: Whole, question: str) -> None:
    expected = whole.text(question, SamplingParams())
    assert _ask(client, question).choices[0].message.content == expected
    assert _ask_streaming(client, question) == expected


@pytest.mark.parametrize("seed", [1, 2])
def test_a_seed_gives_the_whole_models_text(client: openai.OpenAI, whole: Whole, seed: int) -> None:
    question = QUESTIONS[1]
    fields: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": seed, "extra_body": {"top_k": 40}}
    expected = whole.text(question, SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=seed))
    assert _ask_streaming(client, question, **fields) == expected
    assert _ask(client, question, **fields).choices[0].message.content == expected


def test_penalties_and_logprobs(client: openai.OpenAI, whole: Whole) -> None:
    question = QUESTIONS[1]
    sampling = SamplingParams(frequency_penalty=2.0, presence_penalty=2.0)
    expected = whole.text(question, sampling)
    assert expected != whole.text(question, SamplingParams())
    fields: dict[str, Any] = {"frequency_penalty": 2, "presence_penalty": 2, "logprobs": True}
    answer = _ask(client, question, top_logprobs=3, **fields).choices[0]
    assert answer.message.content == expected
    entries = answer.logprobs.content
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode() == expected
    for entry in entries:
        assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-5
    with _ask(client, question, stream=True, top_logprobs=3, **fields) as stream:
        choices = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in choices) == expected
    # In exact mode they are the same bits, in whatever window they were computed.
    assert [each for choice in choices if choice.logprobs for each in choice.logprobs.content] == entries


def test_token_ids(client: openai.OpenAI, whole: Whole) -> None:
    question = QUESTIONS[1]
    expected = whole.tokens(question, SamplingParams())
    fields: dict[str, Any] = {"extra_body": {"return_token_ids": True}}
    answer = _ask(client, question, **fields)
    ids = answer.choices[0].token_ids
    ends = set(ids[len(expected) :])
    assert ids[: len(expected)] == expected
    assert ends <= whole.tokenizer.end_tokens
    assert len(ids) == answer.usage.completion_tokens
    with _ask(client, question, stream=True, **fields) as stream:
        first, *chunks = list(stream)
    assert first.prompt_token_ids == answer.prompt_token_ids
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == ids


def test_a_stream_ends_with_its_usage(client: openai.OpenAI) -> None:
    question = QUESTIONS[1]
    with _ask(client, question, stream=True, stream_options={"include_usage": True}) as stream:
        *chunks, last = list(stream)
    assert last.choices == []
    assert last.usage.completion_tokens == _ask(client, question).usage.completion_tokens
    details = last.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    assert last.timings["draft_n"] >= last.timings["draft_n_accepted"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason in {"stop", "length"}


def test_a_stop_string_that_spans_tokens(client: openai.OpenAI, whole: Whole) -> None:
    question = QUESTIONS[0]
    full = whole.text(question, SamplingParams())
    pieces = [whole.tokenizer.piece(token).decode() for token in whole.tokens(question, SamplingParams())]
    stop = pieces[5][-1:] + pieces[6] + pieces[7][:2]
    before = full[: full.index(stop)]
    answer = _ask(client, question, stop=[stop])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (before, "stop")
    assert _ask_streaming(client, question, stop=stop) == before


def test_questions_asked_together_get_the_same_answers(client: openai.OpenAI, whole: Whole) -> None:
    # Each was asked alone, too: see above.
    alone = [whole.text(question, SamplingParams()) for question in QUESTIONS]
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        together = list(pool.map(lambda question: _ask_streaming(client, question), QUESTIONS))
    assert together == alone


def test_hanging_up_frees_the_slot(client: openai.OpenAI, url: str) -> None:
    with _ask(client, QUESTIONS[2], stream=True, max_tokens=400, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
        assert _status(url)["sessions"]["running"] == 1
    deadline_s = time.monotonic() + 2
    while _status(url)["sessions"]["running"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert _ask(client, QUESTIONS[0], max_tokens=8).choices[0].message.content


def test_a_wrong_key_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        _ask(client.with_options(api_key="sk-wrong"), QUESTIONS[0])
    assert caught.value.code == "invalid_api_key"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        _ask(client, QUESTIONS[0], model="gpt-9")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_an_over_long_prompt_is_refused_with_the_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.BadRequestError, match=f"maximum context length is {CONTEXT_LENGTH} tokens"
    ) as caught:
        _ask(client, "word " * CONTEXT_LENGTH)
    assert caught.value.code == "context_length_exceeded"
