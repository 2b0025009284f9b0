"""Memory that llama.cpp takes of each device, by its own log."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from stages.runtime.llama import heard_log

if TYPE_CHECKING:
    from collections.abc import Iterator

# Such as `load_tensors:      Vulkan0 model buffer size =    12.34 MiB`.
_LINE: Final = re.compile(r"(\S+) +(model|KV|RS|compute|output) buffer size = +([\d.]+) MiB")
_MIB: Final = 2**20


class DeviceBuffers:
    """Sums of the buffers that were made while the log was heard.

    The names are those of llama.cpp's buffers: `Vulkan0` is in a device's memory, `Vulkan_Host`, `CPU`,
    `CPU_Mapped` and `CPU_REPACK` in the host's.
    """

    def __init__(self) -> None:
        self._bytes: Counter[tuple[str, str]] = Counter()

    def note(self, line: str) -> None:
        """Take a line of the log."""
        if found := _LINE.search(line):
            self._bytes[found[1], found[2]] += round(float(found[3]) * _MIB)

    def of(self, name: str, *kinds: str) -> int:
        """Bytes in buffers of a name.

        Args:
            name: Name of the buffers.
            kinds: Such as `model`, `KV`, `RS` and `compute`; all unless given.
        """
        of_name = ((kind, count) for (where, kind), count in self._bytes.items() if where == name)
        return sum(count for kind, count in of_name if not kinds or kind in kinds)

    def on_host(self, *kinds: str) -> int:
        """Bytes in buffers of the processor; see `of`."""
        names = {where for where, _ in self._bytes}
        return sum(self.of(name, *kinds) for name in names if name.startswith("CPU"))

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Bytes by name and kind; JSON-serialisable."""
        found: dict[str, dict[str, int]] = {}
        for (where, kind), count in sorted(self._bytes.items()):
            found.setdefault(where, {})[kind] = count
        return found


@contextmanager
def heard_buffers() -> Iterator[DeviceBuffers]:
    """Buffers that are made in the block."""
    buffers = DeviceBuffers()
    with heard_log(buffers.note):
        yield buffers
