"""Group, recording and drafters of tuning in the background, and its refusals."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from mesh.draft.drafter import read_drafter
from mesh.draft.loading import load_drafter
from mesh.serve.group_drafter import BASE
from mesh.serve.recording import AgreedKeys
from mesh.tuning.drafter_file import require_trainable
from mesh.tuning.tuned_folder import NO_KEY, TunedFolder
from mesh.tuning.tuner import require_torch
from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.draft.drafter import Drafter
    from mesh.engine import GenerationRequest
    from mesh.options.host import HeadOptions
    from mesh.serve.preflight import Preflight
    from speculative.draft.worker import LoadedDrafter

log = structlog.get_logger()


@dataclass(frozen=True)
class TuningRoom:
    """A group of API keys, its recording and its drafters."""

    options: HeadOptions
    """Options of the model."""
    known: Preflight
    """Results of the checks before the start."""
    group: str
    """The group."""
    base: Drafter
    """The drafter that the operator names: it serves all others, and the group before the first swap."""
    recording: Path
    """The recording that is learned from."""
    agreed: AgreedKeys
    """Groups of the keys that may be recorded."""

    @property
    def tuned(self) -> TunedFolder:
        """The group's tuned drafters."""
        return TunedFolder(self.recording)

    def members(self) -> frozenset[str]:
        """Digests of the group's keys as their file has them now, in hex; `NO_KEY` alone without keys."""
        if self.options.api_key_path is None:
            return frozenset({NO_KEY})
        groups = self.agreed() or {}
        return frozenset(digest for digest, group in groups.items() if group == self.group)

    def is_member(self, request: GenerationRequest) -> bool:
        """Whether a request is of the group: by its key, and without keys if it is recorded."""
        if self.options.api_key_path is None:
            return request.recording is not None
        # Of a key that was removed and came back, its identity says so behind the digest.
        return (request.client or "").partition("-")[0] in self.members()

    def file(self, number: int) -> Path:
        """The file of a drafter."""
        return self.base.path if number == BASE else self.tuned.file(number)

    def base_digest(self) -> str:
        """SHA-256 of the base drafter's file, in hex."""
        with self.base.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def load(self, number: int) -> LoadedDrafter:
        """Load a tuned drafter, and have it draft some tokens.

        Raises:
            ModelError: If it cannot draft.
        """
        drafter = read_drafter(self.file(number), self.known.model)
        limits = self.options.draft_options(self.known.draft_ctx_size)
        return load_drafter(drafter, self.known.tokenizer, limits, root=self.tuned.loaded(number))


def tuning_room(options: HeadOptions, known: Preflight) -> TuningRoom | None:
    """Check that a drafter can be tuned; None if none is to be.

    Raises:
        ClusterError: If there is no drafter of a kind that can be tuned.
        ModelError: If torch is missing.
    """
    group, recording, drafter = options.tune_group, options.record_path, known.drafter
    if group is None or recording is None:
        return None
    if options.draft_path is None or drafter is None:
        raise ClusterError(
            "--tune needs an EAGLE-3 drafter to begin with, and none is named: `mesh draft begin` writes one "
            "that is untrained",
            param="--tune",
        )
    require_trainable(drafter)
    require_torch()
    room = TuningRoom(options, known, group, drafter, recording.absolute(), AgreedKeys(options.api_key_path))
    if not room.members():
        remedy = f"mesh keys add NAME --may-record --group {group}"
        log.warning("tuning_group_empty", group=group, remedy=remedy)
    return room
