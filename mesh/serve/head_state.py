"""What a head writes down while it serves, so that `mesh serve`, started again after a crash, takes over.

The file holds the mesh's secrets and is for this user only. A head that is closed in peace removes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, Self

import structlog

from mesh.cluster.ray_node import RayNodeRecord
from stages.gguf.file_io import sync_folder

log = structlog.get_logger()

_FORMAT: Final = 1


@dataclass(frozen=True)
class KeptStage:
    """A stage that may outlive its head.

    Attributes:
        actor: Name of its actor in Ray.
        host: Name of its host.
        ray_node: Name of that host's Ray node.
        start: Its first layer.
        stop: The layer behind its last.
        num_threads: Threads it computes with.
        wire: How its hidden states travel to the next, as in `HiddenType`.
        address: `host:port` where it serves; None if it does not yet.
    """

    actor: str
    host: str
    ray_node: str
    start: int
    stop: int
    num_threads: int
    wire: str
    address: str | None


class KeptRing(Protocol):
    """What may be taken over of one model."""

    @property
    def setup(self) -> str:
        """Fingerprint of all that its stages were loaded with; see `fingerprint`."""

    @property
    def stages(self) -> tuple[KeptStage, ...]:
        """The ring, in pipeline order; none before the first time that it served."""

    @property
    def copies(self) -> tuple[KeptStage, ...]:
        """Stages that spare hosts have loaded ahead."""


@dataclass(frozen=True)
class KeptModel:
    """A model that was loaded beside the first.

    Attributes:
        order: What was asked for, see `mesh.serve.load_order`.
        setup: See `KeptRing`.
        stages: Likewise.
        copies: Likewise.
    """

    order: dict[str, Any]
    setup: str
    stages: tuple[KeptStage, ...] = ()
    copies: tuple[KeptStage, ...] = ()


@dataclass(frozen=True)
class HeadState:
    """One head at one time.

    Attributes:
        term: Grows with each head of the mesh; stages follow the highest.
        ray: Its Ray node.
        secret: That of the join token.
        expires_at_s: Unix time from which the join token is no good.
        join_port: Where hosts reach it.
        certificate_pem: Of the mesh's authority.
        private_key_pem: Of the mesh's authority.
        setup: Fingerprint of all that stages were loaded with; see `fingerprint`.
        stages: The ring, in pipeline order; none before the first time that the mesh served.
        copies: Stages that spare hosts have loaded ahead.
        models: Those that were loaded beside the first, in the order in which they came.
    """

    term: int
    ray: RayNodeRecord
    secret: str = field(repr=False)
    expires_at_s: int
    join_port: int
    certificate_pem: str
    private_key_pem: str = field(repr=False)
    setup: str
    stages: tuple[KeptStage, ...] = ()
    copies: tuple[KeptStage, ...] = ()
    models: tuple[KeptModel, ...] = ()


def fingerprint(**setup: object) -> str:
    """A hash by which two runs of `mesh serve` know that their stages compute the same, in the same way."""
    return hashlib.sha256(repr(sorted(setup.items())).encode()).hexdigest()


class HeadStateFile:
    """The file of one head; locked as long as that one lives.

    Args:
        path: Where it is; its folder is made if need be.

    Attributes:
        path: The same.

    Raises:
        BlockingIOError: If a head that lives uses it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise

    def __enter__(self) -> Self:
        """The file stays locked in the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Unlock it, and leave what is in it."""
        os.close(self._lock)

    def load(self) -> HeadState | None:
        """What the last head left; None if it was closed in peace, or what it left cannot be read."""
        try:
            fields = json.loads(self.path.read_text())
            return _from_json(fields)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("head_state_unreadable", path=str(self.path), reason=repr(error))
            return None

    def save(self, state: HeadState) -> None:
        """Replace what is in it, whole or not at all; when this returns, a crash does not undo it.

        Raises:
            OSError: If it cannot be written.
        """
        part = self.path.with_suffix(".part")
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({"format": _FORMAT, **dataclasses.asdict(state)}, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.path)
        except BaseException:
            # On a full disk it would take the room that the next attempt needs.
            part.unlink(missing_ok=True)
            raise
        sync_folder(self.path.parent)

    def clear(self) -> None:
        """There is nothing to take over."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


def default_state_path(name: str, address: str, join_port: int) -> Path:
    """Where the head of that name, reached there, keeps its state.

    Args:
        name: What its host is called.
        address: Where the others reach it.
        join_port: As the user says it; 0 is any.
    """
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return (
        Path(home) / "spanmesh" / f"head-{fingerprint(name=name, address=address, port=join_port)[:16]}.json"
    )


def _from_json(fields: Any) -> HeadState:
    if fields.pop("format") != _FORMAT:
        raise ValueError("written by another version")
    fields["ray"] = RayNodeRecord(**fields["ray"])
    fields["models"] = tuple(KeptModel(**_with_stages(model)) for model in fields.get("models", ()))
    return HeadState(**_with_stages(fields))


def _with_stages(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {
        name: tuple(KeptStage(**stage) for stage in fields[name]) for name in ("stages", "copies")
    }
