"""Two hosts behind a translating router each, connected by the overlay network of docs/networks.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from meshbench.lab.network import Lab
from tests.support.lab_fixtures import require_lab
from tests.support.lab_mesh import running_mesh
from tests.support.nebula import ADDRESSES, NAMES, UDP_PORT, configuration, overlay, require_nebula

if TYPE_CHECKING:
    from pathlib import Path

NUM_HOSTS = len(NAMES)
RANGE = "20000-20099"
OPTIONS = ["--exact", "--speculate", "ngram", "--parallel", "4", "--ctx-size", "512", "--stages", "2"]


def test_the_page_has_all_that_its_hosts_need(tmp_path: Path) -> None:
    lab = Lab(NUM_HOSTS, networks=[[1], [2]])
    beta, alpha = (configuration(lab, host, tmp_path).splitlines() for host in (1, 0))
    assert '  "192.168.100.1": ["10.77.0.1:4242"]' in beta
    assert f"  cert: {tmp_path}/beta.crt" in beta
    assert f"    - port: {RANGE}" in beta
    changed = [after for before, after in zip(beta, alpha, strict=True) if before != after]
    assert changed[-2:] == ["  am_lighthouse: true", "  hosts: []"]


@pytest.mark.lab
@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_hosts_behind_two_routers_serve_and_repair(smollm2_path: Path, tmp_path: Path) -> None:
    require_lab()
    require_nebula()
    ranged = ["--port-range", RANGE]
    with Lab(NUM_HOSTS, 2.0, shared=[tmp_path], networks=[[1], [2]]) as lab:
        # Nothing else comes in from the others' networks.
        lab.filter_ports(0, [(UDP_PORT, UDP_PORT)])
        with (
            overlay(lab, tmp_path),
            running_mesh(
                lab,
                smollm2_path,
                tmp_path,
                num_hosts=NUM_HOSTS,
                options=[*OPTIONS, *ranged],
                join_options=ranged,
                addresses=ADDRESSES,
            ) as mesh,
        ):
            assert sorted(mesh.stage_hosts()) == [1, 2]
            stages = mesh.status().stages
            assert {stage.address.rpartition(":")[0] for stage in stages} == {*ADDRESSES[1:]}
            undisturbed = mesh.answers(mesh.ask(max_tokens=96))
            num_repairs = mesh.status().repairs.count
            with mesh.streams(undisturbed, max_tokens=96):
                mesh.kill_stage(mesh.stage_hosts()[0])
            mesh.until_repaired(num_repairs + 1)
            mesh.system.stop(hosts=[0])
