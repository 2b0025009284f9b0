"""All that a run measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh.bench.spec.crowd import Crowd
    from mesh.bench.spec.sample import Sample


@dataclass(frozen=True)
class Circumstances:
    """What a figure depends on besides what is compared.

    Attributes:
        command: The command line.
        model: File name.
        draft_model: File name, if there is one.
        num_stages: Hosts that hold layers; one more is the head.
        num_threads: Of each stage.
        num_tokens: Of each answer.
        numeric_mode: `fast` or `exact`.
        seed: Of random prompts and of sampling.
        processor: What the machine says of it.
        num_cores: Of the machine, shared by all hosts of the lab.
        software: Version of ours, and of llama-cpp-python.
    """

    command: str
    model: str
    draft_model: str | None
    num_stages: int
    num_threads: int
    num_tokens: int
    numeric_mode: str
    seed: int
    processor: str
    num_cores: int
    software: str


@dataclass
class Results:
    """Filled in as the run goes along.

    Attributes:
        circumstances: What the figures depend on.
        samples: In the order measured.
        crowds: In the order measured.
        servers: Options of `mesh serve`, by the name of each way to start it.
        hops_ms: One-way delays measured, by the delay asked for.
        failures: What could not be measured, and why.
        peer_rates: By setting of llama.cpp RPC, its tokens per second when the best was chosen, or why it has
            none.
        peer_delay_ms: One-way delay of that choice.
        took_s: The whole run.
    """

    circumstances: Circumstances
    samples: list[Sample] = field(default_factory=list)
    crowds: list[Crowd] = field(default_factory=list)
    servers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    hops_ms: dict[float, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    peer_rates: dict[str, float | str] = field(default_factory=dict)
    peer_delay_ms: float | None = None
    took_s: float = 0.0

    def is_exact(self, server: str) -> bool:
        """Whether a server computed in exact mode."""
        return "--exact" in self.servers.get(server, ())
