"""Command lines of this package's own programs."""

import sys
from pathlib import Path
from typing import Final

_ROOT: Final = str(Path(__file__).parents[2])
# No Python of ours imports from its working directory, and `tests` is not installed.
_RUN: Final = (
    f"import runpy, sys; sys.path.insert(0, {_ROOT!r}); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def program_command(module: str, *arguments: str) -> list[str]:
    """Command line that runs a module of this checkout as a program, in this Python."""
    return [sys.executable, "-P", "-c", _RUN, module, *arguments]
