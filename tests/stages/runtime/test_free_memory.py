"""What control groups leave free, read from file trees such as Linux shows them."""

from pathlib import Path

import psutil

from stages.runtime.process_memory import free_in_groups_bytes, free_memory_bytes

VERSION_2 = ("memory.max", "memory.current", "inactive_file {} \nactive_file 0\nanon 99\n")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file {}\nrss 99\n")


def group(folder: Path, version: tuple[str, str, str], limit: str, used: int, file_pages: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit_file, used_file, stat = version
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / used_file).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat.format(file_pages))


def own_groups(root: Path, text: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    own_groups(tmp_path, "0::/user.slice/mesh.service\n")
    mount = tmp_path / "sys/fs/cgroup"
    mount.mkdir(parents=True)  # the topmost group has no limit of its own, and no such files
    group(mount / "user.slice", VERSION_2, "1000", 400, file_pages=100)
    group(mount / "user.slice/mesh.service", VERSION_2, "max", 300)
    assert free_in_groups_bytes(tmp_path) == [700]


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    own_groups(tmp_path, "9:name=systemd:/a\n4:memory,hugetlb:/a/b\n0::/\n")
    mount = tmp_path / "sys/fs/cgroup/memory"
    group(mount, VERSION_1, "9223372036854771712", 5000)
    group(mount / "a", VERSION_1, "2000", 2500)
    group(mount / "a/b", VERSION_1, "1500", 600, file_pages=50)
    assert free_in_groups_bytes(tmp_path) == [950, 0, 9223372036854771712 - 5000]


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    own_groups(tmp_path, "4:memory:/docker/0123\n")
    group(tmp_path / "sys/fs/cgroup/memory", VERSION_1, "1000", 250)
    assert free_in_groups_bytes(tmp_path) == [750]


def test_without_control_groups_nothing_limits(tmp_path: Path) -> None:
    assert free_in_groups_bytes(tmp_path) == []


def test_this_host_has_no_more_than_its_memory() -> None:
    assert 0 < free_memory_bytes() <= psutil.virtual_memory().total
