"""The overlay network of docs/networks.md, on the hosts of a lab."""

from __future__ import annotations

import errno
import re
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from meshbench.lab.systems import last_lines, start_logged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshbench.lab.network import Lab

PAGE: Final = Path(__file__).parents[2] / "docs" / "networks.md"
# As the page calls its hosts; the first is the one that all others reach.
NAMES: Final = ("alpha", "beta", "gamma")
ADDRESSES: Final = ("192.168.100.1", "192.168.100.2", "192.168.100.3")
UDP_PORT: Final = 4242
_UP_S: Final = 30.0
# A port of the page's range, on which nobody listens yet.
_PROBE: Final = """
import socket, sys
with socket.socket() as probe:
    probe.settimeout(2)
    print(probe.connect_ex((sys.argv[1], 20000)))
"""


def require_nebula() -> None:
    """Skip with the reason where nebula cannot run."""
    missing = [tool for tool in ("nebula", "nebula-cert") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found: apt-get install nebula")


def block(beginning: str) -> str:
    """The block of text of the page that begins so."""
    blocks = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (found,) = [text for text in blocks if text.startswith(beginning)]
    return str(found)


def make_keys(folder: Path) -> None:
    """Run the page's commands for certificates."""
    for line in block("nebula-cert ca").splitlines():
        subprocess.run(shlex.split(line), cwd=folder, check=True, capture_output=True)


def configuration(lab: Lab, host: int, folder: Path) -> str:
    """The page's configuration of a host, with the lab's addresses and files."""
    text = block("pki:").replace("203.0.113.10", lab.address(0)).replace("/etc/nebula", str(folder))
    text = text.replace("host.crt", f"{NAMES[host]}.crt").replace("host.key", f"{NAMES[host]}.key")
    if host == 0:
        for before, after in (
            ("am_lighthouse: false", "am_lighthouse: true"),
            ('["192.168.100.1"]\n', "[]\n"),
        ):
            assert text.count(before) == 1
            text = text.replace(before, after)
    return text


@contextmanager
def overlay(lab: Lab, folder: Path) -> Iterator[None]:
    """While in the block the lab's first three hosts reach one another at `ADDRESSES`.

    Args:
        lab: Its host 0 is reached by the others.
        folder: For keys and logs; the hosts must see it.
    """
    make_keys(folder)
    processes = []
    logs = [folder / f"nebula-{name}.log" for name in NAMES]
    try:
        for host, log in enumerate(logs):
            path = folder / f"{NAMES[host]}.yml"
            path.write_text(configuration(lab, host, folder))
            processes.append(start_logged(lab, host, ["nebula", "-config", str(path)], log))
        for host in (1, 2):
            wait_for_way(lab, host, logs[host])
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait_for_way(lab: Lab, host: int, log: Path) -> None:
    """Wait until a host's connection to the first one is refused, and not lost."""
    deadline_s = time.monotonic() + _UP_S
    while True:
        done = lab.exec(host, [sys.executable, "-S", "-c", _PROBE, ADDRESSES[0]])
        if done.stdout.strip() == str(errno.ECONNREFUSED):
            return
        assert time.monotonic() < deadline_s, f"no way to {ADDRESSES[0]}: {done}\n{last_lines(log)}"
        time.sleep(0.2)
