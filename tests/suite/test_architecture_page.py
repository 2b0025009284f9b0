"""docs/architecture.md and docs/paths.md name modules and classes that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("architecture.md", "paths.md"))
ROOMS = ("docs", "examples", "mesh", "meshbench", "proto", "speculative", "stages", "tests")


def quoted() -> list[str]:
    return re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", PAGE, flags=re.DOTALL | re.MULTILINE))


def paths() -> set[str]:
    """Files and folders that the page names."""
    return {text for text in quoted() if re.fullmatch(rf"(?:{'|'.join(ROOMS)})/[\w./-]*", text)}


def classes() -> set[str]:
    """Names of classes that the page names."""
    return {text for text in quoted() if re.fullmatch(r"(?:[A-Z][a-z]+)+", text)}


def defined_classes() -> set[str]:
    """Names of all classes of the product."""
    rooms = ("mesh", "meshbench", "proto", "speculative", "stages")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    return {node.name for node in nodes if isinstance(node, ast.ClassDef)}


def test_the_page_names_many() -> None:
    assert len(paths()) > 100
    assert {"GenerationRequest", "Pipeline", "RingRepair", "Supervisor", "WindowVerifier"} <= classes()


def test_every_path_that_the_page_names_exists() -> None:
    assert {path for path in paths() if not (ROOT / path).exists()} == set()


def test_every_class_that_the_page_names_exists() -> None:
    assert classes() - defined_classes() == set()
