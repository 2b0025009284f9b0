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
    """A request of one client."""

    id: str
    """What its record is called."""
    body: str
    """JSON."""
    path: str = CHAT_PATH
    """Endpoint."""
    is_streamed: bool = True
    """Whether the answer is to come token by token; otherwise in one piece."""
    hang_up_time: HangUpTime | None = None
    """When the client hangs up; None waits for the end, unless the schedule draws a time."""

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
    """A load for one server."""

    url: str
    """URL of the server, without `/v1`."""
    chats: tuple[tuple[Request, ...], ...]
    """Requests of each chat. A later one is sent once the one before it has ended, ahead of chats that have
    not begun; after the last chat the first begins again."""
    num_at_once: int = 1
    """Requests under way in a closed loop."""
    num_requests: int | None = None
    """Most requests; None for no such limit."""
    duration_s: float | None = None
    """Longest time; None for no such limit."""
    arrivals_s: tuple[float, ...] | None = None
    """Instead of a closed loop: when each request is sent."""
    api_keys: tuple[str | None, ...] = (None,)
    """At least one; the client of place i under way has key i, modulo their number. None is no key."""
    hang_ups: HangUps = NO_HANG_UPS
    """Clients that hang up, and when, drawn as the requests are sent."""
    is_patient: bool = False
    """Whether a client whose request failed waits before it sends the next."""
    timeout_s: float = 300.0
    """Limit of a request; a longer one counts as failed."""

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
