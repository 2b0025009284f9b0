"""One request under load, with what was answered. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mesh.bench.serve.record import Failure, Record


@dataclass(frozen=True)
class Told:
    """A request and its answer.

    Attributes:
        record: Times, counts, failure.
        text: The answer.
        token_ids: Its tokens; none if the server does not send them.
        faults: What is wrong with the stream, apart from a failure.
    """

    record: Record
    text: str
    token_ids: tuple[int, ...]
    faults: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Told:
        """What `as_dict` made, after JSON: which knows no tuples."""
        record = dict(fields["record"])
        if record["failure"] is not None:
            record["failure"] = Failure(**record["failure"])
        record["parts_s"] = tuple(record["parts_s"])
        return cls(Record(**record), fields["text"], tuple(fields["token_ids"]), tuple(fields["faults"]))
