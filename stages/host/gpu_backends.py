"""GPU backends of llama.cpp: what building each needs, and the cards of this host that they compute on.

Needs nothing but Python, so that a Makefile can ask before anything is installed: run as a program with the
name of a backend, it exits with 1 and says what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class BuildHost(Protocol):
    """Tools for a build on a host."""

    @property
    def platform(self) -> str:
        """As `sys.platform`."""

    def has_program(self, name: str) -> bool:
        """Whether a program is there."""

    def has_header(self, name: str) -> bool:
        """Whether C++ sources can include a header."""

    def has_library(self, name: str) -> bool:
        """Whether programs can be linked with a library."""


@dataclass(frozen=True)
class Need:
    """One thing without which a backend cannot be built."""

    what: str
    """Name, for messages."""
    is_there: Callable[[BuildHost], bool]
    """Looks for it."""
    remedy: str
    """How to get it: a package of Debian's, or else a sentence."""
    is_package: bool = True
    """Whether the remedy is a package of Debian's."""


_VULKAN: Final = (
    Need("Vulkan's headers", lambda host: host.has_header("vulkan/vulkan.hpp"), "libvulkan-dev"),
    Need("Vulkan's loader, libvulkan", lambda host: host.has_library("vulkan"), "libvulkan-dev"),
    Need("the shader compiler glslc", lambda host: host.has_program("glslc"), "glslc"),
    Need("SPIR-V's headers", lambda host: host.has_header("spirv/unified1/spirv.hpp"), "spirv-headers"),
)
_CUDA: Final = (
    Need(
        "the CUDA compiler nvcc",
        lambda host: host.has_program("nvcc"),
        "install NVIDIA's CUDA toolkit, and name the folder of nvcc in PATH",
        is_package=False,
    ),
)
_METAL: Final = (
    Need("macOS", lambda host: host.platform == "darwin", "use another backend here", is_package=False),
)
NEEDS: Final = {"vulkan": _VULKAN, "cuda": _CUDA, "metal": _METAL}
"""What building each backend needs."""


class ThisHost:
    """This host, asked by means of its C++ compiler; see `BuildHost`."""

    platform = sys.platform

    def has_program(self, name: str) -> bool:
        """Whether a program is on the PATH, or in a folder where its installer puts it."""
        folders = [
            Path(os.environ[variable]) / "bin"
            for variable in ("VULKAN_SDK", "CUDA_PATH")
            if os.environ.get(variable)
        ]
        if name == "nvcc":
            folders.append(Path("/usr/local/cuda/bin"))
        return any(shutil.which(name, path=path) for path in (None, *map(str, folders)))

    def has_header(self, name: str) -> bool:
        """Whether the preprocessor finds a header."""
        return self._compiles(["-E"], f"#include <{name}>\n")

    def has_library(self, name: str) -> bool:
        """Whether the linker finds a library."""
        return self._compiles([], "int main() { return 0; }\n", libraries=[name])

    @staticmethod
    def _compiles(arguments: list[str], source: str, libraries: Iterable[str] = ()) -> bool:
        compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "clang++")), "c++")
        sdk = os.environ.get("VULKAN_SDK")
        folders = [] if sdk is None else [f"-I{sdk}/include", f"-L{sdk}/lib"]
        with tempfile.TemporaryDirectory(prefix="spanmesh-needs-") as folder:
            output = str(Path(folder) / "output")
            try:
                done = subprocess.run(
                    [compiler, *folders, *arguments, "-x", "c++", "-", "-o", output]
                    + [f"-l{name}" for name in libraries],
                    input=source,
                    capture_output=True,
                    text=True,
                    check=False,
                )
            except OSError:
                return False
        return done.returncode == 0


@dataclass(frozen=True)
class Card:
    """A kind of GPU."""

    vendor: str
    """Name of its vendor."""
    backends: tuple[str, ...]
    """Backends that compute on it, the fastest first."""
    driver: str
    """What its driver is called where llama.cpp's backend finds none."""


_NVIDIA: Final = Card("NVIDIA", ("cuda", "vulkan"), "NVIDIA's driver")
_AMD: Final = Card("AMD", ("vulkan",), "Mesa's driver, on Debian: apt-get install mesa-vulkan-drivers")
_INTEL: Final = Card("Intel", ("vulkan",), _AMD.driver)
CARDS: Final = {card.vendor: card for card in (_NVIDIA, _AMD, _INTEL)}
"""Kinds of GPUs by vendor. On Apple's computers llama.cpp has Metal anyway."""
# Ids of PCI.
_VENDORS: Final = {"0x10de": _NVIDIA, "0x1002": _AMD, "0x8086": _INTEL}


def missing_for(backend: str, host: BuildHost) -> tuple[Need, ...]:
    """Missing tools for the build of a backend.

    Args:
        backend: One of `NEEDS`.
        host: The host.
    """
    return tuple(need for need in NEEDS[backend] if not need.is_there(host))


def missing_message(backend: str, missing: Sequence[Need]) -> str:
    """One line for the operator: what is missing, and how to get it."""
    what = ", ".join(need.what for need in missing)
    packages = dict.fromkeys(need.remedy for need in missing if need.is_package)
    remedies = [f"on Debian: apt-get install {' '.join(packages)}"] if packages else []
    remedies += [need.remedy for need in missing if not need.is_package]
    return f"BACKEND={backend} needs {what}; {'; '.join(remedies)}"


def vendors_here(root: Path = Path("/")) -> tuple[str, ...]:
    """Vendors of the GPUs that Linux has a driver for, whether llama.cpp can use them or not.

    Args:
        root: Of the file system that holds `dev` and `sys`.
    """
    found = {}
    if (root / "dev/nvidiactl").exists():
        found[_NVIDIA.vendor] = True
    if (root / "dev/kfd").exists():
        found[_AMD.vendor] = True
    for path in sorted(root.glob("sys/class/drm/renderD*/device/vendor")):
        try:
            card = _VENDORS.get(path.read_text(encoding="ascii", errors="replace").strip())
        except OSError:
            continue
        if card is not None:
            found[card.vendor] = True
    return tuple(found)


def builds_beside(prefix: Path) -> dict[str, str]:
    """Folders with builds of llama.cpp for GPUs in an environment of `make environment`, by backend.

    Args:
        prefix: Folder of the environment.
    """
    libraries = sorted(prefix.glob("backends/*/libllama.*"))
    return {path.parent.name: str(path.parent) for path in libraries}


def main(arguments: Sequence[str]) -> int:
    """Say what is missing for the backend that is named; returns the exit code."""
    (backend,) = arguments
    if backend not in NEEDS:
        sys.stderr.write(f"error: {backend!r} is no backend for GPUs; there are {', '.join(NEEDS)}\n")
        return 1
    missing = missing_for(backend, ThisHost())
    if missing:
        sys.stderr.write(f"error: {missing_message(backend, missing)}\n")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
