"""Phases of the protocol: what each measures, as JSON-serialisable figures."""

from __future__ import annotations

import asyncio
import platform
import shutil
import subprocess
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mesh.placement.gpu_layers import GPU_PROCESS_BYTES, memory_on
from mesh.placement.host_capacity import Gpu, HostCapacity
from mesh.placement.memory_estimate import StageSizes, Workload
from spanmesh_proto import SOFTWARE_VERSION
from spanmesh_proto.errors import ModelDoesNotFit
from speculative.lookup_proposers import ReplayProposer
from stages.certification.certify import cut_stage
from stages.layers import ranges_from_cuts
from stages.runtime.devices import device_speed_gb_per_s
from stages.runtime.llama import heard_log
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.model_facts import read_model_facts
from tests.qualification import device_exactness, device_parity, device_stops
from tests.qualification.gpu_day import card_ring, whole_model
from tests.qualification.gpu_day.device_buffers import heard_buffers
from tests.qualification.gpu_day.scale import even_cuts
from tests.qualification.random_model import SHAPES, write_random_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stages.layers import LayerRange
    from stages.runtime.devices import Device
    from stages.slicing.model_facts import ModelFacts
    from tests.qualification.gpu_day.device_buffers import DeviceBuffers
    from tests.qualification.gpu_day.scale import Kind, Phase, Scale

# Positions beyond prompt and answer.
_ROOM: Final = 8
# Acceptance of a drafter, by distance from the committed tokens: a good one's, drawn anew for each token.
RATES: Final = (0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55)
_SPECULATION_STAGES: Final = 2
_PARITY_STAGES: Final = 4
_PARITY_TOKENS: Final = 64
_EXPERT_TOKENS: Final = 32
# Room without bound: what is foretold is how much is taken.
_MUCH_BYTES: Final = 2**50


@dataclass(frozen=True)
class Bench:
    """Where a phase runs."""

    folder: Path
    """Folder of models and results."""
    scale: Scale
    """Sizes of the run."""
    device: str | None
    """llama.cpp's name of the device, or None for the first one."""
    num_threads: int
    """Threads of the processor, for layers and experts that it keeps."""


@dataclass(frozen=True)
class _Cut:
    """A model cut for one card."""

    files: tuple[Path, ...]
    """Stage files in order; the model itself if it is whole."""
    ranges: tuple[LayerRange, ...]
    """Layers of each."""
    device: str
    """Name of the device."""

    def stages(self, *, num_slots: int, ctx_size: int) -> list[tuple[Path, RuntimeOptions]]:
        """Files and options for `card_ring`."""
        return [
            (
                path,
                RuntimeOptions(
                    num_slots=num_slots, ctx_size=ctx_size, gpu_layers=((self.device, len(layers)),)
                ),
            )
            for path, layers in zip(self.files, self.ranges, strict=True)
        ]


def run_phase(phase: Phase, bench: Bench) -> dict[str, Any]:
    """Run a phase in this process.

    Args:
        phase: One of `phases_of` the scale.
        bench: Where it runs.

    Raises:
        MeshError: If a model cannot be made, loaded or computed.
    """
    measures: Mapping[Kind, Callable[[Phase, Bench], dict[str, Any]]] = {
        "device": _device,
        "whole": _whole,
        "ring": _ring,
        "parity": _parity,
        "speculation": _speculation,
        "experts": _experts,
        "stops": _stops,
        "exactness": _exactness,
    }
    return measures[phase.kind](phase, bench)


def model_path(bench: Bench, name: str) -> Path:
    """Path of a model's file."""
    return bench.folder / "models" / f"{name}.gguf"


def _made(bench: Bench, name: str) -> Path:
    """The model's file, which is written unless it is there."""
    path = model_path(bench, name)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        write_random_gguf(part, SHAPES[bench.scale.shapes[name]], bench.scale.weight_type)
        part.rename(path)
    return path


def _device(_phase: Phase, bench: Bench) -> dict[str, Any]:
    log: list[str] = []
    with heard_log(log.append):
        device = device_parity.first_device(bench.device)
    return {
        "name": device.name,
        "description": device.description,
        "backend": device.backend,
        "total_bytes": device.total_bytes,
        "free_bytes": device.free_bytes,
        "read_gb_per_s": round(device_speed_gb_per_s(device), 1),
        "driver": _driver(),
        "llama_cpp_log": [line for line in log if line.startswith("ggml_")],
        "llama_cpp": version("llama-cpp-python"),
        "spanmesh": SOFTWARE_VERSION,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "num_threads": bench.num_threads,
    }


def _driver() -> str:
    """Name and version of the GPU's driver, as far as the system tells."""
    nvidia = Path("/proc/driver/nvidia/version")
    if nvidia.exists():
        return nvidia.read_text(encoding="utf-8", errors="replace").splitlines()[0].strip()
    if shutil.which("vulkaninfo") is None:
        return ""
    done = subprocess.run(["vulkaninfo", "--summary"], capture_output=True, text=True, check=False)
    wanted = ("driverName", "driverInfo")
    lines = [line.strip() for line in done.stdout.splitlines()]
    return ", ".join(line.partition("=")[2].strip() for line in lines if line.startswith(wanted))


def _prompts(n_vocab: int, count: int, length: int) -> list[list[int]]:
    noise = np.random.default_rng(count)
    return [noise.integers(n_vocab // 4, n_vocab, length).tolist() for _ in range(count)]


def _whole(phase: Phase, bench: Bench) -> dict[str, Any]:
    scale, path = bench.scale, _made(bench, phase.model)
    device = device_parity.first_device(bench.device)
    ctx_size = scale.num_prompt + scale.num_tokens + _ROOM
    rows: list[dict[str, Any]] = []
    refusals: list[str] = []
    buffers: dict[str, Any] = {}
    wanted = list(scale.num_sessions)
    while wanted:
        try:
            with (
                heard_buffers() as heard,
                whole_model.loaded(path, device, num_sessions=wanted[-1], ctx_size=ctx_size) as model,
            ):
                buffers = heard.as_dict()
                for count in wanted:
                    prompts = _prompts(model.n_vocab, count, scale.num_prompt)
                    rates = model.decode(prompts, scale.num_tokens)
                    rows.append({"sessions": count, "tokens_per_s": rates.tokens_per_s})
            break
        except ModelDoesNotFit as error:
            refusals.append(f"{wanted.pop()} sessions: {error.message}")
    with whole_model.loaded(path, device, num_sessions=1, ctx_size=scale.num_prefill + _ROOM) as model:
        (prompt,) = _prompts(model.n_vocab, 1, scale.num_prefill)
        model.prefill_s(prompt)
        prefill_s = model.prefill_s(prompt)
    return {
        "decode": rows,
        "refused": refusals,
        "prefill_tokens_per_s": scale.num_prefill / prefill_s,
        "buffers": buffers,
        "file_bytes": path.stat().st_size,
    }


def _cut(path: Path, num_stages: int, device: str, folder: Path) -> _Cut:
    n_layers = read_model_facts(path).n_layers
    ranges = ranges_from_cuts(even_cuts(n_layers, num_stages), n_layers)
    if num_stages == 1:
        return _Cut((path,), ranges, device)
    files = tuple(folder / f"stage-{index}.gguf" for index in range(num_stages))
    for file, layers in zip(files, ranges, strict=True):
        cut_stage(path, layers, file)
    return _Cut(files, ranges, device)


def _ring(phase: Phase, bench: Bench) -> dict[str, Any]:
    scale, path = bench.scale, _made(bench, phase.model)
    device = device_parity.first_device(bench.device)
    facts = read_model_facts(path)
    ctx_size = scale.num_prompt + scale.num_tokens + _ROOM
    with tempfile.TemporaryDirectory(prefix="stages-", dir=bench.folder) as folder:
        cut = _cut(path, phase.num_stages, device.name, Path(folder))
        rows: list[dict[str, Any]] = []
        refusals: list[str] = []
        memory: dict[str, Any] = {}
        wanted = list(scale.num_sessions)
        while wanted:
            workload = Workload(ctx_size, wanted[-1])
            try:
                with heard_buffers() as heard:
                    rows = asyncio.run(_decoded(cut, workload, tuple(wanted), facts.n_vocab, scale))
                memory = _memory(heard, device, facts, cut, workload)
                break
            except ModelDoesNotFit as error:
                refusals.append(f"{wanted.pop()} sessions: {error.message}")
        first_token_s = asyncio.run(_prefilled(cut, facts.n_vocab, scale))
    return {
        "decode": rows,
        "refused": refusals,
        "prefill_tokens_per_s": scale.num_prefill / first_token_s,
        "memory": memory,
        "layers": [len(layers) for layers in cut.ranges],
    }


async def _decoded(
    cut: _Cut, workload: Workload, num_sessions: Sequence[int], n_vocab: int, scale: Scale
) -> list[dict[str, Any]]:
    rows = []
    stages = cut.stages(num_slots=workload.num_slots, ctx_size=workload.ctx_size)
    async with card_ring.card_ring(stages) as coordinator:
        # Kernels are compiled at first use.
        await card_ring.decode(coordinator, _prompts(n_vocab, 1, scale.num_prompt), 4)
        for count in num_sessions:
            prompts = _prompts(n_vocab, count, scale.num_prompt)
            rates = await card_ring.decode(coordinator, prompts, scale.num_tokens)
            rows.append(
                {
                    "sessions": count,
                    "tokens_per_s": rates.tokens_per_s,
                    "first_token_s": rates.first_token_s,
                }
            )
    return rows


async def _prefilled(cut: _Cut, n_vocab: int, scale: Scale) -> float:
    stages = cut.stages(num_slots=1, ctx_size=scale.num_prefill + _ROOM)
    (prompt,) = _prompts(n_vocab, 1, scale.num_prefill)
    async with card_ring.card_ring(stages) as coordinator:
        await card_ring.decode(coordinator, [prompt], 2)
        rates = await card_ring.decode(coordinator, [prompt], 2)
    return rates.first_token_s


def _memory(
    heard: DeviceBuffers, device: Device, facts: ModelFacts, cut: _Cut, workload: Workload
) -> dict[str, Any]:
    """What the planner foretells for the device, and what llama.cpp logged; bytes."""
    sizes = StageSizes(facts, workload)
    gpu = Gpu(device.name, device.description, _MUCH_BYTES, _MUCH_BYTES, 1.0)
    host = HostCapacity("card", _MUCH_BYTES, 1.0, gpus=(gpu,))
    memories = [memory_on(sizes, layers, host) for layers in cut.ranges]
    shares = [share for memory in memories if memory is not None for share in memory.gpus]
    return {
        "foretold_weight_bytes": sum(share.weight_bytes for share in shares),
        "foretold_cache_bytes": sum(share.cache_bytes for share in shares),
        "foretold_buffer_bytes": sum(share.buffer_bytes - GPU_PROCESS_BYTES for share in shares),
        "weight_bytes": heard.of(device.name, "model"),
        "cache_bytes": heard.of(device.name, "KV", "RS"),
        "buffer_bytes": heard.of(device.name, "compute"),
        "buffers": heard.as_dict(),
    }


def _parity(phase: Phase, bench: Bench) -> dict[str, Any]:
    path = _made(bench, phase.model)
    n_layers = read_model_facts(path).n_layers
    with tempfile.TemporaryDirectory(prefix="stages-", dir=bench.folder) as folder:
        found = device_parity.measure(
            path,
            device_parity.first_device(bench.device),
            Path(folder),
            cuts=even_cuts(n_layers, min(_PARITY_STAGES, n_layers)),
            num_tokens=min(_PARITY_TOKENS, bench.scale.num_tokens),
            num_threads=bench.num_threads,
        )
    return asdict(found) | {"is_within": found.is_within}


def _speculation(phase: Phase, bench: Bench) -> dict[str, Any]:
    scale, path = bench.scale, _made(bench, phase.model)
    device = device_parity.first_device(bench.device)
    with tempfile.TemporaryDirectory(prefix="stages-", dir=bench.folder) as folder:
        cut = _cut(path, _SPECULATION_STAGES, device.name, Path(folder))
        return asyncio.run(_speculated(cut, read_model_facts(path).n_vocab, scale))


async def _speculated(cut: _Cut, n_vocab: int, scale: Scale) -> dict[str, Any]:
    stages = cut.stages(num_slots=1, ctx_size=scale.num_prompt + scale.num_tokens + _ROOM)
    prompts = _prompts(n_vocab, 1, scale.num_prompt)
    async with card_ring.card_ring(stages) as coordinator:
        await card_ring.decode(coordinator, prompts, 4)
        plain = await card_ring.decode(coordinator, prompts, scale.num_tokens)
    async with card_ring.card_ring(
        stages, make_proposers=lambda _request: [ReplayProposer(plain.tokens, RATES)]
    ) as coordinator:
        await card_ring.decode(coordinator, prompts, 4)
        drafted = await card_ring.decode(coordinator, prompts, scale.num_tokens)
    agreed = sum(ours == theirs for ours, theirs in zip(plain.tokens, drafted.tokens, strict=True))
    return {
        "stages": len(stages),
        "rates": RATES,
        "plain_tokens_per_s": plain.tokens_per_s,
        "tokens_per_s": drafted.tokens_per_s,
        "windows": drafted.stats.num_windows,
        "proposed": drafted.stats.num_proposed,
        "accepted": drafted.stats.num_accepted,
        # Batches of other sizes may round otherwise; from the first other token on nothing is proposed.
        "tokens_agreed": agreed,
        "tokens": len(plain.tokens),
    }


def _experts(phase: Phase, bench: Bench) -> dict[str, Any]:
    path = _made(bench, phase.model)
    device = device_parity.first_device(bench.device)
    facts = read_model_facts(path)
    num_prompt, num_tokens = bench.scale.num_prompt, min(_EXPERT_TOKENS, bench.scale.num_tokens)
    (prompt,) = _prompts(facts.n_vocab, 1, num_prompt)
    workload = Workload(num_prompt + num_tokens, 1)
    rows = []
    for count in (0, facts.n_layers // 2, facts.n_layers):
        options = RuntimeOptions(
            ctx_size=workload.ctx_size,
            num_threads=bench.num_threads,
            gpu_layers=((device.name, facts.n_layers),),
            cpu_moe_layers=count,
        )
        gpu = Gpu(device.name, device.description, _MUCH_BYTES, _MUCH_BYTES, 1.0)
        host = HostCapacity("card", _MUCH_BYTES, 1.0, gpus=(gpu,), cpu_moe_layers=count)
        (whole,) = ranges_from_cuts((), facts.n_layers)
        memory = memory_on(StageSizes(facts, workload), whole, host)
        assert memory is not None
        with heard_buffers() as heard, closing(StageRuntime(path, options)) as runtime:
            device_parity.follow([runtime], prompt, 4)
            runtime.memory.trim(0, 0)
            start_s = time.perf_counter()
            device_parity.follow([runtime], prompt, num_tokens)
            took_s = time.perf_counter() - start_s
        rows.append(
            {
                "cpu_moe_layers": count,
                "tokens_per_s": num_tokens / took_s,
                "device_weight_bytes": heard.of(device.name, "model"),
                "host_weight_bytes": heard.on_host("model"),
                "foretold_device_weight_bytes": memory.gpus[0].weight_bytes,
            }
        )
    return {"layers": facts.n_layers, "rows": rows}


def _stops(phase: Phase, bench: Bench) -> dict[str, Any]:
    path = _made(bench, phase.model)
    device = device_parity.first_device(bench.device)
    with tempfile.TemporaryDirectory(prefix="stages-", dir=bench.folder) as folder:
        found = device_stops.measure(
            path,
            device.name,
            Path(folder),
            num_rows=bench.scale.stop_rows,
            num_rounds=bench.scale.stop_rounds,
        )
    return {"timings": [asdict(each) for each in found], "table": device_stops.table(found)}


def _exactness(_phase: Phase, bench: Bench) -> dict[str, Any]:
    scale = bench.scale
    path = bench.folder / "models" / "exactness.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_random_gguf(path, SHAPES[scale.exactness], scale.weight_type)
    found = device_exactness.measure_settings(path, bench.device, most_settings=scale.most_settings)
    path.unlink()
    return {
        "settings": [
            {"setting": each.setting, "is_exact": each.is_exact, "found": each.summary} for each in found
        ]
    }
