"""Processors are kept awake while there are sessions, and only then."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from stages.host.cpu_latency import DEVICE, Wakefulness

FILES = Path("/proc/self/fd")


def open_files() -> set[str]:
    return {str(entry.readlink()) for entry in FILES.iterdir() if entry.is_symlink()}


@pytest.mark.skipif(not FILES.is_dir(), reason="needs Linux's /proc")
def test_holds_the_device_open_only_while_asked(tmp_path: Path) -> None:
    device = tmp_path / "latency"
    device.touch()
    wakefulness = Wakefulness(device)
    assert not wakefulness.is_held

    wakefulness.update(2)
    wakefulness.update(2)
    assert wakefulness.is_held
    assert str(device) in open_files()
    assert struct.unpack("=i", device.read_bytes()) == (0,)

    wakefulness.update(0)
    wakefulness.update(0)
    assert not wakefulness.is_held
    assert str(device) not in open_files()


def test_a_host_without_the_device_works_as_before(tmp_path: Path) -> None:
    wakefulness = Wakefulness(tmp_path / "absent")
    wakefulness.update(2)
    assert not wakefulness.is_held
    wakefulness.update(0)


@pytest.mark.skipif(not os.access(DEVICE, os.W_OK), reason=f"this user may not write {DEVICE}")
def test_the_kernel_takes_the_request() -> None:
    wakefulness = Wakefulness()
    wakefulness.update(2)
    try:
        assert wakefulness.is_held
        with DEVICE.open("rb") as device:
            assert struct.unpack("=i", device.read(4)) == (0,)
    finally:
        wakefulness.update(0)
