"""How many processors there are for a process: by its mask, and by quotas of control groups."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stages.process_limits import num_bound, num_usable, processor_quota

V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


def own_groups(root: Path, text: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)


def group(folder: Path, quota: str, period: str = "100000") -> None:
    """A group of the second version."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(f"{quota} {period}\n")


def old_group(folder: Path, quota: str, period: str = "100000") -> None:
    """A group of the first version."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (folder / "cpu.cfs_period_us").write_text(f"{period}\n")


def test_as_many_as_this_process_may_use() -> None:
    assert 1 <= num_usable() <= num_bound() <= (os.cpu_count() or 1)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to processors")
def test_fewer_where_the_process_is_bound_to_some() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert num_usable() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_all_of_them_where_no_process_is_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert num_usable(tmp_path) == (os.cpu_count() or 1)


def test_the_smallest_quota_of_nested_groups_counts(tmp_path: Path) -> None:
    own_groups(tmp_path, "0::/user.slice/mesh.service/inner\n")
    mount = tmp_path / "sys/fs/cgroup"
    group(mount / "user.slice", "150000")
    group(mount / "user.slice/mesh.service", "400000")
    group(mount / "user.slice/mesh.service/inner", "max")
    assert processor_quota(tmp_path) == 1.5


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
def test_groups_of_the_first_version(folder: str, tmp_path: Path) -> None:
    own_groups(tmp_path, "4:cpu,cpuacct:/a/b\n3:cpuset:/\n0::/\n")
    mount = tmp_path / "sys/fs/cgroup" / folder
    old_group(mount, "-1")
    old_group(mount / "a", "20000", "10000")
    old_group(mount / "a/b", "300000")
    assert processor_quota(tmp_path) == 2


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    own_groups(tmp_path, "4:cpu:/docker/0123\n")
    old_group(tmp_path / "sys/fs/cgroup/cpu", "50000")
    assert processor_quota(tmp_path) == 0.5


def test_both_versions_beside_each_other(tmp_path: Path) -> None:
    own_groups(tmp_path, "4:memory:/\n0::/mesh\n")
    group(tmp_path / "sys/fs/cgroup/unified/mesh", "250000")
    assert processor_quota(tmp_path) == 2.5


def test_a_quota_is_rounded_down_and_leaves_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    own_groups(tmp_path, "0::/\n")
    assert num_usable(tmp_path) == 8
    for quota, num_threads in (("390000", 3), ("100000", 1), ("20000", 1), ("900000", 8)):
        group(tmp_path / "sys/fs/cgroup", quota)
        assert num_usable(tmp_path) == num_threads


def test_without_control_groups_nothing_limits(tmp_path: Path) -> None:
    assert processor_quota(tmp_path) is None


@pytest.fixture
def half_a_processor() -> Iterator[Path]:
    """A real control group with a quota; made only where this process may."""
    is_old = V1.is_dir()
    folder = (V1 if is_old else V2) / f"spanmesh-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if is_old:
            (folder / "cpu.cfs_quota_us").write_text("50000")
        elif (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text("50000 100000")
        else:
            pytest.skip("control groups here do not count processor time")
        yield folder
    finally:
        with suppress(OSError):
            folder.rmdir()


def test_the_kernel_s_own_files_are_understood(half_a_processor: Path) -> None:
    asked = (
        "from stages.process_limits import num_usable, processor_quota; "
        "print(processor_quota(), num_usable())"
    )
    enter = f'echo $$ > {half_a_processor}/cgroup.procs; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", enter, "sh", sys.executable, "-c", asked], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0.5", "1"]
