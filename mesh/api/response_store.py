"""Response store: answers of /v1/responses kept for later requests, by API key."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.api.errors import is_large_json, json_size

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from mesh.api.api_keys import ApiKeys

_MAX_RESPONSES: Final = 256
_MAX_BYTES: Final = 16 * 2**20


@dataclass(frozen=True)
class StoredResponse:
    """One answer and its conversation."""

    messages: Sequence[Mapping[str, Any]]
    """The conversation in the form of chat templates, the answer included."""
    response: Mapping[str, Any]
    """The response as sent to the client."""
    input_items: Sequence[Mapping[str, Any]] = ()
    """Items of the request's input, each with an id."""
    may_record: bool = True
    """Whether its request left it open that what goes on from it is recorded, texts of its own included."""


class ResponseStore:
    """The latest answers of each client, in memory.

    Args:
        max_responses: Most answers of one client.
        max_bytes: Most bytes of one client, counted as JSON; a larger answer is not kept.
    """

    def __init__(self, max_responses: int = _MAX_RESPONSES, max_bytes: int = _MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._by_client: dict[str | None, _Shelf] = {}
        self._keys: ApiKeys | None = None

    def follow(self, keys: ApiKeys) -> None:
        """Drop the answers of keys when they are removed, and store none for them from then on."""
        self._keys = keys
        keys.on_removed(self.forget)

    async def put(self, client: str | None, id: str, stored: StoredResponse) -> None:
        """Store an answer, and drop the client's oldest ones where there is no room.

        A conversation of many MiB is measured in a thread.

        No effect for a key that was removed while the answer was made: nothing would drop it any more.

        Args:
            client: Identity of the API key, or None where the API is open.
            id: Id of the answer.
            stored: The answer.
        """
        parts = [stored.messages, stored.response, stored.input_items]
        is_large = is_large_json(parts)
        num_bytes = await asyncio.to_thread(json_size, parts) if is_large else json_size(parts)
        if self._keys is not None and client is not None and not self._keys.has(client):
            return
        shelf = self._by_client.setdefault(client, _Shelf())
        shelf.put(id, stored, num_bytes)
        while shelf.held and (len(shelf.held) > self._max_responses or shelf.num_bytes > self._max_bytes):
            shelf.remove(next(iter(shelf.held)))

    def get(self, client: str | None, id: str) -> StoredResponse | None:
        """An answer of the client, if it is still stored."""
        shelf = self._by_client.get(client)
        return None if shelf is None or id not in shelf.held else shelf.held[id][0]

    def items(self, client: str | None, ids: Collection[str]) -> dict[str, Mapping[str, Any]]:
        """Items of the client's answers and of their input that are still stored, by id.

        Args:
            client: Identity of the API key, or None where the API is open.
            ids: Ids of the items.
        """
        shelf = self._by_client.get(client)
        found = {}
        for stored, _ in () if shelf is None else shelf.held.values():
            for item in (*stored.input_items, *stored.response.get("output", ())):
                # That of an input item may be anything.
                if isinstance(item.get("id"), str) and item["id"] in ids:
                    found[item["id"]] = item
        return found

    def forget(self, clients: Collection[str]) -> None:
        """Drop all answers of clients whose keys were removed."""
        for client in clients:
            self._by_client.pop(client, None)

    def remove(self, client: str | None, id: str) -> bool:
        """Drop an answer of the client; returns whether it was stored."""
        shelf = self._by_client.get(client)
        return shelf is not None and shelf.remove(id)


class _Shelf:
    def __init__(self) -> None:
        self.held: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self.num_bytes = 0

    def put(self, id: str, stored: StoredResponse, num_bytes: int) -> None:
        self.held[id] = (stored, num_bytes)
        self.num_bytes += num_bytes

    def remove(self, id: str) -> bool:
        _, num_bytes = self.held.pop(id, (None, 0))
        self.num_bytes -= num_bytes
        return num_bytes > 0
