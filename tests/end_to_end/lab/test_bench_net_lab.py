"""Links of different length: measured, minded by the plan, and shown by `mesh bench net`.

The hosts have no other addresses than those of IPv6, and `make sweep` tries those of IPv4.
"""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from meshbench.lab.network import Lab
from meshbench.lab.systems import COMMAND, MeshSystem, get_status, last_lines
from meshbench.load_client.client import LoadClient
from meshbench.load_client.schedule import Request
from tests.support.lab_fixtures import require_lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]

NUM_HOSTS = 4
NEAR_MS, FAR_MS = 2.0, 25.0
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


@pytest.mark.parametrize(
    "is_ipv6", [pytest.param(True, id="ipv6"), pytest.param(False, id="ipv4", marks=pytest.mark.sweep)]
)
def test_stages_far_from_one_another_are_no_neighbours(
    smollm2_path: Path, tmp_path: Path, *, is_ipv6: bool
) -> None:
    require_lab(is_ipv6=is_ipv6)
    with Lab(NUM_HOSTS, NEAR_MS, shared=[tmp_path], is_ipv6=is_ipv6) as lab:
        lab.set_delay_ms(FAR_MS, between=(1, 2))
        options = ["--ctx-size", "256", "--parallel", "1", "--wire", "auto"]
        mesh = ByDefault(lab, smollm2_path, tmp_path, options=options)
        try:
            mesh.start()
            stages = get_status(lab, mesh.port).stages
            with LoadClient(lab) as client:
                (answer,) = client.answer(mesh.url, (Request.streamed(QUESTION),)).answers
            done = lab.exec(0, [COMMAND, "bench", "net", "--json", "--probes", "5", "--megabytes", "1"])
            doctor = [COMMAND, "doctor", "--url", mesh.url, "--advertise", lab.address(0), "--json"]
            examined = lab.exec(0, doctor, timeout_s=120)
            log = mesh.log(0).read_text()
            # Ctrl-C at the head alone: the others leave with it, and nothing of anybody stays.
            assert mesh.stop(hosts=[0])[0] == 130
            assert [pid for host in range(NUM_HOSTS) for pid in lab.pids(host)] == []
            for host in range(NUM_HOSTS):
                left = lab.exec(host, ["ls", "/tmp"]).stdout.split()
                assert [name for name in left if name.startswith("mesh")] == []
        except BaseException:
            for host in range(NUM_HOSTS):
                if mesh.log(host).exists():
                    print(f"--- host{host}\n{last_lines(mesh.log(host), 60)}")
            raise
    assert answer.num_tokens == QUESTION["max_tokens"]
    assert {stage.address.rpartition(":")[0] for stage in stages} == {
        f"[{lab.address(host)}]" if is_ipv6 else lab.address(host) for host in range(1, NUM_HOSTS)
    }
    checks = json.loads(examined.stdout)
    assert [check for check in checks if check["outcome"] == "fail"] == []
    assert any("host1" in check["where"] + check["what"] for check in checks)
    # Between the two that are far from one another there is the third.
    assert stages[1].host == "host3"
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["round"]["order"] == [stage.host for stage in stages]
    assert found["round"]["best"][1] == "host3"
    assert found["round"]["order_ms"] < 2 * FAR_MS
    names = [f"host{host}" for host in range(NUM_HOSTS)]
    assert len(found["links"]) == NUM_HOSTS * (NUM_HOSTS - 1)
    for link in found["links"]:
        assert {link["from"], link["to"]} <= set(names)
        is_far = {link["from"], link["to"]} == {"host1", "host2"}
        # Never faster than the wire, and what the kernels add is less than the difference between the wires.
        assert (FAR_MS if is_far else NEAR_MS) <= link["hop_ms"] < (2 * FAR_MS if is_far else FAR_MS)
        assert link["rtt_ms"]["min"] >= 2 * (FAR_MS if is_far else NEAR_MS)
        assert link["bytes_per_s"] > 1e5
    # Each link that hidden states cross was looked at, when the stages were placed and now.
    assert [stage.wire in ("f32", "f16", "q8") for stage in stages] == [True, True, False]
    pairs = [(stage.host, after.host) for stage, after in pairwise(stages)]
    assert [(wire["from"], wire["to"]) for wire in found["wires"]] == pairs
    assert "wires_chosen" in log
