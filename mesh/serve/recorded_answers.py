"""The file of `--replay-file`: recorded answers, one JSON object a line, the latest last."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from pathlib import Path

# The latest line is looked for in the last so many bytes first: the file grows while a benchmark runs.
_TAIL_BYTES: Final = 1 << 20


def latest_answer(path: Path) -> tuple[int, ...]:
    """Token ids of the answer that was recorded last: `{"tokens": [1, 2, 3]}`; none if the file is empty.

    Raises:
        ClusterError: If the file cannot be read, or its last line is something else.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError as error:
        raise ClusterError(f"cannot read {path}: {error.strerror}", param="--replay-file") from None
    if not lines:
        return ()
    try:
        return tuple(int(token) for token in json.loads(lines[-1])["tokens"])
    except (ValueError, TypeError, KeyError):
        raise ClusterError(
            f'the last line of {path} records no answer: write it like {{"tokens": [1, 2, 3]}}',
            param="--replay-file",
        ) from None
