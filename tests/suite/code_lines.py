"""Lines of code of each room: without docstrings, comments, imports, and lines of closing brackets only.

python -m tests.suite.code_lines            prints the table, and sums
python -m tests.suite.code_lines --record   writes the table that a test compares
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
TABLE: Final = Path(__file__).with_suffix(".txt")
# Folders whose folders are rooms of their own.
_DIVIDED: Final = ("mesh", "stages", "meshbench")
_LAYOUT: Final = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
_CLOSING: Final = {")", "]", "}", ","}


def code_lines(source: str) -> int:
    """Lines of a module that hold code: how its calls are wrapped does not count."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT and token.string not in _CLOSING:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in _left_out(ast.parse(source)):
        lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _left_out(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for inner in node.body:
                is_text = isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant)
                if is_text and isinstance(inner.value.value, str):  # type: ignore[attr-defined]
                    yield inner


def rooms() -> dict[str, int]:
    """Lines of code by room, of the product and of what measures it; protoc's files left out."""
    found: Counter[str] = Counter()
    for top in ("proto", "speculative", "stages", "mesh", "meshbench"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if "_pb2" not in path.name:
                parts = path.relative_to(ROOT).parts
                depth = 2 if top in _DIVIDED and len(parts) > 2 else 1
                found["/".join(parts[:depth])] += code_lines(path.read_text())
    return dict(found)


def recorded() -> dict[str, int]:
    """The table, by room."""
    rows = (line.split() for line in TABLE.read_text().splitlines())
    return {room: int(count) for room, count in rows}


def main() -> None:
    found = rooms()
    rows = "".join(f"{room} {count}\n" for room, count in found.items())
    if "--record" in sys.argv:
        TABLE.write_text(rows)
    measuring = sum(count for room, count in found.items() if room.startswith("meshbench"))
    print(f"{rows}\ncore {sum(found.values()) - measuring}, measuring {measuring} lines of code")
    for name, tops in {
        "core": ("proto", "speculative", "stages", "mesh"),
        "measuring": ("meshbench",),
        "tests": ("tests",),
    }.items():
        files = [path for top in tops for path in (ROOT / top).rglob("*.py") if "_pb2" not in path.name]
        print(
            f"{name}: {len(files)} modules, {sum(len(path.read_text().splitlines()) for path in files)} lines"
        )


if __name__ == "__main__":
    main()
