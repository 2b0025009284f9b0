from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HostReport(_message.Message):
    __slots__ = ("protocol_version", "software_version", "secret", "name", "address", "check_port", "check_nonce", "memory_bytes", "threads", "speed_gb_per_s", "platform", "llama_cpp_version", "ray_version", "python_version", "ray_node_name", "ray_is_running", "echo_port", "links", "certificate_request", "is_leaving", "gpus", "gpu_layers", "port_range", "check_ports", "cpu_moe_layers", "rejoin_secret", "head_address", "attention_version")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CHECK_PORT_FIELD_NUMBER: _ClassVar[int]
    CHECK_NONCE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    SPEED_GB_PER_S_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    LLAMA_CPP_VERSION_FIELD_NUMBER: _ClassVar[int]
    RAY_VERSION_FIELD_NUMBER: _ClassVar[int]
    PYTHON_VERSION_FIELD_NUMBER: _ClassVar[int]
    RAY_NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    RAY_IS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    ECHO_PORT_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    IS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    GPU_LAYERS_FIELD_NUMBER: _ClassVar[int]
    PORT_RANGE_FIELD_NUMBER: _ClassVar[int]
    CHECK_PORTS_FIELD_NUMBER: _ClassVar[int]
    CPU_MOE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    REJOIN_SECRET_FIELD_NUMBER: _ClassVar[int]
    HEAD_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    software_version: str
    secret: str
    name: str
    address: str
    check_port: int
    check_nonce: bytes
    memory_bytes: int
    threads: int
    speed_gb_per_s: float
    platform: str
    llama_cpp_version: str
    ray_version: str
    python_version: str
    ray_node_name: str
    ray_is_running: bool
    echo_port: int
    links: LinkReport
    certificate_request: bytes
    is_leaving: bool
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    gpu_layers: int
    port_range: PortRange
    check_ports: _containers.RepeatedScalarFieldContainer[int]
    cpu_moe_layers: int
    rejoin_secret: str
    head_address: str
    attention_version: int
    def __init__(self, protocol_version: _Optional[int] = ..., software_version: _Optional[str] = ..., secret: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., check_port: _Optional[int] = ..., check_nonce: _Optional[bytes] = ..., memory_bytes: _Optional[int] = ..., threads: _Optional[int] = ..., speed_gb_per_s: _Optional[float] = ..., platform: _Optional[str] = ..., llama_cpp_version: _Optional[str] = ..., ray_version: _Optional[str] = ..., python_version: _Optional[str] = ..., ray_node_name: _Optional[str] = ..., ray_is_running: _Optional[bool] = ..., echo_port: _Optional[int] = ..., links: _Optional[_Union[LinkReport, _Mapping]] = ..., certificate_request: _Optional[bytes] = ..., is_leaving: _Optional[bool] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ..., gpu_layers: _Optional[int] = ..., port_range: _Optional[_Union[PortRange, _Mapping]] = ..., check_ports: _Optional[_Iterable[int]] = ..., cpu_moe_layers: _Optional[int] = ..., rejoin_secret: _Optional[str] = ..., head_address: _Optional[str] = ..., attention_version: _Optional[int] = ...) -> None: ...

class PortRange(_message.Message):
    __slots__ = ("first", "last")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class Gpu(_message.Message):
    __slots__ = ("name", "description", "free_bytes", "total_bytes", "speed_gb_per_s", "shares_host_memory")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPEED_GB_PER_S_FIELD_NUMBER: _ClassVar[int]
    SHARES_HOST_MEMORY_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    free_bytes: int
    total_bytes: int
    speed_gb_per_s: float
    shares_host_memory: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., free_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., speed_gb_per_s: _Optional[float] = ..., shares_host_memory: _Optional[bool] = ...) -> None: ...

class LinkReport(_message.Message):
    __slots__ = ("id", "links")
    ID_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    id: int
    links: _containers.RepeatedCompositeFieldContainer[MeasuredLink]
    def __init__(self, id: _Optional[int] = ..., links: _Optional[_Iterable[_Union[MeasuredLink, _Mapping]]] = ...) -> None: ...

class MeasuredLink(_message.Message):
    __slots__ = ("target", "small_ms", "hidden_ms", "bytes_per_s", "failure", "port_range", "closed_ports")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SMALL_MS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_MS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PORT_RANGE_FIELD_NUMBER: _ClassVar[int]
    CLOSED_PORTS_FIELD_NUMBER: _ClassVar[int]
    target: str
    small_ms: _containers.RepeatedScalarFieldContainer[float]
    hidden_ms: _containers.RepeatedScalarFieldContainer[float]
    bytes_per_s: float
    failure: str
    port_range: PortRange
    closed_ports: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, target: _Optional[str] = ..., small_ms: _Optional[_Iterable[float]] = ..., hidden_ms: _Optional[_Iterable[float]] = ..., bytes_per_s: _Optional[float] = ..., failure: _Optional[str] = ..., port_range: _Optional[_Union[PortRange, _Mapping]] = ..., closed_ports: _Optional[_Iterable[int]] = ...) -> None: ...

class HeadReport(_message.Message):
    __slots__ = ("protocol_version", "software_version", "ray_address", "ray_token", "state", "is_closing", "measure", "certificate", "ray_certificate", "link_secret", "port_range", "rejoin_secret")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    RAY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RAY_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    IS_CLOSING_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    RAY_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    LINK_SECRET_FIELD_NUMBER: _ClassVar[int]
    PORT_RANGE_FIELD_NUMBER: _ClassVar[int]
    REJOIN_SECRET_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    software_version: str
    ray_address: str
    ray_token: str
    state: str
    is_closing: bool
    measure: LinkOrder
    certificate: bytes
    ray_certificate: bytes
    link_secret: str
    port_range: PortRange
    rejoin_secret: str
    def __init__(self, protocol_version: _Optional[int] = ..., software_version: _Optional[str] = ..., ray_address: _Optional[str] = ..., ray_token: _Optional[str] = ..., state: _Optional[str] = ..., is_closing: _Optional[bool] = ..., measure: _Optional[_Union[LinkOrder, _Mapping]] = ..., certificate: _Optional[bytes] = ..., ray_certificate: _Optional[bytes] = ..., link_secret: _Optional[str] = ..., port_range: _Optional[_Union[PortRange, _Mapping]] = ..., rejoin_secret: _Optional[str] = ...) -> None: ...

class LinkOrder(_message.Message):
    __slots__ = ("id", "targets", "hidden_bytes", "num_probes", "bulk_bytes", "checks_ports")
    ID_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROBES_FIELD_NUMBER: _ClassVar[int]
    BULK_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKS_PORTS_FIELD_NUMBER: _ClassVar[int]
    id: int
    targets: _containers.RepeatedCompositeFieldContainer[LinkTarget]
    hidden_bytes: int
    num_probes: int
    bulk_bytes: int
    checks_ports: bool
    def __init__(self, id: _Optional[int] = ..., targets: _Optional[_Iterable[_Union[LinkTarget, _Mapping]]] = ..., hidden_bytes: _Optional[int] = ..., num_probes: _Optional[int] = ..., bulk_bytes: _Optional[int] = ..., checks_ports: _Optional[bool] = ...) -> None: ...

class LinkTarget(_message.Message):
    __slots__ = ("name", "address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("secret", "sha256", "offset", "ranges", "recipe")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    RECIPE_FIELD_NUMBER: _ClassVar[int]
    secret: str
    sha256: str
    offset: int
    ranges: _containers.RepeatedCompositeFieldContainer[ByteRange]
    recipe: bool
    def __init__(self, secret: _Optional[str] = ..., sha256: _Optional[str] = ..., offset: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[ByteRange, _Mapping]]] = ..., recipe: _Optional[bool] = ...) -> None: ...

class ByteRange(_message.Message):
    __slots__ = ("start", "num_bytes")
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    start: int
    num_bytes: int
    def __init__(self, start: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class FetchChunk(_message.Message):
    __slots__ = ("data", "total_bytes")
    DATA_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    total_bytes: int
    def __init__(self, data: _Optional[bytes] = ..., total_bytes: _Optional[int] = ...) -> None: ...
