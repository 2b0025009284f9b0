"""The folder of a tuning under way: its settings, and where it stands, so that it can go on after its end.

Weights that learned from texts are as private as these: the folder is readable by its user only. Files are
numpy's archives without pickled objects, and appear whole.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from spanmesh_proto.errors import ModelError
from stages.files import locked, whole_file, write_error, write_private_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

_SETTINGS: Final = "run.json"
_STATE: Final = "state"
_LOCK: Final = "lock"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Arrays and numbers of one moment."""

    arrays: Mapping[str, NDArray[Any]]
    state: Mapping[str, Any]
    """JSON."""


class RunFolder:
    """The folder beside a drafter that is being made. One process at a time works in it, until it is closed.

    Args:
        output: The drafter.

    Attributes:
        path: The folder.
    """

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(output.name + ".run")
        self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process go on with the run."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def require_new(self) -> None:
        """Check that there is no folder yet.

        Raises:
            ModelError: If there is one.
        """
        if self.path.exists():
            raise ModelError(
                f"{self.path} holds an unfinished run: go on with --resume, or remove the folder"
            )

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Make the folder for a new run.

        Raises:
            ModelError: If there is one already, or if it cannot be made.
        """
        self.require_new()
        try:
            self.path.mkdir(mode=0o700, parents=True)
            self._take()
            write_private_file(self.path / _SETTINGS, json.dumps(settings, indent=2, sort_keys=True) + "\n")
        except OSError as error:
            raise write_error(self.path / _SETTINGS, error) from error

    def resume(self, settings: Mapping[str, Any]) -> None:
        """Check that the folder's run had these settings, and take it over.

        Raises:
            ModelError: If there is no run, if another process works on it, or if it differs; the message
                names the first difference.
        """
        try:
            self._take()
            said = json.loads((self.path / _SETTINGS).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{self.path} holds no run to go on with: leave out --resume") from error
        for name, value in settings.items():
            if not isinstance(said, dict) or said.get(name) != value:
                raise ModelError(
                    f"{self.path} holds a run with another {name.replace('_', ' ')}: give the same options "
                    "and recordings, or remove the folder and leave out --resume"
                )

    def save(self, name: str, checkpoint: Checkpoint) -> None:
        """Write a checkpoint in place of the former one of this name.

        Raises:
            ModelError: If it cannot be written.
        """
        path = self._path(name)
        try:
            with whole_file(path, is_private=True) as file:
                state = np.array(json.dumps(checkpoint.state))
                np.savez(file, allow_pickle=False, **{_STATE: state}, **checkpoint.arrays)
        except OSError as error:
            raise write_error(path, error) from error

    def load(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint | None:
        """Read a checkpoint; None if there is none.

        Args:
            name: Its name.
            shapes: Shapes of the arrays that it has to have, all float32.

        Raises:
            ModelError: If it is damaged.
        """
        path = self._path(name)
        if not path.exists():
            return None
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                state = dict(json.loads(str(archive[_STATE])))
                arrays = {key: archive[key] for key in shapes}
        except Exception as error:
            # Whatever the readers of archives, arrays and JSON make of it.
            raise ModelError(f"{path} is damaged: remove {self.path} and leave out --resume") from error
        for key, shape in shapes.items():
            if arrays[key].shape != shape or arrays[key].dtype != np.float32:
                raise ModelError(f"{path} is of another drafter: remove {self.path} and leave out --resume")
        return Checkpoint(arrays, state)

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _take(self) -> None:
        """Take the folder's lock, which ends with this process at the latest."""
        try:
            self._lock = locked(self.path / _LOCK)
        except BlockingIOError:
            raise ModelError(
                f"{self.path}: another process works on this run: let it end, or end it first"
            ) from None

    def _path(self, name: str) -> Path:
        return self.path / f"{name}.npz"
