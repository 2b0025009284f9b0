"""What Ray's processes are told, and the files that hold the node's key."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import pytest

from mesh.cluster.certificates import Authority, make_certificate
from mesh.cluster.ray_environment import RayTlsFiles, child_environment, ray_environment

if TYPE_CHECKING:
    from pathlib import Path

TLS = ("RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")


def test_a_node_with_a_key_speaks_tls_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    token_path = tmp_path / "token"
    files = RayTlsFiles(tmp_path)
    assert not files.exist
    assert not set(TLS) & set(ray_environment(token_path))
    identity = Authority(make_certificate(dt.datetime.now(dt.UTC))).own_identity(["studio"], "192.0.2.7")
    files.write(identity)
    assert files.exist
    told = ray_environment(token_path)
    assert told["RAY_USE_TLS"] == "1"
    assert told["RAY_AUTH_MODE"] == "token"
    contents = []
    for name in TLS[1:]:
        path = tmp_path / told[name].rpartition("/")[2]
        assert path.stat().st_mode & 0o777 == 0o600
        contents.append(path.read_bytes())
    assert contents == [identity.certificate_pem, identity.private_key_pem, identity.authority_pem]
    with pytest.raises(FileExistsError):
        files.write(identity)


def test_another_ray_s_settings_do_not_reach_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", "/elsewhere")
    environment = child_environment(tmp_path / "token", tmp_path / "owner", 0.0)
    assert not set(TLS) & set(environment)


def test_stages_allocate_from_one_pool_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    assert child_environment(tmp_path / "token", tmp_path / "owner", 0.0)["MALLOC_ARENA_MAX"] == "1"
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert child_environment(tmp_path / "token", tmp_path / "owner", 0.0)["MALLOC_ARENA_MAX"] == "4"
