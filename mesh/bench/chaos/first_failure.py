"""What is kept of the first thing that went wrong, before anything else is written over it."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.bench.chaos.ground import Ground
    from mesh.bench.chaos.stream import Stream

FOLDER: Final = "first-failure"


class FirstFailure:
    """Copies the logs of all hosts, and says what was wrong, once.

    Args:
        folder: Of the report; a folder in it is made when there is something to keep.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._is_kept = False

    def keep(self, ground: Ground, reason: str, streams: list[Stream]) -> None:
        """Keep it, unless something was kept before.

        Args:
            ground: Whose logs.
            reason: What went wrong.
            streams: That show it; what they should have been is written beside them.
        """
        if self._is_kept:
            return
        self._is_kept = True
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        for host in range(ground.lab.num_hosts):
            log = ground.mesh.log(host)
            if log.exists():
                shutil.copyfile(log, self._folder / log.name)
        names = {stream.told.record.prompt_id for stream in streams}
        fields = {
            "reason": reason,
            "streams": [stream.as_dict() for stream in streams],
            "undisturbed": {name: asdict(ground.expected[name]) for name in sorted(names)},
        }
        text = json.dumps(fields, indent=1, ensure_ascii=False)
        (self._folder / "failure.json").write_text(text + "\n", encoding="utf-8")
