"""Whether this machine can hold a lab."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from mesh.lab.tun import TUN_PATH

_TOOLS = ("ip", "unshare", "nsenter", "mount")
_DISABLED = "/proc/sys/net/ipv6/conf/default/disable_ipv6"


def lab_supported(*, is_ipv6: bool = False) -> str | None:
    """None if a lab can be made here, or else the reason why not, as one line for a person.

    Args:
        is_ipv6: Whether its wires are to carry IPv6.
    """
    if sys.platform != "linux":
        return f"a lab needs Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "a lab needs root, to make network namespaces"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"a lab needs {', '.join(missing)} (packages iproute2 and util-linux)"
    # In a namespace of its own, so that the trial's device is never seen by anything else.
    trial = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", sys.executable, "-m", "mesh.lab.tun"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if trial.returncode != 0:
        complaint = (trial.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"a lab needs namespaces and {TUN_PATH}: {complaint}"
    if is_ipv6:
        # A new network takes the kernel's setting, whatever this one has.
        told = subprocess.run(
            ["unshare", "--net", "cat", _DISABLED], capture_output=True, text=True, check=False
        )
        if told.stdout.strip() != "0":
            return "a lab over IPv6 needs a kernel that has IPv6 on: boot without ipv6.disable=1"
    return None
