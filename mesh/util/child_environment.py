"""Environment of child processes, without secrets."""

from __future__ import annotations

import os
from typing import Final

# Opens an API: of no use to a child, and an environment can be read by others of the same user.
API_KEY: Final = "MESH_API_KEY"
# What `mesh join` takes instead of an argument: as good as a login.
JOIN_TOKEN: Final = "MESH_JOIN_TOKEN"  # noqa: S105 - its name
_SECRETS: Final = frozenset({API_KEY, JOIN_TOKEN})


def inherited_environment() -> dict[str, str]:
    """All of it but keys and tokens."""
    return {name: value for name, value in os.environ.items() if name not in _SECRETS}
