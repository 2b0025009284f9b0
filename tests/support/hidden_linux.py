"""Linux hidden from the product's modules, in a process and all that it starts, to see how they do without.

Other packages see the system as it is: on another one they would take ways of their own, which are theirs to
test. What is hidden: files of `/proc`, `/sys` and some of `/dev`; names of modules that Linux alone has;
functions of its C library; tools for namespaces; and the name of the system, which is macOS's.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, ModuleType

ROOT: Final = Path(__file__).parents[2]
OURS: Final = frozenset({"mesh", "stages", "speculative", "spanmesh_proto"})
# Where a process notes what it was refused, a line for each thing.
RECORD: Final = "SPANMESH_TEST_REFUSED"

FOLDERS: Final = ("/proc", "/sys", "/dev/net", "/dev/shm", "/dev/dri")
FILES: Final = frozenset({"/dev/cpu_dma_latency", "/dev/nvidiactl", "/dev/kfd"})
TOOLS: Final = frozenset({"ip", "unshare", "nsenter", "setpriv", "setsid", "taskset"})
NAMES: Final[dict[ModuleType, tuple[str, ...]]] = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "sched_setscheduler", "sched_getscheduler"),
        *("sched_param", "SCHED_IDLE", "SCHED_BATCH", "SCHED_OTHER", "SCHED_FIFO", "SCHED_RR"),
        *("memfd_create", "pidfd_open", "eventfd", "copy_file_range", "splice", "setns", "unshare"),
        *("posix_fadvise", "posix_fallocate", "fdatasync", "pipe2", "getrandom"),
        *("getxattr", "setxattr", "listxattr", "removexattr", "O_TMPFILE", "O_DIRECT", "O_PATH", "O_NOATIME"),
    ),
    socket: (
        *("SO_BINDTODEVICE", "SO_MARK", "SO_PEERCRED", "SO_DOMAIN", "SO_PROTOCOL", "SO_INCOMING_CPU"),
        *("AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG", "SOCK_CLOEXEC", "SOCK_NONBLOCK"),
        *("TCP_USER_TIMEOUT", "TCP_QUICKACK", "TCP_DEFER_ACCEPT", "TCP_CONGESTION", "TCP_CORK"),
    ),
    select: ("epoll", "EPOLLIN", "EPOLLOUT", "EPOLLERR", "EPOLLHUP"),
    signal: (
        *("sigtimedwait", "sigwaitinfo", "pidfd_send_signal", "SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGPOLL"),
        "SIGSTKFLT",
    ),
    resource: ("prlimit", "RLIMIT_NICE", "RLIMIT_RTPRIO", "RLIMIT_SIGPENDING", "RLIMIT_MSGQUEUE"),
    time: ("CLOCK_BOOTTIME", "CLOCK_TAI", "pthread_getcpuclockid"),
    fcntl: ("F_SETPIPE_SZ", "F_ADD_SEALS", "F_OFD_SETLK", "F_NOTIFY"),
    mmap: ("MADV_HUGEPAGE", "MADV_POPULATE_READ", "MAP_POPULATE", "MAP_STACK"),
}
LIBC_NAMES: Final = frozenset({"prctl", "setns", "unshare", "malloc_trim", "gettid", "sched_setaffinity"})
SYSTEM: Final = "darwin"
SYSTEM_NAME: Final = "Darwin"


def hidden_environment(folder: Path) -> dict[str, str]:
    """Environment of a Python process that, with all that it starts, is to find no Linux.

    Args:
        folder: For two files: the one that Python reads first, and the record of what was refused.
    """
    (folder / "sitecustomize.py").write_text("from tests.support.hidden_linux import hide\n\nhide()\n")
    return os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", RECORD: str(folder / "refused")}


def refused(folder: Path) -> set[str]:
    """What processes with the environment for this folder asked for, and were refused."""
    record = folder / "refused"
    return set(record.read_text().splitlines()) if record.exists() else set()


def hide() -> None:
    """Hide Linux in this process, for good."""
    _hide_names()
    _hide_files()
    _hide_functions()


def _owner(frame: FrameType | None) -> str:
    """Package whose code runs in a frame; of a module that runs as a program, by its real name."""
    if frame is None:
        return ""
    names = frame.f_globals
    spec = names.get("__spec__")
    return str(names.get("__name__") if spec is None else spec.name).partition(".")[0]


def _is_for_us() -> bool:
    """Whether a call comes from the product, by way of the standard library or directly."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        owner = _owner(frame)
        if owner in OURS:
            return True
        if owner not in {"tests", *sys.stdlib_module_names}:
            return False
        frame = frame.f_back
    return False


class _Record:
    """What was refused in this process; each thing is written once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        path = os.environ.get(RECORD)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = None if path is None else os.open(path, flags, 0o600)

    def add(self, what: str) -> None:
        if what not in self._seen and self._file is not None:
            self._seen.add(what)
            os.write(self._file, f"{what}\n".encode())


_record = _Record()


def _hide_names() -> None:
    real = sys.platform

    def shown(_module: object) -> str:
        return SYSTEM if _owner(sys._getframe(1)) in OURS else real

    hidden = {
        module: {name: _hidden(module, name) for name in names if hasattr(module, name)}
        for module, names in NAMES.items()
    }
    hidden[sys] = {"platform": property(shown)}
    for module, properties in hidden.items():
        module.__class__ = type("HidingModule", (type(module),), properties)


def _hidden(module: ModuleType, name: str) -> property:
    value = getattr(module, name)

    def get(_module: object) -> Any:
        # By the nearest frame alone: the standard library may need it, whoever calls.
        if _owner(sys._getframe(1)) in OURS:
            _record.add(f"{module.__name__}.{name}")
            raise AttributeError(name)
        return value

    return property(get)


def _hide_functions() -> None:
    look_up, name_of_system = ctypes.CDLL.__getattr__, platform.system

    def function_of(library: ctypes.CDLL, name: str) -> Any:
        if library._name is None and name in LIBC_NAMES and _is_for_us():
            _record.add(f"libc.{name}")
            raise AttributeError(name)
        return look_up(library, name)

    def system() -> str:
        return SYSTEM_NAME if _is_for_us() else name_of_system()

    for owner, name, function in ((ctypes.CDLL, "__getattr__", function_of), (platform, "system", system)):
        setattr(owner, name, function)


def _hide_files() -> None:
    for name in ("stat", "lstat", "readlink", "access", "statvfs"):
        original = getattr(os, name)
        replacement = _refusing(original)
        setattr(os, name, replacement)
        # Functions of the standard library look here which of them take what.
        for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if original in able:
                able.add(replacement)
    sys.addaudithook(_on_event)


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    def refusing(path: Any, *arguments: Any, **options: Any) -> Any:
        _refuse(path)
        return function(path, *arguments, **options)

    return refusing


_EVENTS: Final = frozenset({"open", "os.listdir", "os.scandir", "os.posix_spawn", "subprocess.Popen"})


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        _refuse(arguments[0])


def _refuse(path: Any) -> None:
    """Raise FileNotFoundError if the product asks for something that only Linux has."""
    try:
        name = os.path.normpath(os.fsdecode(path))
    except TypeError:
        return  # a descriptor, or none
    if is_of_linux(name) and _is_for_us():
        _record.add(name)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def is_of_linux(path: str) -> bool:
    """Whether a path is one that macOS lacks."""
    folder, _, name = path.rpartition("/")
    is_tool = name in TOOLS and (not folder or folder.endswith("bin"))
    return is_tool or path in FILES or any(path == each or path.startswith(f"{each}/") for each in FOLDERS)
