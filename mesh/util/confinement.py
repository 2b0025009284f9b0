"""Confinement of a process that decodes foreign bytes: of the kernel's calls only those that computing needs.

A filter of the kernel (seccomp, https://docs.kernel.org/userspace-api/seccomp_filter.html) answers all other
calls with an error: no file or socket is opened, no process or thread started, no other process touched.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from dataclasses import dataclass
from typing import Final

_PR_SET_NO_NEW_PRIVS: Final = 38
_SET_MODE_FILTER: Final = 1
# For all threads of the process.
_FLAG_TSYNC: Final = 1
# Operations of the filter's machine: load a word of the call, compare with a constant, return.
_LOAD, _JUMP_EQUAL, _JUMP_FROM, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW: Final = 0x7FFF0000
_REFUSE: Final = 0x00050000 | errno.EPERM
# Offsets in the call: its number, the architecture, the low half of the first argument.
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16
# Numbers from here on are of x86-64's other set of calls.
_X32: Final = 0x40000000


@dataclass(frozen=True)
class _Machine:
    """Numbers of an architecture."""

    audit: int
    """The kernel's name for it."""
    seccomp: int
    """The call that installs a filter."""
    tgkill: int
    """Sends a signal to a thread: for this process only, since abort() needs it."""
    allowed: tuple[int, ...]
    """Calls that are let through."""


# In the kernel's order: read, write, close, fstat, poll, lseek, mmap, mprotect, munmap, brk, rt_sigaction,
# rt_sigprocmask, rt_sigreturn, select, sched_yield, mremap, madvise, nanosleep, getitimer, setitimer, getpid,
# exit, sigaltstack, gettid, futex, sched_getaffinity, restart_syscall, clock_gettime, clock_nanosleep,
# exit_group, pselect6, ppoll, getrandom, membarrier, rseq.
_X86_64: Final = _Machine(
    audit=0xC000003E,
    seccomp=317,
    tgkill=234,
    allowed=(
        *(0, 1, 3, 5, *range(7, 16), 23, 24, 25, 28, 35, 36, 38, 39, 60, 131, 186, 202, 204, 219, 228, 230),
        *(231, 270, 271, 318, 324, 334),
    ),
)
# The same, without poll and select, which do not exist there.
_AARCH64: Final = _Machine(
    audit=0xC00000B7,
    seccomp=277,
    tgkill=131,
    allowed=(
        *(57, 62, 63, 64, 72, 73, 80, 93, 94, 98, 101, 102, 103, 113, 115, 123, 124, 128, 132, 134, 135, 139),
        *(172, 178, 214, 215, 216, 222, 226, 233, 278, 283, 293),
    ),
)
_MACHINES: Final = {"x86_64": _X86_64, "aarch64": _AARCH64}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def confine() -> bool:
    """Confine this process for ever, with all of its threads; modules that it needs are imported by now.

    Returns:
        Whether it is: False where the system has no such filters, or forbids them.
    """
    machine = _MACHINES.get(platform.machine()) if sys.platform == "linux" else None
    if machine is None or struct.calcsize("P") != 8:
        return False
    code = _filter(machine, os.getpid())
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    # Without it only a privileged process may install one.
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    result: int = libc.syscall(machine.seccomp, _SET_MODE_FILTER, _FLAG_TSYNC, ctypes.byref(program))
    return result == 0


def _filter(machine: _Machine, pid: int) -> bytes:
    """The filter's program: each step is an operation, two distances to jump, and a constant."""
    num_calls = len(machine.allowed)
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_FROM, num_calls + 3, 0, _X32),
        *((_JUMP_EQUAL, num_calls + 3 - place, 0, number) for place, number in enumerate(machine.allowed)),
        (_JUMP_EQUAL, 0, 2, machine.tgkill),
        (_LOAD, 0, 0, _ARGUMENT),
        (_JUMP_EQUAL, 1, 0, pid),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
