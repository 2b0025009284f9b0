"""Goodput: the requests that were served as well as they should be. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeGuard

from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from mesh.bench.serve.record import Record

SloName = Literal["ttft", "tpot", "e2el"]
_NAMES: Final[tuple[SloName, ...]] = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Slo:
    """A service level objective.

    Attributes:
        name: Which latency.
        limit_ms: It may be that long.
    """

    name: SloName
    limit_ms: float


def parse_slo(text: str) -> Slo:
    """From `ttft:500`, in milliseconds.

    Raises:
        InvalidRequest: If it is not of that form.
    """
    name, _, limit = text.partition(":")
    if not _is_name(name):
        raise InvalidRequest(f"{name!r} is no latency; there are {', '.join(_NAMES)}", param="--goodput")
    try:
        limit_ms = float(limit)
    except ValueError:
        limit_ms = math.nan
    if not limit_ms > 0:
        raise InvalidRequest(f"{text!r} sets no limit above 0 ms; write {name}:500", param="--goodput")
    return Slo(name, limit_ms)


def is_good(record: Record, slos: tuple[Slo, ...], *, from_schedule: bool = False) -> bool:
    """Whether a request was answered in full within all limits.

    As in vLLM, an answer of one token has no time per output token that could be too long.

    Args:
        record: The request.
        slos: The limits.
        from_schedule: Whether TTFT and E2EL count from when the request was to be sent.
    """
    if record.failure is not None:
        return False
    delay_ms = record.delay_ms if from_schedule else 0.0
    measured_ms = {
        "ttft": record.ttft_ms + delay_ms,
        "tpot": record.tpot_ms or 0.0,
        "e2el": record.e2el_ms + delay_ms,
    }
    return all(measured_ms[slo.name] <= slo.limit_ms for slo in slos)


def _is_name(name: str) -> TypeGuard[SloName]:
    return name in _NAMES
