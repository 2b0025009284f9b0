"""CPU latency request: /dev/cpu_dma_latency held open while requests run.

Between two windows of a session a stage has nothing to do for some ten milliseconds: long enough for an idle
processor to go to sleep, and each of a hop's threads then waits for one to wake up. On Linux a process may
ask for no more than so much wake-up latency, for as long as it holds a certain device open (the kernel's PM
QoS interface); root may, others if the administrator lets them write it. Elsewhere nothing is done.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

import structlog

DEVICE: Final = Path("/dev/cpu_dma_latency")
_NO_LATENCY_US: Final = struct.pack("=i", 0)

log = structlog.get_logger()


class CpuLatencyRequest:
    """Asks for processors that answer at once, or takes that back.

    Args:
        device: What the kernel listens to.
    """

    def __init__(self, device: Path = DEVICE) -> None:
        self._device = device
        self._descriptor: int | None = None
        self._is_possible = True

    @property
    def is_held(self) -> bool:
        """Whether the processors are kept awake now, as far as this process is concerned."""
        return self._descriptor is not None

    def update(self, num_sessions: int) -> None:
        """Hold while sessions run, let go when none does; a host that refuses is asked once."""
        if num_sessions and self._descriptor is None and self._is_possible:
            self._hold()
        elif not num_sessions and self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _hold(self) -> None:
        descriptor = None
        try:
            descriptor = os.open(self._device, os.O_WRONLY | os.O_CLOEXEC)
            os.write(descriptor, _NO_LATENCY_US)
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            self._is_possible = False
            remedy = (
                f"give this user write access to {self._device}"
                if isinstance(error, PermissionError)
                else None
            )
            log.info("processors_may_sleep", reason=error.strerror, remedy=remedy)
        else:
            self._descriptor = descriptor
