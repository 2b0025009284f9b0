"""Facts of hosts as messages: each arrives, by its name, and later reports change what they name only."""

from dataclasses import fields

import pytest

from mesh.cluster.host_facts import HostFacts, Versions
from mesh.cluster.members import Member, Members, changes_of, later_report, member_of, report_of
from mesh.placement.host_capacity import Gpu
from spanmesh_proto import membership_pb2 as wire
from spanmesh_proto.addresses import PortRange

VERSIONS = Versions("0.1.0", "0.3.36", "2.60.0", "3.11.7", "Linux x86_64")
GPUS = (
    Gpu("CUDA0", "a card", 3 * 2**30, 4 * 2**30, 400.0, shares_host_memory=True),
    Gpu("CUDA1", "b", 1, 2, 3.0),
)
FACTS = HostFacts(
    memory_bytes=2**30,
    num_threads=4,
    speed_gb_per_s=20.5,
    versions=VERSIONS,
    gpus=GPUS,
    gpu_layers=0,
    cpu_moe_layers=-1,
    attention_version=116,
)
HOST = Member(
    "studio", "10.0.0.2", FACTS, "studio.1", port_range=PortRange(20000, 20099), head_address="10.0.0.1"
)


def sent(report: wire.HostReport) -> wire.HostReport:
    return wire.HostReport.FromString(report.SerializeToString())


def first_report(member: Member) -> wire.HostReport:
    return report_of(member, secret="s", check_ports=(7, 8), check_nonce=b"n", certificate_request=b"c")


def test_every_fact_of_a_host_arrives() -> None:
    untold = [field.name for field in fields(FACTS) if getattr(FACTS, field.name) == field.default]
    assert untold == [], "give it a value of its own, so that it is seen to arrive"
    assert member_of(sent(first_report(HOST))) == HOST


def test_facts_that_are_not_known_stay_unknown() -> None:
    bare = Member("attic", "10.0.0.3", HostFacts(2**30, 4, 20.0, VERSIONS), "attic.1")
    assert member_of(sent(first_report(bare))) == bare


def test_a_host_is_not_ready_and_stays_when_it_joins_whatever_it_says() -> None:
    report = first_report(HOST)
    report.MergeFrom(wire.HostReport(ray_is_running=True, is_leaving=True, echo_port=9))
    assert member_of(sent(report)) == HOST


@pytest.mark.parametrize("changes", [{}, {"is_ready": True, "echo_port": 9}, {"is_leaving": True}])
def test_a_later_report_changes_what_it_names(changes: dict[str, object]) -> None:
    report = sent(later_report("studio", **changes))
    assert report.name == "studio"
    assert changes_of(report) == changes


def test_a_host_that_is_to_leave_keeps_no_layers() -> None:
    members = Members()
    members.admit(HOST)
    assert not members.ready
    members.update("studio", is_ready=True)
    (member,) = members.ready
    assert member.keeps_layers
    members.update("studio", **changes_of(later_report("studio", is_leaving=True)))
    assert not members.ready
    found = members.find("studio")
    assert found is not None
    assert (found.is_ready, found.keeps_layers) == (True, False)
    members.update("attic", is_ready=True)
    assert len(members) == 1
