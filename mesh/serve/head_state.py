"""Head state: file written for the next head, with fingerprints of the settings of its stages.

The file holds the mesh's secrets and is readable by this user only. A head that stops normally removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, Self

import structlog
from pydantic import TypeAdapter, ValidationError

from mesh.cluster.admission import Admissions
from mesh.cluster.certificates import Certificate
from mesh.cluster.join_token import JoinToken
from mesh.cluster.ray_node import RayNodeRecord  # noqa: TC001 - read by pydantic
from mesh.options.model import LoadRequest
from mesh.serve.head_identity import HeadIdentity
from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from spanmesh_proto.errors import ClusterError, InvalidRequest
from stages.cancellable_work import CancellableWork
from stages.files import locked, user_folder, write_private_file
from stages.gguf import part_paths
from stages.weights.hashing import stamps_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mesh.options.host import HeadOptions
    from mesh.serve.head_identity import IdentityFile
    from mesh.serve.preflight import Preflight

_FORMAT: Final = 1
_VERSION: Final = TypeAdapter(dict[str, Any])
_POLL_S: Final = 0.5
# Longest pause between attempts to write, each twice as long as the one before.
_LONGEST_PAUSE_S: Final = 30.0
# Longest time that the answer to a command waits until its effect is written.
_PATIENCE_S: Final = 10.0

log = structlog.get_logger()


@dataclass(frozen=True)
class SavedStage:
    """A stage that may outlive its head."""

    actor: str
    """Name of its actor in Ray."""
    host: str
    """Name of the host."""
    ray_node: str
    """Name of the host's Ray node."""
    start: int
    """First layer."""
    stop: int
    """Last layer plus one."""
    num_threads: int
    """Threads that it computes with."""
    wire: str
    """Format of its hidden states on the wire, as in `HiddenType`."""
    address: str | None
    """`host:port` of its server; None before it serves."""
    ctx_size: int = 0
    """Positions of one session; 0 where an earlier version recorded the stage."""


class SavedRing(Protocol):
    """Stages and replicas of one model that may be taken over."""

    @property
    def setup(self) -> str:
        """Fingerprint of all settings that its stages were loaded with; see `fingerprint`."""

    @property
    def stages(self) -> tuple[SavedStage, ...]:
        """The ring, in pipeline order; empty while it is not whole, as during a repair."""

    @property
    def copies(self) -> tuple[SavedStage, ...]:
        """Replicas on spare hosts."""


@dataclass(frozen=True)
class SavedModel:
    """A model that was loaded beside the first."""

    order: dict[str, Any]
    """Fields of its `LoadRequest`."""
    setup: str
    """See `SavedRing.setup`."""
    stages: tuple[SavedStage, ...] = ()
    """See `SavedRing.stages`."""
    copies: tuple[SavedStage, ...] = ()
    """See `SavedRing.copies`."""

    @property
    def load_request(self) -> LoadRequest:
        """Options that the model was loaded with.

        Raises:
            ValueError: If another version of this software wrote options that this one does not have.
        """
        return LoadRequest.model_validate(self.order)


@dataclass(frozen=True)
class HeadState:
    """State of one head at one time."""

    term: int
    """Grows with each head of the mesh; stages obey the highest."""
    ray: RayNodeRecord
    """Record of its Ray node."""
    secret: str = field(repr=False)
    """Secret of the join token."""
    expires_at_s: int
    """Expiry of the join token, Unix seconds."""
    join_port: int
    """Port of the membership service."""
    certificate_pem: str
    """Certificate of the mesh's authority."""
    private_key_pem: str = field(repr=False)
    """Private key of the mesh's authority."""
    setup: str
    """See `SavedRing.setup`."""
    stages: tuple[SavedStage, ...] = ()
    """See `SavedRing.stages`."""
    copies: tuple[SavedStage, ...] = ()
    """See `SavedRing.copies`."""
    models: tuple[SavedModel, ...] = ()
    """Models loaded beside the first, in the order of loading."""
    rejoin_secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """Secrets by which hosts that were admitted may join again, by host name."""
    evicted: tuple[str, ...] = ()
    """Names of evicted hosts."""

    @property
    def identity(self) -> HeadIdentity:
        """Identity of the head."""
        certificate = Certificate(self.certificate_pem.encode(), self.private_key_pem.encode())
        token = JoinToken((), self.secret, certificate.fingerprint, self.expires_at_s)
        admissions = Admissions(token, self.rejoin_secrets, self.evicted)
        return HeadIdentity(certificate, admissions, self.join_port, self.term)


_CONTENT: Final = TypeAdapter(HeadState)


class HeadStateFile:
    """State file of a head; locked while the head runs.

    Args:
        path: Path of the file; its folder is created if needed.

    Attributes:
        path: As given, with symbolic links followed.

    Raises:
        BlockingIOError: If a running head uses the file.
    """

    def __init__(self, path: Path) -> None:
        # Each name of a file has the same lock.
        self.path = path = Path(os.path.realpath(path))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = locked(path.with_suffix(".lock"))

    def __enter__(self) -> Self:
        """Lock the file for the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Unlock the file and keep its content."""
        os.close(self._lock)

    def load(self) -> HeadState | None:
        """State left by the last head; None if that stopped normally or its state cannot be read."""
        try:
            return _from_json(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("head_state_unreadable", path=str(self.path), reason=str(error))
            return None

    def save(self, state: HeadState) -> None:
        """Replace the content, whole or not at all; it is durable when this returns.

        Raises:
            OSError: If it cannot be written.
        """
        write_private_file(self.path, json.dumps({"format": _FORMAT, **dataclasses.asdict(state)}))

    def clear(self) -> None:
        """Remove the state: there is nothing to take over."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


class HeadStateWriter:
    """Keeps the head state on disk, and holds the state of the former head.

    Args:
        file: State file; None if no head is to take over.
        former: State left by a head that crashed.
        term: Term of this head.
        identity_file: File of the head's identity, which is kept up to date as well; None for none.
        patience_s: Longest wait of `written`, in seconds.

    Attributes:
        failure: Why the file is out of date, for the operator; None while it is up to date.
    """

    def __init__(
        self,
        file: HeadStateFile | None,
        former: HeadState | None,
        term: int,
        *,
        identity_file: IdentityFile | None = None,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._file = file
        self._identity_file = identity_file
        self._patience_s = patience_s
        self._is_asked = asyncio.Event()
        # The result is whether the state was written.
        self._waiting: list[asyncio.Future[bool]] = []
        self._read: Callable[[], HeadState] | None = None
        self._has_ended = self._is_closed = False
        self._writing = asyncio.Lock()
        self._failing: HeadStateFile | IdentityFile | None = None
        self.former = former
        self.term = term
        self.failure: str | None = None

    async def keep_written(self, read: Callable[[], HeadState]) -> NoReturn:
        """Keep the file up to date until cancelled; failed writes are retried.

        Args:
            read: Returns the current state, also after the end of this.
        """
        self._read = read
        written: HeadState | None = None
        pause_s = _POLL_S
        try:
            while True:
                self._is_asked.clear()
                waiting, self._waiting = self._waiting, []
                state = read()
                try:
                    if state != written:
                        await self._write(state)
                        written = state
                except OSError:
                    # One of the files may have been written.
                    written = None
                    log.warning("head_state_not_written", reason=self.failure, again_in_s=pause_s)
                    self._waiting = waiting + self._waiting
                    await self._asked_within(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    continue
                pause_s = _POLL_S
                for asked in waiting:
                    _settle(asked, is_written=True)
                await self._asked_within(_POLL_S)
        finally:
            # The waiting task writes the state itself, as for requests that come while the head shuts down.
            self._has_ended = True
            for asked in (*waiting, *self._waiting):
                _settle(asked, is_written=False)

    async def written(self) -> None:
        """Return once the current state is durable on disk.

        After the end of `keep_written` the state is written here, in one attempt.

        Raises:
            ClusterError: If it cannot be written, or that takes too long.
        """
        if self._file is None and self._identity_file is None:
            return
        try:
            async with asyncio.timeout(self._patience_s):
                if not self._has_ended and await self._next_write():
                    return
                if self._read is not None:
                    await self._write_current(self._read)
        except (TimeoutError, OSError):
            raise self._not_saved() from None

    def close(self) -> None:
        """Save the identity a last time, without the hosts that were dismissed; nothing is written later.

        Call it after the last request and when the hosts have left. A failure is logged.
        """
        self._is_closed = True
        file, read = self._identity_file, self._read
        if file is None or read is None:
            return
        try:
            file.save(read().identity)
        except OSError as error:
            log.warning(
                "identity_not_written",
                path=str(file.path),
                reason=error.strerror or str(error),
                effect="evictions and dismissals since the last write are undone at the next start",
            )

    async def _next_write(self) -> bool:
        """Wait until `keep_written` has written the current state; False if it ended before."""
        asked: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(asked)
        self._is_asked.set()
        return await asyncio.shield(asked)

    async def _write_current(self, read: Callable[[], HeadState]) -> None:
        async with self._writing:
            if self._is_closed:
                self.failure = self.failure or "it has ended"
                raise OSError(self.failure)
            await self._write(read())

    def _not_saved(self) -> ClusterError:
        file = self._failing or self._identity_file or self._file
        where = "a file" if file is None else file.path
        # An orderly end removes the state, and keeps the identity.
        when = "after a crash of this one " if isinstance(file, HeadStateFile) else ""
        then = "`mesh serve` is ending" if self._has_ended and when else "writing is retried"
        return ClusterError(
            "done, but not saved for a restart of `mesh serve` "
            f"({self.failure or 'the disk does not answer'}), which {when}would undo it: "
            f"free space for {where}; {then}"
        )

    async def _write(self, state: HeadState) -> None:
        """Write in a thread, as a disk may take long; if cancelled, wait for its end.

        Raises:
            OSError: If a file cannot be written; `failure` has the reason.
        """
        file, identity_file = self._file, self._identity_file

        def save() -> None:
            # First: see `mesh.serve.head_identity.starting_identity`.
            if identity_file is not None:
                self._failing = identity_file
                identity_file.save(state.identity)
            if file is not None:
                self._failing = file
                file.save(state)
            self._failing = None

        try:
            await CancellableWork().run(save)
        except OSError as error:
            self.failure = error.strerror or str(error)
            raise
        if self.failure is not None:
            log.info("head_state_written_again")
        self.failure = None

    async def _asked_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_asked.wait()


def fingerprint(**setup: object) -> str:
    """Hash of settings: equal if stages of two runs of `mesh serve` compute the same in the same way."""
    return hashlib.sha256(repr(sorted(setup.items())).encode()).hexdigest()


def default_state_path(name: str, address: str, join_port: int) -> Path:
    """Path of the state of the head with this name and address.

    Args:
        name: Name of its host.
        address: Address for other hosts as given by the operator; empty if it was found.
        join_port: Port as given by the operator; 0 is any.
    """
    file = f"head-{fingerprint(name=name, address=address, port=join_port)[:16]}.json"
    return user_folder("XDG_STATE_HOME", ".local", "state") / "spanmesh" / file


def _from_json(text: bytes) -> HeadState:
    """State in a file of this format. Fields that a newer version added are left out.

    Raises:
        ValueError: If it is damaged, or has another format.
    """
    try:
        if _VERSION.validate_json(text).get("format") != _FORMAT:
            raise ValueError("it was written by another version")
        state = _CONTENT.validate_json(text, strict=True)
    except ValidationError as error:
        # Not the values: the mesh's secrets are among them.
        found = error.errors(include_url=False, include_context=False, include_input=False)
        wrong = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'file'}: {each['msg']}" for each in found[:3])
        raise ValueError(f"it is damaged: {wrong}") from None
    return dataclasses.replace(state, models=tuple(filter(_is_known, state.models)))


def _is_known(model: SavedModel) -> bool:
    """Whether this version has the options of a model."""
    try:
        _ = model.load_request.served_name
    except (ValueError, InvalidRequest):
        log.warning("model_not_restored", model=model.order.get("model"), reason="of another version")
        return False
    return True


def _settle(asked: asyncio.Future[bool], *, is_written: bool) -> None:
    if not asked.done():
        asked.set_result(is_written)


@contextmanager
def open_head_state(
    options: HeadOptions, identity_file: IdentityFile | None = None
) -> Iterator[HeadStateWriter]:
    """Read the state of a former head; at the end the file is removed, unless this process is killed.

    Args:
        options: Options of `mesh serve`.
        identity_file: File of the head's identity, which stays; None for none.
    """
    # Grows from one start to the next even without a state file, as long as the clock does.
    term = time.time_ns() // 1_000_000
    # An address that was found may be another one when the head is started again.
    address = options.address if options.is_address_given else ""
    path = options.state_path or default_state_path(options.name, address, options.join_port)
    try:
        file = HeadStateFile(path) if options.linger_s > 0 else None
    except OSError as error:
        log.warning("no_successor", reason=f"{path} cannot be used: {error}")
        file = None
    with contextlib.ExitStack() as stack:
        former = None
        if file is not None:
            stack.enter_context(file)
            former = file.load()
            if former is not None:
                log.info("former_head_found", term=former.term, stages=len(former.stages))
                term = max(term, former.term + 1)
            stack.callback(file.clear)
        writer = HeadStateWriter(file, former, term, identity_file=identity_file)
        stack.callback(writer.close)
        yield writer


def setup_of(options: HeadOptions, known: Preflight) -> str:
    """Fingerprint of all settings that the stages of a model are loaded with."""
    # As the operator asks for now; a repair may have placed the layers otherwise.
    given = {"model": options.model, "topology": options.topology, **options.of_stages()}
    drafter = known.drafter
    given["assistant"] = drafter.path if drafter is not None and drafter.is_beside_tail else None
    return fingerprint(
        **{name: _identified(value) for name, value in given.items()},
        workload=known.workload,
        # The workload has another context if one is chosen once hosts have joined.
        is_context_chosen=options.ctx_size is None,
        software=(SOFTWARE_VERSION, PROTOCOL_VERSION),
    )


def _identified(value: object) -> object:
    """A value for a fingerprint; of the path of a model's first file, its files as well."""
    if not isinstance(value, Path):
        return value
    stamps = [(stamp.size_bytes, stamp.mtime_ns) for stamp in stamps_of(part_paths(value))]
    return str(value.resolve()), stamps
