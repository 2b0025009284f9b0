"""Jobs of the processes for text, and their form on the way there."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import msgpack

if TYPE_CHECKING:
    from collections.abc import Mapping

_IS_JSON: Final = b"j"
_IS_MSGPACK: Final = b"m"


@dataclass(frozen=True)
class TextModel:
    """A vocabulary and a chat template, for which processes for text keep what they need."""

    path: str
    """Path of the model, or of its first file if it is split."""
    stamp: tuple[int, int]
    """Size and time of change of that file when it was loaded: another file has other ids."""
    template: str = ""
    """Jinja source; empty without one."""


def packed_job(kind: str, model: TextModel, values: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Header and payload of a job.

    Args:
        kind: Name of a function of `mesh.text.text_worker`.
        model: The model that it is about.
        values: Arguments, JSON-serialisable; texts may have lone surrogates.

    Raises:
        RecursionError: If they are nested too deeply.
    """
    header = json.dumps({"kind": kind, "model": asdict(model)}).encode()
    try:
        # Several times as fast as JSON, in one stretch of which nothing else of the head goes on.
        return header, _IS_MSGPACK + msgpack.packb(values, unicode_errors="surrogatepass")
    except (ValueError, OverflowError):
        # Of large numbers and deep values it knows less.
        return header, _IS_JSON + json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogatepass")


def unpacked_job(header: bytes, payload: bytes) -> tuple[str, TextModel, dict[str, Any]]:
    """Kind, model and arguments of a job."""
    head = json.loads(header)
    model = head["model"]
    form, data = payload[:1], memoryview(payload)[1:]
    values: dict[str, Any]
    if form == _IS_JSON:
        values = json.loads(str(data, "utf-8", "surrogatepass"))
    else:
        values = msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)
    return head["kind"], TextModel(model["path"], tuple(model["stamp"]), model["template"]), values
