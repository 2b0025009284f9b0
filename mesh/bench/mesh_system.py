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

from mesh.api.api_keys import KeyRecord, add_key, digest_of
from mesh.bench.server_process import get_json, last_lines, start_logged, wait_healthy
from mesh.bench.stage_times import StageTotals
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.lab.hosts import Lab

COMMAND: Final = str(Path(sys.executable).with_name("mesh"))
_POLL_S: Final = 0.1
_ANSWERS_AT_ONCE: Final = 1000


class MeshSystem:
    """A head without layers, and one stage on every other host of the lab but the spare ones.

    Args:
        lab: Its host 0 is the head.
        model: The GGUF, on the head only.
        logs: Directory for logs and the join token; the hosts must see it (`Lab(shared=…)`).
        num_hosts: How many of the lab's hosts take part, by default all.
        num_spares: How many of them are to hold no layers, the head apart.
        num_threads: Of each stage.
        split: Layers of each stage, by default as `mesh serve` plans it.
        options: Further options of `mesh serve`.
        join_options: Further options of `mesh join`.
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
        num_spares: int = 0,
        num_threads: int = 1,
        split: Sequence[int] | None = None,
        options: Sequence[str] = (),
        join_options: Sequence[str] = (),
        api_key: str | None = None,
    ) -> None:
        self._lab = lab
        self._num_hosts = num_hosts or lab.num_hosts
        self._num_spares = num_spares
        self._model = model
        self._logs = logs
        self._threads = str(num_threads)
        self._split = split
        self._options = list(options)
        self._join_options = list(join_options)
        if api_key is not None:
            key_path = logs / "api-keys"
            key_path.unlink(missing_ok=True)
            # One key asks for more at once than one user would.
            add_key(key_path, KeyRecord("bench", digest_of(api_key), max_concurrent=_ANSWERS_AT_ONCE))
            self._options += ["--api-key-file", str(key_path)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.token_path = logs / "join-token"

    @property
    def num_stages(self) -> int:
        """One for each host but the head and the spare ones."""
        return self._num_hosts - 1 - self._num_spares

    def start(self, *, timeout_s: float = 300.0) -> None:
        """Bring everything up and wait until it answers.

        Raises:
            MeshError: If it does not come up.
        """
        self.token_path.unlink(missing_ok=True)
        serve = self.start_head()
        deadline_s = time.monotonic() + timeout_s
        while not self.token_path.exists():
            if serve.poll() is not None or time.monotonic() > deadline_s:
                raise MeshError(f"mesh serve wrote no join token:\n{last_lines(self.log(0))}")
            time.sleep(_POLL_S)
        for host in range(1, self._num_hosts):
            self.start_join(host)
        self.wait_healthy(timeout_s=timeout_s)

    def start_head(self) -> subprocess.Popen[bytes]:
        """`mesh serve` on host 0, also once more after it ended: then its log goes on."""
        waiting = ["--head-only", "--wait-for", str(self._num_hosts - 1)]
        if self._split is None:
            waiting += ["--stages", str(self.num_stages)]
        else:
            waiting += ["--split", ",".join(map(str, self._split))]
        where = ["--advertise", self._lab.address(0), "--token-file", str(self.token_path)]
        return self._launch(
            0,
            ["serve", str(self._model), *where, *waiting, "--threads", self._threads, *self._options],
        )

    def start_join(self, host: int) -> subprocess.Popen[bytes]:
        """`mesh join` on a host, also once more after it ended."""
        return self._launch(host, [*self.join_argv(host), "--threads", self._threads, *self._join_options])

    def wait_healthy(self, *, timeout_s: float = 300.0) -> None:
        """Wait until the head answers 200 to `/health`; raises MeshError if it does not."""
        wait_healthy(self._lab, 0, self.port, self._processes[0], self.log(0), timeout_s=timeout_s)

    def process(self, host: int) -> subprocess.Popen[bytes]:
        """The latest `mesh` of a host, whether it still runs or not."""
        return self._processes[host]

    def join_argv(self, host: int) -> list[str]:
        """Arguments of `mesh` with which a host joins."""
        return ["join", "--token-file", str(self.token_path), "--advertise", self._lab.address(host)]

    def stop(self, *, hosts: Sequence[int] | None = None, timeout_s: float = 60.0) -> list[int]:
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
        for host, process in sorted(self._processes.items()):
            if (hosts is None or host in hosts) and process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
        codes: list[int] = []
        for host, process in sorted(self._processes.items()):
            try:
                codes.append(process.wait(max(0.0, deadline_s - time.monotonic())))
            except subprocess.TimeoutExpired:
                words = last_lines(self.log(host))
                raise MeshError(f"mesh on host{host} runs {timeout_s:g} s after Ctrl-C:\n{words}") from None
        self._processes.clear()
        return codes

    def kill(self) -> None:
        """End what is left, without a word."""
        for process in self._processes.values():
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
        for root in self._processes.values():
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
        is_again = host in self._processes
        process = start_logged(self._lab, host, [COMMAND, *arguments], self.log(host), is_again=is_again)
        self._processes[host] = process
        return process
