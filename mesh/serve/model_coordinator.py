"""Coordinator of a served model: its options and plugs, by the user's options and the model's facts."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesh.coordinator.composition import plugs_of
from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.options import CoordinatorOptions
from mesh.serve.proposers import open_proposers
from mesh.serve.recording import open_recorder
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


@contextmanager
def open_parts(options: HeadOptions, known: Preflight) -> Iterator[CoordinatorParts]:
    """Recorder and proposers as the options ask for; see `open_recorder` and `open_proposers`.

    Raises:
        MeshError: As they do.
    """
    # A folder that is refused is no reason to load a draft model.
    with open_recorder(options, known) as recording, open_proposers(options, known) as proposers:
        yield CoordinatorParts(proposers, recording)


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
        ),
        mesh_id=credentials.mesh_id,
        mesh_key=credentials.mesh_key,
        make_proposers=proposers,
        clock_s=time.monotonic,
        identity=identity,
        term=credentials.term,
    )
