"""Devices of llama.cpp: choice, layers of a file and of each device, and read speed.

The list of devices and their properties come from llama.cpp's library, so they hold for any backend: CUDA,
HIP, Metal, Vulkan, SYCL. Devices for layers are chosen by llama.cpp's defaults: every GPU once, even if two
backends list it; integrated GPUs only where there is no other.

Listing devices initialises them: CUDA takes a few hundred MB of a GPU for each process. So a long-running
process that does not compute there lets a child list them: see `mesh.cluster.host_facts`.

llama.cpp gives layers to devices by their number in the file, from the last one down. A stage's file may have
blank layers besides its own (`stages.slicing.architectures.rule_types.Blanks`), and a whole model layers for
multi-token prediction behind its last.
"""

from __future__ import annotations

import ctypes
import functools
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self

from spanmesh_proto.errors import ClusterError, InvalidModel
from stages.layers import EXPERTS
from stages.runtime.bindings import llama_cpp
from stages.runtime.llama import ggml_base, init_backend, last_complaint, llama_library
from stages.runtime.numerics import verdict_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

# `enum gguf_type`.
_UINT32: Final = 4
# `enum ggml_backend_dev_type`.
_KINDS: Final = ("cpu", "gpu", "integrated gpu", "accelerator", "meta")
# Its devices count as GPUs, but share their memory with Apple's processors.
_METAL: Final = "MTL"
# Larger than any cache on a device.
_PROBE_BYTES: Final = 512 * 2**20
_FIRST_PROBE_BYTES: Final = 8 * 2**20
_PROBE_GROWTH: Final = 4
# A product that takes this long shows a device's speed, whatever the size of its matrix.
_SLOW_PROBE_S: Final = 0.02
_ROUNDS: Final = 5
_ALL_ROUNDS_S: Final = 0.2
_WIDTH: Final = 4096
_F32, _F16 = 0, 1
_F16_BYTES: Final = 2
# The matrix, the vector, the product, and spare ones.
_TENSORS: Final = 8


@dataclass(frozen=True)
class FileLayers:
    """Numbers of layers of a GGUF file, in their order."""

    before: int
    """Blank layers."""
    own: int
    """Layers of the stage."""
    after: int
    """Blank layers, or layers for multi-token prediction."""


class _GgufInitParams(ctypes.Structure):
    """`struct gguf_init_params`."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


class _Numbers:
    """Integers of a file's metadata; 0 where a key is missing."""

    def __init__(self, gguf: Any, context: int) -> None:
        self._gguf = gguf
        self._context = context

    @property
    def architecture(self) -> str:
        key = self._gguf.gguf_find_key(self._context, b"general.architecture")
        return "" if key < 0 else (self._gguf.gguf_get_val_str(self._context, key) or b"").decode()

    def of(self, name: str) -> int:
        key = self._gguf.gguf_find_key(self._context, name.encode())
        if key < 0 or self._gguf.gguf_get_kv_type(self._context, key) != _UINT32:
            return 0
        return int(self._gguf.gguf_get_val_u32(self._context, key))


@dataclass(frozen=True)
class Device:
    """A device of llama.cpp."""

    name: str
    """llama.cpp's name, such as `CUDA0`."""
    description: str
    """Name for display."""
    kind: str
    """`cpu`, `gpu`, `integrated gpu`, `accelerator` or `meta`."""
    backend: str
    """Name of its backend, such as `CUDA`."""
    id: str
    """Hardware id, the same for all backends; empty if unknown."""
    free_bytes: int
    """Free memory; 0 together with `total_bytes` if unknown."""
    total_bytes: int
    """All of its memory."""
    index: int
    """Index in llama.cpp's list."""

    @property
    def is_software(self) -> bool:
        """Whether it is Mesa's software device, which computes on the processor."""
        return "llvmpipe" in self.description

    @property
    def shares_host_memory(self) -> bool:
        """Whether its memory is the host's own."""
        return self.kind == "integrated gpu" or self.backend == _METAL


class _Caps(ctypes.Structure):
    """`struct ggml_backend_dev_caps`."""

    _fields_ = tuple(
        (name, ctypes.c_bool)
        for name in ("async_", "host_buffer", "buffer_from_host_ptr", "events", "mmap_support")
    )


class _Props(ctypes.Structure):
    """`struct ggml_backend_dev_props`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("caps", _Caps),
        # Room for fields of a newer llama.cpp.
        ("room", ctypes.c_byte * 256),
    )


@dataclass(frozen=True)
class GpuPlacing:
    """Devices and numbers of layers for llama.cpp."""

    devices: tuple[Device, ...]
    """Devices for layers."""
    counts: tuple[int, ...] | None
    """Layers of each; None for llama.cpp's default, proportional to free memory."""

    @classmethod
    def find(cls, wanted: Sequence[tuple[str, int]] | None, *, exact: bool = False) -> Self:
        """Look up devices.

        Args:
            wanted: Names and numbers of layers, in the order of layers; None for all devices.
            exact: Numeric mode: in exact mode, only devices count that may compute in it.

        Raises:
            ClusterError: If one of them does not exist.
        """
        if exact:
            # Without numbers, the processor: it is not worth while to initialise GPUs.
            wanted = [each for each in wanted or () if verdict_on(each[0]).is_exact]
        if wanted is not None and not wanted:
            return cls((), ())
        # Listing them initialises GPUs.
        init_backend()
        there = layer_devices() if llama_cpp.llama_supports_gpu_offload() else ()
        if wanted is None:
            return cls(there, None)
        by_name = {device.name: device for device in there}
        missing = [name for name, _ in wanted if name not in by_name]
        if missing:
            known = ", ".join(by_name) or "none"
            raise ClusterError(
                f"layers are assigned to {missing[0]}, which llama.cpp does not find on this host; it finds "
                f"{known}: check that the device exists and that this process may use it"
            )
        return cls(tuple(by_name[name] for name, _ in wanted), tuple(count for _, count in wanted))

    @property
    def has_gpu(self) -> bool:
        """Whether any device holds layers."""
        return bool(self.devices)

    def behind(self) -> Self:
        """Placing of a file all of whose layers go with the last of these."""
        return replace(self, devices=self.devices[-1:], counts=(0,)) if self.counts else self

    def apply(self, params: Any, layers: FileLayers | None = None, *, num_cpu_moe: int = 0) -> None:
        """Write the choice into `llama_model_params`.

        llama.cpp counts the head as a layer after the last, and fills devices in the given proportions; whole
        numbers of layers put layers exactly where they belong. What is behind the file's own layers goes with
        the last of them.

        Args:
            params: Parameters; they keep the referenced arrays alive.
            layers: Layers of the file; None if it has no others than the own ones.
            num_cpu_moe: First own layers whose experts stay with the processor.
        """
        pointers = device_pointers(self.devices)
        params.devices = ctypes.cast(pointers, ctypes.c_void_p)
        overrides = _kept_experts(num_cpu_moe, layers) if num_cpu_moe and self.devices else None
        if overrides is not None:
            params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        params.keep_alive = (pointers, overrides)
        if self.counts is None:
            return
        num_behind = 1 + (0 if layers is None else layers.after)
        params.n_gpu_layers = sum(self.counts) + num_behind if self.counts else 0
        parts = (ctypes.c_float * llama_cpp.LLAMA_MAX_DEVICES)(*self.counts)
        if self.counts:
            parts[len(self.counts) - 1] += num_behind
            params.tensor_split = ctypes.cast(parts, ctypes.POINTER(ctypes.c_float))
        params.keep_alive = (pointers, overrides, parts)


class _Override(ctypes.Structure):
    """`struct llama_model_tensor_buft_override`."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class _InitParams(ctypes.Structure):
    """`struct ggml_init_params`."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def read_file_layers(path: Path) -> FileLayers:
    """Read the numbers from a file's metadata.

    Raises:
        InvalidModel: If it is no GGUF.
    """
    init_backend()
    gguf = _gguf()
    context = gguf.gguf_init_from_file(str(path).encode(), _GgufInitParams(no_alloc=True))
    if not context:
        raise InvalidModel(f"llama.cpp does not load {path.name}: {last_complaint()}")
    try:
        numbers = _Numbers(gguf, context)
        count = numbers.of(f"{numbers.architecture}.block_count")
        if not numbers.of("spanmesh.layer_count"):
            after = numbers.of(f"{numbers.architecture}.nextn_predict_layers")
            return FileLayers(0, count - after, after)
        before = numbers.of("spanmesh.blanks_before")
        own = numbers.of("spanmesh.layer_stop") - numbers.of("spanmesh.layer_start")
        return FileLayers(before, own, count - before - own)
    finally:
        gguf.gguf_free(context)


@functools.cache
def _gguf() -> Any:
    """libggml-base, with the used prototypes."""
    library: Any = ggml_base()
    context, key = ctypes.c_void_p, ctypes.c_int64
    prototypes: dict[str, tuple[Any, list[Any]]] = {
        "gguf_init_from_file": (context, [ctypes.c_char_p, _GgufInitParams]),
        "gguf_free": (None, [context]),
        "gguf_find_key": (key, [context, ctypes.c_char_p]),
        "gguf_get_kv_type": (ctypes.c_int, [context, key]),
        "gguf_get_val_u32": (ctypes.c_uint32, [context, key]),
        "gguf_get_val_str": (ctypes.c_char_p, [context, key]),
    }
    for name, (result, arguments) in prototypes.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def list_devices() -> tuple[Device, ...]:
    """Every device of llama.cpp, the processor included."""
    init_backend()
    library = ggml_devices()
    return tuple(_read(library.ggml_backend_dev_get(i), i) for i in range(library.ggml_backend_dev_count()))


def layer_devices(devices: Iterable[Device] | None = None) -> tuple[Device, ...]:
    """Devices for layers, in the order in which llama.cpp fills them.

    Args:
        devices: All devices; from llama.cpp unless given.
    """
    if devices is None:
        devices = list_devices()
    everything = tuple(devices)
    gpus: list[Device] = []
    for device in everything:
        is_known = device.id and any(other.id == device.id for other in gpus)
        # Devices of another program over a connection come first, as each hop costs time.
        if device.kind == "gpu" and device.backend != "RPC" and not is_known:
            gpus.append(device)
    remote = [device for device in everything if device.kind == "gpu" and device.backend == "RPC"]
    integrated = [device for device in everything if device.kind == "integrated gpu"]
    of_one_backend = [device for device in integrated if device.backend == integrated[0].backend]
    return (*remote, *(gpus or of_one_backend))


def device_pointers(devices: Sequence[Device]) -> Any:
    """Array for `llama_model_params.devices`, ending with NULL; an empty one excludes all devices."""
    library = ggml_devices()
    handles = [library.ggml_backend_dev_get(device.index) for device in devices]
    return (ctypes.c_void_p * (len(handles) + 1))(*handles, None)


@functools.cache
def ggml_devices() -> Any:
    """libggml, where backends are registered, with the used prototypes."""
    library = llama_library("ggml")
    library.ggml_backend_dev_count.argtypes = []
    library.ggml_backend_dev_count.restype = ctypes.c_size_t
    library.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    library.ggml_backend_dev_get.restype = ctypes.c_void_p
    base = ggml_base()
    base.ggml_backend_dev_get_props.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Props)]
    base.ggml_backend_dev_get_props.restype = None
    base.ggml_backend_dev_backend_reg.argtypes = [ctypes.c_void_p]
    base.ggml_backend_dev_backend_reg.restype = ctypes.c_void_p
    base.ggml_backend_reg_name.argtypes = [ctypes.c_void_p]
    base.ggml_backend_reg_name.restype = ctypes.c_char_p
    return library


def _read(handle: int, index: int) -> Device:
    base = ggml_base()
    props = _Props()
    base.ggml_backend_dev_get_props(handle, ctypes.byref(props))
    return Device(
        name=_text(props.name),
        description=_text(props.description),
        kind=_KINDS[props.type] if 0 <= props.type < len(_KINDS) else "unknown",
        backend=_text(base.ggml_backend_reg_name(base.ggml_backend_dev_backend_reg(handle))),
        id=_text(props.device_id),
        free_bytes=props.memory_free,
        total_bytes=props.memory_total,
        index=index,
    )


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


def _kept_experts(count: int, layers: FileLayers | None) -> Any:
    """Array for `llama_model_params.tensor_buft_overrides`, which ends with an empty pattern.

    llama.cpp computes with a weight where it is: a layer's attention on its device, its experts here.
    """
    first = 0 if layers is None else layers.before
    numbers = "|".join(str(first + layer) for layer in range(count))
    pattern = rf"^blk\.({numbers}){EXPERTS}".encode()
    base = ggml_base()
    base.ggml_backend_cpu_buffer_type.argtypes = []
    base.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    return (_Override * 2)(_Override(pattern, base.ggml_backend_cpu_buffer_type()), _Override(None, None))


def device_speed_gb_per_s(device: Device, *, probe_bytes: int = _PROBE_BYTES) -> float:
    """Speed at which a device reads a large F16 matrix times a vector, the best of several rounds.

    This is the cost of a token: every weight is read once, and little else is done.

    Args:
        device: The device.
        probe_bytes: Size of the matrix; smaller unless four times as much is free, and on slow devices.

    Raises:
        ClusterError: If the device cannot compute it.
    """
    init_backend()
    if device.free_bytes:
        probe_bytes = min(probe_bytes, device.free_bytes // 4)
    return speed_of_reads(lambda num_bytes: _read_s(device, num_bytes), probe_bytes) / 1e9


def speed_of_reads(read_s: Callable[[int], float], most_bytes: int) -> float:
    """Bytes a second by the time of reads that grow until one takes long.

    Cards need a large matrix: caches hold a small one, and a start takes as long as reading it. A software
    device would read the large one for minutes, even if it reads the small one fast (Mesa 22.3: 1 GB/s for
    8 MiB, 0.03 for 512 MiB).

    Args:
        read_s: Seconds that reading so many bytes takes.
        most_bytes: The largest read.
    """
    num_bytes = min(most_bytes, _FIRST_PROBE_BYTES)
    while (took_s := read_s(num_bytes)) < _SLOW_PROBE_S and num_bytes < most_bytes:
        num_bytes = min(most_bytes, num_bytes * _PROBE_GROWTH)
    return num_bytes / took_s


def _read_s(device: Device, probe_bytes: int) -> float:
    rows = max(1, probe_bytes // (_WIDTH * _F16_BYTES))
    ggml = _ggml()
    with ExitStack() as stack:
        backend = ggml.ggml_backend_dev_init(ggml_devices().ggml_backend_dev_get(device.index), None)
        if not backend:
            raise ClusterError(f"llama.cpp cannot start the device {device.name} ({device.description})")
        stack.callback(ggml.ggml_backend_free, backend)
        size = _TENSORS * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead()
        context = ggml.ggml_init(_InitParams(size, None, True))  # noqa: FBT003 - a C struct
        stack.callback(ggml.ggml_free, context)
        matrix = ggml.ggml_new_tensor_2d(context, _F16, _WIDTH, rows)
        vector = ggml.ggml_new_tensor_2d(context, _F32, _WIDTH, 1)
        product = ggml.ggml_mul_mat(context, matrix, vector)
        graph = ggml.ggml_new_graph(context)
        ggml.ggml_build_forward_expand(graph, product)
        buffer = ggml.ggml_backend_alloc_ctx_tensors(context, backend)
        if not buffer:
            raise ClusterError(f"the device {device.name} has no {probe_bytes} bytes free for a measurement")
        stack.callback(ggml.ggml_backend_buffer_free, buffer)
        # Touches the pages of a processor's memory before the measurement.
        ggml.ggml_backend_buffer_clear(buffer, 0)
        _time(ggml, backend, graph, device)  # compiles what it computes by
        times_s = [_time(ggml, backend, graph, device)]
        while len(times_s) < _ROUNDS and sum(times_s) < _ALL_ROUNDS_S:
            times_s.append(_time(ggml, backend, graph, device))
    return min(times_s)


def _time(ggml: Any, backend: int, graph: int, device: Device) -> float:
    start_s = time.perf_counter()
    status = ggml.ggml_backend_graph_compute(backend, graph)
    took_s = time.perf_counter() - start_s
    if status != 0:
        raise ClusterError(f"the device {device.name} fails to compute: llama.cpp returns status {status}")
    return took_s


@functools.cache
def _ggml() -> Any:
    """libggml-base, with the used prototypes."""
    library = ggml_base()
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    prototypes: dict[str, tuple[Any, list[Any]]] = {
        "ggml_init": (pointer, [_InitParams]),
        "ggml_free": (None, [pointer]),
        "ggml_tensor_overhead": (size, []),
        "ggml_graph_overhead": (size, []),
        "ggml_new_tensor_2d": (pointer, [pointer, ctypes.c_int, integer, integer]),
        "ggml_mul_mat": (pointer, [pointer, pointer, pointer]),
        "ggml_new_graph": (pointer, [pointer]),
        "ggml_build_forward_expand": (None, [pointer, pointer]),
        "ggml_backend_dev_init": (pointer, [pointer, ctypes.c_char_p]),
        "ggml_backend_free": (None, [pointer]),
        "ggml_backend_alloc_ctx_tensors": (pointer, [pointer, pointer]),
        "ggml_backend_buffer_clear": (None, [pointer, ctypes.c_uint8]),
        "ggml_backend_buffer_free": (None, [pointer]),
        "ggml_backend_graph_compute": (ctypes.c_int, [pointer, pointer]),
    }
    for name, (result, arguments) in prototypes.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
