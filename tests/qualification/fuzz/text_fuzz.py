"""Fuzzing with texts: shapes of texts x vocabularies x endpoints x hang-ups, against a real mesh."""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
import time
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

from mesh.api.bodies import max_body_bytes
from mesh.cli.head_client import ask_head
from meshbench.http_client import Client, parse_url
from meshbench.lab.local_mesh import ServedMesh, served_mesh
from tests.qualification.fuzz.altered_models import PRE_KIND, control_tokens, text_value, write_altered
from tests.qualification.fuzz.head_watch import HeadWatch, footprint_of, settled
from tests.qualification.fuzz.hostile_texts import hostile_text
from tests.qualification.fuzz.http_fuzz import HttpCase, Reply, fault_of
from tests.qualification.fuzz.report import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.qualification.fuzz.report import FuzzOptions, FuzzReport

# Each splits texts in its own way; None is the model's own. Most of them call themselves for each character.
_KINDS: Final = (
    "gpt-4o", None, "tekken", "deepseek-v3", "qwen2", "bailingmoe", "deepseek-llm", "falcon", "default",
    "llama-bpe", "kimi-k2", "minimax-m2", "seed-coder", "command-r",
)  # fmt: skip
_CASES_OF_A_MESH: Final = 100
_NUM_LAYERS: Final = 2
_CONTEXT: Final = 8192
_MESH_OPTIONS: Final = ("--stages", "1", "--threads", "1", "--ctx-size", str(_CONTEXT), "--parallel", "4")
_LENGTHS: Final = (1, 100, 5_000, 28_000, 60_000, 200_000, 1_000_000, None)
_ROOM_BYTES: Final = 512  # of a body, for everything but its text
_CHARS_OF_A_TOKEN: Final = 4
_N_VOCAB: Final = 49_152
_HANG_UP_SHARE: Final = 0.4
_MAX_HANG_UP_S: Final = 3.0
_FEW: Final = {"max_tokens": 2}
_MAX_KEPT_BYTES: Final = 65_536
_AT_ONCE: Final = 8
_TIMEOUT_S: Final = 180.0
# Far beyond what a busy machine does to a healthy head.
_STILL_MS: Final = 10_000.0
_SLOW_MS: Final = 20_000.0
_STREAM_TOKENS: Final = 16
_SETTLE_S: Final = 60.0
_END_S: Final = 2.0
_OVERLOADED: Final = 503
_MIB: Final = 2**20


@dataclass(frozen=True)
class TextCase:
    """One request."""

    number: int
    """From 0; with the seed it makes the same case again."""
    path: str
    """Endpoint."""
    shape: str
    """Of its text."""
    num_chars: int
    """Length of its text."""
    body: bytes
    """JSON."""
    hang_up_s: float | None
    """When its client hangs up; None if it waits for the answer."""

    def __str__(self) -> str:
        """In words."""
        end = "" if self.hang_up_s is None else f", hung up after {self.hang_up_s:.1f} s"
        what = f"{self.num_chars} characters of {self.shape}"
        return f"request {self.number} of the seed: {self.path}, {what}{end}"


class TextCases:
    """Makes requests; each depends on the seed and its number alone.

    Args:
        seed: Of all randomness.
        marks: Names of control tokens.
        max_bytes: Most bytes of a body that the server reads.
    """

    def __init__(self, seed: int, marks: Sequence[str], max_bytes: int) -> None:
        self._seed = seed
        self._marks = marks
        self._max_bytes = max_bytes

    def case(self, number: int) -> TextCase:
        """The request of this number."""
        # Not for secrets: the same seed must make the same texts.
        random = Random(f"{self._seed} {number}")
        path, make = random.choice(_REQUESTS)
        length = random.choice(_LENGTHS)
        found = hostile_text(random, self._max_bytes if length is None else length, self._marks)
        text = found.text
        body = _encoded(make(text))
        while len(body) > self._max_bytes:
            # To nearly the largest body that is read: larger ones are refused by their length.
            text = text[: (len(text) * (self._max_bytes - _ROOM_BYTES)) // len(body)]
            body = _encoded(make(text))
        hang_up_s = random.uniform(0, _MAX_HANG_UP_S) if random.random() < _HANG_UP_SHARE else None
        return TextCase(number, path, found.shape, len(text), body, hang_up_s)

    def usual(self) -> list[TextCase]:
        """One request to each endpoint, of words, as large as is read."""
        text = "of the " * ((self._max_bytes - _ROOM_BYTES) // 7)
        return [
            TextCase(-1, path, "words", len(text), _encoded(make(text)), None) for path, make in _REQUESTS
        ]


class _Answer:
    """Keeps the beginning of a response; implements `http_client.Receiver`."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.content_type = ""
        self.body = b""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Status and headers."""
        self.status = status
        self.content_type = headers.get(b"content-type", b"").decode("latin-1")

    def on_body(self, data: bytes, now_s: float) -> None:
        """The next bytes of the body."""
        if len(self.body) < _MAX_KEPT_BYTES:
            self.body += data


class Attack:
    """Feeds cases to one mesh.

    Args:
        mesh: The mesh.
        tally: Counts of the run.
        cases: Makes the cases.
        key: API key of the other client.
        attacker_key: API key of the attacker.
    """

    def __init__(self, mesh: ServedMesh, tally: Tally, cases: TextCases, key: str, attacker_key: str) -> None:
        self._mesh = mesh
        self._tally = tally
        self._cases = cases
        self._key = key
        self._attacker_key = attacker_key
        self._statuses: dict[str, frozenset[int]] = {}
        self._under_way: dict[int, TextCase] = {}

    async def run(self, numbers: range) -> int:
        """Feed these cases; returns the number of the first that was not fed."""
        url = f"http://127.0.0.1:{self._mesh.port}"
        document = await asyncio.to_thread(ask_head, f"{url}/openapi.json", self._key, timeout_s=_TIMEOUT_S)
        self._statuses = {
            path: frozenset(int(status) for status in document["paths"][path]["post"]["responses"])
            for path, _ in _REQUESTS
        }
        client = Client(
            parse_url(url), api_key=self._attacker_key, timeout_s=_TIMEOUT_S, clock_s=time.perf_counter
        )
        waiting = iter(numbers)

        async def work() -> None:
            while self._mesh.is_running() and (number := next(waiting, None)) is not None:
                await self._one(client, await asyncio.to_thread(self._cases.case, number))

        try:
            for case in self._cases.usual():
                await client.exchange("POST", case.path, case.body, _Answer())
            rest = await asyncio.to_thread(footprint_of, self._mesh)
            watch = HeadWatch(
                self._mesh, self._key, num_streams=1, num_tokens=_STREAM_TOKENS, on_still=self._judge_still
            )
            async with watch:
                await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
        finally:
            client.close()
        await self._judge(watch)
        if self._mesh.is_running():
            left = (await settled(self._mesh, rest, _SETTLE_S)).excess_over(rest)
            if left is not None:
                self._tally.fail("fault", b"", f"left behind: {left}, see {self._mesh.log}")
        return next(waiting, numbers.stop)

    async def _one(self, client: Client, case: TextCase) -> None:
        answer = _Answer()
        self._under_way[case.number] = case
        try:
            async with asyncio.timeout(case.hang_up_s):
                await client.exchange("POST", case.path, case.body, answer)
        except TimeoutError:
            is_hang = case.hang_up_s is None
            self._tally.count("hang" if is_hang else "hung up")
            if is_hang:
                self._tally.fail("hang", case.body, f"no end after {_TIMEOUT_S:g} s: {case}")
        except OSError as error:
            await self._broken(case, error)
        else:
            self._tally.count(str(answer.status))
            self._judge_answer(case, answer)
        finally:
            del self._under_way[case.number]

    async def _broken(self, case: TextCase, error: OSError) -> None:
        """Judge a connection that broke: whether the head is gone shows a moment later."""
        await asyncio.sleep(_END_S)
        self._tally.count("broken off")
        if self._mesh.is_running():
            self._tally.fail("fault", case.body, f"broken off ({error}): {case}")
        else:
            code = self._mesh.process.returncode
            words = f"the head is gone (exit code {code}); under way was {case}"
            self._tally.fail("crash", case.body, words)

    def _judge_answer(self, case: TextCase, answer: _Answer) -> None:
        if answer.status == _OVERLOADED:
            return
        request = HttpCase(b"", is_whole=True, statuses=self._statuses[case.path])
        reply = Reply(answer.status, answer.content_type, answer.body, is_over=True)
        if reason := fault_of(request, reply):
            self._tally.fail("fault", case.body, f"{reason}: {case}")

    def _judge_still(self, took_ms: float) -> None:
        if took_ms > _STILL_MS:
            under_way = "; ".join(map(str, self._under_way.values())) or "nothing"
            data = under_way.encode()
            self._tally.fail("hang", data, f"/health took {took_ms:.0f} ms; under way: {under_way}")

    async def _judge(self, watch: HeadWatch) -> None:
        """Judge the other client's streams, and note what was measured."""
        if self._mesh.is_running():
            for reason in watch.lost():
                self._tally.fail("fault", b"", f"a stream of another key: {reason}, see {self._mesh.log}")
        slow_ms = max((record.ttft_ms for record in watch.records), default=0.0)
        if slow_ms > _SLOW_MS:
            self._tally.fail("hang", b"", f"another key's first token came after {slow_ms:.0f} ms")
        gaps_ms = [gap for record in watch.records for gap in record.itls_ms]
        found = {
            "slowest /health, ms": max(watch.health_ms, default=0.0),
            "slowest first token of another key, ms": slow_ms,
            "longest gap in its streams, ms": max(gaps_ms, default=0.0),
            "most memory, MiB": watch.peak_bytes / _MIB,
        }
        for name, value in found.items():
            self._tally.figures[name] = max(value, self._tally.figures.get(name, 0.0))


def _user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _tool(text: str) -> dict[str, Any]:
    function = {"name": "look", "description": text}
    return {**_user("Look"), "tools": [{"type": "function", "function": function}]}


def _result(text: str) -> dict[str, Any]:
    called = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": text},
    ]
    return {"messages": messages}


def _arguments(text: str) -> dict[str, Any]:
    conversation = _result("done")
    arguments = json.dumps({"place": text})
    conversation["messages"][1]["tool_calls"][0]["function"]["arguments"] = arguments
    return conversation


def _ids(text: str) -> dict[str, Any]:
    count = len(text) // _CHARS_OF_A_TOKEN + 1
    return {"tokens": [(17 * number + len(text)) % _N_VOCAB for number in range(count)]}


_REQUESTS: Final[Sequence[tuple[str, Callable[[str], dict[str, Any]]]]] = (
    ("/v1/chat/completions", lambda text: {**_user(text), **_FEW}),
    ("/v1/chat/completions", lambda text: {**_tool(text), **_FEW}),
    ("/v1/chat/completions", lambda text: {**_result(text), **_FEW}),
    ("/v1/chat/completions", lambda text: {**_arguments(text), **_FEW}),
    (
        "/v1/chat/completions",
        lambda text: {**_user("Go on"), **_FEW, "prediction": {"type": "content", "content": text}},
    ),
    ("/v1/completions", lambda text: {"prompt": text, **_FEW}),
    ("/v1/completions", lambda text: {"prompt": [text[:100], text], **_FEW, "echo": True}),
    ("/v1/messages", lambda text: {**_user(text), **_FEW}),
    ("/v1/messages", lambda text: {**_user("Hello"), "system": text, **_FEW}),
    ("/v1/messages/count_tokens", _user),
    ("/v1/responses", lambda text: {"input": text, "max_output_tokens": 2, "store": False}),
    ("/v1/responses/input_tokens", lambda text: {"input": text}),
    ("/tokenize", lambda text: {"prompt": text}),
    ("/tokenize", lambda text: {"prompt": text, "return_token_strs": True}),
    ("/tokenize", _user),
    ("/detokenize", _ids),
    ("/v1/embeddings", lambda text: {"input": text}),
)


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can write
        return json.dumps(body).encode()


def fuzz_texts(options: FuzzOptions) -> FuzzReport:
    """Do what an attacker of text does: one key sends eight requests at once, another one streams meanwhile.

    The vocabulary is the model's under other kinds (`tokenizer.ggml.pre`), each served for a hundred cases in
    turn. A failure is: the head is gone; no end of an answer in 180 s; `/health` unanswered for 10 s; a first
    token of the other key after 20 s, or a stream of it that breaks off; a 5xx but 503, an error of another
    shape; processes, threads, open files or memory that are left a minute after the last request.

    Args:
        options: Options of the run.

    Raises:
        MeshError: If the mesh does not come up.
    """
    tally = Tally("texts", options, time.monotonic)
    marks = control_tokens(options.model)
    cases = TextCases(options.seed, marks, max_body_bytes(_CONTEXT))
    number = 0
    with tempfile.TemporaryDirectory(prefix="spanmesh-fuzz-") as name:
        for kind in cycle(_KINDS):
            stop = min(number + _CASES_OF_A_MESH, options.num_cases)
            changes = {} if kind is None else {PRE_KIND: text_value(kind)}
            model = write_altered(options.model, Path(name) / f"{kind}.gguf", changes, num_layers=_NUM_LAYERS)
            while number < stop:
                number = _attacked(model, tally, cases, range(number, stop), options.output)
            model.unlink()
            if number >= options.num_cases:
                return tally.report()
    raise AssertionError  # the loop has no other end


def _attacked(model: Path, tally: Tally, cases: TextCases, numbers: range, output: Path) -> int:
    """Serve a model, and feed cases until the last one, or until the head is gone.

    Returns:
        The number of the next case.
    """
    keys = [secrets.token_urlsafe(32) for _ in range(2)]
    with served_mesh(model, output, keys[0], _MESH_OPTIONS, keys[1:]) as mesh:
        return asyncio.run(Attack(mesh, tally, cases, keys[0], keys[1]).run(numbers))
