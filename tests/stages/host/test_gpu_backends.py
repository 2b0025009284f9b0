"""What a build for a GPU needs, and which GPUs are there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from stages.host import gpu_backends
from stages.host.gpu_backends import (
    NEEDS,
    ThisHost,
    builds_beside,
    missing_for,
    missing_message,
    vendors_here,
)

HERE = ThisHost()


@dataclass(frozen=True)
class Found:
    """A host that has just these things."""

    platform: str = "linux"
    things: frozenset[str] = frozenset()

    def has_program(self, name: str) -> bool:
        return name in self.things

    has_header = has_library = has_program


VULKAN = frozenset({"vulkan/vulkan.hpp", "vulkan", "glslc", "spirv/unified1/spirv.hpp"})


def test_each_backend_says_what_it_needs_and_how_to_get_it() -> None:
    bare = Found()
    assert missing_message("vulkan", missing_for("vulkan", bare)) == (
        "BACKEND=vulkan needs Vulkan's headers, Vulkan's loader, libvulkan, the shader compiler glslc, "
        "SPIR-V's headers; on Debian: apt-get install libvulkan-dev glslc spirv-headers"
    )
    assert "nvcc" in missing_message("cuda", missing_for("cuda", bare))
    assert "apt-get" not in missing_message("cuda", missing_for("cuda", bare))
    assert "macOS" in missing_message("metal", missing_for("metal", bare))


@pytest.mark.parametrize(
    ("backend", "host"),
    [
        ("vulkan", Found(things=VULKAN)),
        ("cuda", Found(things=frozenset({"nvcc"}))),
        ("metal", Found(platform="darwin")),
    ],
)
def test_nothing_is_missing_where_all_is_there(backend: str, host: Found) -> None:
    assert missing_for(backend, host) == ()


def test_what_is_there_is_not_named() -> None:
    (missing,) = missing_for("vulkan", Found(things=VULKAN - {"glslc"}))
    assert missing.remedy == "glslc"


def test_this_host_is_asked_by_its_compiler() -> None:
    assert HERE.has_program(Path(sys.executable).name) or HERE.has_program("python3")
    assert HERE.has_header("vector")
    assert not HERE.has_header("no/such/header.h")
    assert HERE.has_library("m")
    assert not HERE.has_library("nosuchlibrary")
    assert not HERE.has_program("no-such-program")


def test_it_runs_without_anything_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", gpu_backends.__file__, "metal"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (sys.platform != "darwin")
    assert ("BACKEND=metal needs macOS" in done.stderr) == (sys.platform != "darwin")


def test_a_backend_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_backends.main(["voodoo"]) == 1
    assert f"'voodoo' is no backend for GPUs; there are {', '.join(NEEDS)}" in capsys.readouterr().err


def test_gpus_are_found_by_what_linux_shows(tmp_path: Path) -> None:
    assert vendors_here(tmp_path) == ()
    for number, vendor in enumerate(("0x8086", "0x1002", "0x1a03", "0x1002")):
        folder = tmp_path / f"sys/class/drm/renderD{128 + number}/device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
    # A server's own console is no GPU to compute on.
    assert vendors_here(tmp_path) == ("Intel", "AMD")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert vendors_here(tmp_path) == ("NVIDIA", "Intel", "AMD")


def test_builds_beside_the_ordinary_one_are_found(tmp_path: Path) -> None:
    for name in ("cuda", "vulkan", "vulkan.package"):
        (tmp_path / "backends" / name).mkdir(parents=True)
    (tmp_path / "backends/cuda/libllama.so").touch()
    (tmp_path / "backends/cuda/libllama.so.0").touch()
    assert builds_beside(tmp_path) == {"cuda": str(tmp_path / "backends/cuda")}
