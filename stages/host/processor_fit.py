"""Processor fit: extensions that llama.cpp was compiled for, and those that this host's processor has.

Run as a program: loads and starts llama.cpp's kernels, and prints two lines of JSON: the extensions that they
were compiled for, and what computes attention. Where the processor lacks an extension, an illegal instruction
may end it after the first line.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stages.runtime.llama_libraries import (
    attention_version,
    kernels_folder,
    library_folder,
    load_best_kernels,
    loaded_kernels,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

# By ggml's name: the kernel's, in /proc/cpuinfo.
_FLAGS: Final = {
    "ssse3": "ssse3",
    "avx": "avx",
    "avx_vnni": "avx_vnni",
    "avx2": "avx2",
    "bmi2": "bmi2",
    "f16c": "f16c",
    "fma": "fma",
    "avx512": "avx512f",
    "avx512_vbmi": "avx512vbmi",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "amx_int8": "amx_int8",
    "neon": "asimd",
    "fp16_va": "asimdhp",
    "dotprod": "asimddp",
    "matmul_int8": "i8mm",
    "sve": "sve",
    "sme": "sme",
}
# x86 and ARM.
_FLAG_LINES: Final = ("flags", "Features")
_CPUINFO: Final = Path("/proc/cpuinfo")


def processor_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """Extensions of this processor, by the kernel's names; empty where the kernel lists none.

    Args:
        cpuinfo: Linux's list.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":") for line in lines)
    return next(
        (frozenset(flags.split()) for name, _, flags in found if name.strip() in _FLAG_LINES), frozenset()
    )


def lacking(compiled: Iterable[str], flags: Collection[str]) -> tuple[str, ...]:
    """Extensions that the processor lacks, by the kernel's names; none if its own are unknown.

    Args:
        compiled: What llama.cpp was compiled for, by ggml's names.
        flags: Result of `processor_flags`.
    """
    if not flags:
        return ()
    needed = (_FLAGS[name] for name in compiled if name in _FLAGS)
    return tuple(flag for flag in needed if flag not in flags)


def extensions_of(kernels: ctypes.CDLL) -> tuple[str, ...]:
    """Extensions that kernels were compiled for, by ggml's names.

    Args:
        kernels: libggml-cpu.
    """
    # Functions of a later or earlier llama.cpp may be missing.
    functions = {name: getattr(kernels, f"ggml_cpu_has_{name}", None) for name in _FLAGS}
    return tuple(name for name, function in functions.items() if function is not None and function())


def main() -> None:
    """Print the extensions, let the kernels compute a little, and print what computes attention."""
    folder = library_folder()
    if folder is None:
        sys.exit("llama-cpp-python is not installed")
    if kernels_folder() is not None:
        # Of several libraries llama.cpp takes one that fits; what all of them need must load.
        _load(folder, "ggml-base")
        _print([])
        ggml = _load(folder, "ggml")
        if ggml is not None:
            load_best_kernels(ggml)
        _print(attention_version(loaded_kernels()))
        return
    kernels = _load(folder, "ggml-cpu")
    if kernels is None:
        # One library with everything in it, which does not tell.
        _print([])
        _print(0)
        return
    _print(extensions_of(kernels))
    kernels.ggml_cpu_init()
    _print(attention_version(kernels))


def _load(folder: Path, name: str) -> ctypes.CDLL | None:
    """The library, by the shortest of its file names; None if there is none."""
    path = min(folder.glob(f"*{name}.*"), key=lambda file: len(file.name), default=None)
    return None if path is None else ctypes.CDLL(str(path))


def _print(fact: Sequence[str] | int) -> None:
    # At once: the next instruction may be the last.
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
