"""A mesh of services: hosts that are lost early, an orderly end, and a token that has expired."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from mesh.cluster.addresses import free_port
from mesh.cluster.join_token import decode
from tests.end_to_end.cluster.test_serve import Mesh, Running, answers, is_healthy, run, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.sociable, pytest.mark.model, pytest.mark.sweep]


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Mesh]:
    # Weights have to be sent.
    running = Mesh(tmp_path, tmp_path / "caches")
    yield running
    running.close()


def test_services_outlast_a_host_that_is_lost_early_and_an_orderly_end(
    services: Mesh, tmp_path: Path
) -> None:
    port, join_port = free_port("127.0.0.1"), free_port("127.0.0.1")
    token, carried, identity = tmp_path / "token", tmp_path / "carried", tmp_path / "identity"

    def start_head(*more: str) -> Running:
        return services.start(
            *("serve", "--port", str(port), "--join-port", str(join_port), "--identity", str(identity)),
            *("--token-file", str(token), "--head-only", "--wait-for", "2", "--split", "10,20"),
            *("--ctx-size", "512", "--linger", "0", *more),
        )

    def start_host(name: str) -> Running:
        return services.start(
            "join", "--token-file", str(carried), "--name", name, "--threads", "1", cache=name
        )

    head = start_head("--transfer-rate", "8M")
    until(token.exists, "no token file")
    carried.write_text(token.read_text())
    stable, lost = start_host("a"), start_host("b")
    until(lambda: head.saw("phase", phase="loading"), "nothing is loaded")
    lost.process.send_signal(signal.SIGKILL)
    lost.process.wait(60)
    until(lambda: head.saw("phase", phase="waiting for 1 of 2 hosts") and _is_waiting(head), "no second wait")
    assert [event["host_left"] for event in head.events() if event["event"] == "placement_given_up"] == ["b"]
    back = start_host("b")
    until(lambda: is_healthy(port) or head.process.poll() is not None, "the mesh does not come up")
    assert answers(port)

    # As `systemctl stop` does: all end with code 0, and what was theirs is gone.
    assert head.interrupt(signal.SIGTERM) == (0, [])
    assert [host.process.wait(120) for host in (stable, back)] == [0, 0]
    assert not token.exists()
    assert identity.stat().st_mode & 0o777 == 0o600

    # The head is away, and a service is started again until it is back.
    early = start_host("a")
    assert early.process.wait(60) == 1
    assert "cannot reach the head" in early.err.read_text().splitlines()[-1]
    head = start_head()
    until(token.exists, "no second token file")
    assert token.read_text() == carried.read_text()
    for name in ("a", "b"):
        start_host(name)
    until(lambda: is_healthy(port) or head.process.poll() is not None, "the mesh does not come back")
    assert answers(port)


def _is_waiting(head: Running) -> bool:
    """Whether it waits for hosts, and has given up a placement before."""
    phases = [event for event in head.events() if event["event"] in {"phase", "placement_given_up"}]
    return len(phases) > 1 and phases[-2]["event"] == "placement_given_up"


def test_a_head_that_crashed_after_its_token_expired_takes_over(services: Mesh, tmp_path: Path) -> None:
    port, join_port, token = free_port("127.0.0.1"), free_port("127.0.0.1"), tmp_path / "token"

    def start_head() -> Running:
        return services.start(
            *("serve", "--port", str(port), "--join-port", str(join_port), "--token-file", str(token)),
            *("--head-only", "--wait-for", "1", "--ctx-size", "512", "--linger", "60"),
            # Long enough for a host to join.
            *("--state", str(tmp_path / "state.json"), "--token-hours", str(20 / 3600)),
        )

    head = start_head()
    until(token.exists, "no token file")
    first = token.read_text()
    host = services.start("join", "--token-file", str(token), "--name", "a", "--threads", "1")
    until(lambda: is_healthy(port) or head.process.poll() is not None, "the mesh does not come up")
    text = answers(port)
    until(lambda: time.time() > decode(first).expires_at_s, "the token does not expire")
    head.process.send_signal(signal.SIGKILL)
    head.process.wait(60)
    head = start_head()
    until(lambda: is_healthy(port) or head.process.poll() is not None, "no takeover")
    assert head.saw("join_token_replaced")
    assert head.saw("stages_taken_over")
    assert not head.saw("stage_loaded")
    assert answers(port) == text
    assert host.process.poll() is None
    assert token.read_text() != first
    refused = run("join", first.strip(), "--name", "b")
    assert "expired at" in refused.stderr.splitlines()[-1]
    # Its stages are ended, and the host, too.
    assert head.interrupt(signal.SIGTERM)[0] == 0
    assert host.process.wait(120) == 0
