"""Dataclasses, restored from JSON."""

from __future__ import annotations

import functools
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Fields = TypeVar("Fields")


def restored(kind: type[Fields], fields: dict[str, Any]) -> Fields:
    """A dataclass from `dataclasses.asdict`'s result after JSON, which has no tuples.

    Args:
        kind: Its fields are values of JSON, dataclasses, optional ones, and tuples of one type.
        fields: By name.
    """
    types = _types(kind)  # type: ignore[arg-type]
    return kind(**{name: _restored(types[name], value) for name, value in fields.items()})


def _restored(kind: Any, value: Any) -> Any:
    if get_origin(kind) in {Union, UnionType}:
        kind = get_args(kind)[0]
    if value is None:
        return None
    if is_dataclass(kind):
        return restored(kind, value)  # type: ignore[arg-type]
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return tuple(value) if item in {str, int, float} else tuple(_restored(item, each) for each in value)
    return value


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
