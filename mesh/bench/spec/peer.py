"""llama.cpp RPC with its own ways to speculate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class PeerSetting:
    """How its server is started.

    Attributes:
        name: For tables.
        options: Of `llama-server`, besides those that spread the model over hosts.
    """

    name: str
    options: tuple[str, ...]


def peer_settings(draft_model: Path | None) -> tuple[PeerSetting, ...]:
    """What is tried: nothing, its n-gram modes, and a draft model of several lengths if there is one.

    Its n-gram modes look for 12 equal tokens by default, which chat hardly ever has; they are given a length
    that finds something. The draft model stays on the head, where it costs no network; by default it would be
    spread over the hosts like the model itself.
    """
    found = [
        PeerSetting("off", ()),
        PeerSetting(
            "ngram-simple",
            _spec("ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8"),
        ),
        PeerSetting("ngram-cache", _spec("ngram-cache")),
    ]
    if draft_model is not None:
        model = ("--spec-draft-model", str(draft_model))
        draft = (*model, "--spec-draft-device", "none", "--spec-draft-threads", "1")
        found += [
            PeerSetting(
                f"draft/{length} p_min {p_min}",
                _spec(
                    "draft-simple",
                    *draft,
                    *("--spec-draft-n-max", str(length), "--spec-draft-p-min", str(p_min)),
                ),
            )
            for length, p_min in ((2, 0.0), (4, 0.0), (8, 0.5))
        ]
    return tuple(found)


def _spec(kind: str, *options: str) -> tuple[str, ...]:
    return ("--spec-type", kind, *options)
