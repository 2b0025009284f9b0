"""Folder of a recording while answers are added: its lock, its limits, and what is erased from it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import structlog

from mesh.tuning.conversation_file import SUFFIX, conversation_bytes, read_tokens, write_conversation
from mesh.tuning.recording import (
    conversation_path,
    conversation_paths,
    create_recording,
    read_recording_header,
)
from spanmesh_proto.errors import ClusterError, ModelError
from stages.files import locked, write_error
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from mesh.tuning.conversation_file import Conversation
    from mesh.tuning.recording import RecordingHeader

_LOCK: Final = "lock"
_ID_BYTES: Final = 8
_MOST_ID_CHARS: Final = 64
# Other programs need some of the disk, too.
_LEFT_FREE: Final = 0.05
_DAY_S: Final = 86400.0

log = structlog.get_logger()


@dataclass(frozen=True)
class RecordingLimits:
    """Limits of a recording."""

    most_bytes: int
    """Of all conversations: the oldest go first."""
    days: float
    """Days after which a conversation is erased."""


@dataclass(frozen=True)
class _Entry:
    """A conversation of the folder."""

    path: Path
    num_bytes: int
    num_tokens: int
    key_digest: str
    time_s: float


class RecordingFolder:
    """Conversations of a folder that this process alone adds to. All but the constructor is for one thread.

    Args:
        folder: Made if it is missing.
        header: What its conversations are of.
        limits: Limits of the folder.
        one_bytes: Most bytes that the features of one answer may take.

    Attributes:
        path: As given.
        id: Name of this writer, which the lock holds as well.
        num_bytes: Size of all conversations.
        num_tokens: Their tokens of answers.

    Raises:
        ModelError: If it holds a recording of something else, or is readable by others.
        ClusterError: If another process adds to it, or the limit is too small, or larger than its disk.
    """

    def __init__(
        self, folder: Path, header: RecordingHeader, limits: RecordingLimits, *, one_bytes: int
    ) -> None:
        create_recording(folder, header)
        self.path = folder
        self._shape = header.shape
        self._limits = limits
        self._entries: deque[_Entry] = deque()
        self._next_number = 0
        self.id = secrets.token_hex(_ID_BYTES)
        self.num_bytes = self.num_tokens = 0
        self._lock = _locked(folder)
        try:
            self._check_limit(one_bytes)
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, self.id.encode(), 0)
        except OSError as error:
            self.close()
            raise write_error(folder / _LOCK, error) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Number of conversations."""
        return len(self._entries)

    def close(self) -> None:
        """Let others add to it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def look_through(self) -> None:
        """Learn what the folder holds; what a crash has left half, or a reader refuses, is removed.

        Raises:
            ModelError: If the folder cannot be read.
            OSError: If something cannot be removed; all else has been learned by then.
        """
        kept: OSError | None = None
        damaged = list(self.path.glob(f".*{SUFFIX}.*.part"))
        for path in conversation_paths(self.path):
            self._next_number = int(path.stem) + 1
            try:
                self._note(path, read_tokens(path, self._shape), path.stat().st_size)
            except ModelError as error:
                log.warning("recording_damaged", reason=error.message)
                damaged.append(path)
        for path in damaged:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                kept = error
        if kept is not None:
            raise kept

    def add(self, conversation: Conversation) -> None:
        """Write a conversation; the oldest make room for it.

        Raises:
            ModelError: If it is larger than the folder may be.
            OSError: If it cannot be written, such as on a full disk; nothing of it is left then.
        """
        num_bytes = conversation_bytes(conversation)
        if num_bytes > self._limits.most_bytes:
            raise ModelError(
                f"an answer takes {format_size(num_bytes)}, more than --record-limit, "
                f"{format_size(self._limits.most_bytes)}: raise it"
            )
        while self._entries and self.num_bytes + num_bytes > self._limits.most_bytes:
            self._erase(self._entries[0])
            self._entries.popleft()
        path = conversation_path(self.path, self._next_number)
        write_conversation(path, conversation)
        self._next_number += 1
        self._note(path, conversation, num_bytes)

    def erase_old(self, now_s: float) -> int:
        """Erase conversations that are too old; returns how many.

        Args:
            now_s: Unix seconds.

        Raises:
            OSError: If one cannot be removed.
        """
        oldest_s = now_s - self._limits.days * _DAY_S
        # The clock may have been wrong when some were written: not only the first ones are looked at.
        return self._erase_all(lambda entry: entry.time_s < oldest_s)

    def erase_others(self, key_digests: Collection[str]) -> int:
        """Erase conversations of API keys other than these; returns how many. Those of no key stay.

        Raises:
            OSError: If one cannot be removed.
        """
        kept = {"", *key_digests}
        return self._erase_all(lambda entry: entry.key_digest not in kept)

    def _erase_all(self, is_over: Callable[[_Entry], bool]) -> int:
        """Erase conversations; returns how many.

        Raises:
            OSError: If one cannot be removed, which is tried again the next time; all others are.
        """
        kept: OSError | None = None
        num_before = len(self._entries)
        for _ in range(num_before):
            entry = self._entries.popleft()
            try:
                if is_over(entry):
                    self._erase(entry)
                    continue
            except OSError as error:
                kept = error
            self._entries.append(entry)
        if kept is not None:
            raise kept
        return num_before - len(self._entries)

    def _erase(self, entry: _Entry) -> None:
        entry.path.unlink(missing_ok=True)
        self.num_bytes -= entry.num_bytes
        self.num_tokens -= entry.num_tokens

    def _note(self, path: Path, conversation: Conversation, num_bytes: int) -> None:
        info = conversation.info
        self._entries.append(
            _Entry(path, num_bytes, conversation.num_answer_tokens, info.key_digest, info.time_s)
        )
        self.num_bytes += num_bytes
        self.num_tokens += conversation.num_answer_tokens

    def _check_limit(self, one_bytes: int) -> None:
        most_bytes = self._limits.most_bytes
        if most_bytes < one_bytes:
            raise ClusterError(
                f"--record-limit is {format_size(most_bytes)}, and the hidden states of one answer may take "
                f"{format_size(one_bytes)}: raise it",
                param="--record-limit",
            )
        held_bytes = sum(path.stat().st_size for path in conversation_paths(self.path))
        usage = shutil.disk_usage(self.path)
        room_bytes = held_bytes + usage.free - int(_LEFT_FREE * usage.total)
        if most_bytes > room_bytes:
            raise ClusterError(
                f"--record-limit is {format_size(most_bytes)}, and the disk of {self.path} has room for "
                f"{format_size(max(0, room_bytes))}, with a twentieth left free: lower it, or name another",
                param="--record-limit",
            )


def recorded_prompts(folder: Path) -> list[str]:
    """Names of the prompts of a recording, one for each answer; what is removed meanwhile is left out.

    Raises:
        ModelError: If the folder is no recording.
    """
    shape, names = read_recording_header(folder).shape, []
    for path in conversation_paths(folder):
        with contextlib.suppress(ModelError):
            names.append(read_tokens(path, shape).info.prompt_id)
    return names


def erase_key(folder: Path, key_digest: str) -> int:
    """Erase the conversations of an API key, also while another process adds to the folder.

    Args:
        folder: A recording.
        key_digest: Digest of the key, in hex.

    Returns:
        How many there were.

    Raises:
        ModelError: If the folder is no recording, or one cannot be removed.
    """
    shape, num_erased = read_recording_header(folder).shape, 0
    for path in conversation_paths(folder):
        with contextlib.suppress(ModelError):
            if read_tokens(path, shape).info.key_digest != key_digest:
                continue
        # One that is damaged may be of any key.
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise write_error(path, error) from error
        num_erased += 1
    return num_erased


def writer_of(folder: Path) -> str | None:
    """Name of the latest process that added to a recording, see `RecordingFolder`; None if there was none."""
    with contextlib.suppress(OSError), (folder / _LOCK).open("rb") as file:
        return file.read(_MOST_ID_CHARS).decode("ascii", "replace") or None
    return None


def _locked(folder: Path) -> int:
    """Descriptor that holds the lock of a folder."""
    try:
        return locked(folder / _LOCK)
    except BlockingIOError:
        raise ClusterError(
            f"{folder} is being recorded into by another process: end that one, or name another folder"
        ) from None
    except OSError as error:
        raise write_error(folder / _LOCK, error) from error
