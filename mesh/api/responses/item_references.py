"""References to stored items in the input of /v1/responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from mesh.api.protocol import StrictBody
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.api.response_store import ResponseStore


class ItemReference(StrictBody):
    """An item of a stored response or of its input, by its id."""

    type: Literal["item_reference"] | None = None
    id: str


def with_stored_items(
    value: str | list[Any], store: ResponseStore, client: str | None
) -> str | list[Mapping[str, Any]]:
    """The input of a request, with the items themselves in place of references.

    Args:
        value: `input` of the request.
        store: Stored responses.
        client: Identity of the API key, whose items alone are found.

    Raises:
        InvalidRequest: Naming the reference at fault.
    """
    if isinstance(value, str):
        return value
    ids = {index: _id_of(item, index) for index, item in enumerate(value) if _is_reference(item)}
    if not ids:
        return value
    seen: set[str] = set()
    for index, item_id in ids.items():
        # Each could stand for an item of any size.
        if item_id in seen:
            raise InvalidRequest(
                f"input[{index}].id: the item {item_id!r} is referred to twice: refer to it once",
                param=f"input[{index}].id",
            )
        seen.add(item_id)
    items = store.items(client, seen)
    for index, item_id in ids.items():
        if item_id not in items:
            raise InvalidRequest(
                f"input[{index}].id: the item {item_id!r} is not stored here, or no longer: send the item"
                " itself",
                param=f"input[{index}].id",
            )
    return [items[ids[index]] if index in ids else item for index, item in enumerate(value)]


def _is_reference(item: Any) -> bool:
    """Whether an item is a reference: untyped, it has an id and, unlike a message, no role or content."""
    if not isinstance(item, dict):
        return False
    is_untyped = "id" in item and not any(item.get(name) for name in ("type", "role", "content"))
    return is_untyped or item.get("type") == "item_reference"


def _id_of(item: Mapping[str, Any], index: int) -> str:
    item_id = item.get("id")
    if not isinstance(item_id, str):
        where = f"input[{index}].id"
        raise InvalidRequest(f"{where}: must be a string, the id of a stored item", param=where)
    return item_id
