"""Preflight checks, before any long work, with recorded answers and memory beside stages on the head."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import structlog

from mesh.api.api_keys import ApiKeys
from mesh.api.auth import check_origins, require_key_beyond_loopback
from mesh.cluster.addresses import bind_address, check_port_free
from mesh.cluster.host_facts import HostFacts, find_gpus, read_host_facts
from mesh.cluster.members import check_name
from mesh.draft.drafter import Drafter, own_head, read_drafter, with_drafter
from mesh.draft.memory import drafter_bytes, most_ctx_size, tuning_bytes
from mesh.placement.gpu_layers import check_gpu_layers
from mesh.placement.host_assignment import never
from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.placement.planner import Plan, check_stages, plan
from mesh.serve.options import ctx_size_for, fitted_to, picture_bytes_for
from mesh.text.text_service import text_bytes_of, worker_bytes
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import ClusterError, ModelDoesNotFit
from stages.gguf import part_paths
from stages.runtime.kv_types import check_kv_type
from stages.slicing.model_facts import ModelFacts, read_model_facts
from stages.transport.hidden_codec import HiddenType
from stages.units import format_size
from stages.weights.hashing import stamps_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from mesh.options.host import HeadOptions
    from mesh.placement.host_capacity import HostCapacity
    from stages.weights.hashing import FileStamp

# The last line is searched in this many bytes first: the file grows while a benchmark runs.
_TAIL_BYTES: Final = 1 << 20
# With more than the fewest positions a draft model takes at most this part of its host's memory.
_DRAFT_PART: Final = 8
# The base drafter, a tuned one, and one that takes its place while sessions still use that.
_NUM_TUNED: Final = 3

log = structlog.get_logger()


@dataclass(frozen=True)
class Preflight:
    """Results of the checks before any work begins."""

    model: ModelFacts
    """Facts of the model."""
    tokenizer: Tokenizer
    """Tokenizer of the model."""
    api_keys: ApiKeys | None
    """Keys that open the API; None opens it without a key."""
    workload: Workload
    """What stages must hold besides weights. Unless the operator names a context, it has the fewest positions
    that are chosen; more are chosen once hosts have joined."""
    facts: HostFacts
    """Facts of this host."""
    stamps: tuple[FileStamp, ...]
    """Stamps of the model's files when they were read."""
    draft_bytes: int = 0
    """Memory of the draft model on this host."""
    request_bytes: int = 0
    """Memory of the processes on this host that read its texts and pictures."""
    draft_ctx_size: int = 0
    """Positions of one session of the draft model; beyond them nothing is drafted."""
    drafter: Drafter | None = None
    """The draft model, or the model's own head; None if nothing drafts."""


def latest_answer(path: Path) -> tuple[int, ...]:
    """Token ids of the last recorded answer: `{"tokens": [1, 2, 3]}`; empty if the file is.

    Raises:
        ClusterError: If the file cannot be read, or its last line is something else.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError as error:
        raise ClusterError(f"cannot read {path}: {error.strerror}", param="replay-file") from None
    if not lines:
        return ()
    try:
        return tuple(int(token) for token in json.loads(lines[-1])["tokens"])
    except (ValueError, TypeError, KeyError):
        raise ClusterError(
            f'the last line of {path} records no answer: write it like {{"tokens": [1, 2, 3]}}',
            param="replay-file",
        ) from None


def check(options: HeadOptions) -> Preflight:
    """Check all options, files and ports.

    Raises:
        PortInUse: If another process listens on the port of the API or of the membership service.
        InvalidModel: If the model or the draft is no GGUF or truncated, or the model has no vocabulary.
        UncuttableModel: If the model cannot be cut as requested.
        ModelDoesNotFit: If no other host is to join and this one is too small, or too small for the draft.
        JoinError: If this host's name is invalid.
        ClusterError: If options contradict one another, or the model, or recorded answers cannot be read.
        MeshError: If the API would be open to other machines without a key.
    """
    api_keys = ApiKeys.from_file(options.api_key_path) if options.api_key_path is not None else None
    has_keys = api_keys is not None
    require_key_beyond_loopback(options.host, has_keys=has_keys, is_insecure=options.insecure)
    check_origins(options.cors_origins, has_keys=has_keys)
    if options.head_only and options.num_hosts == 0:
        raise ClusterError(
            "--head-only leaves no host to hold the model: add --wait-for with the number of hosts that "
            "will join",
            param="--wait-for",
        )
    check_numbers(options)
    check_port_free(options.host, options.port, "--port")
    where = bind_address(options.address, options.other_addresses)
    check_port_free(where, options.join_port, "--join-port")
    check_name(options.name)
    if options.discoverable and ":" in options.address:
        raise ClusterError(
            f"--discoverable announces IPv4 addresses only, and other hosts reach this one at "
            f"{options.address}: leave it out and give them the join token, or --advertise an IPv4 address",
            param="--discoverable",
        )
    known = check_model(
        options,
        lambda: read_host_facts(
            memory_bytes=options.memory_bytes,
            num_threads=options.threads,
            gpu_layers=options.gpu_layers if options.gpu_layers or not options.exact else 0,
            cpu_moe_layers=options.cpu_moe_layers,
        ),
        taken_bytes=worker_bytes(),
    )
    known = replace(known, api_keys=api_keys)
    if options.num_hosts == 0:
        placed(options, known, [own_capacity(options.name, known)])
    return known


def check_model(
    options: HeadOptions, facts_of_host: Callable[[], HostFacts], *, taken_bytes: int = 0
) -> Preflight:
    """Check the model and its options.

    Args:
        options: Options of the model.
        facts_of_host: Reads the facts of this host; called last, since it takes some time.
        taken_bytes: Memory of this host that other models hold, and processes that read texts of all models.

    Raises:
        InvalidModel: If the model or the draft is no GGUF or truncated, or the model has no vocabulary.
        UncuttableModel: If the model cannot be cut as requested.
        ModelDoesNotFit: If this host is too small for the draft.
        ClusterError: If options contradict one another, or the model, or recorded answers cannot be read.
    """
    check_numbers(options)
    model = read_model_facts(options.model)
    stamps = stamps_of(part_paths(options.model))
    options = fitted_to(options, model)
    ctx_size = ctx_size_for(options.ctx_size, model.n_ctx_train)
    if ctx_size > model.n_ctx_train:
        log.warning("context_beyond_training", ctx_size=ctx_size, trained_for=model.n_ctx_train)
    check_kv_type(options.kv_type, model.name, model.head_widths, option="--kv-type")
    workload = Workload(
        ctx_size,
        options.parallel,
        options.kv_type,
        options.exact,
        num_checkpoints=0 if model.can_trim else options.checkpoints,
        repacks=options.repacks,
    )
    drafter = _drafter(options, model)
    model = with_drafter(model, drafter, options.parallel)
    check_stages(model, num_stages=options.stages, split=options.split)
    if options.topology is not None:
        options.topology.check(model)
    facts = facts_of_host()
    request_bytes = text_bytes_of(options.model) + picture_bytes_for(options)
    free_bytes = facts.memory_bytes - taken_bytes - request_bytes
    draft_ctx_size = _draft_ctx_size(options, drafter, StageSizes(model, workload), free_bytes)
    return Preflight(
        model,
        Tokenizer(options.model),
        None,
        workload,
        facts,
        stamps,
        _draft_bytes(options, drafter, draft_ctx_size, free_bytes),
        request_bytes,
        draft_ctx_size,
        drafter,
    )


def check_numbers(options: HeadOptions) -> None:
    """Check the options of the exact mode.

    Raises:
        ClusterError: Naming the option.
    """
    if options.exact and options.hidden_type is not HiddenType.F32:
        raise ClusterError(
            "--exact guarantees the same text in one stage or in many, which "
            f"--wire {options.hidden_type or 'auto'} does not: leave one out",
            param="--wire",
        )
    if options.exact and options.gpu_layers:
        check_gpu_layers(options.gpu_layers, find_gpus(), is_exact=True)


def placed(
    options: HeadOptions,
    known: Preflight,
    hosts: Sequence[HostCapacity],
    *,
    is_time_up: Callable[[], bool] = never,
) -> Plan:
    """Placement of the model on these hosts, within the options.

    Args:
        options: Options of the model.
        known: Results of the checks before the start.
        hosts: Capacities, in the order in which the hosts joined.
        is_time_up: See `mesh.placement.planner.plan`.

    Raises:
        ModelDoesNotFit: With the memory that is needed and that each host has.
        UncuttableModel: If the model cannot be cut as requested.
        NotEnoughHosts: If there is no host, or a host to which layers are locked is missing.
    """
    if options.topology is not None:
        return options.topology.plan(StageSizes(known.model, known.workload), hosts)
    return plan(
        known.model,
        hosts,
        known.workload,
        num_stages=options.stages,
        split=options.split,
        is_time_up=is_time_up,
    )


def own_capacity(name: str, known: Preflight) -> HostCapacity:
    """Capacity of this host for the planner."""
    return known.facts.capacity(name).on_head(
        draft_bytes=known.draft_bytes, request_bytes=worker_bytes() + known.request_bytes
    )


def _drafter(wanted: HeadOptions, model: ModelFacts) -> Drafter | None:
    """Check the files of proposers; returns the drafter, if there is one.

    Raises:
        InvalidModel: If the draft is no GGUF, truncated, or made for another model.
        UncuttableModel: If drafters of its kind cannot be run for this model.
        ClusterError: If the recorded answers cannot be read, or there is nothing that could draft.
    """
    if wanted.speculate != "off" and wanted.replay_path is not None:
        latest_answer(wanted.replay_path)
    if wanted.may_draft and wanted.draft_path is not None:
        return read_drafter(wanted.draft_path, model)
    drafter = own_head(model) if wanted.may_draft else None
    if drafter is None and wanted.speculate == "draft":
        raise ClusterError(
            "--speculate draft needs a draft model: name one with --draft; `mesh draft make` makes one "
            "from the model",
            param="--draft",
        )
    return drafter


def _draft_ctx_size(options: HeadOptions, drafter: Drafter | None, sizes: StageSizes, free_bytes: int) -> int:
    """Positions of one session of the draft model.

    It is loaded before the context of the stages is chosen. Where no context is requested, it has as large a
    one as could be chosen, halved until it takes a small part of this host's memory. If this host can hold
    the whole model beside a draft model with a short context, it still can.

    Args:
        options: Options of the model.
        drafter: The drafter, if there is one.
        sizes: Sizes of the model's stages, with the context that the placement is made for.
        free_bytes: Memory of this host for stages and the draft model.

    Raises:
        ClusterError: If the KV cache cannot have the requested format with its head size.
    """
    least = sizes.workload.ctx_size
    if drafter is None or drafter.is_beside_tail or options.ctx_size is not None:
        return least
    ctx_size = most_ctx_size(drafter, sizes.model)
    most_bytes = free_bytes // _DRAFT_PART
    beside_bytes = free_bytes - sizes.memory(sizes.whole).total_bytes
    if not options.head_only and _bytes_of(options, drafter, least) <= beside_bytes:
        most_bytes = min(most_bytes, beside_bytes)
    while ctx_size > least and _bytes_of(options, drafter, ctx_size) > most_bytes:
        ctx_size //= 2
    return max(ctx_size, least)


def _bytes_of(options: HeadOptions, drafter: Drafter, ctx_size: int) -> int:
    limits = options.draft_options(ctx_size)
    return drafter_bytes(drafter, options.model, limits, options.draft_context)


def _draft_bytes(options: HeadOptions, drafter: Drafter | None, ctx_size: int, free_bytes: int) -> int:
    """Memory of the draft model on this host, if there is one.

    Raises:
        ModelDoesNotFit: If that is more than is free.
        ClusterError: If the KV cache cannot have the requested format with its head size.
    """
    wanted = options
    if drafter is None:
        return 0
    needed, what = _bytes_of(options, drafter, ctx_size), ""
    remedy = "leave out --draft" if wanted.draft_path is not None else "add --no-draft-head"
    if options.tune_group is not None:
        needed = _NUM_TUNED * needed + tuning_bytes(drafter)
        what, remedy = f", {_NUM_TUNED} times for --tune and once in training,", "leave out --tune"
    if needed > free_bytes:
        raise ModelDoesNotFit(
            f"the draft model {drafter.path.name}{what} needs {format_size(needed)} of this host with "
            f"{options.parallel} x {ctx_size} positions in {wanted.draft_kv_type}; free are "
            f"{format_size(max(0, free_bytes))}; lower --ctx-size or --parallel, or {remedy}",
            param="--draft",
        )
    return needed
