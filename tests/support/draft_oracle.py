"""Reference drafts: llama.cpp's own `common_speculative` on the whole model, built from its source.

llama.cpp's common library is no part of our build. The few files of it that drafting needs are compiled
against the installed llama.cpp, once for each version of it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import llama_cpp

from meshbench.lab.llama_cpp_build import PACKAGE, default_cache, do, unpacked_source

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM: Final = Path(__file__).with_name("draft_oracle.cpp")
LIBRARIES: Final = Path(llama_cpp.__file__).parent / "lib"
# What speculation calls, and what that calls in turn. Functions that nobody calls are left out by the linker,
# with what they would need.
_COMMON: Final = (
    "common",
    "ngram-cache",
    "ngram-map",
    "ngram-mod",
    "reasoning-budget",
    "sampling",
    "speculative",
    "trie",
    "unicode",
)
_INCLUDES: Final = ("common", "include", "ggml/include", "vendor")
_FLAGS: Final = ("-std=c++17", "-O1", "-w", "-ffunction-sections", "-fdata-sections")
_LIBRARY_NAMES: Final = ("-lllama", "-lggml", "-lggml-base")
_ROUND: Final = re.compile(r"(\d+) (\d+) \|((?: \d+)*) \| (\d+)")


class OracleMissing(Exception):
    """The program cannot be built here; the message gives the reason."""


@dataclass(frozen=True)
class Round:
    """Draft, verification and verdict."""

    position: int
    """Position of the committed token that the draft follows."""
    last: int
    """That token."""
    drafted: tuple[int, ...]
    """Drafted ids."""
    num_accepted: int
    """How many of them the model chose as well."""


@dataclass(frozen=True)
class DraftOracle:
    """llama.cpp's drafts of a target and a drafter."""

    program: Path
    """The program."""
    target: Path
    """The whole model."""
    drafter: Path | None
    """The drafter, complete; None for the target's own head."""
    kind: str
    """Its kind: `eagle3`, `mtp` (assistants of Gemma 4 as well), `dflash` (DFlash2 as well) or `dspark`."""

    def rounds(
        self,
        texts: Sequence[Sequence[int]],
        num_drafted: int,
        num_rounds: int,
        *,
        verdicts: str = "greedy",
        p_min: float = 0.0,
        kv_type: str = "f16",
    ) -> list[list[Round]]:
        """Rounds behind each text.

        Args:
            texts: Token ids, two or more; the first draft follows the last of them.
            num_drafted: Tokens of a draft.
            num_rounds: Rounds behind each text.
            verdicts: `greedy`, or `scripted` or `all`, as the program has them.
            p_min: A draft ends before a token whose probability is below this.
            kv_type: Format of the KV caches: `f16`, `q8_0` or `q4_0`.

        Raises:
            RuntimeError: If the program fails.
        """
        drafter = "-" if self.drafter is None else str(self.drafter)
        done = subprocess.run(
            [
                str(self.program),
                str(self.target),
                drafter,
                f"draft-{self.kind}",
                str(num_drafted),
                str(num_rounds),
                verdicts,
                str(p_min),
                kv_type,
            ],
            input="".join(" ".join(map(str, text)) + "\n" for text in texts),
            env=os.environ | {"GGML_CPU_TILED_MM": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the oracle ended with code {done.returncode}: {done.stderr[-1000:]}")
        found = [[_round(line) for line in part.splitlines()] for part in done.stdout.split("\n\n")[:-1]]
        if [len(rounds) for rounds in found] != [num_rounds] * len(texts):
            raise RuntimeError(f"the oracle printed {[len(rounds) for rounds in found]} rounds")
        return found


def _round(line: str) -> Round:
    match = _ROUND.fullmatch(line)
    if match is None:
        raise RuntimeError(f"the oracle printed {line!r}")
    position, last, drafted, num_accepted = match.groups()
    return Round(int(position), int(last), tuple(map(int, drafted.split())), int(num_accepted))


def build_draft_oracle(cache: Path | None = None) -> Path:
    """Build the program once: about 40 seconds on one core.

    Args:
        cache: Folder of the build, by default in the user's cache directory.

    Raises:
        OracleMissing: If llama.cpp's source or a compiler is missing.
        MeshError: If the compiler fails; the message names the log.
    """
    package_version = version(PACKAGE)
    said = hashlib.sha256(" ".join((package_version, *_FLAGS, *_COMMON, str(LIBRARIES))).encode())
    home = (cache or default_cache()) / f"draft-oracle-{package_version}-{said.hexdigest()[:8]}"
    program = home / f"draft_oracle-{hashlib.sha256(PROGRAM.read_bytes()).hexdigest()[:8]}"
    if program.exists():
        return program
    source, compiler = _source(), shutil.which("c++") or shutil.which("clang++")
    if source is None:
        raise OracleMissing("no source of llama.cpp's common library: see SPANMESH_LLAMA_CPP")
    if compiler is None:
        raise OracleMissing("no C++ compiler")
    home.mkdir(parents=True, exist_ok=True)
    log = home / "build.log"
    includes = [f"-I{source / folder}" for folder in _INCLUDES]

    def compiled(path: Path, name: str) -> Path:
        made = home / f"{name}.o"
        if not made.exists():
            _make(made, [compiler, *_FLAGS, *includes, "-c", str(path)], log)
        return made

    parts = [str(compiled(source / "common" / f"{name}.cpp", name)) for name in _COMMON]
    main = str(compiled(PROGRAM, program.name))
    link = ["-Wl,--gc-sections", f"-L{LIBRARIES}", f"-Wl,-rpath,{LIBRARIES}"]
    _make(program, [compiler, main, *parts, *link, *_LIBRARY_NAMES], log)
    return program


def _source() -> Path | None:
    """Folder of llama.cpp's source, with its common library."""
    named = os.environ.get("SPANMESH_LLAMA_CPP")
    folder = Path(named) if named else unpacked_source()
    return folder if folder is not None and (folder / "common" / "speculative.cpp").is_file() else None


def _make(made: Path, argv: Sequence[str], log: Path) -> None:
    """Run a tool, whose output is there only once it is complete."""
    scratch = made.with_name(f"{made.name}.{os.getpid()}")
    do([*argv, "-o", str(scratch)], log)
    scratch.rename(made)
