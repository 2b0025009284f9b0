"""Host facts: memory, threads, speed, GPUs and versions of this host."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
import re
import signal
import subprocess
from dataclasses import dataclass
from typing import Final

import psutil

from mesh.placement.gpu_layers import check_gpu_layers
from mesh.placement.host_capacity import Gpu, HostCapacity
from mesh.util.dependent_child import run_dependent
from spanmesh_proto import SOFTWARE_VERSION
from spanmesh_proto.errors import ClusterError
from stages.host.processor_fit import lacking, processor_flags
from stages.process_limits import num_usable
from stages.runtime.llama_libraries import may_have_layer_devices
from stages.runtime.process_memory import free_memory_bytes

# A process that lists GPUs holds memory of theirs until it ends, so `mesh join`, which keeps running, starts
# another process for it.
# Drivers of GPUs can be slow to start.
_TIMEOUT_S: Final = 120.0
_REBUILD: Final = (
    "install a build of llama-cpp-python for this kind of host, or compile it here: make environment"
)
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
# Memory of a Ray node's own processes, which start after the facts are read.
_NODE_BYTES: Final = 320 * 2**20


@dataclass(frozen=True)
class LlamaCppFault:
    """Reason why llama.cpp's build does not run on this host, with a remedy."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class LlamaCppTrial:
    """Result of trying llama.cpp's build on this host."""

    fault: LlamaCppFault | None = None
    """Why it does not run; None if it does."""
    attention_version: int = 0
    """What computes attention, see `stages.runtime.llama_libraries`."""


@dataclass(frozen=True)
class Versions:
    """Versions that must agree among hosts, or are of interest to the operator."""

    software: str
    llama_cpp: str
    ray: str
    python: str
    platform: str


@dataclass(frozen=True)
class HostFacts:
    """Memory, speed, GPUs and versions of one host, for the planner and the operator."""

    memory_bytes: int
    """Memory for the mesh."""
    num_threads: int
    """Compute threads; they spin, so no more than cores."""
    speed_gb_per_s: float
    """Memory read speed. Decoding reads every weight for every token, so this decides the host's number of
    layers."""
    versions: Versions
    """Versions of its software."""
    gpus: tuple[Gpu, ...] = ()
    """GPUs that llama.cpp finds, if layers may go there."""
    gpu_layers: int | None = None
    """Layers of each stage on GPUs; None for as many as fit, see `mesh.placement.host_capacity`."""
    cpu_moe_layers: int | None = None
    """First layers of a model whose experts stay with the processor; None for as few as give layers room on
    GPUs."""
    attention_version: int = 0
    """What computes attention on its processor, see `stages.runtime.llama_libraries`."""

    def capacity(self, name: str) -> HostCapacity:
        """Capacity for the planner.

        Args:
            name: Name of the host.
        """
        return HostCapacity(
            name,
            max(0, self.memory_bytes),
            self.speed_gb_per_s,
            gpus=self.gpus,
            gpu_layers=self.gpu_layers,
            cpu_moe_layers=self.cpu_moe_layers,
            attention_version=self.attention_version,
        )


def find_gpus() -> tuple[Gpu, ...]:
    """GPUs that llama.cpp finds here; at once where it was built without support for any.

    Raises:
        ClusterError: If the listing process fails; with the end of its error output.
    """
    if not may_have_layer_devices():
        return ()
    try:
        return tuple(Gpu(**fields) for fields in json.loads(_probe("mesh.cluster.device_probe")))
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        raise ClusterError(
            f"cannot inspect this host's GPUs: {_reason(error)}; --gpu-layers none uses none of them",
            param="--gpu-layers",
        ) from error


@functools.cache
def try_llama_cpp() -> LlamaCppTrial:
    """Try llama.cpp's build in another process: an instruction that this processor lacks ends it."""
    try:
        done = run_dependent("stages.host.processor_fit", timeout_s=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return LlamaCppTrial(
            LlamaCppFault(f"it cannot be tried: {error}", "try again when this host has less to do")
        )
    extensions, version = [*done.stdout.splitlines(), "[]", "0"][:2]
    missing = lacking(json.loads(extensions), processor_flags())
    if missing:
        reason = f"it was compiled for a processor with {', '.join(missing)}, which this one lacks"
    elif done.returncode == -signal.SIGILL:
        reason = "it was compiled for another processor: an illegal instruction ends it"
    elif done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"its process ended with code {done.returncode}"]
        remedy = (
            "install libgomp, on Debian with apt-get install libgomp1" if "libgomp" in said[-1] else _REBUILD
        )
        return LlamaCppTrial(LlamaCppFault(f"it cannot be loaded: {said[-1]}", remedy))
    else:
        return LlamaCppTrial(attention_version=int(version))
    return LlamaCppTrial(LlamaCppFault(reason, _REBUILD))


def check_llama_cpp() -> None:
    """Check that llama.cpp's build runs on this host, before this process loads it.

    Raises:
        ClusterError: If it does not; with the reason.
    """
    fault = try_llama_cpp().fault
    if fault is not None:
        raise ClusterError(f"llama.cpp does not run on this host: {fault.reason}; {fault.remedy}")


def _probe(module: str, *arguments: str) -> str:
    """Output of a module that runs as a program."""
    done = run_dependent(module, *arguments, timeout_s=_TIMEOUT_S)
    done.check_returncode()
    return done.stdout


def _reason(error: Exception) -> str:
    """The last line that a probe wrote, or the error itself."""
    said = (error.stderr or "").splitlines() if isinstance(error, subprocess.CalledProcessError) else []
    return next((line for line in reversed(said) if line.strip()), str(error))


def read_host_facts(
    *,
    memory_bytes: int | None = None,
    num_threads: int | None = None,
    gpu_layers: int | None = None,
    cpu_moe_layers: int | None = None,
) -> HostFacts:
    """Facts of this host; takes about half a second, and more with GPUs.

    llama.cpp is tried first: a host on which it does not run is of no use.

    Args:
        memory_bytes: Requested memory, instead of all that is free now less Ray's own.
        num_threads: Requested threads, instead of all physical cores that this process may use.
        gpu_layers: Requested layers of each stage on GPUs; None for as many as fit.
        cpu_moe_layers: Requested first layers of a model whose experts stay with the processor; None for as
            few as give layers room on GPUs.

    Raises:
        ClusterError: If llama.cpp does not run here, if the speed cannot be measured, or if layers are
            to go to a GPU and there is none.
    """
    check_llama_cpp()
    threads = num_threads or default_num_threads()
    gpus = () if gpu_layers == 0 else find_gpus()
    check_gpu_layers(gpu_layers, gpus)
    return HostFacts(
        memory_bytes=memory_bytes if memory_bytes is not None else max(0, free_memory_bytes() - _NODE_BYTES),
        num_threads=threads,
        speed_gb_per_s=measure_speed_gb_per_s(threads),
        versions=read_versions(),
        gpus=gpus,
        gpu_layers=gpu_layers,
        cpu_moe_layers=cpu_moe_layers,
        attention_version=try_llama_cpp().attention_version,
    )


def default_num_threads() -> int:
    """Physical cores that this process may use: hyper-threads slow one another down; see `num_usable`."""
    usable = num_usable()
    return max(1, min(psutil.cpu_count(logical=False) or usable, usable))


def read_versions() -> Versions:
    """Versions of the installed software, from package metadata, without imports."""
    return Versions(
        software=SOFTWARE_VERSION,
        llama_cpp=importlib.metadata.version("llama-cpp-python"),
        ray=importlib.metadata.version("ray"),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
    )


def parse_size(text: str) -> int:
    """`8G`, `512 MiB`, `1.5g` or plain bytes, in powers of 1024.

    Raises:
        ClusterError: If it is not a size above zero.
    """
    match = _SIZE.fullmatch(text.strip())
    size_bytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size_bytes <= 0:
        raise ClusterError(f"{text!r} is not a memory size; write it like 8G or 512M")
    return size_bytes


def measure_speed_gb_per_s(num_threads: int) -> float:
    """Speed at which `num_threads` threads together read memory; see `memory_speed`.

    Measured in a process of its own, which imports numpy: this one may run for weeks without.

    Raises:
        ClusterError: If that process fails.
    """
    try:
        return float(_probe("mesh.cluster.memory_speed", str(num_threads)))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ClusterError(
            f"cannot measure how fast {num_threads} threads read this host's memory: {_reason(error)}"
        ) from error
