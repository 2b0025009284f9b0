"""How fast a device reads weights, by having llama.cpp multiply a matrix there."""

from __future__ import annotations

import ctypes
import functools
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from spanmesh_proto.errors import ClusterError
from stages.devices import ggml_devices
from stages.llama import ggml_base, init_backend

if TYPE_CHECKING:
    from stages.devices import Device

# Larger than any cache on a device.
_PROBE_BYTES: Final = 512 * 2**20
_ROUNDS: Final = 5
_WIDTH: Final = 4096
_F32, _F16 = 0, 1
_F16_BYTES: Final = 2
# The matrix, the vector, what comes of them, and room for more.
_TENSORS: Final = 8


class _InitParams(ctypes.Structure):
    """`struct ggml_init_params`."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def device_speed_gb_per_s(device: Device, *, probe_bytes: int = _PROBE_BYTES) -> float:
    """How fast a device reads a large F16 matrix that it multiplies by a vector, the best of several rounds.

    That is what a token costs: every weight is read once, and hardly anything else is done.

    Args:
        device: Which.
        probe_bytes: Size of the matrix, if so much is free four times over; smaller otherwise.

    Raises:
        ClusterError: If the device does not compute it.
    """
    init_backend()
    if device.free_bytes:
        probe_bytes = min(probe_bytes, device.free_bytes // 4)
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
        # Else the pages of a processor's memory are not there yet.
        ggml.ggml_backend_buffer_clear(buffer, 0)
        best_s = min(_time(ggml, backend, graph, device) for _ in range(_ROUNDS))
    return rows * _WIDTH * _F16_BYTES / best_s / 1e9


def _time(ggml: Any, backend: int, graph: int, device: Device) -> float:
    start_s = time.perf_counter()
    status = ggml.ggml_backend_graph_compute(backend, graph)
    took_s = time.perf_counter() - start_s
    if status != 0:
        raise ClusterError(f"the device {device.name} does not compute: llama.cpp says {status}")
    return took_s


@functools.cache
def _ggml() -> Any:
    """libggml-base, with the prototypes used here."""
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
