"""`hf:org/repo:QUANT`: a model at the hub, as users name it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from spanmesh_proto.errors import ModelError

PREFIX: Final = "hf:"
# The hub's own rule; a folder here is called so, too.
_NAME: Final = r"(?![A-Za-z0-9_.-]*(?:\.\.|--))[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_REFERENCE: Final = re.compile(
    rf"hf:(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>[^:@\s]+))?(?::(?P<wanted>[\w./-]+))?"
)


@dataclass(frozen=True)
class HubReference:
    """A model at the hub.

    Attributes:
        repo: `org/repo`.
        revision: Branch, tag or commit.
        wanted: Quantisation, or the file's name; None if the repository has but one model.
    """

    repo: str
    revision: str = "main"
    wanted: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{PREFIX}{self.repo}{revision}" + (f":{self.wanted}" if self.wanted else "")


def is_reference(text: str) -> bool:
    """Whether a user means the hub, not a file."""
    return text.startswith(PREFIX)


def parse_reference(text: str) -> HubReference:
    """What `hf:org/repo:QUANT` means.

    Raises:
        ModelError: If it is not written like that.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise ModelError(f"{text!r} names no model at the hub; write it like hf:org/repo:Q4_K_M")
    return HubReference(match["repo"], match["revision"] or "main", match["wanted"])
