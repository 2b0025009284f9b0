"""Child process that lists GPUs and measures their speed.

Run as a program; prints a JSON list of `Gpu`s. See `mesh.cluster.host_facts`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from mesh.placement.host_capacity import Gpu
from stages.runtime.devices import device_speed_gb_per_s, layer_devices
from stages.runtime.process_memory import free_memory_bytes


def gpus_here() -> tuple[Gpu, ...]:
    """GPUs as llama.cpp lists them; this process holds memory of theirs from now on."""
    found = []
    for device in layer_devices():
        # A device that does not report its memory has the host's.
        tells = device.total_bytes > 0
        found.append(
            Gpu(
                name=device.name,
                description=device.description,
                free_bytes=device.free_bytes if tells else free_memory_bytes(),
                total_bytes=device.total_bytes,
                speed_gb_per_s=device_speed_gb_per_s(device),
                shares_host_memory=device.shares_host_memory or not tells,
            )
        )
    return tuple(found)


if __name__ == "__main__":
    sys.stdout.write(json.dumps([asdict(gpu) for gpu in gpus_here()]))
