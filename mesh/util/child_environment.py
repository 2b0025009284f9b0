"""Environment of child processes, without secrets."""

from __future__ import annotations

import os
from typing import Final

# An API key: not needed by children, and other processes of the user can read an environment.
API_KEY: Final = "MESH_API_KEY"
# A join token, in place of an argument: a credential.
JOIN_TOKEN: Final = "MESH_JOIN_TOKEN"  # noqa: S105 - its name
_SECRETS: Final = frozenset({API_KEY, JOIN_TOKEN})


def inherited_environment() -> dict[str, str]:
    """The environment without keys and tokens."""
    return {name: value for name, value in os.environ.items() if name not in _SECRETS}
