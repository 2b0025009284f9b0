"""Paired measurement of a mesh and llama.cpp's RPC server, in turn.

While ours answers, the other side's processes are stopped, since llama.cpp's threads may spin. Ours only
idles while the other side answers: Ray's nodes take each other for dead when they are stopped. How much
processor time that idling takes is measured.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Final

import structlog

from mesh.bench.blocking_client import Answer, Batch, chat
from mesh.lab.llama_cpp_build import build_llama_rpc
from mesh.lab.systems import MeshSystem, RpcSystem
from spanmesh_proto.errors import MeshError
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mesh.bench.blocking_client import Client
    from mesh.lab.network import Lab
    from mesh.lab.systems import StageTimes


@dataclass(frozen=True)
class Pair:
    """The same prompt, answered by both sides in the same round.

    Attributes:
        mesh_tokens_per_s: Our decode rate.
        peer_tokens_per_s: The other side's.
    """

    mesh_tokens_per_s: float
    peer_tokens_per_s: float

    @property
    def ratio(self) -> float:
        """Ratio of our speed to the peer's."""
        return self.mesh_tokens_per_s / self.peer_tokens_per_s


@dataclass(frozen=True)
class Comparison:
    """Measurements at one delay.

    Attributes:
        delay_ms: Requested one-way delay.
        hop_ms: One-way delay measured.
        in_process_ms: Per token, the whole model in one process.
        compute_ms: Per token, what the stages computed, summed over them, by their own clocks.
        queue_ms: Per token, how long its window waited for the stages' workers, summed over them.
        num_hops: Times that a token crosses the network in our ring.
        pairs: In the order measured; at least one.
        target_ratio: What the median ratio should reach, if there is a target at this delay.
        target_overhead_ms: What `overhead_ms` should not exceed.
    """

    delay_ms: float
    hop_ms: float
    in_process_ms: float
    compute_ms: float
    queue_ms: float
    num_hops: int
    pairs: tuple[Pair, ...]
    target_ratio: float | None
    target_overhead_ms: float

    @property
    def mesh_tokens_per_s(self) -> float:
        """Our median rate."""
        return median(pair.mesh_tokens_per_s for pair in self.pairs)

    @property
    def peer_tokens_per_s(self) -> float:
        """The other side's median rate."""
        return median(pair.peer_tokens_per_s for pair in self.pairs)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Of each pair."""
        return tuple(pair.ratio for pair in self.pairs)

    @property
    def ratio(self) -> float:
        """Median over the pairs."""
        return median(self.ratios)

    @property
    def mesh_ms(self) -> float:
        """Our time per token, in milliseconds."""
        return 1e3 / self.mesh_tokens_per_s

    @property
    def overhead_ms(self) -> float:
        """Our time per token beyond what computing and the network take."""
        return self.mesh_ms - self.in_process_ms - self.num_hops * self.hop_ms

    @property
    def slower_compute_ms(self) -> float:
        """How much longer the stages computed than the whole model in one process; part of the overhead."""
        return self.compute_ms - self.in_process_ms

    @property
    def transport_ms(self) -> float:
        """Rest beyond computing, queues and the wire: messages, event loops, sampling."""
        return self.overhead_ms - self.slower_compute_ms - self.queue_ms

    def report(self) -> str:
        """Lines for a person."""
        lines = [
            f"delay {self.delay_ms:g} ms one way (measured {self.hop_ms:.2f})",
            "  mesh tok/s  RPC tok/s  ratio",
        ]
        lines += [
            f"  {pair.mesh_tokens_per_s:10.2f}  {pair.peer_tokens_per_s:9.2f}  {pair.ratio:5.2f}"
            for pair in self.pairs
        ]
        target = ""
        if self.target_ratio is not None:
            target = f", target {self.target_ratio:.2f}: {_verdict(self.ratio >= self.target_ratio)}"
        lines.append(
            f"  medians: {self.mesh_tokens_per_s:.2f} against {self.peer_tokens_per_s:.2f} tok/s, "
            f"ratio {self.ratio:.2f} ({min(self.ratios):.2f} to {max(self.ratios):.2f}){target}"
        )
        lines.append(
            f"  {self.mesh_ms:.2f} ms per token = {self.in_process_ms:.2f} in one process "
            f"+ {self.num_hops} hops of {self.hop_ms:.2f} + {self.overhead_ms:.2f}, "
            f"target {self.target_overhead_ms:.2f}: {_verdict(self.overhead_ms <= self.target_overhead_ms)}"
        )
        lines.append(
            f"  of these {self.overhead_ms:.2f}: {self.slower_compute_ms:+.2f} since the stages computed "
            f"{self.compute_ms:.2f}, "
            f"{self.queue_ms:.2f} in their queues, {self.transport_ms:.2f} in transport"
        )
        return "\n".join(lines)


def _verdict(reached: bool) -> str:  # noqa: FBT001 - it is the question itself
    return "reached" if reached else "missed"


log = structlog.get_logger()

# Our own bounds on the overhead beyond computing and the wire, by one-way delay.
TARGET_RATIO: Final = {5.0: 1.35, 20.0: 1.45}
TARGET_OVERHEAD_MS: Final = 1.5


@dataclass(frozen=True)
class Settings:
    """Options of the measurement.

    Attributes:
        model: A GGUF.
        prompts: Prompts for both sides, in every round.
        num_tokens: Of each answer.
        num_rounds: How often both sides take their turn, at each delay.
        num_threads: Of each stage, and of the whole model in one process.
        exact: Our numeric mode, for the stages and the whole model.
    """

    model: Path
    prompts: tuple[str, ...]
    num_tokens: int
    num_rounds: int
    num_threads: int
    exact: bool


def even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, as equal as can be: what the other side does, too."""
    edges = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return tuple(stop - start for start, stop in pairwise(edges))


class Contest:
    """Both systems, up and warm, on one lab.

    Args:
        lab: Where.
        client: Client of both, on the head's host.
        settings: Options of the measurement.
        logs: Directory for what the processes write, seen by all hosts.
    """

    def __init__(self, lab: Lab, client: Client, settings: Settings, logs: Path) -> None:
        mode = ["--exact"] if settings.exact else []
        self._lab = lab
        self._client = client
        self._settings = settings
        self._mesh = MeshSystem(
            lab,
            settings.model,
            logs,
            num_threads=settings.num_threads,
            split=even_split(read_model_facts(settings.model).n_layers, lab.num_hosts - 1),
            options=["--speculate", "off", "--parallel", "1", *mode],
        )
        self._rpc = RpcSystem(lab, build_llama_rpc(), settings.model, logs, num_threads=settings.num_threads)
        self._idle_cpu_s = 0.0
        self._idle_s = 0.0

    @property
    def mesh_idle_share(self) -> float:
        """Processor time of our side while the other answered, in cores."""
        return self._idle_cpu_s / self._idle_s

    def start(self) -> None:
        """Bring both up, and have each answer once: nothing measured is a first time."""
        for system in (self._rpc, self._mesh):
            log.info("starting", system=system.name)
            system.start()
            self._ask(system, self._settings.prompts[:1])
            if system is self._rpc:
                self._rpc.pause()

    def measure(self, delay_ms: float) -> Comparison:
        """Take turns at one delay."""
        self._lab.set_delay_ms(delay_ms)
        hops_ms: list[float] = []
        whole_ms: list[float] = []
        times: list[StageTimes] = []
        pairs: list[Pair] = []
        for number in range(1, self._settings.num_rounds + 1):
            hops_ms.append(self._lab.round_trip_ms(0, 1) / 2)
            whole_ms.append(self._time_in_process())
            ours, in_stages = self._ask_mesh()
            times.append(in_stages)
            theirs = self._ask_rpc()
            fresh = [
                Pair(mesh.tokens_per_s, rpc.tokens_per_s) for mesh, rpc in zip(ours, theirs, strict=True)
            ]
            pairs += fresh
            log.info(
                "round_done",
                delay_ms=delay_ms,
                round=number,
                ratio=round(statistics.median(pair.ratio for pair in fresh), 2),
                equal_texts=sum(mesh.text == rpc.text for mesh, rpc in zip(ours, theirs, strict=True)),
                mesh_ttft_ms=round(statistics.median(answer.ttft_ms for answer in ours)),
                rpc_ttft_ms=round(statistics.median(answer.ttft_ms for answer in theirs)),
            )
        return Comparison(
            delay_ms=delay_ms,
            hop_ms=statistics.median(hops_ms),
            in_process_ms=statistics.median(whole_ms),
            compute_ms=statistics.median(time.compute_ms for time in times),
            queue_ms=statistics.median(time.queue_ms for time in times),
            num_hops=self._lab.num_hosts,
            pairs=tuple(pairs),
            target_ratio=TARGET_RATIO.get(delay_ms),
            target_overhead_ms=TARGET_OVERHEAD_MS,
        )

    def stop(self) -> None:
        """End both."""
        self._rpc.stop()
        self._mesh.stop()

    def _ask_mesh(self) -> tuple[list[Answer], StageTimes]:
        """Answers, and how long a decode step took in the stages: what a prompt alone takes is left out."""
        prompts = self._settings.prompts
        before = self._mesh.stage_totals()
        self._ask(self._mesh, prompts, num_tokens=1)
        between = self._mesh.stage_totals()
        answers = self._ask(self._mesh, prompts)
        return answers, (self._mesh.stage_totals() - between - (between - before)).per_window()

    def _ask_rpc(self) -> list[Answer]:
        self._rpc.resume()
        cpu_s, start_s = self._mesh.cpu_s(), time.monotonic()
        answers = self._ask(self._rpc, self._settings.prompts)
        self._idle_cpu_s += self._mesh.cpu_s() - cpu_s
        self._idle_s += time.monotonic() - start_s
        self._rpc.pause()
        return answers

    def _ask(
        self, system: MeshSystem | RpcSystem, prompts: Sequence[str], *, num_tokens: int | None = None
    ) -> list[Answer]:
        asks = tuple(
            chat(prompt, num_tokens or self._settings.num_tokens, system.fields) for prompt in prompts
        )
        try:
            return list(self._client.ask(Batch(system.port, asks)).answers)
        except MeshError as error:
            raise MeshError(f"{system.name}: {error.message}") from error

    def _time_in_process(self) -> float:
        settings = self._settings
        argv = [sys.executable, "-m", "mesh.bench.local_decode", str(settings.model)]
        argv += ["--tokens", str(settings.num_tokens), "--threads", str(settings.num_threads)]
        done = self._lab.exec(0, argv + ["--exact"] * settings.exact)
        if done.returncode != 0:
            raise MeshError(f"the model in one process: {done.stderr.strip()}")
        return float(done.stdout)
