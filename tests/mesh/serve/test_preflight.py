"""What `mesh serve` finds out about memory and formats before any work."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.cluster.addresses import free_port
from mesh.cluster.host_facts import HostFacts, read_versions
from mesh.options.host import HeadOptions
from mesh.placement.memory_estimate import StageSizes
from mesh.serve.head_state import setup_of
from mesh.serve.preflight import Preflight, _draft_ctx_size, check, check_model, own_capacity
from mesh.text.text_service import num_text_workers, vocabulary_bytes, worker_bytes
from spanmesh_proto.errors import ClusterError, InvalidModel, MeshError, ModelDoesNotFit, UncuttableModel
from stages.gguf import read_one_header
from tests.qualification.own_models import OWN_MODELS
from tests.support.assistant_files import write_assistant
from tests.support.ipv6 import needs_ipv6
from tests.support.tiny_models import TinyModel

MIB = 2**20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel("llama", head_size=16).write(tmp_path_factory.mktemp("preflight") / "tiny.gguf")


def options(model: Path) -> HeadOptions:
    return HeadOptions(
        model=model,
        port=free_port("127.0.0.1"),
        name="studio",
        address="127.0.0.1",
        token_hours=1.0,
        ctx_size=1024,
        parallel=2,
        max_waiting=1,
        memory_bytes=1000 * MIB,
        threads=1,
    )


def test_heads_that_do_not_suit_the_format_are_found_out(tiny: Path) -> None:
    with pytest.raises(ClusterError, match="--kv-type q8_0 packs 32 elements") as refused:
        check(options(tiny).changed(kv_type="q8_0"))
    assert refused.value.param == "--kv-type"
    with pytest.raises(ClusterError, match="--draft-kv-type q4_0 packs 32 elements"):
        check(options(tiny).changed(draft_path=tiny, draft_kv_type="q4_0"))


@needs_ipv6
def test_an_address_that_mdns_does_not_announce_is_found_out(tiny: Path) -> None:
    over_ipv6 = options(tiny).changed(address="::1")
    assert check(over_ipv6).model.n_layers
    with pytest.raises(ClusterError, match="--discoverable announces IPv4 addresses only") as refused:
        check(over_ipv6.changed(discoverable=True))
    assert refused.value.param == "--discoverable"


def test_an_api_that_would_let_strangers_in_is_found_out(tiny: Path) -> None:
    with pytest.raises(MeshError, match="--insecure"):
        check(options(tiny).changed(host="0.0.0.0"))
    with pytest.raises(MeshError, match=r"'evil\.example' is not an origin"):
        check(options(tiny).changed(cors_origins=("evil.example",)))
    with pytest.raises(MeshError, match=r"'\*' lets every web page"):
        check(options(tiny).changed(cors_origins=("*",)))
    known = check(options(tiny).changed(host="0.0.0.0", insecure=True, cors_origins=("http://[::1]:3000",)))
    assert known.api_keys is None


def test_exact_text_does_not_cross_a_wire_that_rounds(tiny: Path) -> None:
    for wire in ("f16", "q8", "auto"):
        with pytest.raises(
            ClusterError, match=f"--exact guarantees .* which --wire {wire} does not"
        ) as refused:
            check(options(tiny).changed(wire=wire, exact=True))
        assert refused.value.param == "--wire"
    check(options(tiny).changed(exact=True))
    check(options(tiny).changed(wire="q8"))


def test_hidden_states_of_many_layers_travel_in_fewer_bytes_unless_told(tiny: Path) -> None:
    given = options(tiny)
    assert [given.feature_type(count) for count in (1, 3, 4, 5)] == ["f16", "f16", "q8", "q8"]
    assert given.changed(draft_wire="f16").feature_type(5) == "f16"
    assert given.changed(draft_wire="q8").feature_type(1) == "q8"


def test_drafting_needs_something_that_drafts(tiny: Path) -> None:
    with pytest.raises(ClusterError, match=r"needs a draft model: .* `mesh draft make`") as refused:
        check(options(tiny).changed(speculate="draft"))
    assert refused.value.param == "--draft"


def test_a_draft_leaves_less_for_stages(tiny: Path) -> None:
    plain = own_capacity("studio", check(options(tiny)))
    drafting = options(tiny).changed(draft_path=tiny)
    known = check(drafting)
    beside = own_capacity("studio", known)
    assert (plain.memory_bytes + plain.request_bytes, plain.draft_bytes) == (1000 * MIB, 0)
    assert beside.memory_bytes + beside.draft_bytes == plain.memory_bytes
    assert beside.draft_bytes > tiny.stat().st_size

    # Just enough for the model alone is too little for both.
    sizes = StageSizes(known.model, known.workload)
    enough = sizes.memory(sizes.whole).total_bytes + plain.request_bytes
    check(options(tiny).changed(memory_bytes=enough))
    # The processes that read texts take what they take, too.
    with pytest.raises(ModelDoesNotFit, match=r"beside .* for reading texts"):
        check(options(tiny).changed(memory_bytes=enough - 1))
    with pytest.raises(ModelDoesNotFit, match=r"for the draft model"):
        check(drafting.changed(memory_bytes=enough))
    with pytest.raises(ModelDoesNotFit, match=r"the draft model tiny.gguf needs .* of this host") as refused:
        check(drafting.changed(memory_bytes=MIB))
    assert refused.value.param == "--draft"


def test_an_assistant_takes_its_memory_beside_the_last_stage(tmp_path: Path) -> None:
    model = OWN_MODELS["gemma4-dense"](1).write(tmp_path / "model.gguf")
    assistant = write_assistant(tmp_path / "assistant.gguf")
    plain, drafting = options(model), options(model).changed(draft_path=assistant)
    known, beside = check(plain), check(drafting)
    assert beside.drafter is not None
    assert beside.drafter.is_beside_tail
    assert (beside.draft_bytes, beside.draft_ctx_size) == (0, 1024)
    assert beside.model.head_bytes > known.model.head_bytes + assistant.stat().st_size
    assert check(drafting.changed(speculate="ngram")).model == known.model
    # Stages without it do not serve a head that wants it.
    assert setup_of(drafting, beside) != setup_of(plain, known)
    known_of(plain.changed(split=(2, 1)))
    with pytest.raises(UncuttableModel, match=r"reads the last two layers, which have to be in one stage"):
        known_of(drafting.changed(split=(2, 1)))
    other = write_assistant(tmp_path / "other.gguf", metadata={"embedding_length_out": 96})
    with pytest.raises(InvalidModel, match="it was made for another model"):
        check(plain.changed(draft_path=other))


def test_each_model_counts_its_vocabulary_for_each_process(tiny: Path) -> None:
    known = known_of(options(tiny))
    assert known.request_bytes == num_text_workers() * vocabulary_bytes(read_one_header(tiny))
    # The processes themselves are there once, whatever they have loaded.
    assert own_capacity("studio", known).request_bytes == worker_bytes() + known.request_bytes


def known_of(given: HeadOptions) -> Preflight:
    """What is found out about the model and its options, with this much memory."""
    memory_bytes = given.memory_bytes or 0
    return check_model(given, lambda: HostFacts(memory_bytes, 1, 20.0, read_versions()))


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("preflight") / "long.gguf"
    return TinyModel("llama", head_size=16, n_ctx_train=100_000).write(path)


def test_a_context_that_nobody_names_is_chosen_later(long: Path) -> None:
    unnamed, named = options(long).changed(ctx_size=None), options(long).changed(ctx_size=4096)
    # The placement is made for a short one.
    assert known_of(unnamed).workload == known_of(named).workload
    assert known_of(unnamed).workload.ctx_size == 4096
    # But a ring with a chosen context is not one of 4096 positions.
    assert setup_of(unnamed, known_of(unnamed)) != setup_of(named, known_of(named))
    assert setup_of(unnamed, known_of(unnamed)) == setup_of(unnamed, known_of(unnamed))


@pytest.mark.parametrize(
    "change",
    [
        {"ctx_size": 512},
        {"parallel": 3},
        {"kv_type": "f32"},
        {"exact": True},
        {"wire": "q8"},
        {"stages": 1},
        {"split": (3, 3)},
        {"threads": 2},
        {"memory_bytes": 999 * MIB},
        {"gpu_layers": 0},
        {"cpu_moe": True},
        {"n_cpu_moe": 1},
        {"kv_disk_bytes": MIB},
        {"repacks": False},
    ],
)
def test_stages_of_other_settings_are_not_taken_over(tiny: Path, change: dict[str, object]) -> None:
    given = options(tiny)
    changed = given.changed(**change)
    assert setup_of(changed, known_of(changed)) != setup_of(given, known_of(given))


def test_stages_of_another_file_are_not_taken_over(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / tiny.name
    copy.write_bytes(tiny.read_bytes())
    before = setup_of(options(copy), known_of(options(copy)))
    assert before != setup_of(options(tiny), known_of(options(tiny)))
    assert before == setup_of(options(copy), known_of(options(copy)))
    os.utime(copy, (1, 1))
    assert before != setup_of(options(copy), known_of(options(copy)))


def test_stages_are_taken_over_with_other_settings_of_requests(tiny: Path) -> None:
    given = options(tiny)
    changed = given.changed(max_waiting=9, speculate="ngram", draft_max=3, port=1, checkpoints=2)
    assert setup_of(changed, known_of(changed)) == setup_of(given, known_of(given))


def test_a_draft_is_loaded_before_the_context_is_chosen(long: Path) -> None:
    drafting = options(long).changed(ctx_size=None, draft_path=long)
    roomy, tight, tighter = (
        known_of(drafting.changed(memory_bytes=memory_mib * MIB)) for memory_mib in (64_000, 1600, 700)
    )
    assert roomy.draft_ctx_size == 100_000
    assert 4096 < tight.draft_ctx_size < 100_000
    assert tight.draft_bytes <= 200 * MIB
    # One that takes more than a small part of the memory in any case is as short as can be.
    assert tighter.draft_ctx_size == 4096
    assert known_of(drafting.changed(ctx_size=9000)).draft_ctx_size == 9000


def test_a_draft_drafts_no_further_than_it_was_trained_for(long: Path, tmp_path: Path) -> None:
    roomy = options(long).changed(ctx_size=None, memory_bytes=64_000 * MIB)
    for n_ctx_train, ctx_size in ((20_000, 20_000), (1024, 4096)):
        draft = TinyModel("llama", head_size=16, n_ctx_train=n_ctx_train).write(tmp_path / "draft.gguf")
        known = known_of(roomy.changed(draft_path=draft))
        assert known.draft_ctx_size == ctx_size


def test_a_model_that_fits_beside_a_draft_still_does(long: Path) -> None:
    drafting = options(long).changed(ctx_size=None, draft_path=long)
    known = known_of(drafting.changed(memory_bytes=64_000 * MIB))
    facts = replace(known.model, layer_bytes=(1000 * MIB,) * known.model.n_layers)
    sizes = StageSizes(facts, known.workload)
    short_bytes = known_of(drafting.changed(ctx_size=4096)).draft_bytes
    enough_bytes = sizes.memory(sizes.whole).total_bytes + short_bytes
    assert known.drafter is not None
    assert known.draft_bytes < enough_bytes // 8
    for free_bytes, is_short in (
        (enough_bytes, True),
        (enough_bytes - 1, False),
        (enough_bytes + known.draft_bytes - short_bytes, False),
    ):
        ctx_size = _draft_ctx_size(drafting, known.drafter, sizes, free_bytes)
        assert ctx_size == (4096 if is_short else known.draft_ctx_size)
    # A head without layers has no model beside it.
    on_head = drafting.changed(head_only=True)
    assert _draft_ctx_size(on_head, known.drafter, sizes, enough_bytes) == known.draft_ctx_size
