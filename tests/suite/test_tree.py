"""The tree of the product: what rooms hold, what modules import, no circles, options in one place."""

from __future__ import annotations

import ast
import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.suite import code_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]
QUESTION: Final = re.compile(r"(What|Who|Whose|How|Which|Where|When|Why|Whether)\b")
ROOMS: Final = ("proto/spanmesh_proto", "stages", "speculative", "mesh", "meshbench")
MAX_IMPORTS: Final = 15
# Modules that put parts together, with how many they import; a row only ever becomes smaller.
COMPOSITION: Final = {
    "mesh.serve.main": 34,
    "mesh.serve.status": 26,
    "mesh.serve.deployment": 25,
    "meshbench.speculation_run": 23,
    "mesh.serve.preflight": 23,
    "meshbench.stress.run": 22,
    "mesh.cli.plan": 22,
    "mesh.serve.one_host": 20,
    "mesh.serve.reconfiguration": 19,
    "mesh.serve.head": 20,
    "mesh.coordinator.coordinator": 19,
    "mesh.serve.stage_factory": 20,
    "mesh.api.app": 21,
    "stages.serving.actor": 18,
    "mesh.serve.model_registry": 17,
    "meshbench.chaos.run": 18,
    "stages.serving.stage_engine": 18,
    "mesh.serve.head_failover": 18,
    "mesh.forecast.dry_run": 17,
    "mesh.serve.embeddings.model": 16,
}
# A row that is far above what a room holds is no decision any more.
SLACK: Final = 0.03
FEW_LINES: Final = 40
FIELDS: Final = (ast.Assign, ast.AnnAssign)
# The order of a module.
RANKS: Final = {ast.Assign: 0, ast.AnnAssign: 0, ast.ClassDef: 1, ast.FunctionDef: 2, ast.AsyncFunctionDef: 2}
# Modules of few lines that one other module imports, or none: why each is not a part of that one.
SMALL: Final = {
    "mesh.__main__": "the command as a module, for processes that end with their parent",
    "mesh.cluster.device_probe": "a child process",
    "mesh.cluster.ray_child": "a child process",
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


def test_a_room_holds_the_code_that_was_decided() -> None:
    """Raise a row of the table with the change that needs it: python -m tests.suite.code_lines --record."""
    decided, found = code_lines.recorded(), code_lines.rooms()
    assert {room: count for room, count in found.items() if count > decided.get(room, 0)} == {}
    stale = {room: count for room, count in decided.items() if found.get(room, 0) < count * (1 - SLACK) - 10}
    assert stale == {}, "lower these rows"


def test_lines_of_code_are_counted() -> None:
    source = '''"""A module.

Of three lines."""
import os  # not counted

# A comment.
NAMES = (
    "a",
    """b
c""",
)


def answer() -> int:
    """A docstring."""
    return len(
        NAMES
    )
'''
    assert code_lines.code_lines(source) == 7


def test_a_module_imports_few_others() -> None:
    counts = {name: len(IMPORTS[name] - {name}) for name in NUM_LINES}
    assert {name: count for name, count in counts.items() if count > MAX_IMPORTS} == COMPOSITION


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


def needed(node: ast.AST) -> Iterator[str]:
    """Names that a statement reads when it runs: of a function its decorators and defaults."""
    parts = list(ast.iter_child_nodes(node))
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        parts = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
    if isinstance(node, ast.Name):
        yield node.id
    for part in parts:
        yield from needed(part)


def defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return {statement.name}
    nodes = ast.walk(statement)
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def out_of_order(source: str) -> list[int]:
    """Lines of statements below those of a later kind, of which they need none."""
    found, most = [], 0
    later: dict[int, set[str]] = {0: set(), 1: set(), 2: set()}  # names of this kind or a later one
    for statement in ast.parse(source).body:
        rank = RANKS.get(type(statement))
        if rank is None:
            continue
        is_late = rank < most
        if is_late and later[rank + 1].isdisjoint(needed(statement)):
            found.append(statement.lineno)
        most = max(most, rank)
        for lower in range(3 if is_late else rank + 1):
            later[lower] |= defined(statement)
    return found


def test_constants_come_before_classes_and_classes_before_functions() -> None:
    found = {name: out_of_order(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("A = 1\nclass B: ...\ndef c(): ...", []),
        ("class B: ...\nA = 1", [2]),
        ("class B: ...\nA = B()\nC = A", []),
        ("def c(): ...\nclass B:\n    x = c()", []),
        ("def c(): ...\nclass B:\n    def d(self): c()", [2]),
    ],
)
def test_what_is_out_of_order_is_found(source: str, lines: list[int]) -> None:
    assert out_of_order(source) == lines


def test_a_field_is_explained_at_the_field() -> None:
    """No class lists its own fields in its docstring once more."""
    twice = {}
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                listed = (ast.get_docstring(node) or "").partition("Attributes:\n")[2]
                fields = set().union(*(defined(each) for each in node.body if isinstance(each, FIELDS)))
                if both := fields & set(re.findall(r"^    (\w+):", listed, re.MULTILINE)):
                    twice[f"{name}.{node.name}"] = both
    assert twice == {}


def test_a_text_below_a_constant_is_its_own() -> None:
    lost = {}
    for name, path in FILES.items():
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for before, statement in pairwise(body):
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if is_text and not isinstance(before, FIELDS):
                lost[name] = statement.lineno
    assert lost == {}
