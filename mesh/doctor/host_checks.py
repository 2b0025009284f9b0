"""What one host's own look says of it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mesh.doctor.check import Check, fail, ok, warn
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_GIB: Final = 2**30
# Less leaves no room for a stage of any model worth sharing.
_LITTLE_MEMORY_BYTES: Final = _GIB
_LITTLE_DISK_BYTES: Final = 2 * _GIB
# What must be the same everywhere, and what breaks if it is not.
_MUST_AGREE: Final = {
    "spanmesh": "install the same spanmesh on both",
    "protocol": "install the same spanmesh on both",
    "ray": "install the same ray on both: pip install -c constraints.txt ray",
    "python": "use the same minor version of Python on both",
}


def host_checks(where: str, look: Mapping[str, Any], *, has_gpu_hardware: bool = False) -> Iterator[Check]:
    """Versions, devices, memory, disk, processors, stage files.

    Args:
        where: The host's name.
        look: `stages.host.host_report.HostLook` as JSON has it.
        has_gpu_hardware: Whether a GPU is there, as far as anybody but llama.cpp knows.
    """
    versions = look["versions"]
    yield ok(where, "versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
    yield _devices(where, look, has_gpu_hardware=has_gpu_hardware)
    yield _room(
        where,
        "memory",
        look["free_memory_bytes"],
        _LITTLE_MEMORY_BYTES,
        "end what else runs there, or serve with --head-only if it is the head",
    )
    yield _room(
        where,
        f"disk at {look['cache_dir']}",
        look["free_disk_bytes"],
        _LITTLE_DISK_BYTES,
        "remove stage files there that are not needed, or set XDG_CACHE_HOME to a larger disk",
    )
    if look["can_stay_awake"]:
        yield ok(where, "processors", "can be kept awake while requests run")
    else:
        yield warn(
            where,
            "processors",
            "may fall asleep between two tokens",
            "let the user write /dev/cpu_dma_latency, by a udev rule or as root",
        )
    yield from _files(where, look["files"])


def agreement_checks(where: str, versions: Mapping[str, str], head: Mapping[str, str]) -> Iterator[Check]:
    """Whether a host runs what the head runs."""
    for name, fix in _MUST_AGREE.items():
        here, there = _shortened(name, versions[name]), _shortened(name, head[name])
        if here != there:
            yield fail(where, name, f"{here} here, {there} on the head", fix)
    if versions["llama_cpp"] != head["llama_cpp"]:
        yield warn(
            where,
            "llama.cpp",
            f"{versions['llama_cpp']} here, {head['llama_cpp']} on the head: texts may differ in near-ties",
            "install the same llama-cpp-python on both",
        )


def _shortened(name: str, version: str) -> str:
    """Of Python only the minor version matters."""
    return ".".join(version.split(".")[:2]) if name == "python" else version


def _devices(where: str, look: Mapping[str, Any], *, has_gpu_hardware: bool) -> Check:
    shown = ", ".join(f"{each['name']} ({each['description'].strip()})" for each in look["devices"])
    if not look["devices"]:
        return fail(
            where, "device", "llama.cpp finds nothing to compute on", "install llama-cpp-python again"
        )
    if has_gpu_hardware and not look["can_offload"]:
        return warn(
            where,
            "device",
            f"llama.cpp computes on {shown}, though there is a GPU",
            'build it for the GPU, such as CMAKE_ARGS="-DGGML_CUDA=on" pip install --force-reinstall '
            "--no-binary llama-cpp-python llama-cpp-python",
        )
    return ok(where, "device", f"llama.cpp computes on {shown}")


def _room(where: str, what: str, free_bytes: int, little_bytes: int, fix: str) -> Check:
    detail = f"{format_size(free_bytes)} free"
    return ok(where, what, detail) if free_bytes >= little_bytes else warn(where, what, detail, fix)


def _files(where: str, files: Mapping[str, bool | None]) -> Iterator[Check]:
    for sha256, is_whole in files.items():
        name = f"stage file {sha256[:12]}"
        if is_whole is None:
            yield warn(
                where, name, "is gone from the disk", "nothing now: it is fetched again when it is needed"
            )
        elif not is_whole:
            yield fail(where, name, "is not what its hash says", "remove it, and look after that disk")
        else:
            yield ok(where, name, "is what its hash says")
