"""Child processes: how a Python is started, and an environment without secrets.

`python -m` and `python -c` import from the working directory first, and so does every Python whose
`PYTHONPATH` has an empty or relative entry. The working directory may be anybody's project, with a `json.py`
in it: no child imports from there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

# An API key: not needed by children, and other processes of the user can read an environment.
API_KEY: Final = "MESH_API_KEY"
# A join token, in place of an argument: a credential.
JOIN_TOKEN: Final = "MESH_JOIN_TOKEN"  # noqa: S105 - its name
_SECRETS: Final = frozenset({API_KEY, JOIN_TOKEN})

_SAFE_PATH: Final = "PYTHONSAFEPATH"
_PATH: Final = "PYTHONPATH"
# As they were before `protect_children` changed them; None where there was none.
_given: dict[str, str | None] = {}


def module_command(module: str, *arguments: str) -> list[str]:
    """Command line that runs a module as a program, in this Python.

    Args:
        module: Dotted name of the module.
        arguments: Of its command line.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def inherited_environment() -> dict[str, str]:
    """The environment without keys and tokens, in which no Python imports from its working directory."""
    return _safe({name: value for name, value in os.environ.items() if name not in _SECRETS})


def protect_children() -> None:
    """Let no Python that this process starts import from its working directory.

    For processes that are started by others, without an environment of ours, as by multiprocessing and Ray.
    """
    _given.update({name: os.environ.pop(name, None) for name in (_SAFE_PATH, _PATH)})
    os.environ.update(_safe({name: value for name, value in _given.items() if value is not None}))


def foreign_environment() -> dict[str, str]:
    """The environment as the user gave it to this process: for programs that are not ours."""
    own = {name: value for name, value in os.environ.items() if name not in _given}
    return own | {name: value for name, value in _given.items() if value is not None}


def relative_entries() -> list[str]:
    """Entries of the user's `PYTHONPATH` that are not absolute; an empty one is the working directory."""
    path = foreign_environment().get(_PATH)
    return [entry for entry in path.split(os.pathsep) if not Path(entry).is_absolute()] if path else []


def _safe(environment: Mapping[str, str]) -> dict[str, str]:
    safe = {**environment, _SAFE_PATH: "1"}
    absolute = [entry for entry in safe.pop(_PATH, "").split(os.pathsep) if Path(entry).is_absolute()]
    return safe | ({_PATH: os.pathsep.join(absolute)} if absolute else {})
