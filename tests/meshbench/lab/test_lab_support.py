import os
import sys

import pytest

from meshbench.lab import namespace_init
from meshbench.lab.host import Host
from meshbench.lab.network import Lab, lab_supported
from spanmesh_proto.errors import MeshError
from tests.support.lab_fixtures import require_lab


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert lab_supported() == "a lab needs ip, unshare, nsenter, mount (packages iproute2 and util-linux)"


def test_whoever_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert lab_supported() == "a lab needs root, to make network namespaces"


def test_other_systems_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert lab_supported() == "a lab needs Linux, this is darwin"


def test_a_missing_lab_skips_at_home_and_fails_on_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="darwin"):
        require_lab()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="darwin"):
        require_lab()


def test_hosts_cannot_work_in_the_directory_that_each_has_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(namespace_init.TMP)
    with pytest.raises(MeshError, match="start this from another directory"):
        Host("host1")


@pytest.mark.lab
def test_a_lab_that_cannot_start_says_why_and_leaves_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    require_lab()
    lab = Lab(2, delay_ms=1.0)
    monkeypatch.setattr(lab, "address", lambda host: "nonsense")
    with pytest.raises(MeshError, match="router ended with code 1"):
        lab.__enter__()
    with pytest.raises(IndexError):
        lab.pids(0)
