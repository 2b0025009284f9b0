"""Bytes that move when a fourth host joins.

The planner places the model over three hosts, which fetch their stages from a head over TLS on loopback, each
into a cache of its own. Then a fourth joins, the layers are planned anew, and all four fetch what they are to
hold now. What crosses must be the tensors that change hands, to the byte, and no more. What that is, is
counted from the model's header alone. Every stage is held against the one that is cut directly.
"""

from __future__ import annotations

import asyncio
import filecmp
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mesh.placement.host_capacity import HostCapacity
from mesh.placement.memory_estimate import Workload
from mesh.placement.planner import plan
from mesh.serve.options import demo_model
from stages.certification.certify import cut_stage
from stages.gguf import read_header
from stages.slicing.model_facts import read_model_facts
from stages.slicing.tensor_names import EMBEDDING, OUTPUT, OUTPUT_BIAS, layer_of
from stages.weights.disk_cache import StageStore
from stages.weights.fetch import fetch_stage
from stages.weights.virtual_stages import StageCache
from tests.qualification.weights.transfer import sending_head

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stages.gguf import GgufHeader
    from stages.layers import LayerRange
    from stages.weights.fetch import FetchSource

_HOSTS: Final = ("host1", "host2", "host3", "host4")
_MEMORY_BYTES: Final = 2**40
_WORKLOAD: Final = Workload(ctx_size=256, num_slots=1)


@dataclass(frozen=True)
class Move:
    """Transfer to one host."""

    host: str
    """Its name."""
    before: str
    """Layers before; empty for none."""
    after: str
    """Layers afterwards."""
    sent_bytes: int
    """Of weights that it was sent."""
    changed_bytes: int
    """Of tensors that it holds now and did not hold before."""
    stage_bytes: int
    """Of all its weights now: what a host would be sent that reuses nothing."""
    is_equal: bool
    """Whether its stage file is the one that is cut directly."""


async def add_fourth_host(model: Path, folder: Path) -> list[Move]:
    """Three hosts, then four; gives what came to each of the four.

    Args:
        model: A GGUF file.
        folder: Where the hosts' caches are to be.
    """
    header = await asyncio.to_thread(read_header, model)
    cache = StageCache(folder / "head")
    stores = {name: StageStore(folder / name) for name in _HOSTS}
    before, after = _placed(model, _HOSTS[:3]), _placed(model, _HOSTS)
    moves = []
    async with sending_head(cache) as source:
        await asyncio.gather(
            *(_bring(cache, model, layers, stores[name], source) for name, layers in before.items())
        )
        brought = await asyncio.gather(
            *(_bring(cache, model, layers, stores[name], source) for name, layers in after.items())
        )
    for (name, layers), (path, sent_bytes) in zip(after.items(), brought, strict=True):
        held = _tensors(header, before[name]) if name in before else {}
        wanted = _tensors(header, layers)
        expected = folder / "expected.gguf"
        cut_stage(model, layers, expected)
        moves.append(
            Move(
                name,
                str(before.get(name, "")),
                str(layers),
                sent_bytes,
                sum(num_bytes for tensor, num_bytes in wanted.items() if tensor not in held),
                sum(wanted.values()),
                filecmp.cmp(path, expected, shallow=False),
            )
        )
    return moves


def _placed(model: Path, hosts: Sequence[str]) -> dict[str, LayerRange]:
    capacities = [HostCapacity(name, _MEMORY_BYTES, 20.0) for name in hosts]
    placed = plan(read_model_facts(model), capacities, _WORKLOAD, num_stages=len(hosts))
    return {stage.host: stage.layers for stage in placed.stages}


async def _bring(
    cache: StageCache, model: Path, layers: LayerRange, store: StageStore, source: FetchSource
) -> tuple[Path, int]:
    recipe = await asyncio.to_thread(cache.describe, model, layers)
    fetched = await fetch_stage(store, recipe.sha256, source)
    if fetched.transfer.moved_bytes or fetched.transfer.reused_bytes:
        await asyncio.to_thread(store.settle, recipe.sha256)
    return fetched.path, fetched.transfer.moved_bytes


def _tensors(header: GgufHeader, layers: LayerRange) -> Mapping[str, int]:
    """What a stage of these layers must have of the model, and the bytes of each: from the header alone."""
    is_first, is_tail = layers.start == 0, layers.stop == header.integer(f"{header.architecture}.block_count")
    held = {}
    for tensor in header.tensors.values():
        layer = layer_of(tensor.name)
        if tensor.name == EMBEDDING:
            is_held = is_first or (is_tail and OUTPUT not in header.tensors)
        elif tensor.name in (OUTPUT, OUTPUT_BIAS):
            is_held = is_tail
        else:
            is_held = layer is None or layers.start <= layer < layers.stop
        if is_held:
            held[tensor.name] = tensor.n_bytes
    return held


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="A GGUF file; the demo's unless given.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(*, model: Path | None, as_json: bool) -> None:
    """Count what moves; exit code 1 if it is more, or less, than what changes hands."""
    with tempfile.TemporaryDirectory(prefix="spanmesh-fourth-") as folder:
        moves = asyncio.run(add_fourth_host(model or demo_model(), Path(folder)))
    passed = all(move.is_equal and move.sent_bytes == move.changed_bytes for move in moves)
    if as_json:
        click.echo(json.dumps({"moves": [asdict(move) for move in moves], "passed": passed}))
    else:
        for move in moves:
            click.echo(
                f"{move.host}: {move.before or 'nothing'} -> {move.after}: {move.sent_bytes} bytes sent, "
                f"{move.changed_bytes} change hands, {move.stage_bytes} in the stage, "
                f"byte-equal: {move.is_equal}"
            )
        sent, whole = sum(move.sent_bytes for move in moves), sum(move.stage_bytes for move in moves)
        click.echo(
            f"in all {sent} of {whole} bytes ({sent / whole:.0%}): {'as it must be' if passed else 'WRONG'}"
        )
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
