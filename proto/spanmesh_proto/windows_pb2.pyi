from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HiddenType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HIDDEN_TYPE_F32: _ClassVar[HiddenType]
    HIDDEN_TYPE_F16: _ClassVar[HiddenType]
    HIDDEN_TYPE_Q8: _ClassVar[HiddenType]
HIDDEN_TYPE_F32: HiddenType
HIDDEN_TYPE_F16: HiddenType
HIDDEN_TYPE_Q8: HiddenType

class FeatureRequest(_message.Message):
    __slots__ = ("hello", "layers", "type")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    layers: _containers.RepeatedScalarFieldContainer[int]
    type: HiddenType
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., layers: _Optional[_Iterable[int]] = ..., type: _Optional[_Union[HiddenType, str]] = ...) -> None: ...

class FeatureBundle(_message.Message):
    __slots__ = ("layers", "features")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    features: _containers.RepeatedCompositeFieldContainer[Features]
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., features: _Optional[_Iterable[_Union[Features, _Mapping]]] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("session", "window_id", "start", "num_rows", "rows", "type", "stage", "window_rows")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WINDOW_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_ROWS_FIELD_NUMBER: _ClassVar[int]
    session: int
    window_id: int
    start: int
    num_rows: int
    rows: _containers.RepeatedScalarFieldContainer[bytes]
    type: HiddenType
    stage: int
    window_rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[int] = ..., window_id: _Optional[int] = ..., start: _Optional[int] = ..., num_rows: _Optional[int] = ..., rows: _Optional[_Iterable[bytes]] = ..., type: _Optional[_Union[HiddenType, str]] = ..., stage: _Optional[int] = ..., window_rows: _Optional[_Iterable[int]] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("hello", "held")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    held: _containers.RepeatedCompositeFieldContainer[HeldSlot]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., held: _Optional[_Iterable[_Union[HeldSlot, _Mapping]]] = ...) -> None: ...

class HeldSlot(_message.Message):
    __slots__ = ("slot", "num_positions", "tokens_sha256")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_SHA256_FIELD_NUMBER: _ClassVar[int]
    slot: int
    num_positions: int
    tokens_sha256: bytes
    def __init__(self, slot: _Optional[int] = ..., num_positions: _Optional[int] = ..., tokens_sha256: _Optional[bytes] = ...) -> None: ...

class SlotRows(_message.Message):
    __slots__ = ("slot", "session", "start", "tokens", "kv", "sent", "state", "num_state_bytes")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    slot: int
    session: int
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    kv: bytes
    sent: bytes
    state: bytes
    num_state_bytes: int
    def __init__(self, slot: _Optional[int] = ..., session: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., kv: _Optional[bytes] = ..., sent: _Optional[bytes] = ..., state: _Optional[bytes] = ..., num_state_bytes: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "software_version", "mesh_id", "sender", "term")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MESH_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    software_version: str
    mesh_id: str
    sender: str
    term: int
    def __init__(self, protocol_version: _Optional[int] = ..., software_version: _Optional[str] = ..., mesh_id: _Optional[str] = ..., sender: _Optional[str] = ..., term: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "software_version", "stage_index", "layer_start", "layer_stop")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_STOP_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    software_version: str
    stage_index: int
    layer_start: int
    layer_stop: int
    def __init__(self, protocol_version: _Optional[int] = ..., software_version: _Optional[str] = ..., stage_index: _Optional[int] = ..., layer_start: _Optional[int] = ..., layer_stop: _Optional[int] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("hello", "open", "windows", "vocabulary")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    open: Open
    windows: WindowBundle
    vocabulary: Vocabulary
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., windows: _Optional[_Union[WindowBundle, _Mapping]] = ..., vocabulary: _Optional[_Union[Vocabulary, _Mapping]] = ...) -> None: ...

class Vocabulary(_message.Message):
    __slots__ = ("texts", "lengths", "end_tokens")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    END_TOKENS_FIELD_NUMBER: _ClassVar[int]
    texts: bytes
    lengths: _containers.RepeatedScalarFieldContainer[int]
    end_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, texts: _Optional[bytes] = ..., lengths: _Optional[_Iterable[int]] = ..., end_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class WindowBundle(_message.Message):
    __slots__ = ("windows", "hidden", "hidden_type", "times", "features")
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_TYPE_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    windows: _containers.RepeatedCompositeFieldContainer[Window]
    hidden: bytes
    hidden_type: HiddenType
    times: _containers.RepeatedCompositeFieldContainer[StageTime]
    features: _containers.RepeatedCompositeFieldContainer[Features]
    def __init__(self, windows: _Optional[_Iterable[_Union[Window, _Mapping]]] = ..., hidden: _Optional[bytes] = ..., hidden_type: _Optional[_Union[HiddenType, str]] = ..., times: _Optional[_Iterable[_Union[StageTime, _Mapping]]] = ..., features: _Optional[_Iterable[_Union[Features, _Mapping]]] = ...) -> None: ...

class VerdictBundle(_message.Message):
    __slots__ = ("verdicts", "times", "features", "drafts")
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    times: _containers.RepeatedCompositeFieldContainer[StageTime]
    features: _containers.RepeatedCompositeFieldContainer[Features]
    drafts: _containers.RepeatedCompositeFieldContainer[Draft]
    def __init__(self, verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ..., times: _Optional[_Iterable[_Union[StageTime, _Mapping]]] = ..., features: _Optional[_Iterable[_Union[Features, _Mapping]]] = ..., drafts: _Optional[_Iterable[_Union[Draft, _Mapping]]] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("session", "window_id", "start", "tokens", "confidences", "token_us")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WINDOW_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    session: int
    window_id: int
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    confidences: _containers.RepeatedScalarFieldContainer[float]
    token_us: int
    def __init__(self, session: _Optional[int] = ..., window_id: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., confidences: _Optional[_Iterable[float]] = ..., token_us: _Optional[int] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("session", "slot", "sampling", "num_prompt_tokens", "num_top_logprobs", "cached_tokens", "source_slot", "resumed_session", "num_resumed", "grammar", "fetch", "client", "images")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SLOT_FIELD_NUMBER: _ClassVar[int]
    RESUMED_SESSION_FIELD_NUMBER: _ClassVar[int]
    NUM_RESUMED_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    session: int
    slot: int
    sampling: Sampling
    num_prompt_tokens: int
    num_top_logprobs: int
    cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    source_slot: int
    resumed_session: int
    num_resumed: int
    grammar: str
    fetch: int
    client: bytes
    images: _containers.RepeatedCompositeFieldContainer[ImageChunk]
    def __init__(self, session: _Optional[int] = ..., slot: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., num_prompt_tokens: _Optional[int] = ..., num_top_logprobs: _Optional[int] = ..., cached_tokens: _Optional[_Iterable[int]] = ..., source_slot: _Optional[int] = ..., resumed_session: _Optional[int] = ..., num_resumed: _Optional[int] = ..., grammar: _Optional[str] = ..., fetch: _Optional[int] = ..., client: _Optional[bytes] = ..., images: _Optional[_Iterable[_Union[ImageChunk, _Mapping]]] = ...) -> None: ...

class ImageChunk(_message.Message):
    __slots__ = ("first_row", "num_rows", "columns", "sees_all")
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    SEES_ALL_FIELD_NUMBER: _ClassVar[int]
    first_row: int
    num_rows: int
    columns: int
    sees_all: bool
    def __init__(self, first_row: _Optional[int] = ..., num_rows: _Optional[int] = ..., columns: _Optional[int] = ..., sees_all: _Optional[bool] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty", "repetition_window", "bias_tokens", "biases")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_WINDOW_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    repetition_window: int
    bias_tokens: _containers.RepeatedScalarFieldContainer[int]
    biases: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., repetition_window: _Optional[int] = ..., bias_tokens: _Optional[_Iterable[int]] = ..., biases: _Optional[_Iterable[float]] = ...) -> None: ...

class Window(_message.Message):
    __slots__ = ("session", "epoch", "id", "start", "tokens", "verify_rows", "wants_features", "checkpoints", "recomputed_rows", "num_committed", "features_together", "scored_next", "num_drafts", "drafts_on_rejection", "rows")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_ROWS_FIELD_NUMBER: _ClassVar[int]
    WANTS_FEATURES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FEATURES_TOGETHER_FIELD_NUMBER: _ClassVar[int]
    SCORED_NEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_ON_REJECTION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    id: int
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    verify_rows: int
    wants_features: bool
    checkpoints: _containers.RepeatedScalarFieldContainer[int]
    recomputed_rows: int
    num_committed: int
    features_together: int
    scored_next: int
    num_drafts: int
    drafts_on_rejection: bool
    rows: bytes
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., id: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., verify_rows: _Optional[int] = ..., wants_features: _Optional[bool] = ..., checkpoints: _Optional[_Iterable[int]] = ..., recomputed_rows: _Optional[int] = ..., num_committed: _Optional[int] = ..., features_together: _Optional[int] = ..., scored_next: _Optional[int] = ..., num_drafts: _Optional[int] = ..., drafts_on_rejection: _Optional[bool] = ..., rows: _Optional[bytes] = ...) -> None: ...

class StageTime(_message.Message):
    __slots__ = ("queue_us", "compute_us", "num_rows", "arrived_us")
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_US_FIELD_NUMBER: _ClassVar[int]
    queue_us: int
    compute_us: int
    num_rows: int
    arrived_us: int
    def __init__(self, queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., num_rows: _Optional[int] = ..., arrived_us: _Optional[int] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("session", "epoch", "window_id", "start", "tokens", "logprobs", "features")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WINDOW_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    window_id: int
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    features: Features
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., window_id: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., features: _Optional[_Union[Features, _Mapping]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_tokens", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class ControlRequest(_message.Message):
    __slots__ = ("hello", "cancel", "close", "ping", "fetch")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    cancel: Cancel
    close: Close
    ping: Ping
    fetch: Fetch
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("session", "epoch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("session", "keep")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    session: int
    keep: Keep
    def __init__(self, session: _Optional[int] = ..., keep: _Optional[_Union[Keep, _Mapping]] = ...) -> None: ...

class Keep(_message.Message):
    __slots__ = ("num_positions", "tokens_sha256", "blocks")
    NUM_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_SHA256_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_positions: int
    tokens_sha256: bytes
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    def __init__(self, num_positions: _Optional[int] = ..., tokens_sha256: _Optional[bytes] = ..., blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("name", "start", "stop", "has_state")
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    HAS_STATE_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    start: int
    stop: int
    has_state: bool
    def __init__(self, name: _Optional[bytes] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., has_state: _Optional[bool] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("id", "names")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    id: int
    names: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, id: _Optional[int] = ..., names: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Fetched(_message.Message):
    __slots__ = ("id", "num_positions")
    ID_FIELD_NUMBER: _ClassVar[int]
    NUM_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    id: int
    num_positions: int
    def __init__(self, id: _Optional[int] = ..., num_positions: _Optional[int] = ...) -> None: ...

class BlockNews(_message.Message):
    __slots__ = ("rows_identity", "added", "state_positions", "removed")
    ROWS_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    STATE_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    rows_identity: bytes
    added: _containers.RepeatedScalarFieldContainer[bytes]
    state_positions: _containers.RepeatedScalarFieldContainer[int]
    removed: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, rows_identity: _Optional[bytes] = ..., added: _Optional[_Iterable[bytes]] = ..., state_positions: _Optional[_Iterable[int]] = ..., removed: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("sent_us",)
    SENT_US_FIELD_NUMBER: _ClassVar[int]
    sent_us: int
    def __init__(self, sent_us: _Optional[int] = ...) -> None: ...

class ControlReply(_message.Message):
    __slots__ = ("welcome", "failure", "pong", "block_news", "fetched")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NEWS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    failure: Failure
    pong: Pong
    block_news: BlockNews
    fetched: Fetched
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., block_news: _Optional[_Union[BlockNews, _Mapping]] = ..., fetched: _Optional[_Union[Fetched, _Mapping]] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("sent_us", "stats", "stage_us", "activity")
    SENT_US_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    STAGE_US_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    sent_us: int
    stats: StageStats
    stage_us: int
    activity: Activity
    def __init__(self, sent_us: _Optional[int] = ..., stats: _Optional[_Union[StageStats, _Mapping]] = ..., stage_us: _Optional[int] = ..., activity: _Optional[_Union[Activity, _Mapping]] = ...) -> None: ...

class Activity(_message.Message):
    __slots__ = ("has_ended", "batch_age_us", "batch_rows", "num_received", "num_sent")
    HAS_ENDED_FIELD_NUMBER: _ClassVar[int]
    BATCH_AGE_US_FIELD_NUMBER: _ClassVar[int]
    BATCH_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    NUM_SENT_FIELD_NUMBER: _ClassVar[int]
    has_ended: bool
    batch_age_us: int
    batch_rows: int
    num_received: int
    num_sent: int
    def __init__(self, has_ended: _Optional[bool] = ..., batch_age_us: _Optional[int] = ..., batch_rows: _Optional[int] = ..., num_received: _Optional[int] = ..., num_sent: _Optional[int] = ...) -> None: ...

class StageStats(_message.Message):
    __slots__ = ("num_windows", "num_rows", "num_dropped_windows", "num_decodes", "compute_us", "num_queued_windows", "num_open_sessions", "num_sent_bytes", "resident_bytes", "decode_cpu_us", "blocks", "drafts_off")
    NUM_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODES_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DECODE_CPU_US_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_OFF_FIELD_NUMBER: _ClassVar[int]
    num_windows: int
    num_rows: int
    num_dropped_windows: int
    num_decodes: int
    compute_us: int
    num_queued_windows: int
    num_open_sessions: int
    num_sent_bytes: int
    resident_bytes: int
    decode_cpu_us: int
    blocks: BlockStats
    drafts_off: str
    def __init__(self, num_windows: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_dropped_windows: _Optional[int] = ..., num_decodes: _Optional[int] = ..., compute_us: _Optional[int] = ..., num_queued_windows: _Optional[int] = ..., num_open_sessions: _Optional[int] = ..., num_sent_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., decode_cpu_us: _Optional[int] = ..., blocks: _Optional[_Union[BlockStats, _Mapping]] = ..., drafts_off: _Optional[str] = ...) -> None: ...

class BlockStats(_message.Message):
    __slots__ = ("num_files", "num_bytes", "most_bytes", "num_written", "num_left_out", "num_damaged", "num_restored", "num_restored_positions")
    NUM_FILES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    NUM_DAMAGED_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTORED_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTORED_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    num_files: int
    num_bytes: int
    most_bytes: int
    num_written: int
    num_left_out: int
    num_damaged: int
    num_restored: int
    num_restored_positions: int
    def __init__(self, num_files: _Optional[int] = ..., num_bytes: _Optional[int] = ..., most_bytes: _Optional[int] = ..., num_written: _Optional[int] = ..., num_left_out: _Optional[int] = ..., num_damaged: _Optional[int] = ..., num_restored: _Optional[int] = ..., num_restored_positions: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("session", "epoch", "window_id", "code", "message")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WINDOW_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    window_id: int
    code: str
    message: str
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., window_id: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
