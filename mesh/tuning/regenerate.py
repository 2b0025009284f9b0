"""Answers to prompts by the served model, asked for through its API, which records them.

Requests keep to the API key's limits: where one is refused for now, it is sent again when the server says so.
User turns that a model writes itself are what it puts behind the header of one (Xu et al. 2024, Magpie).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

import httpx

from mesh.tuning.prompts import OwnPrompts, Prompt
from mesh.util.completion_stream import CHAT_PATH, COMPLETION_PATH
from spanmesh_proto.errors import ClusterError, Unauthorized
from stages.tls import authorities_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_RECORD: Final = "record"
# Statuses that a server answers while it has no room, or still loads.
_LATER: Final = frozenset({429, 503})
_RETRY_S: Final = 2.0
_MOST_RETRY_S: Final = 60.0
# The whole of an answer comes at once, and it may wait for a slot.
_PATIENCE_S: Final = 1800.0
_SEED_BITS: Final = 63
# Of a user turn that the model writes; short ones are not worth an answer.
_OWN_TOKENS: Final = 96
_OWN_TOP_K: Final = 200
_OWN_CHARS: Final = 12
_OWN_TRIES: Final = 3
_STRANGERS: Final = ("a", "7")


@dataclass(frozen=True)
class Wanted:
    """How answers are asked for."""

    temperature: float
    """Of the answers."""
    max_tokens: int
    """Limit of each answer."""
    num_parallel: int
    """Requests at once."""
    is_raw: bool = False
    """Whether prompts are no chats."""


@dataclass
class Regenerated:
    """What came of the prompts."""

    num_answers: int = 0
    """Answers."""
    num_tokens: int = 0
    """Their tokens."""
    num_known: int = 0
    """Prompts that were recorded before."""
    refused: Counter[str] = field(default_factory=Counter)
    """Prompts that the server refused, or the model did not write, by the reason."""


class ChatServer:
    """The API of a mesh.

    Args:
        url: Without a path.
        key: API key, if it needs one.
        sleep: Waits, seconds.
    """

    def __init__(self, url: str, key: str | None, *, sleep: Callable[[float], Any] = asyncio.sleep) -> None:
        self._url = url
        self._sleep = sleep
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=_PATIENCE_S,
            verify=authorities_for(url),
            # As `mesh.cli.head_client`: no proxy, and the key is for the named server only.
            trust_env=False,
            follow_redirects=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._http.aclose()

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A JSON answer.

        Raises:
            RefusedPrompt: If the server refuses this request; others may be answered.
            Unauthorized: If the key is missing or wrong.
            ClusterError: If no mesh answers, or it records nothing of this key.
        """
        while True:
            try:
                response = await self._http.post(path, json=body)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                reason = str(error).strip() or type(error).__name__
                raise ClusterError(
                    f"no mesh answers at {self._url} ({reason}); start the command again: answers that are "
                    "recorded are not asked for again"
                ) from None
            if response.status_code not in _LATER:
                break
            await self._sleep(_retry_after_s(response))
        if response.is_success:
            answer = _json_of(response)
            if isinstance(answer, dict):
                return answer
            raise ClusterError(f"{self._url} did not answer as a mesh does")
        error_said = _json_of(response)
        told = error_said.get("error") if isinstance(error_said, dict) else None
        said: dict[str, Any] = told if isinstance(told, dict) else {}
        message = str(said.get("message") or f"{self._url} answered {response.status_code}")
        if response.status_code in {401, 403}:
            raise Unauthorized(message)
        if said.get("param") == _RECORD or response.status_code >= 500:
            raise ClusterError(message)
        raise RefusedPrompt(message)


class RefusedPrompt(Exception):
    """A request that the server refuses; its text says why."""


class Regeneration:
    """Answers to prompts, several at once.

    Args:
        server: Answers, and records.
        wanted: How they are asked for.
        recorded: As for `unrecorded`.
        on_prompt: Called after each prompt with how many of all are done.
    """

    def __init__(
        self,
        server: ChatServer,
        wanted: Wanted,
        recorded: Iterable[str],
        on_prompt: Callable[[int, int], None],
    ) -> None:
        self._server = server
        self._wanted = wanted
        self._recorded = tuple(recorded)
        self._on_prompt = on_prompt
        self._header: list[int] = []
        self._num_done = 0
        self.result = Regenerated()

    async def run(self, prompts: Sequence[Prompt] | OwnPrompts) -> Regenerated:
        """Ask for all that is not recorded.

        Raises:
            MeshError: As `ChatServer.post`.
        """
        if isinstance(prompts, OwnPrompts):
            self._header = await self._user_header()
        wanted = _listed(prompts)
        left, num_prompts = deque(unrecorded(wanted, self._recorded)), len(wanted)
        self._num_done = self.result.num_known = num_prompts - len(left)

        async def work() -> None:
            while left:
                await self._answered(left.popleft())
                self._num_done += 1
                self._on_prompt(self._num_done, num_prompts)

        tasks = [asyncio.create_task(work()) for _ in range(min(self._wanted.num_parallel, len(left)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self.result

    async def _answered(self, prompt: Prompt) -> None:
        try:
            turns = prompt.turns if prompt.turns[0] else (await self._own_turn(prompt.name),)
            messages = list(prompt.messages)
            for number, turn in enumerate(turns):
                asked = {
                    "temperature": self._wanted.temperature,
                    "max_tokens": self._wanted.max_tokens,
                    "seed": _seed(f"{prompt.name} {number}"),
                    _RECORD: prompt.name,
                }
                if self._wanted.is_raw:
                    answer = await self._server.post(COMPLETION_PATH, {"prompt": turn, **asked})
                else:
                    messages.append({"role": "user", "content": turn})
                    answer = await self._server.post(CHAT_PATH, {"messages": messages, **asked})
                    messages.append({"role": "assistant", "content": _content(answer)})
                self.result.num_answers += 1
                self.result.num_tokens += int((answer.get("usage") or {}).get("completion_tokens", 0))
        except RefusedPrompt as refusal:
            self.result.refused[str(refusal)] += 1

    async def _own_turn(self, name: str) -> str:
        """What the model writes as a user."""
        for number in range(_OWN_TRIES):
            asked = {
                "prompt": self._header,
                "max_tokens": _OWN_TOKENS,
                "temperature": 1.0,
                "top_k": _OWN_TOP_K,
                "seed": _seed(f"{name} user {number}"),
                _RECORD: False,
            }
            answer = await self._server.post(COMPLETION_PATH, asked)
            text = str(answer["choices"][0].get("text") or "").strip()
            if len(text) >= _OWN_CHARS:
                return text
        raise RefusedPrompt("the model wrote no turn of a user; name a file of prompts instead")

    async def _user_header(self) -> list[int]:
        """Token ids that the model's template puts before what a user says."""
        found = []
        for text in _STRANGERS:
            asked = {"messages": [{"role": "user", "content": text}]}
            found.append((await self._server.post("/tokenize", asked))["tokens"])
        header = []
        for token, other in zip(*found, strict=False):
            if token != other:
                break
            header.append(token)
        if not header:
            raise ClusterError("the model's chat template puts nothing before a user's turn: name prompts")
        return header


def unrecorded(prompts: Sequence[Prompt] | OwnPrompts, recorded: Iterable[str]) -> list[Prompt]:
    """Prompts of which an answer is missing; one that is listed twice is answered twice.

    Args:
        prompts: What is to be recorded.
        recorded: Names of prompts that are recorded already, one for each answer.
    """
    left, found = Counter(recorded), []
    for prompt in _listed(prompts):
        if left[prompt.name] < len(prompt.turns):
            left[prompt.name] = 0
            found.append(prompt)
        else:
            left[prompt.name] -= len(prompt.turns)
    return found


def _listed(prompts: Sequence[Prompt] | OwnPrompts) -> Sequence[Prompt]:
    """One by one; those that the model writes have no text yet."""
    if isinstance(prompts, OwnPrompts):
        return [Prompt(f"own-{number}", ("",)) for number in range(prompts.count)]
    return prompts


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return min(max(0.1, float(response.headers["Retry-After"])), _MOST_RETRY_S)
    except (KeyError, ValueError):
        return _RETRY_S


def _json_of(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


def _content(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"].get("content") or "")


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> (64 - _SEED_BITS)
