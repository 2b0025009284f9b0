"""Systems under test in the lab: a mesh and llama.cpp's RPC server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from mesh.api.api_keys import KeyRecord, add_key, digest_of
from mesh.status import read_status
from spanmesh_proto.errors import ClusterError, MeshError
from stages.openmp_tuning import SPIN_COUNT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mesh.status import MeshStatus
    from meshbench.lab.llama_cpp_build import LlamaRpc
    from meshbench.lab.network import Lab

_POLL_S: Final = 0.2
_LAST_LINES: Final = 15
_MAX_SHOWN_CHARS: Final = 200
_GET: Final = """
import sys, urllib.request
headers = {"Authorization": f"Bearer {key}" for key in sys.argv[2:]}
request = urllib.request.Request(sys.argv[1], headers=headers)
print(urllib.request.urlopen(request, timeout=10).read().decode())
"""
_UNTIL_HEALTHY: Final = """
import sys, time, urllib.request
while True:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/health", timeout=2)
    except OSError:
        time.sleep(float(sys.argv[2]))
    else:
        break
"""
_RPC_PORT: Final = 50052
COMMAND: Final = str(Path(sys.executable).with_name("mesh"))
_MESH_POLL_S: Final = 0.1
_ANSWERS_AT_ONCE: Final = 1000


class RpcSystem:
    """llama.cpp RPC: layers evenly on the RPC servers, no prompt cache, by default no speculation.

    Args:
        lab: Its host 0 is the head, every other one a stage.
        programs: The programs.
        model: The GGUF, on the head only.
        logs: Directory for the programs' output.
        num_threads: Threads of each program.
        options: Further options of `llama-server`.
        ctx_size: Positions of each session.
        num_slots: Concurrent sessions.
    """

    name = "llama.cpp RPC"
    is_mesh = False
    port: Final = 8080
    url: Final = f"http://127.0.0.1:{port}"
    # Both sides generate all requested tokens, so that all answers have the same length.
    fields: Final[dict[str, Any]] = {"ignore_eos": True, "cache_prompt": False}

    def __init__(
        self,
        lab: Lab,
        programs: LlamaRpc,
        model: Path,
        logs: Path,
        *,
        num_threads: int,
        options: Sequence[str] = (),
        ctx_size: int = 2048,
        num_slots: int = 1,
    ) -> None:
        self._lab = lab
        self._programs = programs
        self._model = model
        self._logs = logs
        self._threads = str(num_threads)
        self._options = options
        # llama.cpp divides its context among the slots.
        self._ctx_size = str(ctx_size * num_slots)
        self._slots = str(num_slots)
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start everything and wait until it answers.

        Raises:
            MeshError: If it does not start.
        """
        lab = self._lab
        stages = range(1, lab.num_hosts)
        for host in stages:
            argv = [str(self._programs.rpc_server), "-H", lab.address(host), "-p", str(_RPC_PORT)]
            process = self._launch(host, [*argv, "-t", self._threads])
            wait_listening(lab, host, _RPC_PORT, process, self._log(host))
        endpoints = ",".join(f"{lab.address(host)}:{_RPC_PORT}" for host in stages)
        argv = [str(self._programs.server), "--model", str(self._model), "--port", str(self.port)]
        argv += ["--rpc", endpoints, "--n-gpu-layers", "99", "--split-mode", "layer"]
        argv += ["--tensor-split", ",".join("1" for _ in stages)]
        argv += ["--threads", self._threads, "--parallel", self._slots, "--ctx-size", self._ctx_size]
        argv += ["--no-cache-prompt", "--cache-ram", "0", "--offline", "--no-ui", *self._options]
        server = self._launch(0, argv)
        wait_healthy(lab, 0, self.port, server, self._log(0))

    def pause(self) -> None:
        """Stop the processes, so that they take no processor time."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the processes."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the processes."""
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, number)

    def _launch(self, host: int, argv: list[str]) -> subprocess.Popen[bytes]:
        # As users run it: what spanmesh sets for its own threads is not for these.
        argv = ["env", f"--unset={SPIN_COUNT}", *argv]
        process = start_logged(self._lab, host, argv, self._log(host))
        self._processes.append(process)
        return process

    def _log(self, host: int) -> Path:
        return self._logs / f"rpc-host{host}.log"


@dataclass(frozen=True)
class StageTimes:
    """Times of one window, summed over all stages."""

    compute_ms: float
    """In llama.cpp."""
    queue_ms: float
    """Waiting for a worker."""


@dataclass(frozen=True)
class StageTotals:
    """Times since the start, or between two readings."""

    num_windows: int
    """Windows that went around the ring."""
    compute_ms: float
    """Of all stages and windows."""
    queue_ms: float
    """Of all stages and windows."""

    @classmethod
    def from_status(cls, status: MeshStatus) -> StageTotals:
        """Times of the stages so far."""
        stages = status.stages
        return cls(
            num_windows=stages[0].windows,
            compute_ms=sum(stage.windows * stage.mean_compute_ms for stage in stages),
            queue_ms=sum(stage.windows * stage.mean_queue_ms for stage in stages),
        )

    def __sub__(self, other: StageTotals) -> StageTotals:
        """Times added since `other`."""
        return StageTotals(
            self.num_windows - other.num_windows,
            self.compute_ms - other.compute_ms,
            self.queue_ms - other.queue_ms,
        )

    def per_window(self) -> StageTimes:
        """Means; zero without a window."""
        count = max(self.num_windows, 1)
        return StageTimes(self.compute_ms / count, self.queue_ms / count)


class MeshSystem:
    """A mesh: a head without layers, and one stage on every other host of the lab but the spares.

    Args:
        lab: Its host 0 is the head.
        model: The GGUF, on the head only.
        logs: Directory for logs and the join token; the hosts must see it (`Lab(shared=…)`).
        num_hosts: Number of the lab's hosts in the mesh, by default all.
        num_spares: Number of them without layers, besides the head.
        num_threads: Threads of each stage.
        split: Layers of each stage, by default as `mesh serve` plans it.
        options: Further options of `mesh serve`.
        join_options: Further options of `mesh join`.
        join_options_of: Further ones of single hosts.
        api_key: API key, or None for an open API.
        addresses: Addresses that the hosts advertise, by default those of the lab.
        env: Variables besides the inherited ones.
        checkout: Its programs, in `.venv/bin`; by default those of this process.
        name: For tables; by default told from the checkout. Another than `mesh` may run on the same hosts.
    """

    is_mesh = True
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
        join_options_of: Mapping[int, Sequence[str]] | None = None,
        api_key: str | None = None,
        addresses: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        checkout: Path | None = None,
        name: str | None = None,
    ) -> None:
        self.name = name or ("mesh" if checkout is None else f"the mesh of {checkout.name}")
        # Both may run on the same hosts.
        self.port = 8000 if self.name == "mesh" else 8001
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = COMMAND if checkout is None else str(command_of(checkout))
        self._lab = lab
        self._addresses = addresses or [lab.address(host) for host in range(lab.num_hosts)]
        self._num_hosts = num_hosts or lab.num_hosts
        self._num_spares = num_spares
        self._model = model
        self._logs = logs
        self._threads = str(num_threads)
        self._split = split
        self._options = list(options)
        self._join_options = list(join_options)
        self._join_options_of = join_options_of or {}
        if api_key is not None:
            key_path = logs / "api-keys"
            key_path.unlink(missing_ok=True)
            # Benchmarks use one key for many concurrent answers.
            add_key(key_path, KeyRecord("bench", digest_of(api_key), max_concurrent=_ANSWERS_AT_ONCE))
            self._options += ["--api-key-file", str(key_path)]
        self._env = env
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.token_path = logs / "join-token"

    @property
    def num_stages(self) -> int:
        """One for each host but the head and the spares."""
        return self._num_hosts - 1 - self._num_spares

    def start(self, *, timeout_s: float = 300.0) -> None:
        """Start everything and wait until it answers.

        Raises:
            MeshError: If it does not start.
        """
        self.token_path.unlink(missing_ok=True)
        serve = self.start_head()
        deadline_s = time.monotonic() + timeout_s
        while not self.token_path.exists():
            if serve.poll() is not None or time.monotonic() > deadline_s:
                raise MeshError(f"mesh serve wrote no join token:\n{last_lines(self.log(0))}")
            time.sleep(_MESH_POLL_S)
        for host in range(1, self._num_hosts):
            self.start_join(host)
        self.wait_healthy(timeout_s=timeout_s)

    def start_head(self) -> subprocess.Popen[bytes]:
        """Start `mesh serve` on host 0; after an earlier one its log is continued."""
        waiting = ["--head-only", "--wait-for", str(self._num_hosts - 1)]
        if self._split is None:
            waiting += ["--stages", str(self.num_stages)]
        else:
            waiting += ["--split", ",".join(map(str, self._split))]
        where = ["--advertise", self._addresses[0], "--token-file", str(self.token_path)]
        where += ["--port", str(self.port)]
        return self._launch(
            0,
            ["serve", str(self._model), *where, *waiting, "--threads", self._threads, *self._options],
        )

    def start_join(self, host: int) -> subprocess.Popen[bytes]:
        """Start `mesh join` on a host, possibly again."""
        options = (*self._join_options, *self._join_options_of.get(host, ()))
        return self._launch(host, [*self.join_argv(host), "--threads", self._threads, *options])

    def wait_healthy(self, *, timeout_s: float = 300.0) -> None:
        """Wait until the head answers 200 to `/health`; raises MeshError if it does not."""
        wait_healthy(self._lab, 0, self.port, self._processes[0], self.log(0), timeout_s=timeout_s)

    def process(self, host: int) -> subprocess.Popen[bytes]:
        """The latest `mesh` process of a host, running or not."""
        return self._processes[host]

    def join_argv(self, host: int) -> list[str]:
        """Arguments of `mesh` with which a host joins."""
        return ["join", "--token-file", str(self.token_path), "--advertise", self._addresses[host]]

    def stop(self, *, hosts: Sequence[int] | None = None, timeout_s: float = 60.0) -> list[int]:
        """Ctrl-C, and wait until every `mesh` process has ended.

        Args:
            hosts: Hosts with Ctrl-C, by default all; the others leave when the head does.
            timeout_s: Longest wait for all of them together.

        Returns:
            Exit codes, the head's first.

        Raises:
            MeshError: If one still runs after that.
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
        """Kill all remaining processes."""
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()

    def pause(self) -> None:
        """Stop all processes, Ray's included, so that they take no processor time.

        Nothing is taken for dead meanwhile: what watches others is stopped with them.
        """
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        """Continue all processes."""
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def stage_totals(self) -> StageTotals:
        """Times of the stages so far."""
        return StageTotals.from_status(get_status(self._lab, self.port))

    def cpu_s(self) -> float:
        """Processor time of all its processes so far, Ray's included."""
        total_s = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total_s += times.user + times.system
        return total_s

    def _tree(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for root in self._processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                top = psutil.Process(root.pid)
                found += (top, *top.children(recursive=True))
        return found

    def log(self, host: int) -> Path:
        """Log of the `mesh` process of a host."""
        return self._logs / f"mesh-host{host}.log"

    def _launch(self, host: int, arguments: list[str]) -> subprocess.Popen[bytes]:
        is_again = host in self._processes
        argv, log = [self._command, *arguments], self.log(host)
        process = start_logged(self._lab, host, argv, log, is_again=is_again, env=self._env)
        self._processes[host] = process
        return process


def start_logged(
    lab: Lab,
    host: int,
    argv: Sequence[str],
    log: Path,
    *,
    is_again: bool = False,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program on a host with all its output in a file; `is_again` keeps what the file holds."""
    with log.open("ab" if is_again else "wb") as output:
        return lab.run(host, argv, stdout=output, stderr=output, env=env)


def wait_healthy(
    lab: Lab, host: int, port: int, process: subprocess.Popen[bytes], log: Path, *, timeout_s: float = 120.0
) -> None:
    """Wait until `/health` on the host's loopback answers 200.

    Raises:
        MeshError: If the process ends first or takes too long; the message ends with its last words.
    """
    watcher = lab.run(host, health_watcher(port))
    try:
        wait_until(lambda: watcher.poll() == 0, f"host{host}'s server", process, log, timeout_s)
    finally:
        watcher.kill()
        watcher.wait()


def health_watcher(port: int) -> list[str]:
    """Program that ends with code 0 once `/health` on its own loopback answers 200.

    One process polls: a new Python for each try would take a fifth of a core from the server.
    """
    return [sys.executable, "-I", "-S", "-c", _UNTIL_HEALTHY, str(port), str(_POLL_S)]


def wait_listening(
    lab: Lab, host: int, port: int, process: subprocess.Popen[bytes], log: Path, *, timeout_s: float = 20.0
) -> None:
    """Wait until a process listens on a host's port, without connecting: not every server supports that.

    Raises:
        MeshError: Like `wait_healthy`.
    """
    wait_until(lambda: _is_listening(lab, host, port), f"host{host}'s server", process, log, timeout_s)


def get_status(lab: Lab, port: int, *, api_key: str | None = None) -> MeshStatus:
    """Status of a mesh whose head is host 0.

    Raises:
        MeshError: If it does not answer with one.
    """
    text = get_text(lab, 0, port, "/mesh/status", api_key=api_key)
    try:
        return read_status(json.loads(text))
    except json.JSONDecodeError:
        raise MeshError(f"host0 does not answer /mesh/status with JSON: {text[:_MAX_SHOWN_CHARS]}") from None


def get_text(lab: Lab, host: int, port: int, path: str, *, api_key: str | None = None) -> str:
    """Answer of a server on the host's loopback to a GET, as text.

    Raises:
        MeshError: If it does not answer.
    """
    argv = [sys.executable, "-I", "-S", "-c", _GET, f"http://127.0.0.1:{port}{path}"]
    done = lab.exec(host, argv if api_key is None else [*argv, api_key])
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [done.stdout])[-1]
        raise MeshError(f"host{host} does not answer {path}: {words}")
    return done.stdout


def last_lines(log: Path, num_lines: int = _LAST_LINES) -> str:
    """The end of a log, for errors: without requests for `/health`, of which there may be hundreds."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([line for line in lines if '"path": "/health"' not in line][-num_lines:])


def wait_until(
    is_ready: Callable[[], bool], name: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float
) -> None:
    """Wait for a server that was started.

    Args:
        is_ready: Whether it is ready; asked again and again.
        name: Name for errors.
        process: Its process.
        log: File with its output.
        timeout_s: Longest wait.

    Raises:
        MeshError: If the process ends first or takes too long; the message ends with its last words.
    """
    deadline_s = time.monotonic() + timeout_s
    while not is_ready():
        if process.poll() is not None:
            raise MeshError(f"{name} ended with code {process.returncode}:\n{last_lines(log)}")
        if time.monotonic() > deadline_s:
            raise MeshError(f"{name} is not ready after {timeout_s:g} s:\n{last_lines(log)}")
        time.sleep(_POLL_S)


def _is_listening(lab: Lab, host: int, port: int) -> bool:
    table = lab.exec(host, ["cat", "/proc/net/tcp"]).stdout.splitlines()[1:]
    # Second column: local address in hexadecimal; fourth: state, of which 0A is LISTEN.
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in map(str.split, table))


def command_of(checkout: Path) -> Path:
    """The program `mesh` of a checkout.

    Raises:
        ClusterError: If it has none.
    """
    command = checkout.absolute() / ".venv" / "bin" / "mesh"
    if not command.is_file():
        raise ClusterError(
            f"{checkout} has no {command.relative_to(checkout.absolute())}: run `make environment` there"
        )
    return command


@contextlib.contextmanager
def in_place_of(mesh: MeshSystem, peer: RpcSystem | MeshSystem) -> Iterator[None]:
    """Have a paused system run in place of a mesh on the same hosts, which is paused meanwhile."""
    mesh.pause()
    peer.resume()
    try:
        yield
    finally:
        peer.pause()
        mesh.resume()
