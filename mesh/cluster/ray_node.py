"""Ray node of this host: start, adoption by the next head, and stop.

The head's may outlive its starter, so that stages keep running while `mesh serve` is started again.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import psutil
import structlog

from mesh.cluster.ray_environment import RayTlsFiles, child_environment
from mesh.util.child_environment import module_command
from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mesh.cluster.port_plan import RayPorts
    from stages.transport.channels import Identity

_LOCK: Final = "lock"
_OBJECT_STORE_BYTES: Final = 80_000_000
_START_TIMEOUT_S: Final = 60.0
# Ray waits 30 s for a node to be listed in its cluster, without an option: too short on a busy machine.
MOST_STARTS: Final = 3
_POLL_S: Final = 0.1
_WATCH_S: Final = 0.5
_GRACE_S: Final = 3.0
_KILL_TIMEOUT_S: Final = 10.0
# The machine's start is known to the second, and may be rounded another way each time.
_SAME_START_S: Final = 2.0

log = structlog.get_logger()


class PrivateFolder:
    """Private folder: removed by `close`, or, if its owner was killed, when the next one is created.

    Its owner holds a lock in it, which the kernel releases with the owner; unlike a process id, that works
    across containers. The folder itself is locked too: programs that remove old files from temporary folders,
    such as systemd-tmpfiles, leave alone what is below a locked folder.

    Args:
        prefix: Beginning of its name.

    Attributes:
        path: The folder.
        descriptors: Of the locks; a child that inherits them owns the folder as well. Empty once closed.
    """

    def __init__(self, prefix: str) -> None:
        # Sockets go into it, and their paths end at 107 characters: no long TMPDIR.
        root = Path("/tmp")  # noqa: S108 - mkdtemp makes a folder that no other user can enter
        if not root.is_dir():
            with _naming_temporary_folder(root):
                root = Path(tempfile.gettempdir())
        for left in root.glob(f"{prefix}*"):
            _remove_if_abandoned(left)
        # Created with mode 0700, or not at all if the name exists.
        with _naming_temporary_folder(root):
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        folder = _open_folder(self.path)
        fcntl.flock(folder, fcntl.LOCK_SH)
        lock = _open_lock(self.path, folder, os.O_CREAT | os.O_EXCL)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.descriptors: tuple[int, ...] = (lock, folder)

    @property
    def is_open(self) -> bool:
        """Whether this process owns it."""
        return bool(self.descriptors)

    def close(self) -> None:
        """Remove the folder and its content. Later calls have no effect."""
        if self.is_open:
            shutil.rmtree(self.path, ignore_errors=True)
            self.release()

    def release(self) -> None:
        """Give up the locks, without removing anything."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()

    @classmethod
    def of_another(cls, path: Path) -> PrivateFolder:
        """A folder that another process still locks, to be removed by this one.

        Args:
            path: The folder.

        Raises:
            OSError: If it is gone.
            ClusterError: If it is not private to this user.
        """
        private = cls.__new__(cls)
        private.path = path
        folder = _open_folder(path)
        try:
            lock = _open_lock(path, folder)
        except BaseException:
            os.close(folder)
            raise
        # Shared: the process that locks it may end at any time.
        fcntl.flock(folder, fcntl.LOCK_SH)
        private.descriptors = (lock, folder)
        return private


@dataclass(frozen=True)
class RayNodeConfig:
    """Configuration of a Ray node."""

    address: str
    """IP address of this host for the others."""
    name: str
    """Its name in the cluster, unique in the mesh."""
    token: str = field(repr=False)
    """Ray's auth token."""
    head_address: str | None = None
    """`host:port` of the cluster to join, or None to start one."""
    linger_s: float = 0.0
    """Time for which the node runs on after its owner ended without stopping it; Linux only."""
    identity: Identity | None = field(default=None, repr=False)
    """TLS identity of its processes; None for plain text, as for all nodes of such a mesh."""
    ports: RayPorts | None = None
    """Ports of its processes; None for any free ones."""


@dataclass(frozen=True)
class RayNodeRecord:
    """Record of a node, by which another process can adopt it."""

    address: str
    """IP address of this host."""
    name: str
    """Its name in the cluster."""
    folder: str
    """Folder of its files."""
    pid: int
    """Process id of its first process."""
    started_s: float
    """When that process started, see `started_s`: process ids are used again."""


class _NodeFolder:
    """Files of a node, and the lock by which this process owns it.

    Args:
        folder: Folder of this process, or of the former owner.
        is_new: Whether the node is to be started; otherwise it has had an owner.

    Raises:
        BlockingIOError: If another process owns the node.
        FileNotFoundError: If it is not new, and the file by which it is owned is gone.
    """

    def __init__(self, folder: PrivateFolder, *, is_new: bool = True) -> None:
        self._folder = folder
        self.path = folder.path
        self.descriptors = folder.descriptors
        self.ray_dir = folder.path / "ray"
        self.token_path = folder.path / "token"
        self.log_path = folder.path / "ray.log"
        self.owner_path = folder.path / "owner"
        # The node watches the file that it was started with: another one would not make an owner.
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if is_new else 0)
        with contextlib.ExitStack() as undone:
            undone.callback(folder.release)
            self._owner_lock = os.open(self.owner_path, flags, 0o600)
            undone.callback(os.close, self._owner_lock)
            fcntl.flock(self._owner_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            undone.pop_all()

    @property
    def is_open(self) -> bool:
        """Whether this process owns the node."""
        return self._folder.is_open

    def close(self) -> None:
        self._folder.close()
        os.close(self._owner_lock)


class RayNode:
    """Ray processes of this host, owned by this process; see `start` and `adopt`.

    `stop`, or at the latest the end of this process (and `linger_s`), ends every process of the node.

    Args:
        address: IP address of this host.
        name: Its name in the cluster.
        folder: Folder of its files.
        first: Its first process.

    Attributes:
        ray_dir: Folder of Ray's sockets and logs.
        token_path: File with Ray's token, readable by this user only.
    """

    def __init__(self, address: str, name: str, folder: _NodeFolder, first: psutil.Process) -> None:
        self._address = address
        self._name = name
        self._folder = folder
        self._first = first
        self._started_s = started_s(first.pid)
        self._descendants: set[psutil.Process] = set()
        self.ray_dir = folder.ray_dir
        self.token_path = folder.token_path
        atexit.register(self.stop)

    @classmethod
    def start(cls, config: RayNodeConfig) -> Self:
        """Start a node.

        To be called in the main thread: on Linux the kernel ends a node that does not linger when the thread
        that started it ends.
        """
        folder = _NodeFolder(PrivateFolder("mesh-ray-"))
        with _naming_temporary_folder(folder.path.parent):
            folder.token_path.touch(mode=0o600)
            folder.token_path.write_text(config.token)
            if config.identity is not None:
                RayTlsFiles(folder.path).write(config.identity)
        with folder.log_path.open("wb") as output:
            first = psutil.Popen(
                module_command("mesh.cluster.ray_child", *start_arguments(config, folder.ray_dir)),
                env=child_environment(folder.token_path, folder.owner_path, config.linger_s),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal is handled here; Ray is ended afterwards.
                start_new_session=True,
                # The folder counts as in use as long as the node runs.
                pass_fds=folder.descriptors,
            )
        return cls(config.address, config.name, folder, first)

    @classmethod
    def adopt(cls, record: RayNodeRecord) -> Self:
        """Own a node whose former owner has ended.

        Raises:
            ClusterError: If it has ended too, or has an owner.
        """
        try:
            first = psutil.Process(record.pid)
            if abs(started_s(record.pid) - record.started_s) < _SAME_START_S and _is_alive(first):
                folder = _NodeFolder(PrivateFolder.of_another(Path(record.folder)), is_new=False)
                return cls(record.address, record.name, folder, first)
        except BlockingIOError:
            raise ClusterError(f"the Ray node {record.name} on {record.address} is in use") from None
        except FileNotFoundError:
            raise ClusterError(
                f"the Ray node {record.name} on {record.address} has lost its files in {record.folder}"
            ) from None
        except (psutil.NoSuchProcess, OSError):
            pass
        raise ClusterError(f"the Ray node {record.name} that ran on {record.address} has ended")

    @property
    def record(self) -> RayNodeRecord:
        """Record for adoption."""
        return RayNodeRecord(
            self._address,
            self._name,
            str(self._folder.path),
            self._first.pid,
            self._started_s,
        )

    @property
    def is_encrypted(self) -> bool:
        """Whether its processes use TLS."""
        return RayTlsFiles(self._folder.path).exist

    @property
    def is_running(self) -> bool:
        """Whether its first process runs; that one ends when another of the node's processes does."""
        return _is_alive(self._first)

    @property
    def crash_message(self) -> str:
        """The last line of its processes' output."""
        lines = [line.strip() for line in self._folder.log_path.read_text(errors="replace").splitlines()]
        words = [line for line in lines if line]
        return words[-1] if words else "it wrote nothing"

    async def ended(self) -> None:
        """Return when its first process has ended."""
        while self.is_running:  # noqa: ASYNC110 - a child without an event of its own
            await asyncio.sleep(_WATCH_S)

    async def wait_ready(self, timeout_s: float = _START_TIMEOUT_S) -> str:
        """Wait until the node is part of its cluster.

        Returns:
            The cluster's address, `host:port`.

        Raises:
            ClusterError: If Ray gave up or is not ready in time; with the end of its output.
        """
        started_s = time.monotonic()
        # Ray writes this file when all of the node's processes run and the cluster lists the node.
        ready_path = self.ray_dir / "ray_current_cluster"
        while not (address := _text_of(ready_path)):
            if not self.is_running:
                raise ClusterError(f"Ray did not start on {self._address}: {self.crash_message}")
            if time.monotonic() - started_s > timeout_s:
                raise ClusterError(
                    f"Ray on {self._address} is not ready after {timeout_s:g} s: {self.crash_message}"
                )
            await asyncio.sleep(_POLL_S)
        log.info("ray_started", node=self._name, seconds=round(time.monotonic() - started_s, 1))
        return address

    def stop(self) -> None:
        """End every process of the node and remove its files; takes a few seconds at the first call."""
        atexit.unregister(self.stop)
        if self._folder.is_open:
            self._end_processes()
            self._folder.close()

    def _end_processes(self) -> None:
        self._descendants.update(self._processes())
        if self.is_running:
            # Ray's own way first: it ends its children as well.
            with contextlib.suppress(psutil.NoSuchProcess):
                self._first.terminate()
            with contextlib.suppress(psutil.TimeoutExpired):
                self._first.wait(_GRACE_S)
        deadline_s = time.monotonic() + _KILL_TIMEOUT_S
        while (left := self._processes()) and time.monotonic() < deadline_s:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1)
        with contextlib.suppress(psutil.TimeoutExpired):
            self._first.wait(_GRACE_S)
        if left:
            log.error("ray_processes_left", pids=[process.pid for process in left])

    def _processes(self) -> list[psutil.Process]:
        """Running processes of the node, by session and by descent, orphans included."""
        # The first one as this object knows it: only then can its exit status be read here.
        found = {self._first, *self._descendants}
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(self._first.children(recursive=True))
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if os.getsid(pid) == self._first.pid:
                    found.add(psutil.Process(pid))
        return [process for process in found if _is_alive(process)]


@contextlib.contextmanager
def _naming_temporary_folder(folder: Path) -> Iterator[None]:
    """Context in which files are made in a temporary folder, which may be full, read-only or missing.

    Raises:
        ClusterError: If one cannot be; with the folder, the reason and the remedy.
    """
    try:
        yield
    except OSError as error:
        raise ClusterError(
            f"cannot make files in {folder}: {error.strerror or error}; Ray needs a temporary folder: make "
            "room there, or let this user write to it"
        ) from error


def _remove_if_abandoned(path: Path) -> None:
    # Of another user, gone, or in use: left alone.
    with contextlib.suppress(OSError, ClusterError), contextlib.ExitStack() as opened:
        folder = _open_folder(path)
        opened.callback(os.close, folder)
        # Its maker locks the folder before it makes the lock; earlier versions lock nothing but the latter.
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock = _open_lock(path, folder)
        opened.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)


def _open_folder(path: Path) -> int:
    """Open a private folder, without following links: `/tmp` is writable by all users.

    Args:
        path: Path of the folder.

    Returns:
        Its descriptor.

    Raises:
        OSError: If it is missing, or a link.
        ClusterError: If another user owns it or may enter it.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    found = os.fstat(folder)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(folder)
        raise ClusterError(
            f"{path} is not private to this user (it is user {found.st_uid}'s, with mode "
            f"{stat.S_IMODE(found.st_mode):o}): remove it"
        )
    return folder


def _open_lock(path: Path, folder: int, flags: int = 0) -> int:
    """Open the lock in a folder, without following links.

    Args:
        path: Path of the folder, for messages.
        folder: Its descriptor.
        flags: Further flags for opening it.

    Returns:
        Descriptor for reading and writing.

    Raises:
        OSError: If the lock is missing, or a link.
        ClusterError: If it is not a file.
    """
    # Opening a pipe would block until its other end is opened.
    lock = os.open(_LOCK, flags | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        os.close(lock)
        raise ClusterError(f"{path / _LOCK} is not a regular file: remove {path}")
    return lock


def started_s(pid: int) -> float:
    """Seconds from the start of this machine to that of a process: a clock that is set does not change it.

    Raises:
        psutil.NoSuchProcess: If the process has ended.
    """
    # The one is the other plus a whole number of seconds, which moves with the wall clock.
    return psutil.Process(pid).create_time() - psutil.boot_time()


def new_ray_token() -> str:
    """A random token."""
    return secrets.token_hex(32)


def start_arguments(config: RayNodeConfig, ray_dir: Path) -> list[str]:
    """Arguments of `ray start`.

    Args:
        config: Configuration of the node.
        ray_dir: Folder of Ray's sockets and logs.
    """
    control = 0 if config.ports is None else config.ports.control
    where = ["--head", f"--port={control}", "--include-dashboard=false", "--no-monitor"]
    if config.head_address is not None:
        where = [f"--address={config.head_address}"]
    return [
        "start",
        *where,
        f"--node-ip-address={config.address}",
        f"--node-name={config.name}",
        f"--temp-dir={ray_dir}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        # Stages ask for no CPU. One unit keeps one worker process warm.
        "--num-cpus=1",
        "--disable-usage-stats",
        "--include-log-monitor=false",
        *_port_arguments(config.ports),
    ]


def _port_arguments(ports: RayPorts | None) -> list[str]:
    if ports is None:
        # Any free port for everything: several nodes may share a machine.
        return ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    agent, export, dashboard, runtime_env = ports.agents
    return [
        f"--node-manager-port={ports.node_manager}",
        f"--object-manager-port={ports.object_manager}",
        f"--worker-port-list={','.join(map(str, ports.workers))}",
        # Where these agents are left out, the start hook has them open no port.
        f"--dashboard-agent-grpc-port={agent}",
        f"--metrics-export-port={export}",
        f"--dashboard-agent-listen-port={dashboard}",
        f"--runtime-env-agent-port={runtime_env}",
    ]


def _text_of(path: Path) -> str:
    """Content of a file that another process may still be writing."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
