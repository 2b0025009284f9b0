"""What `mesh serve` finds out about memory and formats before any work."""

from dataclasses import replace
from pathlib import Path

import pytest

from mesh.cluster.addresses import free_port
from mesh.placement.memory_estimate import StageSizes
from mesh.serve.options import ServeOptions, SpeculationOptions
from mesh.serve.preflight import check, own_capacity
from spanmesh_proto.errors import ClusterError, MeshError, ModelDoesNotFit
from stages.transport.hidden_codec import HiddenType
from tests.support.ipv6 import needs_ipv6
from tests.support.tiny_models import TinyModel

MIB = 2**20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel("llama", head_size=16).write(tmp_path_factory.mktemp("preflight") / "tiny.gguf")


def options(model: Path) -> ServeOptions:
    return ServeOptions(
        model=model,
        host="127.0.0.1",
        port=free_port("127.0.0.1"),
        name="studio",
        advertise="127.0.0.1",
        join_port=0,
        token_hours=1.0,
        token_path=None,
        num_hosts=0,
        is_head_only=False,
        num_stages=None,
        split=None,
        ctx_size=1024,
        num_slots=2,
        kv_type="f16",
        num_checkpoints=8,
        max_waiting=1,
        memory_bytes=1000 * MIB,
        num_threads=1,
        speculation=SpeculationOptions(),
        is_exact=False,
        api_key_path=None,
    )


def test_heads_that_do_not_suit_the_format_are_found_out(tiny: Path) -> None:
    with pytest.raises(ClusterError, match="--kv-type q8_0 packs 32 elements") as refused:
        check(replace(options(tiny), kv_type="q8_0"))
    assert refused.value.param == "--kv-type"
    drafting = SpeculationOptions(draft_path=tiny, draft_kv_type="q4_0")
    with pytest.raises(ClusterError, match="--draft-kv-type q4_0 packs 32 elements"):
        check(replace(options(tiny), speculation=drafting))


@needs_ipv6
def test_an_address_that_mdns_does_not_announce_is_found_out(tiny: Path) -> None:
    over_ipv6 = replace(options(tiny), advertise="::1")
    assert check(over_ipv6).model.n_layers
    with pytest.raises(ClusterError, match="--discoverable announces IPv4 addresses only") as refused:
        check(replace(over_ipv6, is_discoverable=True))
    assert refused.value.param == "--discoverable"


def test_an_api_that_would_let_strangers_in_is_found_out(tiny: Path) -> None:
    with pytest.raises(MeshError, match="--insecure"):
        check(replace(options(tiny), host="0.0.0.0"))
    with pytest.raises(MeshError, match=r"'evil\.example' is not an origin"):
        check(replace(options(tiny), cors_origins=("evil.example",)))
    with pytest.raises(MeshError, match=r"'\*' lets every web page"):
        check(replace(options(tiny), cors_origins=("*",)))
    known = check(
        replace(options(tiny), host="0.0.0.0", is_insecure=True, cors_origins=("http://[::1]:3000",))
    )
    assert known.api_keys is None


def test_exact_text_does_not_cross_a_wire_that_rounds(tiny: Path) -> None:
    for wire in (HiddenType.F16, HiddenType.Q8, None):
        with pytest.raises(
            ClusterError, match=f"--exact guarantees .* which --wire {wire or 'auto'} does not"
        ) as refused:
            check(replace(options(tiny), wire=wire, is_exact=True))
        assert refused.value.param == "--wire"
    check(replace(options(tiny), is_exact=True))
    check(replace(options(tiny), wire=HiddenType.Q8))


def test_drafting_needs_something_that_drafts(tiny: Path) -> None:
    with pytest.raises(ClusterError, match=r"needs a draft model: .* `mesh draft make`") as refused:
        check(replace(options(tiny), speculation=SpeculationOptions(mode="draft")))
    assert refused.value.param == "--draft"


def test_a_draft_leaves_less_for_stages(tiny: Path) -> None:
    plain = own_capacity("studio", check(options(tiny)))
    drafting = replace(options(tiny), speculation=SpeculationOptions(draft_path=tiny))
    known = check(drafting)
    beside = own_capacity("studio", known)
    assert (plain.memory_bytes, plain.draft_bytes) == (1000 * MIB, 0)
    assert beside.memory_bytes + beside.draft_bytes == plain.memory_bytes
    assert beside.draft_bytes > tiny.stat().st_size

    # Just enough for the model alone is too little for both.
    sizes = StageSizes(known.model, known.workload)
    enough = sizes.memory(sizes.whole).total_bytes
    check(replace(options(tiny), memory_bytes=enough))
    with pytest.raises(ModelDoesNotFit, match=r"for the draft model"):
        check(replace(drafting, memory_bytes=enough))
    with pytest.raises(ModelDoesNotFit, match=r"the draft model tiny.gguf needs .* of this host") as refused:
        check(replace(drafting, memory_bytes=MIB))
    assert refused.value.param == "--draft"
