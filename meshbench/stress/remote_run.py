"""Run of `mesh bench stress --url`: the load of a lab's run on a mesh that runs already."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import structlog

from meshbench.load_client.client import LoadClient
from meshbench.stress.harness import LoadTestBed
from meshbench.stress.load_run import LoadRun, Subject
from meshbench.under_test.links import known_links
from meshbench.under_test.mesh import reach_mesh, tokenizer_of
from spanmesh_proto import SOFTWARE_VERSION
from stages.process_limits import num_usable

if TYPE_CHECKING:
    from meshbench.report_tools import Report
    from meshbench.stress.options import RemoteStressOptions
    from meshbench.under_test.mesh import ServedModel

# Only measured of a mesh whose processes run on this machine.
_OMITTED: Final = (
    "memory of processes, and whether it is flat: they run on other machines",
    "processor time, and the share of what the processors can compute: likewise",
    "llama.cpp RPC on the same hosts, as --peer measures it in the lab",
)

log = structlog.get_logger()


def run_remote_stress(options: RemoteStressOptions) -> Report:
    """Measure and write the report, of as much as could be measured, also when Ctrl-C ends it.

    Raises:
        MeshError: If no mesh answers, or it is not ready, or an input is wrong.
    """
    target = options.target
    # A mesh that may speculate does so where requests allow it; without the field they allow all.
    speculation = {} if options.speculate == "auto" else {"speculation": {"mode": options.speculate}}
    mesh, served = reach_mesh(target, speculation)
    tokenizer = tokenizer_of(target, mesh)
    num_places = served.num_places(has_key=target.api_key is not None)
    if options.with_clients and target.api_key is not None:
        # Until the server has noticed that a client hung up, its next request is beside the old one.
        num_places = max(1, num_places // 2)
    omitted = list(_OMITTED)
    if tokenizer is None:
        omitted.append("whether each text is that of its own tokens: name the model's file as MODEL")
    if "memory" in options.lines and options.preset == "acceptance":
        omitted.append("the line `memory` of the acceptance table")
    plan = options
    if options.fits_slots and options.preset == "ramp" and max(options.concurrency) > num_places:
        steps = tuple(count for count in options.concurrency if count <= num_places) or (num_places,)
        plan = replace(options, concurrency=steps)
        omitted.append(
            f"steps of more than {num_places} at once, which the mesh would not answer at once: name them"
            " with --concurrency"
        )
    log.info("remote_mesh", url=mesh.url, model=mesh.model, stages=len(served.stages), slots=served.num_slots)
    links = known_links(target)
    with LoadClient(None) as load_client:
        run = LoadRun(
            plan,
            LoadTestBed(load_client, mesh, served.ctx_size),
            Subject(served.is_exact, num_places, tokenizer),
        )
        run.work()
        report = run.report(_conditions(plan, mesh.url, served), links=links, omitted=omitted)
    report.write(options.output)
    return report


def _conditions(options: RemoteStressOptions, url: str, served: ServedModel) -> dict[str, Any]:
    return {
        "url": url,
        "preset": options.preset,
        **served.as_conditions(),
        "speculation_of_requests": options.speculate,
        "api_keys": 0 if options.target.api_key is None else 1,
        "hang_ups": options.hang_up_share,
        "chats": options.num_scripts,
        "seed": options.seed,
        "goodput": ", ".join(f"{slo.name} {slo.limit_ms:g} ms" for slo in options.slos) or "no limits",
        "cores_of_the_client": num_usable(),
        "software_of_the_client": f"spanmesh {SOFTWARE_VERSION}",
    }
