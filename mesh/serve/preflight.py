"""What can go wrong and be known at once is found out before any long work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from mesh.api import ApiKeys, require_key_beyond_loopback
from mesh.cluster.addresses import check_port_free
from mesh.cluster.host_facts import HostFacts, read_host_facts
from mesh.cluster.members import check_name
from mesh.planner import HostCapacity, check_stages, plan
from mesh.serve.options import ctx_size_for
from mesh.stage_sizes import Workload
from mesh.tokenizer import Tokenizer
from spanmesh_proto.errors import ClusterError
from stages.cutting import ModelFacts, read_model_facts

if TYPE_CHECKING:
    from mesh.serve.options import ServeOptions

log = structlog.get_logger()


@dataclass(frozen=True)
class Preflight:
    """What is known before any work begins.

    Attributes:
        model: Facts of the model.
        tokenizer: The model's own.
        api_keys: Who may use the API; None lets everybody in.
        workload: What the KV caches must hold.
        facts: Of this host.
    """

    model: ModelFacts
    tokenizer: Tokenizer
    api_keys: ApiKeys | None
    workload: Workload
    facts: HostFacts


def check(options: ServeOptions) -> Preflight:
    """Look at everything that the user named.

    Raises:
        PortInUse: If another process listens where the API or the membership service is to.
        InvalidModel: If the model is no GGUF, truncated, or carries no vocabulary.
        UncuttableModel: If it cannot be cut as the user wants.
        ModelDoesNotFit: If no other host is to join and this one is too small.
        JoinError: If this host's name is none.
        ClusterError: If options contradict one another.
        MeshError: If the API would be open to other machines without a key.
    """
    api_keys = ApiKeys.from_file(options.api_key_path) if options.api_key_path is not None else None
    require_key_beyond_loopback(options.host, has_keys=api_keys is not None)
    if options.is_head_only and options.num_hosts == 0:
        raise ClusterError(
            "--head-only leaves no host to hold the model: add --wait-for with the number of hosts that "
            "will join",
            param="--wait-for",
        )
    check_port_free(options.host, options.port, "--port")
    check_port_free(options.advertise, options.join_port, "--join-port")
    model = read_model_facts(options.model)
    ctx_size = ctx_size_for(options.ctx_size, model.n_ctx_train)
    if ctx_size > model.n_ctx_train:
        log.warning("context_beyond_training", ctx_size=ctx_size, trained_for=model.n_ctx_train)
    workload = Workload(ctx_size, options.num_slots)
    check_name(options.name)
    check_stages(model, num_stages=options.num_stages, split=options.split)
    facts = read_host_facts(memory_bytes=options.memory_bytes, num_threads=options.num_threads)
    if options.num_hosts == 0:
        alone = HostCapacity(options.name, facts.memory_bytes, facts.speed_gb_per_s)
        plan(model, [alone], workload, num_stages=options.num_stages, split=options.split)
    return Preflight(model, Tokenizer(options.model), api_keys, workload, facts)
