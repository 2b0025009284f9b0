"""The tree of the product: few modules in a folder, none too long or too small, no circles of imports."""

from __future__ import annotations

import ast
import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
QUESTION: Final = re.compile(r"(What|Who|Whose|How|Which|Where|When|Why|Whether)\b")
ROOMS: Final = ("proto/spanmesh_proto", "stages", "speculative", "mesh", "meshbench")
MAX_MODULES: Final = 25
MAX_LINES: Final = 700
FEW_LINES: Final = 40
# Modules of few lines that one other module imports, or none: why each is not a part of that one.
SMALL: Final = {
    "mesh.cluster.device_probe": "a child process",
    "meshbench.lab.tcp_ping": "a child process",
    "mesh.util.fresh_start": "ends the process that calls it",
}


def product_files() -> dict[str, Path]:
    """By module; without what protoc has written."""
    files: dict[str, Path] = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if "_pb2" not in path.name:
                parts = path.relative_to(ROOT).with_suffix("").parts
                name = ".".join(part for part in parts if part not in {"proto", "__init__"})
                files[name] = path
    return files


def imports_of(path: Path, modules: dict[str, Path]) -> set[str]:
    """Modules of the product that a file names in imports: also in functions, also for types only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(inner & modules.keys() or {node.module})
    return found & modules.keys()


FILES: Final = product_files()
IMPORTS: Final = {name: imports_of(path, FILES) for name, path in FILES.items()}
NUM_LINES: Final = {
    name: len(path.read_text(encoding="utf-8").splitlines())
    for name, path in FILES.items()
    if path.name != "__init__.py"
}


def test_a_folder_holds_few_modules() -> None:
    counts = Counter(FILES[name].parent.relative_to(ROOT) for name in NUM_LINES)
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_a_module_is_not_long() -> None:
    assert {name: count for name, count in NUM_LINES.items() if count > MAX_LINES} == {}


def test_no_imports_go_in_a_circle() -> None:
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}")


def test_a_small_module_has_several_importers_or_a_reason() -> None:
    importers = Counter(imported for name in NUM_LINES for imported in IMPORTS[name] - {name})
    small = {name for name, count in NUM_LINES.items() if count < FEW_LINES and importers[name] <= 1}
    small -= {"spanmesh_proto.grpc_tuning"}  # packages import it
    assert small == set(SMALL)


def test_a_module_says_what_it_is() -> None:
    """The first line of a module is a noun phrase, no question: a reader looks it up in a list of files."""
    first_lines = {
        name: (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        for name, path in FILES.items()
    }
    assert {name: line for name, line in first_lines.items() if not line or QUESTION.match(line)} == {}
