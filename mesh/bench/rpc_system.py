"""llama.cpp RPC on the lab: its server on host 0, its RPC servers on the others."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any, Final

from mesh.bench.server_process import start_logged, wait_healthy, wait_listening

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence
    from pathlib import Path

    from mesh.bench.llama_rpc import LlamaRpc
    from mesh.lab.hosts import Lab

_RPC_PORT: Final = 50052


class RpcSystem:
    """All layers on the RPC servers, evenly split, no cache of prompts; no speculation unless told.

    Args:
        lab: Its host 0 is the head, every other one a stage.
        programs: What to run.
        model: The GGUF, on the head only.
        logs: Directory for the programs' output.
        num_threads: Of each program.
        options: Further options of `llama-server`.
        ctx_size: Positions of each session.
        num_slots: Sessions at once.
    """

    name = "llama.cpp RPC"
    port: Final = 8080
    # Both sides go on to the last token asked for, so that all answers are equally long.
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
        # llama.cpp shares its context out among the slots.
        self._ctx_size = str(ctx_size * num_slots)
        self._slots = str(num_slots)
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Bring everything up and wait until it answers.

        Raises:
            MeshError: If it does not come up.
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
        """Stop the processes, so that none of them takes processor time."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
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
        process = start_logged(self._lab, host, argv, self._log(host))
        self._processes.append(process)
        return process

    def _log(self, host: int) -> Path:
        return self._logs / f"rpc-host{host}.log"
