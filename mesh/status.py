"""Status of a mesh: written by its head and coordinator, read by attribute everywhere else.

Names of fields are keys of the JSON of `/mesh/status`. The classes are plain dataclasses: pydantic is
imported when a status is read, so that what writes one needs no more packages and starts as quickly.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from dataclasses import Field

    from _typeshed import DataclassInstance
    from pydantic import TypeAdapter

# Metadata of fields that are left out of the JSON while they have their default, and while the field that is
# named is left out, too.
_BESIDE: Final = "beside"
_UNSET: Final = {_BESIDE: ""}
_OF_RING: Final = {_BESIDE: "sessions"}
_OF_CONTROLLER: Final = {_BESIDE: "policy"}
_OF_SERVER: Final = {_BESIDE: "mode"}

Part = TypeVar("Part", bound="DataclassInstance")


@dataclass(kw_only=True, slots=True)
class ModelDescription:
    """Facts of a model's file, and how it is served."""

    name: str = "?"
    """Name in the file."""
    architecture: str = "?"
    layers: int | None = field(default=None, metadata=_UNSET)
    """Number of layers."""
    file_bytes: int | None = field(default=None, metadata=_UNSET)
    context: int | None = field(default=None, metadata=_UNSET)
    """Positions of a session; of an embedding model, most tokens of a text."""
    numeric_mode: str = "?"
    """`fast` or `exact`."""
    dimensions: int | None = field(default=None, metadata=_UNSET)
    """Numbers of a vector, of an embedding model."""
    pooling: str | None = field(default=None, metadata=_UNSET)
    """How an embedding model makes one vector of a text."""
    projector: str | None = field(default=None, metadata=_UNSET)
    """Name of the file with which it reads pictures; None for one that reads text only."""
    projector_host: str | None = field(default=None, metadata=_UNSET)
    """Host that computes with it; None while a process of the head does."""
    projector_device: str | None = field(default=None, metadata=_UNSET)
    """GPU that computes with it; None for the processor."""
    projector_bytes: int | None = field(default=None, metadata=_UNSET)
    """Memory that it takes of its host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureStatus:
    """A lost stage."""

    at_s: float = 0.0
    """Time of the loss, Unix seconds."""
    host: str = ""
    """Host of the stage."""
    layers: str = ""
    """Layers of the stage, `[start, stop)`."""
    reason: str = ""
    """Reason as far as it is known; one line."""


@dataclass(kw_only=True, slots=True)
class RepairStatus:
    """Counts of losses and what followed."""

    losses: int = 0
    """Stages lost."""
    count: int = 0
    """Repairs."""
    last_s: float | None = None
    """Time for which the ring was down for the latest repair; None before the first."""
    moves: int = 0
    """Planned moves of layers between hosts."""


@dataclass(kw_only=True, slots=True)
class LoadingStatus:
    """A stage on its way to a host: at the start, in a repair, in a move."""

    host: str = ""
    layers: tuple[int, int] = (0, 0)
    """Half-open range."""
    bytes: int = 0
    """Memory that it will hold."""
    step: str = ""
    """Current step, in a few words."""
    share: float = 0.0
    """Share of the step that is done, 0 to 1."""
    fetched_bytes: int = 0
    """Weights fetched so far."""
    fetch_bytes: int = 0
    """All weights to fetch."""


@dataclass(kw_only=True, slots=True)
class StageCounts:
    """Counters of a stage since its start; None if it did not answer in time."""

    open_sessions: int | None = field(default=None, metadata=_UNSET)
    """Sessions that it knows."""
    queued_windows: int | None = field(default=None, metadata=_UNSET)
    """Windows that wait now."""
    dropped_windows: int | None = field(default=None, metadata=_UNSET)
    """Void windows dropped."""
    decodes: int | None = field(default=None, metadata=_UNSET)
    """Batches computed."""
    rows: int | None = field(default=None, metadata=_UNSET)
    """Rows computed."""
    decode_cpu_ms: float | None = field(default=None, metadata=_UNSET)
    """Processor time of the computing thread inside llama.cpp."""
    sent_bytes: int | None = field(default=None, metadata=_UNSET)
    """Sent to the next stage."""
    resident_bytes: int | None = field(default=None, metadata=_UNSET)
    """Memory of its process, mapped files included."""


@dataclass(kw_only=True, slots=True)
class StageStatus(StageCounts):
    """A stage of the ring, with what the coordinator knows of it and its own counters."""

    index: int = 0
    """Place in the pipeline."""
    host: str = ""
    address: str = ""
    layers: tuple[int, int] = (0, 0)
    """Half-open range."""
    wire: str | None = None
    """Encoding of hidden states sent to the next stage; None for the tail."""
    windows: int = 0
    """Windows computed since the ring was made, chunks of prompts too."""
    compute_ms: float = 0.0
    """Computing them."""
    queue_ms: float = 0.0
    """Their waiting."""
    mean_compute_ms: float = 0.0
    mean_queue_ms: float = 0.0
    rtt_ms: float | None = None
    """Round trip from the coordinator; None if unknown."""


@dataclass(kw_only=True, slots=True)
class EmbeddingStageStatus:
    """The process of an embedding model."""

    index: int = 0
    host: str = ""
    address: str | None = None
    """None until it serves."""
    layers: tuple[int, int] = (0, 0)
    """Half-open range: all of them."""
    threads: int | None = field(default=None, metadata=_UNSET)
    """Compute threads."""


@dataclass(kw_only=True, slots=True)
class PrefillStatus:
    """A prompt that is being read."""

    read: int = 0
    """Tokens read so far."""
    prompt: int = 0
    """Tokens of the prompt."""


@dataclass(kw_only=True, slots=True)
class SessionsStatus:
    """Sessions and slots of a model."""

    running: int = 0
    """Requests with a slot."""
    waiting: int = 0
    """Requests that wait for a slot."""
    paused: int = 0
    """Sessions whose client does not read."""
    slots: int = 0
    """Concurrent sessions."""
    positions: int = 0
    """Positions in use, of all sessions."""
    prefill: tuple[PrefillStatus, ...] = ()
    """Prompts that are being read."""
    context: int = 0
    """Positions of one session, prompt and answer together."""
    groups: int = 0
    """Groups of decoding sessions, whose windows travel together."""
    largest_group: int = 0
    """Sessions of the largest."""
    groups_found: dict[int, int] = field(default_factory=dict)
    """Best number of groups, by the number of sessions."""


@dataclass(kw_only=True, slots=True)
class TokenCounts:
    """Tokens since the start."""

    prompt: int = 0
    generated: int = 0


@dataclass(kw_only=True, slots=True)
class EmbeddingCounts:
    """Requests to an embedding model since it was loaded."""

    waiting: int = 0
    """Requests with texts that wait now."""
    requests: int = 0
    """Requests that ended."""
    texts: int = 0
    """Texts whose vectors were computed."""
    tokens: int = 0
    """Their tokens."""
    batches: int = 0
    compute_ms: float = 0.0
    """Computing batches."""


@dataclass(kw_only=True, slots=True)
class ProposerStatus:
    """Proposals of one proposer."""

    drafts: int = 0
    """Windows that proposed tokens."""
    drafted: int = 0
    """Tokens proposed and verified."""
    accepted: int = 0
    """Those that the model chose too."""
    mean_accepted: float = 0.0
    """Of a window that proposed tokens."""
    drafted_per_position: tuple[int, ...] = ()
    """Tokens by their place in the window."""
    accepted_per_position: tuple[int, ...] = ()
    reached_per_position: tuple[int, ...] = ()
    """Those before which all tokens were accepted."""
    spans: dict[str, int] = field(default_factory=dict)
    """Windows by how much of them was accepted, and whether an end token was among that."""
    drafted_per_depth: tuple[int, ...] | None = field(default=None, metadata=_UNSET)
    """Tokens by distance from the drafter's last feature, those of void windows too; None of a proposer that
    reads no features, and so are the other ones by depth."""
    reached_per_depth: tuple[int, ...] | None = field(default=None, metadata=_UNSET)
    accepted_per_depth: tuple[int, ...] | None = field(default=None, metadata=_UNSET)
    acceptance_per_depth: tuple[float, ...] | None = field(default=None, metadata=_UNSET)
    conditional_acceptance_per_depth: tuple[float, ...] | None = field(default=None, metadata=_UNSET)
    """Shares of the tokens before which all were accepted."""


@dataclass(kw_only=True, slots=True)
class FeatureStatus:
    """Hidden states of the model that a drafter or a recording reads."""

    wanted: int = 0
    """Positions whose hidden states were asked for."""
    received: int = 0
    """Those among them whose hidden states arrived."""
    missing: int = 0
    """Those among them whose hidden states did not."""
    bytes: int = 0
    """Size of all that arrived."""
    off: str | None = None
    """Reason why they do not come; None while they do."""


@dataclass(kw_only=True, slots=True)
class TailDraftStatus:
    """Drafts of an assistant beside the last stage."""

    drafts: int = 0
    """Drafts that came."""
    tokens: int = 0
    """Their tokens."""
    off: str | None = None
    """Reason why none come; None while they do."""


@dataclass(kw_only=True, slots=True)
class WindowTimes:
    """Mean times of a window, milliseconds."""

    round_trip: float = 0.0
    verify: float = 0.0
    """Computing, sampling and verifying."""
    queue: float = 0.0
    """Waiting at stages."""
    network: float = 0.0
    """The rest."""


@dataclass(kw_only=True, slots=True)
class SpeculationStatus:
    """Speculation over judged windows, without prefill chunks."""

    mode: str | None = field(default=None, metadata=_UNSET)
    """Proposers that the server allows."""
    policy: str | None = field(default=None, metadata=_UNSET)
    """`auto` or `fixed`; None before the first session with proposers, and so are the controller's other
    figures, which are those of the latest session."""
    width: int | None = field(default=None, metadata=_OF_CONTROLLER)
    """Most proposed tokens in a window."""
    depth: int | None = field(default=None, metadata=_OF_CONTROLLER)
    """Most windows in flight."""
    expected_tokens_per_s: float | None = field(default=None, metadata=_OF_CONTROLLER)
    measured_tokens_per_s: float | None = field(default=None, metadata=_OF_CONTROLLER)
    """While it speculated."""
    plain_tokens_per_s: float | None = field(default=None, metadata=_OF_CONTROLLER)
    """What plain windows would bring."""
    won_tokens: float | None = field(default=None, metadata=_OF_CONTROLLER)
    """Tokens beyond those that plain windows would have brought."""
    contention: float | None = field(default=None, metadata=_OF_CONTROLLER)
    """Factor of the stages' times while windows are in flight together; 1 for none."""
    reason: str | None = field(default=None, metadata=_OF_SERVER)
    """Reason of the controller's latest decision, or why nothing can be proposed."""
    windows: int = 0
    """Windows judged."""
    proposed: int = 0
    """Tokens proposed and verified."""
    accepted: int = 0
    """Those that the model chose too."""
    tokens_per_window: float = 0.0
    """Mean of committed ones."""
    acceptance_per_position: tuple[float, ...] = ()
    """Share of the windows whose token at this place was accepted."""
    conditional_acceptance_per_position: tuple[float, ...] = ()
    """Likewise, of windows whose tokens before it were."""
    proposers: dict[str, ProposerStatus] = field(default_factory=dict)
    """By name."""
    features: FeatureStatus | None = None
    """Features that were asked for; None if neither a drafter reads them nor a recording."""
    tail_drafts: TailDraftStatus | None = field(default=None, metadata=_UNSET)
    """Drafts of an assistant beside the last stage; None without one, and so is that of an answer."""
    stale_windows: int = 0
    """Windows that a rejection voided on their way."""
    stale_rows: int = 0
    """Their rows."""
    stale_rows_computed: int = 0
    """Those of them that all stages computed."""
    recomputed_rows: int = 0
    """Rows of accepted tokens that were computed again by models with recurrent layers."""
    cancels: int = 0
    """Cancel messages."""
    mean_window_ms: WindowTimes = field(default_factory=WindowTimes)
    draft_ms_per_token: float | None = None
    """Time of the draft model per token; None without one."""
    draft_tokens_per_pass: float | None = None
    """Tokens that it drafts at once, in the mean: 1, or those of a block; None without one."""


@dataclass(kw_only=True, slots=True)
class RoundTripStatus:
    """Round trips of decoding windows, as sums over their parts; bytes of all windows.

    The difference of two readings covers the time between them.
    """

    windows: int = 0
    wire_ms: tuple[float, ...] = ()
    """By hop, of which there is one more than there are stages."""
    queue_ms: tuple[float, ...] = ()
    """By stage."""
    compute_ms: tuple[float, ...] = ()
    """By stage."""
    sent_bytes: int = 0
    """Sent by the coordinator."""
    received_bytes: int = 0
    """Received by the coordinator."""


@dataclass(kw_only=True, slots=True)
class BlocksStatus:
    """KV rows on one stage's disk."""

    files: int = 0
    bytes: int = 0
    """Size of the files."""
    most_bytes: int = 0
    """Limit for all stages of its host together."""
    written: int = 0
    """Blocks written."""
    left_out: int = 0
    """Blocks left out: the disk was behind, full or failing."""
    damaged: int = 0
    """Damaged or foreign files, which were removed."""
    restored: int = 0
    """Sessions that began with rows from there."""
    restored_tokens: int = 0


@dataclass(kw_only=True, slots=True)
class KvDiskStatus:
    """KV rows on the stages' disks."""

    on: bool = False
    """Whether prefixes are fetched from there."""
    fetched: int = 0
    """Requests that began with tokens from disk."""
    fetched_tokens: int = 0
    """Those tokens."""
    failed: int = 0
    """Fetches that brought nothing, after which prompts were computed."""
    stages: tuple[BlocksStatus | None, ...] = ()
    """By stage; None of one that did not tell."""


@dataclass(kw_only=True, slots=True)
class RecordingStatus:
    """Answers that are recorded, for drafters that are tuned on them."""

    id: str = ""
    """Name of this run of the recorder, which its folder's lock holds as well."""
    conversations: int = 0
    """Answers in the folder."""
    tokens: int = 0
    """Their tokens, prompts left out."""
    bytes: int = 0
    """Size of their files."""
    most_bytes: int = 0
    """Limit of that: the oldest go first."""
    written: int = 0
    """Answers written since the start."""
    left_out: int = 0
    """Answers left out since then: the disk was behind, full or failing, or hidden states did not come."""
    erased: int = 0
    """Answers erased since then, with their API key or its right, or by their age."""
    off: str | None = None
    """Reason why none are written; None while they are."""


@dataclass(kw_only=True, slots=True)
class TuningStatus:
    """A drafter that is tuned in the background, on the answers to a group of API keys."""

    group: str = ""
    """The group."""
    state: Literal["waiting for answers", "waiting for idleness", "tuning", "paused"] = "waiting for answers"
    """What it does; paused while requests run, and for a minute behind them."""
    step: str | None = None
    """What is being done, or was before the pause, and how far it is; None between trainings."""
    drafter: str | None = None
    """Name of the tuned file that the group is served with; None for the base drafter."""
    age_s: int | None = None
    """Seconds since it was chosen."""
    gain: float | None = None
    """Accepted tokens of a window more than the drafter before, on answers that neither learned from."""
    learned_tokens: int = 0
    """Tokens of the answers that it learned from."""
    learned_prompts: int = 0
    """Their prompts."""
    new_tokens: int = 0
    """Tokens of answers since the latest training began."""
    new_prompts: int = 0
    """Prompts from which the served drafter has not learned."""
    chosen: int = 0
    """Candidates chosen since the start."""
    refused: int = 0
    """Candidates refused since then: not surely better, or trainings that failed."""
    gone_back: int = 0
    """How often the group went back to an earlier drafter since then."""
    latest: str | None = None
    """What became of the latest candidate, or why the group went back; None before any."""


@dataclass(kw_only=True, slots=True)
class WeightsStatus:
    """Weights brought to a host since the head was started."""

    reused_bytes: int = 0
    """Read on the host itself."""
    head_bytes: int = 0
    """Sent by the head."""
    hub_bytes: int = 0
    """Sent by the hub."""
    wrong_pieces: int = 0
    """Pieces with a wrong hash, which were fetched again."""


@dataclass(kw_only=True, slots=True)
class GpuStatus:
    """A device of a host to which layers can go."""

    name: str = ""
    """As llama.cpp calls it."""
    description: str = ""
    """Name for display."""
    free_bytes: int = 0
    total_bytes: int = 0
    speed_gb_per_s: float = 0.0
    """Speed at which it reads weights."""
    shares_host_memory: bool = False


@dataclass(kw_only=True, slots=True)
class HostStatus:
    """A host of the mesh."""

    name: str = ""
    address: str = ""
    """For the other hosts."""
    ready: bool = False
    """Whether a stage can be placed there."""
    leaving: bool = False
    """Whether it leaves as soon as its layers have moved."""
    layers: str = ""
    """Layers that it holds, for display."""
    copies: tuple[str, ...] = ()
    """Layers of replicas."""
    weights: WeightsStatus = field(default_factory=WeightsStatus)
    memory_bytes: int = 0
    """Memory for the mesh."""
    held_bytes: int = 0
    """Of that, held by all models: stages, replicas, draft models."""
    threads: int = 0
    """Compute threads."""
    speed_gb_per_s: float = 0.0
    """Memory read speed."""
    gpus: tuple[GpuStatus, ...] = ()
    gpu_layers: str = "auto"
    """Layers of each stage on GPUs, as an operator writes it."""
    cpu_moe_layers: str = "auto"
    """Of a model's first layers, the experts stay with the processor."""
    llama_cpp: str = ""
    """Version."""
    attention: str = ""
    """What computes attention on its processor."""
    attention_version: int = 0
    platform: str = ""
    """System and processor."""
    port_range: str | None = None
    """Ports on which it may listen; None for any free ones."""


@dataclass(kw_only=True, slots=True)
class LibraryStatus:
    """A model that requests load."""

    name: str = ""
    phase: str = ""
    context: int = 0
    """Positions of a session."""
    size_bytes: int = 0
    """Size of its file."""
    projector: str | None = None
    """Name of the file with which it reads pictures; None for text only."""


@dataclass(kw_only=True, slots=True)
class RightsStatus:
    """What the client may do."""

    load: bool = False
    unload: bool = False


@dataclass(kw_only=True, slots=True)
class ModelStatus:
    """A model of any kind."""

    name: str = field(default="", metadata=_UNSET)
    """Name for clients; empty of the mesh as a whole."""
    kind: str = field(default="", metadata=_UNSET)
    """`chat` or `embeddings`; empty of the mesh as a whole."""
    model: ModelDescription = field(default_factory=ModelDescription)
    phase: str = ""
    """Current step, in a few words."""
    ready: bool | None = field(default=None, metadata=_UNSET)
    """Whether requests are answered at once; None in the answer of something else than a mesh."""
    plan: str | None = None
    """Reason of the placement; None before there is one."""
    failures: tuple[FailureStatus, ...] = ()
    """Recent ones, the latest last."""
    repairs: RepairStatus = field(default_factory=RepairStatus)


@dataclass(kw_only=True, slots=True)
class ChatModelStatus(ModelStatus):
    """A model that answers in text."""

    lost: str | None = field(default=None, metadata=_OF_RING)
    """Reason why the ring is broken; None if it is not."""
    loading: tuple[LoadingStatus, ...] = ()
    stages: tuple[StageStatus, ...] = ()
    """In pipeline order; none before the first ring."""
    sessions: SessionsStatus | None = field(default=None, metadata=_UNSET)
    """None before the first ring."""
    tokens: TokenCounts | None = field(default=None, metadata=_UNSET)


@dataclass(kw_only=True, slots=True)
class EmbeddingModelStatus(ModelStatus):
    """A model that makes vectors."""

    kind: Literal["embeddings"] = "embeddings"
    stages: tuple[EmbeddingStageStatus, ...] = ()
    """One, once it is loaded."""
    embeddings: EmbeddingCounts = field(default_factory=EmbeddingCounts)


@dataclass(kw_only=True, slots=True)
class MeshStatus(ChatModelStatus):
    """Body of `/mesh/status`: the first model, the mesh, and all models."""

    version: str = field(default="", metadata=_UNSET)
    """Version of the head's software."""
    protocol_version: int | None = field(default=None, metadata=_UNSET)
    hosts: tuple[HostStatus, ...] = ()
    """In the order of joining."""
    state_not_written: str | None = None
    """Reason why the head state on disk is out of date; None if it is not."""
    reconnects: int | None = field(default=None, metadata=_UNSET)
    """Rings made in place of others; None before the first ring, and so are all counts below."""
    prefix_mismatches: int | None = field(default=None, metadata=_UNSET)
    """Sessions that restarted because a slot did not hold the expected tokens."""
    speculation: SpeculationStatus | None = field(default=None, metadata=_UNSET)
    round_trips: RoundTripStatus | None = field(default=None, metadata=_UNSET)
    kv_disk: KvDiskStatus | None = field(default=None, metadata=_OF_RING)
    """None if no stage keeps KV rows on disk."""
    recording: RecordingStatus | None = field(default=None, metadata=_UNSET)
    """None if no answers are recorded."""
    tuning: TuningStatus | None = field(default=None, metadata=_UNSET)
    """None if no drafter is tuned in the background."""
    models: tuple[ChatModelStatus | EmbeddingModelStatus, ...] = ()
    """Every model, the first one first."""
    library: tuple[LibraryStatus, ...] | None = field(default=None, metadata=_UNSET)
    """Models that requests load; None without a library."""
    rights: RightsStatus | None = field(default=None, metadata=_UNSET)
    """Of the client that asked."""


def copied(kind: type[Part], /, *sources: object, **given: Any) -> Part:
    """A part of a status, with the attributes of objects that have the names of its fields.

    Args:
        kind: Class of the part.
        sources: Objects; the first that has an attribute counts.
        given: Fields that have other names or values there.
    """
    for each in fields(kind):
        holder = next((source for source in sources if hasattr(source, each.name)), None)
        if holder is not None and each.name not in given:
            given[each.name] = getattr(holder, each.name)
    return kind(**given)


def as_json(part: Any) -> Any:
    """JSON of a status or a part of it, without what is unset."""
    if is_dataclass(part):
        found = ((each, getattr(part, each.name)) for each in fields(part))
        return {each.name: as_json(value) for each, value in found if not _is_left_out(part, each, value)}
    if isinstance(part, (list, tuple)):
        return [as_json(each) for each in part]
    if isinstance(part, dict):
        return {str(key): as_json(value) for key, value in part.items()}
    return part


def _is_left_out(part: Any, of: Field[Any], value: Any) -> bool:
    beside = of.metadata.get(_BESIDE)
    if beside is None or value != of.default:
        return False
    return not (beside and getattr(part, beside) is not None)


def read_status(body: object) -> MeshStatus:
    """A status from its JSON.

    Keys that are new to this version are left out, and what an older head does not tell is unset.

    Args:
        body: Answer of `/mesh/status`.

    Raises:
        ClusterError: If it is something else.
    """
    from pydantic import ValidationError  # noqa: PLC0415 - see above

    try:
        return _reader().validate_python(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise ClusterError(
            f"the server does not tell its state as a mesh does: {where}: {first['msg']}"
        ) from None


@functools.cache
def _reader() -> TypeAdapter[MeshStatus]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - see above

    return TypeAdapter(MeshStatus)
