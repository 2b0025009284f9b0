"""`mesh serve` from its first check to its last goodbye."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NoReturn

from mesh.api import create_app, serve_api
from mesh.cluster.discovery import announced, head_found
from mesh.interruption import first_of
from mesh.serve.announce import print_served
from mesh.serve.bringup import Bringup
from mesh.serve.head import Head, open_head
from mesh.serve.inspection import Inspection
from mesh.serve.measured_links import measured_links
from mesh.serve.pending import PendingEngine
from mesh.serve.preflight import check
from mesh.serve.proposers import open_proposers
from mesh.serve.speculation_fit import fitted_to
from mesh.serve.stage_counts import stage_counts
from mesh.serve.state import MeshState
from mesh.serve.succession import open_succession
from mesh.tracing import closing, open_tracer
from spanmesh_proto.errors import ClusterError
from stages.cutting import StageCache
from stages.cutting.gguf_parts import model_name

if TYPE_CHECKING:
    from mesh.interruption import Interruption
    from mesh.serve.options import ServeOptions


async def serve_mesh(options: ServeOptions, interruption: Interruption) -> None:
    """Serve until interrupted. However it ends, nothing that it started is left.

    Args:
        options: What the user says.
        interruption: What cancels this.

    Raises:
        MeshError: If anything stands in the way; the message says what, and what to do.
    """
    known = check(options)
    options = fitted_to(options, known.model)
    engine = PendingEngine(known.workload.ctx_size)
    state = MeshState(
        known.model,
        engine,
        numeric_mode="exact" if options.is_exact else "fast",
        speculation_mode=options.speculation.mode,
    )
    cache = StageCache()
    tracer = open_tracer()
    app = create_app(
        engine=engine,
        tokenizer=known.tokenizer,
        model_id=model_name(options.model),
        created=int(time.time()),
        api_keys=known.api_keys,
        cors_origins=options.cors_origins,
        status=state.as_dict,
        ready=lambda: engine.coordinator is not None,
        is_whole=lambda: engine.is_ready,
        refusal=lambda: engine.refusal,
        stage_counts=lambda: stage_counts(engine),
        measure_links=lambda num_probes, bulk_bytes: measured_links(state, num_probes, bulk_bytes),
        departures=lambda: state.departures,
        look_into_hosts=lambda: state.inspection,
        tracer=tracer,
    )
    await asyncio.to_thread(app.state.backend.chat_template.try_out)
    with (
        closing(tracer),
        open_proposers(options, known) as proposers,
        open_succession(options, known) as succession,
    ):
        async with (
            serve_api(app, options.host, options.port, is_insecure=options.is_insecure) as url,
            open_head(options, known.facts, cache, interruption, succession.former) as head,
            announced(head_found(options.name, head.service.token), is_wanted=options.is_discoverable),
        ):
            state.members, state.survey = head.members, head.survey
            state.inspection = Inspection(head.driver, head.members, state)
            bringup = Bringup(options, known, state, head, cache, proposers=proposers, succession=succession)
            await first_of(bringup.run(lambda: print_served(options, state, url, head)), _watch_ray(head))


async def _watch_ray(head: Head) -> NoReturn:
    await head.node.ended()
    raise ClusterError("the head's Ray node ended; see what else runs on this host and start again")
