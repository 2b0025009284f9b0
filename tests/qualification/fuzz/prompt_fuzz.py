"""Fuzzing of prompts: what clients send is compared with what reaches the model."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

from mesh.api.app import create_app
from mesh.api.backend import ApiContext, Backend, Backends
from mesh.api.http_server import serve_api
from mesh.engine import Committed, GenerationStats
from mesh.status import MeshStatus
from mesh.text.tokenizer import Tokenizer
from meshbench.http_client import Client, WholeBody, parse_url
from meshbench.lab.llama_cpp_build import unpacked_source
from tests.qualification.fuzz.altered_models import (
    TEMPLATE,
    control_tokens,
    text_value,
    with_control_tokens,
    write_vocabulary,
)
from tests.qualification.fuzz.conversations import Conversations, body_for, marks_of
from tests.qualification.fuzz.prompt_comparison import Piece, forged, hidden, skeleton
from tests.qualification.fuzz.report import Tally

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping

    from mesh.engine import GenerationRequest
    from tests.qualification.fuzz.conversations import ApiName, Conversation
    from tests.qualification.fuzz.report import FuzzOptions, FuzzReport

_CONTEXT: Final = 131_072
_TIMEOUT_S: Final = 60.0
_OK: Final = 200
_REFUSED: Final = 400
# What templates write as control tokens, in the spellings of all of llama.cpp's templates.
_NAMES: Final = re.compile(
    r"<\|[^|<>\s'\"{}]{1,40}\|>|<｜[^｜<>\s'\"{}]{1,40}｜>|</?(?:[a-z]+:)?[a-z]+(?:_[a-z]+)*>|\[/?[A-Z][A-Z_]+\]"
)
# Each API: its endpoint, the field that limits the answer, and the endpoint that counts the same prompt.
_APIS: Final[Mapping[ApiName, tuple[str, str, str]]] = {
    "chat": ("/v1/chat/completions", "max_tokens", "/tokenize"),
    "messages": ("/v1/messages", "max_tokens", "/v1/messages/count_tokens"),
    "responses": ("/v1/responses", "max_output_tokens", "/v1/responses/input_tokens"),
}


class PromptRecorder:
    """Engine that keeps the prompt of each request, and answers nothing.

    Attributes:
        prompts: Token ids so far.
    """

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []

    @property
    def context_length(self) -> int:
        """Positions that one session may use."""
        return _CONTEXT

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Committed, None]:
        """The end of the answer."""
        self.prompts.append(request.prompt)
        end = min(request.end_tokens, default=0)
        yield Committed((end,), "stop" if request.end_tokens else "length", GenerationStats())


@dataclass(frozen=True)
class _Prompts:
    """A running API."""

    client: Client
    recorder: PromptRecorder
    tokenizer: Tokenizer
    control: frozenset[int]

    async def ask(self, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and answer."""
        reply = WholeBody()
        await self.client.exchange("POST", path, json.dumps(body).encode(), reply)
        return reply.status, json.loads(reply.body)

    def pieces(self, tokens: tuple[int, ...]) -> Iterator[Piece]:
        """What each token stands for."""
        for token in tokens:
            if token in self.control:
                yield Piece(self.tokenizer.name(token).encode(), is_control=True)
            else:
                yield Piece(self.tokenizer.piece(token), is_control=False)


def known_templates(source: Path | None) -> dict[str, str]:
    """Chat templates of llama.cpp's source by name; none without the source.

    Args:
        source: Folder of the source.
    """
    paths = [] if source is None else sorted(source.glob("models/templates/*.jinja"))
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def fuzz_prompts(options: FuzzOptions) -> FuzzReport:
    """Put random conversations to the real API, in all three forms, and compare the prompts with them.

    The templates are the model's own and those of llama.cpp's source, in turn; the vocabulary is the model's,
    in which what a template writes between brackets are control tokens. A failure (fault) is: a control token
    that a client's text made, or kept the template from writing; a word that was sent and does not reach the
    prompt, or not in its place, without a refusal or a warning; a count of another endpoint that differs; an
    answer that is neither 200 nor 400.

    Args:
        options: Options of the run.

    Raises:
        MeshError: If the model cannot be read.
    """
    return asyncio.run(_fuzz(options, known_templates(unpacked_source())))


async def _fuzz(options: FuzzOptions, templates: Mapping[str, str]) -> FuzzReport:
    tally = Tally("prompts", options, time.monotonic)
    sources: list[tuple[str, str | None]] = [("the model's own", None), *templates.items()]
    with tempfile.TemporaryDirectory(prefix="spanmesh-fuzz-") as name:
        for index, (title, source) in enumerate(sources[: options.num_cases]):
            num_cases = len(range(index, options.num_cases, len(sources)))
            path = Path(name) / "vocabulary.gguf"
            names = _write_model(options.model, path, source)
            # Not for secrets: the same seed must make the same conversations.
            draw = Conversations(marks_of(names), Random(f"{options.seed} {title}"))
            async with _running(Tokenizer(path)) as prompts:
                for _ in range(num_cases):
                    await _one(prompts, tally, title, *draw.next())
    return tally.report()


def _write_model(model: Path, output: Path, template: str | None) -> list[str]:
    """Write the vocabulary with a template; returns names of its control tokens."""
    if template is None:
        write_vocabulary(model, output, {})
        return control_tokens(model)
    names = list(dict.fromkeys(_NAMES.findall(template))) or control_tokens(model)
    changes = with_control_tokens(model, names)
    write_vocabulary(model, output, {TEMPLATE: text_value(template), **changes})
    return names


@asynccontextmanager
async def _running(tokenizer: Tokenizer) -> AsyncGenerator[_Prompts]:
    recorder = PromptRecorder()
    backend = Backend(
        api=ApiContext(),
        engine=recorder,
        tokenizer=tokenizer,
        model_id="prompts",
        created=int(time.time()),
        status=MeshStatus,
        ready=lambda: True,
    )
    control = frozenset(token for token in range(tokenizer.n_vocab) if not tokenizer.piece(token))
    async with serve_api(create_app(Backends(backend), api_keys=None), "127.0.0.1", 0) as url:
        client = Client(parse_url(url), api_key=None, timeout_s=_TIMEOUT_S, clock_s=time.perf_counter)
        try:
            yield _Prompts(client, recorder, tokenizer, control)
        finally:
            client.close()


async def _one(
    prompts: _Prompts, tally: Tally, template: str, conversation: Conversation, marks: tuple[str, ...]
) -> None:
    for api in _APIS:
        bodies = [body_for(api, conversation.written(each)) for each in (marks, None)]
        try:
            outcome, reasons = await _compare(prompts, api, conversation, bodies)
        except (OSError, ValueError) as error:
            outcome, reasons = "no answer", [f"no answer: {error!r}"]
        tally.count(f"{api}: {outcome}")
        for reason in reasons:
            data = json.dumps({"template": template, "api": api, "body": bodies[0]}, indent=1).encode()
            tally.fail("fault", data, f"{template}, {api}: {reason}")


async def _compare(
    prompts: _Prompts, api: ApiName, conversation: Conversation, bodies: list[dict[str, Any]]
) -> tuple[str, list[str]]:
    """Name of the outcome, and what is wrong."""
    path, limit, counting = _APIS[api]
    skeletons = []
    reasons = []
    is_warned = False
    statuses = []
    for body in bodies:
        status, answer = await prompts.ask(path, {**body, limit: 1})
        statuses.append(status)
        if status not in {_OK, _REFUSED}:
            reasons.append(f"status {status}: {answer}")
        if status != _OK:
            continue
        is_warned = is_warned or bool(answer.get("warnings"))
        tokens = prompts.recorder.prompts.pop()
        skeletons.append(skeleton(prompts.pieces(tokens)))
        status, counted = await prompts.ask(counting, body)
        number = counted.get("input_tokens", counted.get("count"))
        if status != _OK or number != len(tokens):
            reasons.append(f"{counting} counts {number} (status {status}) where the prompt has {len(tokens)}")
    if len(skeletons) < 2:
        if len(skeletons) == 1:
            reasons.append(f"refused only with marks, or only without: {statuses}")
        return "refused", reasons
    if difference := forged(*skeletons):
        reasons.append(f"control tokens differ {difference}")
    if not is_warned and (missing := hidden(conversation.texts(), skeletons[0])):
        reasons.append(f"hidden: {missing}")
    return "differs" if reasons else "equal", reasons
