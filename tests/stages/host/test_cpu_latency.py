"""Processors are kept awake while there are sessions, and only then."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from stages.host.cpu_latency import DEVICE, CpuLatencyRequest

FILES = Path("/proc/self/fd")


def open_files() -> set[str]:
    return {str(entry.readlink()) for entry in FILES.iterdir() if entry.is_symlink()}


@pytest.mark.skipif(not FILES.is_dir(), reason="needs Linux's /proc")
def test_holds_the_device_open_only_while_asked(tmp_path: Path) -> None:
    device = tmp_path / "latency"
    device.touch()
    cpu_latency = CpuLatencyRequest(device)
    assert not cpu_latency.is_held

    cpu_latency.update(2)
    cpu_latency.update(2)
    assert cpu_latency.is_held
    assert str(device) in open_files()
    assert struct.unpack("=i", device.read_bytes()) == (0,)

    cpu_latency.update(0)
    cpu_latency.update(0)
    assert not cpu_latency.is_held
    assert str(device) not in open_files()


def test_a_host_without_the_device_works_as_before(tmp_path: Path) -> None:
    cpu_latency = CpuLatencyRequest(tmp_path / "absent")
    cpu_latency.update(2)
    assert not cpu_latency.is_held
    cpu_latency.update(0)


@pytest.mark.skipif(not os.access(DEVICE, os.W_OK), reason=f"this user may not write {DEVICE}")
def test_the_kernel_takes_the_request() -> None:
    cpu_latency = CpuLatencyRequest()
    cpu_latency.update(2)
    try:
        assert cpu_latency.is_held
        with DEVICE.open("rb") as device:
            assert struct.unpack("=i", device.read(4)) == (0,)
    finally:
        cpu_latency.update(0)
