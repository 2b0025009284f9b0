"""What the measured rates amount to. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median


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
        """How many times faster we are."""
        return self.mesh_tokens_per_s / self.peer_tokens_per_s


@dataclass(frozen=True)
class Comparison:
    """All that was measured at one delay.

    Attributes:
        delay_ms: One-way delay asked for.
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
        """What neither computing nor queues nor the wire explain: messages, loops, the sampler's way back."""
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
