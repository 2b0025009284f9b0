"""What llama.cpp can compute on here besides the processor, by its own list of devices.

The list and all that is known of a device comes from llama.cpp's library, so it holds for any backend that it
was built with: CUDA, HIP, Metal, Vulkan, SYCL. Which devices layers go to is chosen as llama.cpp chooses when
nobody says anything: every GPU once, even if two backends know it; integrated GPUs only where there is no
other.

To ask wakes the devices up: CUDA, for one, gives a process that looks at a GPU a few hundred MB of it. So a
process that stays, and computes nothing there, has another one look: see `mesh.cluster.gpus`.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from stages.llama import ggml_base, init_backend, llama_library

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# `enum ggml_backend_dev_type`.
_KINDS: Final = ("cpu", "gpu", "integrated gpu", "accelerator", "meta")
# Its devices count as GPUs, but Apple's processors share their memory with them.
_METAL: Final = "MTL"


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: As llama.cpp calls it, such as `CUDA0`.
        description: For people.
        kind: `cpu`, `gpu`, `integrated gpu`, `accelerator` or `meta`.
        backend: What brings it, such as `CUDA`.
        id: Of the hardware, the same whichever backend speaks of it; empty if unknown.
        free_bytes: Of its memory, now; 0 together with `total_bytes` if it does not tell.
        total_bytes: Of its memory.
        index: Its place in llama.cpp's list.
    """

    name: str
    description: str
    kind: str
    backend: str
    id: str
    free_bytes: int
    total_bytes: int
    index: int

    @property
    def shares_host_memory(self) -> bool:
        """Whether what it holds is taken from the host's own memory."""
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
        # A newer llama.cpp may write more than is known here.
        ("room", ctypes.c_byte * 256),
    )


def list_devices() -> tuple[Device, ...]:
    """Every device that llama.cpp knows, the processor among them."""
    init_backend()
    library = ggml_devices()
    return tuple(_read(library.ggml_backend_dev_get(i), i) for i in range(library.ggml_backend_dev_count()))


def layer_devices(devices: Iterable[Device] | None = None) -> tuple[Device, ...]:
    """Those that layers go to, in the order in which llama.cpp fills them.

    Args:
        devices: All there are; asked of llama.cpp unless given.
    """
    if devices is None:
        devices = list_devices()
    everything = tuple(devices)
    gpus: list[Device] = []
    for device in everything:
        is_known = device.id and any(other.id == device.id for other in gpus)
        # Lent by another program over a connection: they come first, as each hop costs time.
        if device.kind == "gpu" and device.backend != "RPC" and not is_known:
            gpus.append(device)
    remote = [device for device in everything if device.kind == "gpu" and device.backend == "RPC"]
    integrated = [device for device in everything if device.kind == "integrated gpu"]
    of_one_backend = [device for device in integrated if device.backend == integrated[0].backend]
    return (*remote, *(gpus or of_one_backend))


def device_pointers(devices: Sequence[Device]) -> Any:
    """What `llama_model_params.devices` takes: an array that ends with NULL; an empty one bars them all."""
    library = ggml_devices()
    handles = [library.ggml_backend_dev_get(device.index) for device in devices]
    return (ctypes.c_void_p * (len(handles) + 1))(*handles, None)


@functools.cache
def ggml_devices() -> Any:
    """libggml, where backends are registered, with the prototypes used here."""
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
