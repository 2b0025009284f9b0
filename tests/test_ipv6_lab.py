"""A mesh of three hosts that have no other addresses than those of IPv6."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from mesh.bench.client import Client
from mesh.bench.mesh_system import COMMAND, MeshSystem
from mesh.bench.server_process import get_json, last_lines
from mesh.bench.stream_client import Ask, Batch
from mesh.lab import Lab
from tests.lab_fixtures import require_lab

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

NUM_HOSTS = 3
QUESTION = {
    "messages": [{"role": "user", "content": "Describe a house by the sea."}],
    "max_tokens": 12,
    "temperature": 0,
}


class ByDefault(MeshSystem):
    """Hosts advertise the address that leads to the head."""

    def join_argv(self, host: int) -> list[str]:
        assert host > 0
        return ["join", "--token-file", str(self.token_path)]


def test_a_mesh_over_ipv6_serves_and_is_well(smollm2_path: Path, tmp_path: Path) -> None:
    require_lab(is_ipv6=True)
    with Lab(NUM_HOSTS, 1.0, shared=[tmp_path], is_ipv6=True) as lab, Client(lab) as client:
        mesh = ByDefault(lab, smollm2_path, tmp_path, split=[15, 15])
        try:
            mesh.start()
            asked = Ask("/v1/chat/completions", dict(QUESTION))
            (answer,) = client.ask(Batch(MeshSystem.port, (asked,))).answers
            assert answer.num_tokens == QUESTION["max_tokens"]
            status = get_json(lab, 0, MeshSystem.port, "/mesh/status")
            hosts = {stage["address"].rpartition(":")[0] for stage in status["stages"]}
            assert hosts == {"[fd77::2]", "[fd77::3]"}
            url = f"http://127.0.0.1:{MeshSystem.port}"
            doctor = [COMMAND, "doctor", "--url", url, "--advertise", lab.address(0), "--json"]
            told = lab.exec(0, doctor, timeout_s=120)
            checks = json.loads(told.stdout)
            assert [check for check in checks if check["outcome"] == "fail"] == []
            assert any("host1" in check["where"] + check["what"] for check in checks)
            assert mesh.stop()[0] == 130, last_lines(mesh.log(0), 40)
        finally:
            mesh.kill()
