"""Response store: answers of /v1/responses kept for later requests, by API key."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.api.errors import is_large_json, json_size
from mesh.api.picture_parts import PicturedText, pictures_in

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from mesh.api.api_keys import ApiKeys

_MAX_RESPONSES: Final = 256
_MAX_BYTES: Final = 16 * 2**20
# More than the pictures of one conversation.
_MAX_PICTURE_BYTES: Final = 32 * 2**20


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
        max_bytes: Most bytes of one client, counted as JSON without pictures; a larger answer is not kept.
        max_picture_bytes: Likewise of pictures, as they were sent; one of several answers counts once.
    """

    def __init__(
        self,
        max_responses: int = _MAX_RESPONSES,
        max_bytes: int = _MAX_BYTES,
        max_picture_bytes: int = _MAX_PICTURE_BYTES,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_picture_bytes = max_picture_bytes
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
        pictures = _texts_of_pictures(stored.messages)
        parts = [
            [_without_pictures(message) for message in stored.messages],
            stored.response,
            [_without_texts(item, pictures) for item in stored.input_items],
        ]
        is_large = is_large_json(parts)
        num_bytes = await asyncio.to_thread(json_size, parts) if is_large else json_size(parts)
        if self._keys is not None and client is not None and not self._keys.has(client):
            return
        shelf = self._by_client.setdefault(client, _Shelf())
        shelf.put(id, _Held(stored, num_bytes, pictures))
        while shelf.held and (
            len(shelf.held) > self._max_responses
            or shelf.num_bytes > self._max_bytes
            or shelf.num_picture_bytes > self._max_picture_bytes
        ):
            shelf.remove(next(iter(shelf.held)))

    def get(self, client: str | None, id: str) -> StoredResponse | None:
        """An answer of the client, if it is still stored."""
        shelf = self._by_client.get(client)
        return None if shelf is None or id not in shelf.held else shelf.held[id].stored

    def items(self, client: str | None, ids: Collection[str]) -> dict[str, Mapping[str, Any]]:
        """Items of the client's answers and of their input that are still stored, by id.

        Args:
            client: Identity of the API key, or None where the API is open.
            ids: Ids of the items.
        """
        shelf = self._by_client.get(client)
        found = {}
        for held in () if shelf is None else shelf.held.values():
            for item in (*held.stored.input_items, *held.stored.response.get("output", ())):
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


@dataclass(frozen=True)
class _Held:
    stored: StoredResponse
    num_bytes: int
    pictures: Mapping[int, str]
    """Pictures of the conversation as they were sent, by identity."""


class _Shelf:
    def __init__(self) -> None:
        self.held: OrderedDict[str, _Held] = OrderedDict()
        self.num_bytes = 0
        self.num_picture_bytes = 0
        # Answers that hold a picture, by its identity.
        self._holders: Counter[int] = Counter()

    def put(self, id: str, held: _Held) -> None:
        self.held[id] = held
        self.num_bytes += held.num_bytes
        for picture, text in held.pictures.items():
            self.num_picture_bytes += 0 if self._holders[picture] else len(text)
            self._holders[picture] += 1

    def remove(self, id: str) -> bool:
        held = self.held.pop(id, None)
        if held is None:
            return False
        self.num_bytes -= held.num_bytes
        for picture, text in held.pictures.items():
            self._holders[picture] -= 1
            if not self._holders[picture]:
                del self._holders[picture]
                self.num_picture_bytes -= len(text)
        return True


def _texts_of_pictures(messages: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    return {id(picture.text): picture.text for picture in pictures_in(messages)}


def _without_pictures(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, PicturedText):
        return message
    return {**message, "content": [part for part in content.parts if isinstance(part, str)]}


def _without_texts(value: Any, left_out: Mapping[int, str]) -> Any:
    """A JSON value without some of its texts, by their identities."""
    if not left_out:
        return value
    if id(value) in left_out:
        return ""
    if isinstance(value, dict):
        return {name: _without_texts(each, left_out) for name, each in value.items()}
    return [_without_texts(each, left_out) for each in value] if isinstance(value, list) else value
