"""Finds llama.cpp RPC's best setting in this lab, and keeps it at hand."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import structlog

from mesh.bench.stream_client import Ask, Batch
from mesh.lab.systems import RpcSystem
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mesh.bench.client import Client
    from mesh.bench.spec.peer import PeerSetting
    from mesh.bench.spec.runner import RunnerOptions
    from mesh.bench.spec.workload import Workload
    from mesh.lab.llama_cpp_build import LlamaRpc
    from mesh.lab.network import Lab

log = structlog.get_logger()

# Of each answer while settings are compared: enough to tell them apart.
_NUM_TOKENS: Final = 48


class Peer:
    """llama.cpp RPC on the lab's hosts, one setting at a time.

    Args:
        lab: Where.
        client: Asks on the head's host.
        programs: What to run.
        options: Model, threads and lengths, as for the mesh.
        logs: Directory for what the processes write.
    """

    def __init__(
        self, lab: Lab, client: Client, programs: LlamaRpc, options: RunnerOptions, logs: Path
    ) -> None:
        self._lab = lab
        self._client = client
        self._programs = programs
        self._options = options
        self._logs = logs
        self._best: tuple[RpcSystem, str] | None = None

    @property
    def best(self) -> tuple[RpcSystem, str]:
        """The fastest setting that `choose` found, up and paused, with its name.

        Raises:
            MeshError: If none was found.
        """
        if self._best is None:
            raise MeshError("llama.cpp RPC could not be measured")
        return self._best

    def choose(
        self, settings: Sequence[PeerSetting], workloads: Sequence[Workload], delay_ms: float
    ) -> dict[str, float | str]:
        """Have each setting answer the first question of each workload, and keep the fastest running.

        Returns:
            By setting, tokens per second over all its answers, or why it gave none.
        """
        rates: dict[str, float | str] = {}
        for setting in settings:
            system = self._system(setting)
            try:
                self._start(system, delay_ms)
                rates[setting.name] = self._rate(system, workloads)
            except MeshError as error:
                rates[setting.name] = error.message.splitlines()[0]
            finally:
                system.stop()
            log.info("peer", setting=setting.name, tokens_per_s=rates[setting.name])
        measured = {name: rate for name, rate in rates.items() if isinstance(rate, float)}
        if measured:
            name = max(measured, key=lambda name: measured[name])
            best = self._system(next(setting for setting in settings if setting.name == name))
            self._start(best, delay_ms)
            best.pause()
            self._best = best, name
        return rates

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the best setting's processes run meanwhile."""
        system, _name = self.best
        system.resume()
        try:
            yield
        finally:
            system.pause()

    def stop(self) -> None:
        """End the processes."""
        if self._best is not None:
            self._best[0].stop()

    def _system(self, setting: PeerSetting) -> RpcSystem:
        folder = self._logs / f"rpc-{setting.name.replace('/', '-')}"
        folder.mkdir(parents=True, exist_ok=True)
        options = self._options
        return RpcSystem(
            self._lab,
            self._programs,
            options.model,
            folder,
            num_threads=options.num_threads,
            options=setting.options,
            ctx_size=options.ctx_size,
        )

    def _start(self, system: RpcSystem, delay_ms: float) -> None:
        """Loading weights over a slow wire takes long and is not what is measured."""
        self._lab.set_delay_ms(0.0)
        system.start()
        self._lab.set_delay_ms(delay_ms)

    def _rate(self, system: RpcSystem, workloads: Sequence[Workload]) -> float:
        most = min(self._options.num_tokens, _NUM_TOKENS)
        fields = {"temperature": 0, "max_tokens": most, **system.fields}
        asks = [
            Ask(workload.path, {**workload.questions[0].content, **workload.fields, **fields})
            for workload in workloads
        ]
        answers = self._client.ask(Batch(system.port, tuple(asks))).answers
        decode_s = sum(answer.decode_ms for answer in answers) / 1e3
        return sum(answer.num_tokens - 1 for answer in answers) / decode_s
