"""Schedule of a load: its requests, and when each is sent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mesh.util.completion_stream import CHAT_PATH
from meshbench.load_client.hang_ups import NO_HANG_UPS, HangUps, HangUpTime

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True)
class Request:
    """A request of one client.

    Attributes:
        id: What its record is called.
        body: JSON.
        path: Endpoint.
        is_streamed: Whether the answer is to come token by token; otherwise in one piece.
        hang_up_time: When the client hangs up; None waits for the end, unless the schedule draws a time.
    """

    id: str
    body: str
    path: str = CHAT_PATH
    is_streamed: bool = True
    hang_up_time: HangUpTime | None = None

    @classmethod
    def streamed(cls, fields: Mapping[str, Any], path: str = CHAT_PATH, *, name: str = "request") -> Request:
        """A request whose answer is a stream with usage.

        Args:
            fields: Of the body. The prompt is computed anew unless they say otherwise: prompts are repeated.
            path: Endpoint.
            name: What its record is called.
        """
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": "default", "cache_prompt": False, **fields, **stream}
        return cls(name, json.dumps(body), path)

    @classmethod
    def chat(
        cls, prompt: str, max_tokens: int, fields: Mapping[str, Any], *, name: str = "request"
    ) -> Request:
        """One user message, answered greedily unless the fields say otherwise; see `streamed`."""
        message = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
        return cls.streamed({**message, "temperature": 0, **fields}, name=name)


@dataclass(frozen=True)
class Schedule:
    """A load for one server.

    Attributes:
        url: URL of the server, without `/v1`.
        chats: Requests of each chat. A later one is sent once the one before it has ended, ahead of chats
            that have not begun; after the last chat the first begins again.
        num_at_once: Requests under way in a closed loop.
        num_requests: Most requests; None for no such limit.
        duration_s: Longest time; None for no such limit.
        arrivals_s: Instead of a closed loop: when each request is sent.
        api_keys: At least one; the client of place i under way has key i, modulo their number. None is no
            key.
        hang_ups: Clients that hang up, and when, drawn as the requests are sent.
        is_patient: Whether a client whose request failed waits before it sends the next.
        timeout_s: Limit of a request; a longer one counts as failed.
    """

    url: str
    chats: tuple[tuple[Request, ...], ...]
    num_at_once: int = 1
    num_requests: int | None = None
    duration_s: float | None = None
    arrivals_s: tuple[float, ...] | None = None
    api_keys: tuple[str | None, ...] = (None,)
    hang_ups: HangUps = NO_HANG_UPS
    is_patient: bool = False
    timeout_s: float = 300.0

    @classmethod
    def once(cls, url: str, requests: Iterable[Request], num_at_once: int = 1, **fields: Any) -> Schedule:
        """Each request once, in this order.

        Args:
            url: See above.
            requests: The requests.
            num_at_once: See above.
            fields: The others of a schedule.
        """
        chats = tuple((request,) for request in requests)
        return cls(url, chats, num_at_once, len(chats), **fields)
