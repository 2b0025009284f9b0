"""Random cases of planning, each the same for ever: what a new planner is held against an old one with.

`tests/plans_430fc7c.jsonl` has the cases and what the planner of commit 430fc7c made of them. It was
written by running this file in a checkout of that commit:

    python -m tests.support.plan_cases plans.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mesh.forecast.cost_model import HANDLING_MS
from mesh.placement.gpu_layers import read_time
from mesh.placement.host_capacity import Gpu, HostCapacity
from mesh.placement.link_choices import has_an_order, ordered_by_links
from mesh.placement.links import Link, Links
from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.placement.planner import Plan, even_out_noise, plan
from spanmesh_proto.errors import MeshError
from stages.slicing.model_facts import ModelFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD: Final = "h0"
_MIB: Final = 2**20
_NUM_CASES: Final = 200
_SEED: Final = 430_7


def plan_cases() -> list[dict[str, Any]]:
    """Models of 2 to 80 layers on 1 to 6 hosts of which some are too small, fit for JSON."""
    draw = random.Random(_SEED)
    return [_case(draw) for _ in range(_NUM_CASES)]


def _case(draw: random.Random) -> dict[str, Any]:
    n_layers = draw.choice([2, 6, 12, 24, 30, 32, 48, 61, 80])
    n_hosts = draw.choice([1, 2, 3, 4, 4, 5, 5, 5, 6, 6, 6])
    # Later layers may be larger than the first ones, as those with experts are.
    layer_mib, num_dense = draw.randint(20, 500), draw.choice([0, 0, 0, 1, 3])
    layers_mib = [
        layer_mib * (1 if layer < num_dense else draw.choice([1, 1, 1, 2])) for layer in range(n_layers)
    ]
    if draw.random() < 0.6:
        layers_mib = [layer_mib] * n_layers
    every = draw.choice([1, 1, 1, 1, 2, 4])
    cuts = list(range(every, n_layers, every))
    model = {
        "layers_mib": layers_mib,
        "embedding_mib": draw.choice([0, 50, 600]),
        "head_mib": draw.choice([0, 50, 800]),
        "is_tied": draw.random() < 0.2,
        "n_vocab": draw.choice([0, 32_000, 128_000]),
        "kv_width": draw.choice([128, 1024, 2048]),
        "cuts": cuts,
        "refused_lengths": draw.sample(range(2, 10), 2) if draw.random() < 0.15 else [],
    }
    workload: dict[str, Any] = {
        "ctx_size": draw.choice([512, 4096, 16_384]),
        "num_slots": draw.choice([1, 4]),
        "kv_type": draw.choice(["f16", "q8_0"]),
        "is_exact": draw.random() < 0.3,
    }
    sizes = StageSizes(model_of({"model": model}), Workload(**workload))
    needed_mib = sizes.memory(sizes.whole).total_bytes / _MIB
    overhead_mib = needed_mib - (sizes.weight_bytes(sizes.whole) + sizes.cache_bytes(sizes.whole)) / _MIB
    # From a little too small together to roomy.
    room = draw.choice([0.97, 1.02, 1.05, 1.1, 1.2, 1.5, 3.0])
    shares = [draw.choice([1.0, draw.uniform(0.3, 2.0)]) for _ in range(n_hosts)]
    with_gpus = draw.random() < 0.25
    hosts = []
    for index, share in enumerate(shares):
        mib = int((needed_mib - overhead_mib) * room * share / sum(shares) + overhead_mib)
        speed = draw.choice([20.0, round(draw.uniform(8.0, 60.0), 1)])
        gpus = (
            [[draw.randint(mib // 4, mib), round(speed * draw.uniform(3.0, 15.0), 1)]]
            if with_gpus and draw.random() < 0.6
            else []
        )
        hosts.append({"name": f"h{index}", "mib": mib, "speed": speed, "gpus": gpus})
    num_stages = draw.randint(1, min(6, len(cuts) + 1)) if draw.random() < 0.15 else None
    pairs = [*permutations((host["name"] for host in hosts), 2)] if draw.random() < 0.4 else []
    return {
        "model": model,
        "workload": workload,
        "hosts": hosts,
        "num_stages": num_stages,
        "hops_ms": {f"{a} {b}": round(draw.uniform(0.2, 30.0), 2) for a, b in pairs},
    }


def model_of(case: dict[str, Any]) -> ModelFacts:
    """The model of a case."""
    fields = case["model"]
    layer_bytes = tuple(mib * _MIB for mib in fields["layers_mib"])
    return ModelFacts(
        path=Path("model.gguf"),
        architecture="llama",
        name="model",
        n_layers=len(layer_bytes),
        n_embd=4096,
        n_vocab=fields["n_vocab"],
        n_ctx_train=131_072,
        file_bytes=sum(layer_bytes),
        layer_bytes=layer_bytes,
        embedding_bytes=fields["embedding_mib"] * _MIB,
        head_bytes=fields["head_mib"] * _MIB,
        is_tied=fields["is_tied"],
        kv_widths=(fields["kv_width"],) * len(layer_bytes),
        head_widths=(64, 64),
        row_width=20_000,
        has_windows=False,
        allowed_cuts=tuple(fields["cuts"]),
        refused_lengths=dict.fromkeys(fields["refused_lengths"], "taken for another model"),
    )


def hosts_of_case(case: dict[str, Any]) -> list[HostCapacity]:
    """The hosts of a case."""
    return [
        HostCapacity(
            host["name"],
            host["mib"] * _MIB,
            host["speed"],
            gpus=tuple(
                Gpu(f"CUDA{index}", "made up", mib * _MIB, mib * _MIB, speed)
                for index, (mib, speed) in enumerate(host["gpus"])
            ),
        )
        for host in case["hosts"]
    ]


@dataclass(frozen=True)
class Answer:
    """What a planner makes of a case."""

    stages: tuple[tuple[str, int, int], ...]
    """Host, first layer and the one behind the last, in pipeline order; none if it is refused."""
    error: str
    """Type of the refusal, or empty."""
    tokens_per_s: float
    """Of one session: every stage reads its weights, one after the other, and the token is handled
    everywhere. What it takes on the wire is not the planner's to know."""
    full_tokens_per_s: float
    """Of as many sessions as there are stages: the slowest stage sets the pace."""


def answer(case: dict[str, Any]) -> Answer:
    """What this tree's planner makes of a case."""
    try:
        return rated(case, planned(case))
    except MeshError as error:
        return Answer((), type(error).__name__, 0.0, 0.0)


def planned(case: dict[str, Any]) -> Plan:
    """Plan a case as the head of a mesh does, its hosts ordered by their links if it has any.

    Raises:
        MeshError: If there is no plan.
    """
    model, workload, hosts = model_of(case), Workload(**case["workload"]), hosts_of_case(case)

    def place(ordered: Sequence[HostCapacity]) -> Plan:
        return plan(model, ordered, workload, num_stages=case["num_stages"])

    found, links = place(hosts), links_of(case)
    if links.links and has_an_order(found, HEAD):
        ordered = ordered_by_links(hosts, found, place, HEAD, links)
        found = found if ordered is None else ordered.plan
    return found


def links_of(case: dict[str, Any]) -> Links:
    """The links of a case."""
    return Links(
        tuple(
            Link(source, target, (2 * hop_ms,), (2 * hop_ms,))
            for (source, target), hop_ms in ((pair.split(), ms) for pair, ms in case["hops_ms"].items())
        )
    )


def rated(case: dict[str, Any], found: Plan) -> Answer:
    """How fast a plan is by what the planner knows."""
    sizes = StageSizes(model_of(case), Workload(**case["workload"]))
    hosts = {host.name: host for host in even_out_noise(hosts_of_case(case))}
    reads_ms = [
        read_time(sizes, stage.layers, stage.memory, hosts[stage.host]) / 1e6 for stage in found.stages
    ]
    token_ms = sum(reads_ms) + HANDLING_MS * (len(reads_ms) + 1)
    return Answer(
        tuple((stage.host, stage.layers.start, stage.layers.stop) for stage in found.stages),
        "",
        1e3 / token_ms,
        1e3 / max(*reads_ms, 1e-6),
    )


def main(path: str) -> None:
    """Write each case with what this tree's planner makes of it, one a line."""
    lines = (json.dumps({"case": case, "answer": asdict(answer(case))}) for case in plan_cases())
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
