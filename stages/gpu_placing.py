"""Which layers of a file llama.cpp puts on which devices."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import llama_cpp

from spanmesh_proto.errors import ClusterError
from stages.devices import device_pointers, layer_devices
from stages.llama import init_backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stages.devices import Device


@dataclass(frozen=True)
class GpuPlacing:
    """What is to be said to llama.cpp about devices.

    Attributes:
        devices: Those that layers go to.
        counts: How many layers each holds; None for all, shared out as llama.cpp does by default, which is by
            free memory.
    """

    devices: tuple[Device, ...]
    counts: tuple[int, ...] | None

    @classmethod
    def find(cls, wanted: Sequence[tuple[str, int]] | None) -> Self:
        """Look for the devices that are wanted.

        Args:
            wanted: Names and numbers of layers, in the order of layers; None for all that there are.

        Raises:
            ClusterError: If one of them is not there.
        """
        if wanted is not None and not wanted:
            return cls((), ())
        # Looking at them wakes GPUs up.
        init_backend()
        there = layer_devices() if llama_cpp.llama_supports_gpu_offload() else ()
        if wanted is None:
            return cls(there, None)
        by_name = {device.name: device for device in there}
        missing = [name for name, _ in wanted if name not in by_name]
        if missing:
            known = ", ".join(by_name) or "none"
            raise ClusterError(
                f"layers were to go to {missing[0]}, which llama.cpp does not find here; it finds {known}: "
                "is the device still there, and this process allowed to use it?"
            )
        return cls(tuple(by_name[name] for name, _ in wanted), tuple(count for _, count in wanted))

    @property
    def has_gpu(self) -> bool:
        """Whether any layer goes to a device."""
        return bool(self.devices)

    def apply(self, params: Any) -> None:
        """Write it into `llama_model_params`.

        llama.cpp counts the head as a layer behind the last, and fills devices in the given proportions; with
        whole numbers of layers for these, layers go exactly where they are to.

        Args:
            params: Keeps what llama.cpp points to alive.
        """
        pointers = device_pointers(self.devices)
        params.devices = ctypes.cast(pointers, ctypes.c_void_p)
        if self.counts is None:
            params.keep_alive = (pointers,)
            return
        params.n_gpu_layers = sum(self.counts) + 1 if self.counts else 0
        parts = (ctypes.c_float * llama_cpp.LLAMA_MAX_DEVICES)(*self.counts)
        if self.counts:
            parts[len(self.counts) - 1] += 1
            params.tensor_split = ctypes.cast(parts, ctypes.POINTER(ctypes.c_float))
        params.keep_alive = (pointers, parts)
