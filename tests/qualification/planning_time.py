"""Time that planning takes, and for which it holds a head's event loop.

    python -m tests.qualification.planning_time

80 layers of 500 MiB on hosts that bring just enough, or not quite, the way a head plans them: in a thread,
which chooses the context as well. A task that sleeps a millisecond again and again notes the longest time
between two of its turns. What else the machine does disturbs it, too: so the same is noted while another
thread only sleeps.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mesh.placement.context_choice import EXAMINED_S, choose_context
from mesh.placement.gpu_layers import read_time
from mesh.placement.host_capacity import HostCapacity
from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.placement.planner import even_out_noise, plan
from mesh.serve.planning import plan_in_thread
from meshbench.report_tools import markdown_table
from spanmesh_proto.errors import ModelDoesNotFit
from stages.slicing.model_facts import ModelFacts

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.placement.planner import Plan

_MIB: Final = 2**20
_GIB: Final = 2**30
_PROBE_S: Final = 0.001
_WORKLOAD: Final = Workload(ctx_size=4096, num_slots=4)
# As long as a plan takes, or so.
_CONTROL_S: Final = 0.5


@dataclass(frozen=True)
class Timing:
    """One case."""

    outcome: str
    """How many stages, or that it does not fit."""
    processor_s: float
    """What planning took of the processors."""
    context_s: float | None
    """What the choice of the context took of them, or None."""
    tokens_per_s: float | None
    """What one session could expect if there were no wire, or None."""
    longest_gap_ms: float
    """Between two turns of the probing task."""
    control_gap_ms: float
    """The same while nothing was planned."""


def made_up_model(n_layers: int = 80, layer_mib: int = 500) -> ModelFacts:
    """A Llama of equal layers, 70B unless told otherwise."""
    return ModelFacts(
        path=Path("model.gguf"),
        architecture="llama",
        name="model",
        n_layers=n_layers,
        n_embd=8192,
        n_vocab=128_000,
        n_ctx_train=131_072,
        file_bytes=n_layers * layer_mib * _MIB,
        layer_bytes=(layer_mib * _MIB,) * n_layers,
        embedding_bytes=600 * _MIB,
        head_bytes=800 * _MIB,
        is_tied=False,
        kv_widths=(2048,) * n_layers,
        head_widths=(128, 128),
        row_width=40_000,
        has_windows=False,
        allowed_cuts=tuple(range(1, n_layers)),
    )


def _uneven(count: int, least_gib: float, spread_gib: float, seed: int) -> list[HostCapacity]:
    draw = random.Random(seed)
    return [
        HostCapacity(
            f"h{index}",
            int((least_gib + spread_gib * draw.random()) * _GIB) + 1500 * _MIB,
            10 + draw.random() * 40,
        )
        for index in range(count)
    ]


def cases() -> dict[str, list[HostCapacity]]:
    """Hosts by the name of the case."""
    return {
        "fit8": [HostCapacity(f"h{index}", 8 * _GIB, 20.0) for index in range(8)],
        "tight8": _uneven(8, 4.6, 1.2, seed=1),
        "nofit8": [HostCapacity(f"h{index}", int(6.2 * _GIB), 10 + index * 8.0) for index in range(8)],
        "tight12": _uneven(12, 3.3, 1.0, seed=2),
        "h100": [HostCapacity(f"h{index}", int(2.6 * _GIB), 10 + (index % 7) * 8.0) for index in range(100)],
    }


async def measured(hosts: list[HostCapacity]) -> Timing:
    """Plan one case in a thread.

    Args:
        hosts: Of the case.
    """
    model = made_up_model()
    control_gap_ms, _ = await _probed(lambda _: time.sleep(_CONTROL_S))
    spent: list[float] = []

    def make(is_time_up: Callable[[], bool]) -> Plan | None:
        began_s = time.process_time()
        try:
            found = plan(model, hosts, _WORKLOAD, is_time_up=is_time_up)
        except ModelDoesNotFit:
            return None
        finally:
            spent.append(time.process_time() - began_s)
        until_s = time.monotonic() + EXAMINED_S
        choose_context(
            StageSizes(model, _WORKLOAD), found, hosts, is_time_up=lambda: time.monotonic() >= until_s
        )
        spent.append(time.process_time() - began_s - spent[0])
        return found

    longest_gap_ms, found = await _probed(make)
    if found is None:
        return Timing("does not fit", spent[0], None, None, longest_gap_ms, control_gap_ms)
    return Timing(
        f"{len(found.stages)} stages",
        spent[0],
        spent[1],
        _tokens_per_s(model, hosts, found),
        longest_gap_ms,
        control_gap_ms,
    )


async def _probed(make: Callable[[Callable[[], bool]], Plan | None]) -> tuple[float, Plan | None]:
    longest_s, last_s = 0.0, time.perf_counter()

    async def probe() -> None:
        nonlocal longest_s, last_s
        while True:
            await asyncio.sleep(_PROBE_S)
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s

    probing = asyncio.create_task(probe())
    found = await plan_in_thread(make)
    await asyncio.sleep(2 * _PROBE_S)
    probing.cancel()
    return longest_s * 1e3, found


def _tokens_per_s(model: ModelFacts, hosts: list[HostCapacity], found: Plan) -> float:
    sizes = StageSizes(model, _WORKLOAD)
    by_name = {host.name: host for host in even_out_noise(hosts)}
    read_ns = sum(read_time(sizes, stage.layers, stage.memory, by_name[stage.host]) for stage in found.stages)
    return 1e9 / read_ns


@click.command()
def main() -> None:
    """Plan each case once and print a table."""
    rows = []
    for name, hosts in cases().items():
        timing = asyncio.run(measured(hosts))
        rate = "" if timing.tokens_per_s is None else f"{timing.tokens_per_s:.3f}"
        rows.append(
            (
                name,
                timing.outcome,
                f"{timing.processor_s:.2f}",
                "" if timing.context_s is None else f"{timing.context_s:.2f}",
                rate,
                f"{timing.longest_gap_ms:.1f}",
                f"{timing.control_gap_ms:.1f}",
            )
        )
    heads = (
        *("case", "outcome", "processor s", "for the context", "tokens/s expected", "longest gap ms"),
        "of a control run",
    )
    sys.stdout.write(markdown_table(heads, rows) + "\n")


if __name__ == "__main__":
    main()
