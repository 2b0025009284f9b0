"""TUN device, and the check for its support.

Run as a program it tries to create one, and exits with the kernel's error if it is refused.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from pathlib import Path
from typing import Final

TUN_PATH: Final = Path("/dev/net/tun")
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN: Final = 0x0001
_IFF_NO_PI: Final = 0x1000


def open_tun(name: str) -> int:
    """Create a TUN device for IP packets; it exists as long as the returned descriptor.

    Raises:
        OSError: If the kernel refuses.
    """
    descriptor = os.open(TUN_PATH, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


if __name__ == "__main__":
    try:
        open_tun("mesh")
    except OSError as error:
        sys.exit(str(error))
