"""This host's Ray node: started as a child, stopped so that no process of it is left."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Final

import psutil
import structlog

from mesh.cluster.private_folder import PrivateFolder
from mesh.cluster.ray_environment import child_environment
from spanmesh_proto.errors import ClusterError

log = structlog.get_logger()

_OBJECT_STORE_BYTES: Final = 80_000_000
_START_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1
_WATCH_S: Final = 0.5
_GRACE_S: Final = 3.0
_KILL_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True)
class RayNodeConfig:
    """One Ray node.

    Attributes:
        address: IP address of this host, as the others reach it.
        name: Its name in the cluster; no two nodes of a mesh share it.
        token: Ray's token.
        head_address: `host:port` of the cluster to join, or None to start one.
    """

    address: str
    name: str
    token: str
    head_address: str | None = None


def new_ray_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_hex(32)


class RayNode:
    """The Ray processes of this host.

    Start it in the main thread: on Linux the kernel ends them when the thread that started them ends.
    `stop`, or at the latest the end of this process, ends every process of the node.

    Args:
        config: Which node.

    Attributes:
        ray_dir: Where Ray keeps its sockets and logs.
        token_path: File with Ray's token, readable by this user only.
    """

    def __init__(self, config: RayNodeConfig) -> None:
        self._config = config
        self._folder = PrivateFolder("mesh-ray-")
        self.ray_dir = self._folder.path / "ray"
        self.token_path = self._folder.path / "token"
        self.token_path.touch(mode=0o600)
        self.token_path.write_text(config.token)
        self._log_path = self._folder.path / "ray.log"
        self._descendants: set[psutil.Process] = set()
        with self._log_path.open("wb") as output:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "mesh.cluster.ray_child", *self._arguments()],
                env=child_environment(self.token_path),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal is for us; we end Ray when its turn has come.
                start_new_session=True,
            )
        atexit.register(self.stop)

    @property
    def is_running(self) -> bool:
        """Whether its first process lives; that one ends when another of the node's processes does."""
        return self._child.poll() is None

    @property
    def last_words(self) -> str:
        """The last line that its processes have said."""
        lines = [line.strip() for line in self._log_path.read_text(errors="replace").splitlines()]
        words = [line for line in lines if line]
        return words[-1] if words else "it said nothing"

    async def ended(self) -> None:
        """Return when its first process has ended."""
        while self.is_running:  # noqa: ASYNC110 - a child without an event of its own
            await asyncio.sleep(_WATCH_S)

    async def wait_ready(self, timeout_s: float = _START_TIMEOUT_S) -> str:
        """Wait until the node is part of its cluster.

        Returns:
            The cluster's address, `host:port`.

        Raises:
            ClusterError: If Ray gave up or is not ready in time; with its last words.
        """
        started_s = time.monotonic()
        # Ray writes this file when all of the node's processes run and the cluster knows the node.
        ready_path = self.ray_dir / "ray_current_cluster"
        while not ready_path.exists():
            if not self.is_running:
                raise ClusterError(f"Ray did not start on {self._config.address}: {self.last_words}")
            if time.monotonic() - started_s > timeout_s:
                raise ClusterError(
                    f"Ray on {self._config.address} is not ready after {timeout_s:g} s: {self.last_words}"
                )
            await asyncio.sleep(_POLL_S)
        log.info("ray_started", node=self._config.name, seconds=round(time.monotonic() - started_s, 1))
        return ready_path.read_text().strip()

    def stop(self) -> None:
        """End every process of the node and remove its files; takes a few seconds, the first time."""
        atexit.unregister(self.stop)
        if self._folder.path.exists():
            self._end_processes()
            self._folder.close()

    def _arguments(self) -> list[str]:
        config = self._config
        where = ["--head", "--port=0", "--include-dashboard=false", "--no-monitor"]
        if config.head_address is not None:
            where = [f"--address={config.head_address}"]
        return [
            "start",
            *where,
            f"--node-ip-address={config.address}",
            f"--node-name={config.name}",
            f"--temp-dir={self.ray_dir}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            # Stages ask for no CPU. One unit keeps one worker process warm.
            "--num-cpus=1",
            "--disable-usage-stats",
            "--include-log-monitor=false",
            # Any free port for everything: several nodes may share a machine.
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--dashboard-agent-listen-port=0",
        ]

    def _end_processes(self) -> None:
        self._descendants.update(self._processes())
        if self.is_running:
            # Ray's own way first: it takes its children along.
            self._child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_GRACE_S)
        deadline_s = time.monotonic() + _KILL_TIMEOUT_S
        while (left := self._processes()) and time.monotonic() < deadline_s:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1)
        self._child.wait(_GRACE_S)
        if left:
            log.error("ray_processes_left", pids=[process.pid for process in left])

    def _processes(self) -> list[psutil.Process]:
        """Processes of the node that live, by session and by descent, so also those without a parent."""
        found = set(self._descendants)
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(psutil.Process(self._child.pid).children(recursive=True))
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if os.getsid(pid) == self._child.pid:
                    found.add(psutil.Process(pid))
        return [process for process in found if _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
