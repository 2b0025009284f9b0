"""Coordinator of a served model: its options and plugs, by the user's options and the model's facts."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesh.coordinator.composition import plugs_of
from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.options import CoordinatorOptions
from mesh.serve.background_tuning import BackgroundTuning
from mesh.serve.proposers import open_proposers
from mesh.serve.recording import open_recorder
from mesh.serve.tuning_room import tuning_room
from mesh.tuning.background import TuningBounds
from mesh.tuning.jobs import Schedule
from stages.runtime.numerics import numerics_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mesh.coordinator.ring import StageAddress
    from mesh.options.host import HeadOptions
    from mesh.serve.preflight import Preflight
    from mesh.serve.proposers import Proposers
    from mesh.serve.recording import OpenRecorder
    from mesh.serve.stage_handle import RingCredentials
    from stages.transport.channels import Identity


@dataclass(frozen=True)
class CoordinatorParts:
    """What a coordinator works with that outlasts its rings and is made before them."""

    proposers: Proposers | None = None
    """Proposers for each request; None for plain decoding."""
    recording: OpenRecorder | None = None
    """Recorder of answers; None if none are recorded."""
    tuning: BackgroundTuning | None = None
    """What tunes the drafter of a group on them; None if nothing does."""


@contextmanager
def open_parts(options: HeadOptions, known: Preflight) -> Iterator[CoordinatorParts]:
    """Recorder, proposers and tuning as the options ask for.

    Raises:
        MeshError: See `tuning_room`, `open_recorder` and `open_proposers`.
    """
    room = tuning_room(options, known)
    is_member = None if room is None else room.is_member
    # A folder that is refused is no reason to load a draft model.
    with open_recorder(options, known) as recording, open_proposers(options, known, is_member) as proposers:
        if room is None or proposers is None or proposers.group is None:
            yield CoordinatorParts(proposers, recording)
            return
        bounds = TuningBounds(options.tune_idle_s, schedule=Schedule(minutes=options.tune_minutes))
        tuning = BackgroundTuning(room, proposers.group, bounds)
        with closing(tuning):
            yield CoordinatorParts(proposers, recording, tuning)


def new_coordinator(
    stages: Sequence[StageAddress],
    options: HeadOptions,
    known: Preflight,
    *,
    parts: CoordinatorParts,
    credentials: RingCredentials,
    identity: Identity,
) -> Coordinator:
    """A coordinator of loaded stages, which is not started.

    Args:
        stages: Addresses of the stages, in pipeline order.
        options: Options, fitted to the model.
        known: Results of the checks, with the context that is served.
        parts: Its recorder and proposers.
        credentials: Keys of the ring.
        identity: TLS identity shown to the stages.
    """
    model, workload, tokenizer = known.model, known.workload, known.tokenizer
    proposers, recording = parts.proposers, parts.recording
    needs = None if proposers is None else proposers.feature_needs
    if needs is None and recording is not None:
        needs = recording.needs
    core = CoordinatorOptions(
        context_length=workload.ctx_size,
        num_slots=workload.num_slots,
        max_rows=numerics_for(exact=options.exact, num_threads=1).max_rows,
        n_vocab=tokenizer.n_vocab,
        token_texts=lambda: tokenizer.texts,
        max_waiting=options.max_waiting,
        controller=options.controller_options(),
        can_trim=model.can_trim,
        cancels=options.cancels,
        num_groups=options.num_groups,
    )
    return Coordinator(
        stages,
        core,
        plugs=plugs_of(
            options,
            model,
            needs,
            recorder=None if recording is None else recording.recorder,
            has_assistant=proposers is not None and proposers.assistant is not None,
            tuning=parts.tuning,
        ),
        mesh_id=credentials.mesh_id,
        mesh_key=credentials.mesh_key,
        make_proposers=proposers,
        clock_s=time.monotonic,
        identity=identity,
        term=credentials.term,
    )
