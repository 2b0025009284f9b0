"""Drafters that were tuned in the background, in the folder of the recording that they learned from.

Each has a number, with which the names of all its files begin: `0003.json` says what it learned from, and is
there before anything else of it; `0003.gguf` is the drafter, once it has been chosen; `0003.gguf.run` is the
run that makes it, and `0003.loaded` what llama.cpp reads of it. So what has learned from an API key can be
erased whole, whatever has become of it.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from spanmesh_proto.errors import ModelError
from stages.files import write_error, write_private_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

NUM_KEPT: Final = 3
"""Chosen drafters that are kept."""
_FOLDER: Final = "tuned"
_TRIED: Final = "tried.json"
_NEVER_S: Final = -1.0
_NUMBERED: Final = re.compile(r"\.?([0-9]{4,})\.")
_MOST_BYTES: Final = 1 << 20
NO_KEY: Final = ""
"""Stands for requests without an API key among the digests of keys."""


@dataclass(frozen=True)
class TunedDrafter:
    """What is known of a tuned drafter; all of it that a file says is checked."""

    number: int
    """From 1 on: each is younger than those before."""
    base: str
    """SHA-256 of the base drafter's file, in hex: that with which tuning began."""
    source: int
    """Number of the drafter that it was tuned from; 0 for the base drafter."""
    group: str
    """Group of API keys that it serves."""
    keys: tuple[str, ...]
    """Digests of the keys whose answers it and its sources learned from, in hex; `NO_KEY` without one."""
    latest_s: float
    """When the latest answer that it may learn from ended, Unix seconds."""
    is_chosen: bool = False
    """Whether it has been chosen; it is being tuned before."""
    num_tokens: int = 0
    """Tokens of the answers that it learned from."""
    num_prompts: int = 0
    """Their prompts."""
    former_rate: float | None = None
    """First drafted tokens of its source that were accepted as served; None if there were too few to tell."""
    gain: float = 0.0
    """Accepted tokens of a window more than its source, on answers that none of them learned from."""
    time_s: float = 0.0
    """When it was chosen, Unix seconds."""


class TunedFolder:
    """Tuned drafters of a recording.

    One thread adds to it; any thread, and other processes, may erase.

    Args:
        recording: The recording's folder.

    Attributes:
        path: Where they lie.
    """

    def __init__(self, recording: Path) -> None:
        self.path = recording / _FOLDER

    def drafters(self) -> list[TunedDrafter]:
        """All drafters, oldest first; what cannot be read is left out."""
        found = (self._read(number) for number in sorted(self._entries()))
        return [each for each in found if each is not None]

    def has(self, drafter: TunedDrafter) -> bool:
        """Whether a drafter has not been erased."""
        return self._read(drafter.number) is not None and (
            not drafter.is_chosen or self.file(drafter.number).exists()
        )

    def next_number(self) -> int:
        """A number above all that are there."""
        return max(self._entries(), default=0) + 1

    def file(self, number: int) -> Path:
        """The drafter's file."""
        return self.path / f"{number:04d}.gguf"

    def loaded(self, number: int) -> Path:
        """Folder for what is loaded of it."""
        return self.path / f"{number:04d}.loaded"

    def write(self, drafter: TunedDrafter) -> None:
        """Write what is known of a drafter, in place of what was written before.

        Raises:
            ModelError: If it cannot be written.
        """
        path = self._said(drafter.number)
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            write_private_file(path, json.dumps(asdict(drafter), indent=2) + "\n")
        except OSError as error:
            raise write_error(path, error) from error

    def choose(self, drafter: TunedDrafter, candidate: Path) -> None:
        """Give a candidate its name, and end its run.

        Raises:
            ModelError: If that cannot be written, or the candidate has been erased.
        """
        path = self.file(drafter.number)
        try:
            candidate.chmod(0o600)
            candidate.replace(path)
        except OSError as error:
            raise write_error(path, error) from error
        self.write(drafter)
        shutil.rmtree(path.with_name(path.name + ".run"), ignore_errors=True)

    def prune(self) -> None:
        """Erase the oldest chosen drafters beyond those that are kept.

        Raises:
            ModelError: If one cannot be removed.
        """
        chosen = [each for each in self.drafters() if each.is_chosen]
        for each in chosen[:-NUM_KEPT]:
            self.erase(each.number)

    def note_tried(self, drafter: TunedDrafter) -> None:
        """Note which answers the latest training of a group has seen.

        Raises:
            ModelError: If it cannot be written.
        """
        said = {"base": drafter.base, "group": drafter.group, "latest_s": drafter.latest_s}
        try:
            write_private_file(self.path / _TRIED, json.dumps(said) + "\n")
        except OSError as error:
            raise write_error(self.path / _TRIED, error) from error

    def tried(self, base: str, group: str) -> float:
        """When the latest answer ended that a training of a group has seen, Unix seconds; -1 before any."""
        said = _json(self.path / _TRIED)
        if not isinstance(said, dict) or (said.get("base"), said.get("group")) != (base, group):
            return _NEVER_S
        latest_s = said.get("latest_s")
        return float(latest_s) if isinstance(latest_s, (int, float)) else _NEVER_S

    def erase(self, number: int) -> None:
        """Erase all files of a drafter, what is said of it last.

        Raises:
            ModelError: If something of it cannot be removed; all else is, but for what is said of it.
        """
        said = self._said(number)
        kept: ModelError | None = None
        for path in [*(each for each in self._entries().get(number, []) if each != said), said]:
            if path == said and kept is not None:
                raise kept
            try:
                is_folder = path.is_dir() and not path.is_symlink()
                shutil.rmtree(path) if is_folder else path.unlink(missing_ok=True)
            except FileNotFoundError:
                # Another one erases it, too; what is left then is erased at the next look.
                continue
            except OSError as error:
                kept = write_error(path, error)
        if kept is not None:
            raise kept

    def erase_unless(self, may_stay: Callable[[TunedDrafter], bool]) -> int:
        """Erase drafters, and what belongs to none; returns how many.

        Args:
            may_stay: Whether a drafter may.

        Raises:
            ModelError: If something cannot be removed; all else is.
        """
        num_erased = 0
        kept: ModelError | None = None
        for number, paths in self._entries().items():
            found = self._read(number)
            if found is not None and may_stay(found):
                continue
            # What begins to be written is of a drafter that is not there yet.
            if any(not path.name.startswith(".") for path in paths):
                try:
                    self.erase(number)
                    num_erased += 1
                except ModelError as error:
                    kept = error
        if kept is not None:
            raise kept
        return num_erased

    def erase_key(self, digest: str) -> int:
        """Erase drafters that learned from an API key; returns how many.

        Raises:
            ModelError: If something cannot be removed.
        """
        return self.erase_unless(lambda drafter: digest not in drafter.keys)

    def erase_others(self, groups: Mapping[str, str | None]) -> int:
        """Erase drafters that learned from a key that is none of their group's now; returns how many.

        Args:
            groups: The group of each API key that may be recorded, by its digest.

        Raises:
            ModelError: If something cannot be removed.
        """
        return self.erase_unless(
            lambda drafter: all(
                key == NO_KEY or groups.get(key, NO_KEY) == drafter.group for key in drafter.keys
            )
        )

    def _said(self, number: int) -> Path:
        return self.path / f"{number:04d}.json"

    def _entries(self) -> dict[int, list[Path]]:
        """Files and folders of each drafter."""
        found: dict[int, list[Path]] = defaultdict(list)
        with contextlib.suppress(FileNotFoundError):
            for path in sorted(self.path.iterdir()):
                if (match := _NUMBERED.match(path.name)) is not None:
                    found[int(match[1])].append(path)
        return found

    def _read(self, number: int) -> TunedDrafter | None:
        return _parsed(number, _json(self._said(number)))


def may_serve(drafter: TunedDrafter, base: str, group: str, members: frozenset[str]) -> bool:
    """Whether a group may be served with a drafter.

    Args:
        drafter: The drafter.
        base: Digest of the base drafter's file.
        group: The group.
        members: Digests of its keys; `NO_KEY` alone where there are no keys.
    """
    return (drafter.base, drafter.group) == (base, group) and members.issuperset(drafter.keys)


def _json(path: Path) -> Any:
    """What a small file says; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def _parsed(number: int, said: Any) -> TunedDrafter | None:
    """What a file says; None if that is something else."""
    kinds: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "int": (int,),
        "bool": (bool,),
        "float": (int, float),
        "float | None": (int, float, type(None)),
        "tuple[str, ...]": (list,),
    }
    expected = {each.name: kinds[str(each.type)] for each in fields(TunedDrafter)}
    if not isinstance(said, dict) or said.keys() != expected.keys() or said["number"] != number:
        return None
    if not all(type(said[name]) in types for name, types in expected.items()):
        return None
    if not all(isinstance(key, str) for key in said["keys"]):
        return None
    return TunedDrafter(**{**said, "keys": tuple(said["keys"])})
