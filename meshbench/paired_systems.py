"""Paired measurement of a mesh and llama.cpp's RPC server, in turn.

While one side answers, all processes of the other are stopped: llama.cpp's threads may spin, and an idle mesh
takes processor time, too.

Stages compute with weights that llama.cpp repacked for fast kernels, which its RPC server cannot use. So the
mesh is measured twice: as users run it, and with the peer's kernels.
"""

from __future__ import annotations

import statistics
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import structlog

from mesh.placement.context_choice import least_context
from mesh.util.child_environment import module_command
from meshbench.lab.llama_cpp_build import build_llama_rpc
from meshbench.lab.systems import MeshSystem, RpcSystem
from meshbench.load_client.schedule import Request
from spanmesh_proto.errors import MeshError
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from meshbench.lab.network import Lab
    from meshbench.lab.systems import StageTimes
    from meshbench.load_client.answers import AnswerRecord
    from meshbench.load_client.client import LoadClient

OWN: Final[Kernels] = "as users run it"
PEERS: Final[Kernels] = "with the peer's kernels"
# Our own bounds: on the ratio by kernels and one-way delay, and on what a token takes beyond computing and
# hops.
TARGET_RATIO: Final = {
    (OWN, 5.0): 1.5,
    (OWN, 20.0): 1.5,
    (PEERS, 5.0): 1.22,
    (PEERS, 20.0): 1.3,
}
TARGET_OVERHEAD_MS: Final = 2.5
TARGET_TRANSPORT_MS: Final = 1.2

log = structlog.get_logger()

# What the mesh computes with: repacked weights where llama.cpp has such kernels, and spanmesh's for
# attention; or what llama.cpp's RPC server uses.
Kernels: TypeAlias = Literal["as users run it", "with the peer's kernels"]


@dataclass(frozen=True)
class Pair:
    """The same prompt, answered by both sides in the same round."""

    mesh_tokens_per_s: float
    """Our decode rate."""
    peer_tokens_per_s: float
    """The other side's."""

    @property
    def ratio(self) -> float:
        """Ratio of our speed to the peer's."""
        return self.mesh_tokens_per_s / self.peer_tokens_per_s


@dataclass(frozen=True)
class Comparison:
    """Measurements at one delay."""

    kernels: Kernels
    """Of the mesh."""
    delay_ms: float
    """Requested one-way delay."""
    hop_ms: float
    """One-way delay measured."""
    in_process_ms: float
    """Per token, the whole model in one process."""
    compute_ms: float
    """Per token, what the stages computed, summed over them, by their own clocks."""
    queue_ms: float
    """Per token, how long its window waited for the stages' workers, summed over them."""
    num_hops: int
    """Times that a token crosses the network in our ring."""
    pairs: tuple[Pair, ...]
    """In the order measured; at least one."""
    target_ratio: float | None
    """What the median ratio should reach, if there is a target at this delay."""
    target_overhead_ms: float
    """What `overhead_ms` should not exceed."""
    target_transport_ms: float
    """What `transport_ms` should not exceed."""

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
            f"mesh {self.kernels}, delay {self.delay_ms:g} ms one way (measured {self.hop_ms:.2f})",
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
        transport = _verdict(self.transport_ms <= self.target_transport_ms)
        lines.append(
            f"  of these {self.overhead_ms:.2f}: {self.slower_compute_ms:+.2f} since the stages computed "
            f"{self.compute_ms:.2f}, "
            f"{self.queue_ms:.2f} in their queues, {self.transport_ms:.2f} in transport, "
            f"target {self.target_transport_ms:.2f}: {transport}"
        )
        return "\n".join(lines)


@dataclass(frozen=True)
class Settings:
    """Options of the measurement."""

    model: Path
    """A GGUF."""
    prompts: tuple[str, ...]
    """Prompts for both sides, in every round."""
    num_tokens: int
    """Of each answer."""
    num_rounds: int
    """How often both sides take their turn, at each delay."""
    num_threads: int
    """Of each stage, and of the whole model in one process."""
    exact: bool
    """Our numeric mode, for the stages and the whole model."""


class Contest:
    """Both systems on one lab; of the mesh one with either kind of kernels at a time.

    Args:
        lab: Where.
        client: Client of both, on the head's host.
        settings: Options of the measurement.
        logs: Directory for what the processes write, seen by all hosts.
    """

    def __init__(self, lab: Lab, client: LoadClient, settings: Settings, logs: Path) -> None:
        self._lab = lab
        self._client = client
        self._settings = settings
        self._logs = logs
        self._rpc = RpcSystem(lab, build_llama_rpc(), settings.model, logs, num_threads=settings.num_threads)

    @property
    def kernels(self) -> tuple[Kernels, ...]:
        """Kinds of kernels to measure: exact mode repacks no weights."""
        return (PEERS,) if self._settings.exact else (OWN, PEERS)

    def start(self) -> None:
        """Bring the peer up, and have it answer once: nothing measured is a first time."""
        log.info("starting", system=self._rpc.name)
        self._rpc.start()
        self._ask(self._rpc, self._settings.prompts[:1])
        self._rpc.pause()

    @contextmanager
    def mesh(self, kernels: Kernels) -> Iterator[MeshSystem]:
        """A mesh with these kernels, up and warm."""
        settings = self._settings
        facts = read_model_facts(settings.model)
        sizes = ["--parallel", "1", "--ctx-size", str(least_context(facts.n_ctx_train))]
        numerics = ["--exact"] if settings.exact else ["--no-repack"] * (kernels == PEERS)
        mesh = MeshSystem(
            self._lab,
            settings.model,
            self._logs,
            num_threads=settings.num_threads,
            split=even_split(facts.n_layers, self._lab.num_hosts - 1),
            options=["--speculate", "off", *sizes, *numerics],
            env=None if settings.exact else environment_for(kernels),
        )
        log.info("starting", system=f"{mesh.name} {kernels}")
        self._lab.set_delay_ms(0)
        try:
            mesh.start()
            self._ask(mesh, settings.prompts[:1])
            yield mesh
            mesh.stop()
        finally:
            mesh.kill()

    def measure(self, mesh: MeshSystem, kernels: Kernels, delay_ms: float) -> Comparison:
        """Take turns at one delay.

        Args:
            mesh: From `mesh`.
            kernels: Its kernels.
            delay_ms: One way.
        """
        self._lab.set_delay_ms(delay_ms)
        hops_ms: list[float] = []
        whole_ms: list[float] = []
        times: list[StageTimes] = []
        pairs: list[Pair] = []
        for number in range(1, self._settings.num_rounds + 1):
            hops_ms.append(self._lab.round_trip_ms(0, 1) / 2)
            mesh.pause()
            whole_ms.append(self._time_in_process(kernels))
            mesh.resume()
            ours, in_stages = self._ask_mesh(mesh)
            times.append(in_stages)
            theirs = self._ask_rpc(mesh)
            fresh = [Pair(own.tokens_per_s, rpc.tokens_per_s) for own, rpc in zip(ours, theirs, strict=True)]
            pairs += fresh
            log.info(
                "round_done",
                kernels=kernels,
                delay_ms=delay_ms,
                round=number,
                ratio=round(statistics.median(pair.ratio for pair in fresh), 2),
                equal_texts=sum(own.text == rpc.text for own, rpc in zip(ours, theirs, strict=True)),
                mesh_ttft_ms=round(statistics.median(answer.ttft_ms for answer in ours)),
                rpc_ttft_ms=round(statistics.median(answer.ttft_ms for answer in theirs)),
            )
        return Comparison(
            kernels=kernels,
            delay_ms=delay_ms,
            hop_ms=statistics.median(hops_ms),
            in_process_ms=statistics.median(whole_ms),
            compute_ms=statistics.median(time.compute_ms for time in times),
            queue_ms=statistics.median(time.queue_ms for time in times),
            num_hops=self._lab.num_hosts,
            pairs=tuple(pairs),
            target_ratio=TARGET_RATIO.get((kernels, delay_ms)),
            target_overhead_ms=TARGET_OVERHEAD_MS,
            target_transport_ms=TARGET_TRANSPORT_MS,
        )

    def stop(self) -> None:
        """End the peer."""
        self._rpc.stop()

    def _ask_mesh(self, mesh: MeshSystem) -> tuple[list[AnswerRecord], StageTimes]:
        """Answers, and how long a decode step took in the stages: what a prompt alone takes is left out."""
        prompts = self._settings.prompts
        before = mesh.stage_totals()
        self._ask(mesh, prompts, num_tokens=1)
        between = mesh.stage_totals()
        answers = self._ask(mesh, prompts)
        return answers, (mesh.stage_totals() - between - (between - before)).per_window()

    def _ask_rpc(self, mesh: MeshSystem) -> list[AnswerRecord]:
        mesh.pause()
        self._rpc.resume()
        answers = self._ask(self._rpc, self._settings.prompts)
        self._rpc.pause()
        mesh.resume()
        return answers

    def _ask(
        self, system: MeshSystem | RpcSystem, prompts: Sequence[str], *, num_tokens: int | None = None
    ) -> list[AnswerRecord]:
        requests = [
            Request.chat(prompt, num_tokens or self._settings.num_tokens, system.fields) for prompt in prompts
        ]
        try:
            return list(self._client.answer(system.url, requests).answers)
        except MeshError as error:
            raise MeshError(f"{system.name}: {error.message}") from error

    def _time_in_process(self, kernels: Kernels) -> float:
        settings = self._settings
        argv = module_command("meshbench.local_decode", str(settings.model))
        argv += ["--tokens", str(settings.num_tokens), "--threads", str(settings.num_threads)]
        argv += ["--exact"] * settings.exact + ["--no-repack"] * (kernels == PEERS)
        done = self._lab.exec(0, argv, env=None if settings.exact else environment_for(kernels))
        if done.returncode != 0:
            raise MeshError(f"the model in one process: {done.stderr.strip()}")
        return float(done.stdout)


def environment_for(kernels: Kernels) -> dict[str, str]:
    """Variables with which a program computes attention by these kernels."""
    return {"SPANMESH_ATTENTION": "ggml"} if kernels == PEERS else {}


def _verdict(reached: bool) -> str:  # noqa: FBT001 - it is the question itself
    return "reached" if reached else "missed"


def even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, as equal as can be: what the other side does, too."""
    edges = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return tuple(stop - start for start, stop in pairwise(edges))


def side_by_side(comparisons: Sequence[Comparison]) -> str:
    """Tokens per second in three columns: the mesh with each kind of kernels, and the peer."""
    lines = [f"{'delay':>8}  {OWN:>23}  {PEERS:>23}  {'llama.cpp RPC':>13}"]
    for delay_ms in dict.fromkeys(each.delay_ms for each in comparisons):
        found = {each.kernels: each for each in comparisons if each.delay_ms == delay_ms}
        cells = [
            f"{one.mesh_tokens_per_s:.2f} ({one.ratio:.2f} times)" if (one := found.get(kernels)) else "-"
            for kernels in (OWN, PEERS)
        ]
        peer = median(pair.peer_tokens_per_s for each in found.values() for pair in each.pairs)
        lines.append(f"{f'{delay_ms:g} ms':>8}  {cells[0]:>23}  {cells[1]:>23}  {peer:13.2f}")
    return "\n".join(lines)
