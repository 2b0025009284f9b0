"""Coordinator of a served model: its options and plugs, by the user's options and the model's facts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mesh.coordinator.composition import plugs_of
from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.options import CoordinatorOptions
from stages.runtime.numerics import numerics_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.coordinator.ring import StageAddress
    from mesh.options.host import HeadOptions
    from mesh.serve.preflight import Preflight
    from mesh.serve.proposers import Proposers
    from mesh.serve.stage_handle import RingCredentials
    from stages.transport.channels import Identity


def new_coordinator(
    stages: Sequence[StageAddress],
    options: HeadOptions,
    known: Preflight,
    *,
    proposers: Proposers | None,
    credentials: RingCredentials,
    identity: Identity,
) -> Coordinator:
    """A coordinator of loaded stages, which is not started.

    Args:
        stages: Addresses of the stages, in pipeline order.
        options: Options, fitted to the model.
        known: Results of the checks, with the context that is served.
        proposers: Proposers for each request; None for plain decoding.
        credentials: Keys of the ring.
        identity: TLS identity shown to the stages.
    """
    model, workload, tokenizer = known.model, known.workload, known.tokenizer
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
            None if proposers is None else proposers.feature_needs,
            has_assistant=proposers is not None and proposers.assistant is not None,
        ),
        mesh_id=credentials.mesh_id,
        mesh_key=credentials.mesh_key,
        make_proposers=proposers,
        clock_s=time.monotonic,
        identity=identity,
        term=credentials.term,
    )
