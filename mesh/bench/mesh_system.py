"""Our mesh on the lab: `mesh serve` on host 0, `mesh join` on the others."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from mesh.bench.server_process import get_json, last_lines, start_logged, wait_healthy
from mesh.bench.stage_times import StageTotals
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.lab import Lab

COMMAND: Final = str(Path(sys.executable).with_name("mesh"))
_POLL_S: Final = 0.1


class MeshSystem:
    """A head without layers, and one stage on every other host of the lab.

    Args:
        lab: Its host 0 is the head.
        model: The GGUF, on the head only.
        logs: Directory for logs and the join token; the hosts must see it (`Lab(shared=…)`).
        num_hosts: How many of the lab's hosts take part, by default all.
        num_threads: Of each stage.
        split: Layers of each stage, by default as `mesh serve` plans it.
        options: Further options of `mesh serve`.
        api_key: What clients must show, or None for an open API.
    """

    name = "mesh"
    port: Final = 8000
    fields: Final[dict[str, Any]] = {"ignore_eos": True}

    def __init__(
        self,
        lab: Lab,
        model: Path,
        logs: Path,
        *,
        num_hosts: int | None = None,
        num_threads: int = 1,
        split: Sequence[int] | None = None,
        options: Sequence[str] = (),
        api_key: str | None = None,
    ) -> None:
        self._lab = lab
        self._num_hosts = num_hosts or lab.num_hosts
        self._model = model
        self._logs = logs
        self._threads = str(num_threads)
        self._split = split
        self._options = list(options)
        if api_key is not None:
            key_path = logs / "api-keys"
            key_path.touch(mode=0o600)
            key_path.write_text(api_key + "\n", encoding="utf-8")
            self._options += ["--api-key-file", str(key_path)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self.token_path = logs / "join-token"

    @property
    def num_stages(self) -> int:
        """One for each host but the head."""
        return self._num_hosts - 1

    def start(self, *, timeout_s: float = 120.0) -> None:
        """Bring everything up and wait until it answers.

        Raises:
            MeshError: If it does not come up.
        """
        self.token_path.unlink(missing_ok=True)
        waiting = ["--head-only", "--wait-for", str(self.num_stages)]
        if self._split is None:
            waiting += ["--stages", str(self.num_stages)]
        else:
            waiting += ["--split", ",".join(map(str, self._split))]
        where = ["--advertise", self._lab.address(0), "--token-file", str(self.token_path)]
        serve = self._launch(
            0,
            ["serve", str(self._model), *where, *waiting, "--threads", self._threads, *self._options],
        )
        deadline_s = time.monotonic() + timeout_s
        while not self.token_path.exists():
            if serve.poll() is not None or time.monotonic() > deadline_s:
                raise MeshError(f"mesh serve wrote no join token:\n{last_lines(self.log(0))}")
            time.sleep(_POLL_S)
        for host in range(1, self._num_hosts):
            self._launch(host, [*self.join_argv(host), "--threads", self._threads])
        wait_healthy(self._lab, 0, self.port, serve, self.log(0), timeout_s=timeout_s)

    def join_argv(self, host: int) -> list[str]:
        """Arguments of `mesh` with which a host joins."""
        return ["join", "--token-file", str(self.token_path), "--advertise", self._lab.address(host)]

    def stop(self, *, hosts: Sequence[int] | None = None, timeout_s: float = 30.0) -> list[int]:
        """Ctrl-C, and wait until every `mesh` process has ended.

        Args:
            hosts: Where Ctrl-C is pressed, by default everywhere; the others leave when the head does.
            timeout_s: For all of them together.

        Returns:
            Exit codes, the head's first.

        Raises:
            MeshError: If one is still there when the time is over.
        """
        deadline_s = time.monotonic() + timeout_s
        for host, process in enumerate(self._processes):
            if (hosts is None or host in hosts) and process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
        codes: list[int] = []
        for host, process in enumerate(self._processes):
            try:
                codes.append(process.wait(max(0.0, deadline_s - time.monotonic())))
            except subprocess.TimeoutExpired:
                words = last_lines(self.log(host))
                raise MeshError(f"mesh on host{host} runs {timeout_s:g} s after Ctrl-C:\n{words}") from None
        self._processes.clear()
        return codes

    def kill(self) -> None:
        """End what is left, without a word."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()

    def stage_totals(self) -> StageTotals:
        """What the stages computed so far, by `/mesh/status`."""
        return StageTotals.from_status(get_json(self._lab, 0, self.port, "/mesh/status"))

    def cpu_s(self) -> float:
        """Processor time that all its processes, Ray's included, took so far."""
        total_s = 0.0
        for root in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                top = psutil.Process(root.pid)
                for process in (top, *top.children(recursive=True)):
                    times = process.cpu_times()
                    total_s += times.user + times.system
        return total_s

    def log(self, host: int) -> Path:
        """What the `mesh` process of a host wrote."""
        return self._logs / f"mesh-host{host}.log"

    def _launch(self, host: int, arguments: list[str]) -> subprocess.Popen[bytes]:
        process = start_logged(self._lab, host, [COMMAND, *arguments], self.log(host))
        self._processes.append(process)
        return process
