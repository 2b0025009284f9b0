"""Dataclasses, restored from JSON."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from pydantic import TypeAdapter

Fields = TypeVar("Fields")


def restored(kind: type[Fields], fields: dict[str, Any]) -> Fields:
    """A dataclass from `dataclasses.asdict`'s result after JSON, which has no tuples.

    Args:
        kind: Its class.
        fields: By name.
    """
    found: Fields = _adapter(kind).validate_python(fields)  # type: ignore[arg-type]
    return found


@functools.cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
