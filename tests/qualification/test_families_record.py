"""What a run over many models becomes: counts, a table. And the published table is of a recorded run."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from meshbench.lab.llama_cpp_build import unpacked_source
from spanmesh_proto.errors import MeshError
from stages.certification.certify import certify
from stages.certification.comparison import Difference, EquivalenceReport
from stages.gguf import read_header
from stages.runtime.slot_memory import StateCheckpoints
from stages.slicing.architectures.cutting_rules import FAMILIES, family_of
from tests.qualification.architectures import WITHOUT_MODEL, listed_architectures
from tests.qualification.families import examine
from tests.qualification.families_table import (
    FamilyRecord,
    GoesBack,
    Outcome,
    counts,
    from_json,
    markdown,
    to_json,
)
from tests.qualification.own_models import OWN_MODELS
from tests.qualification.tiny_models import deepened
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TinyModel

ROOT = Path(__file__).parents[2]


def test_a_record_survives_the_file() -> None:
    record = FamilyRecord("a.gguf", Outcome.BIT_EQUAL, rules=("windows",), allowed_cuts=(1, 2), n_layers=3)
    assert from_json(json.loads(json.dumps(to_json(record)))) == record


def test_how_a_model_goes_back_survives_the_file_and_is_read_from_old_ones() -> None:
    record = FamilyRecord("a.gguf", Outcome.BIT_EQUAL, goes_back=GoesBack.CHECKPOINTS)
    saved = json.loads(json.dumps(to_json(record)))
    assert from_json(saved) == record
    del saved["goes_back"], saved["why_no_checkpoints"]
    assert from_json(saved | {"can_trim": True}).goes_back is GoesBack.POSITION
    assert from_json(saved | {"can_trim": False}).goes_back is GoesBack.NO


def test_the_least_way_of_a_model_s_depths_is_shown() -> None:
    runs = {
        depth: [to_json(FamilyRecord("a.gguf", Outcome.BIT_EQUAL, goes_back=way, why_no_checkpoints=why))]
        for depth, way, why in (("d1", GoesBack.CHECKPOINTS, ""), ("d2", GoesBack.NO, "rows differ"))
    }
    listed = {"architectures": ["a", "b"], "without_model": {"b": "makes sound"}}
    table = markdown({"llama_cpp_python": "1", "runs": runs, **listed})
    assert "| a | 0 of -1 cuts | 0 of -1 cuts |  | no |  |  |" in table
    assert "\na: rows differ.\n" in table
    assert "\n| b | no model | no model |  |  |  | makes sound |\n" in table
    assert "\n- llama.cpp's list: 2 architectures, 1 with a model here, 1 without one\n" in table


def test_a_family_without_rules_is_refused_and_one_with_wrong_rules_is_wrong() -> None:
    record = FamilyRecord("a.gguf", Outcome.REFUSED)
    assert record.failed("logits differ", is_known=False).outcome is Outcome.REFUSED
    assert record.failed("logits differ", is_known=True).outcome is Outcome.WRONG
    assert counts([record, record.bit_equal()]) == "2 models, 1 bit-equal, 1 refused, 0 wrong"


def test_examining_a_model(tmp_path: Path) -> None:
    record = examine(TinyModel("granite", n_layers=3).write(tmp_path / "granite.gguf"), certify)
    assert record.outcome is Outcome.BIT_EQUAL
    assert record.rules == ("enters at embd",)
    assert record.allowed_cuts == (1, 2)
    (tmp_path / "no.gguf").write_bytes(b"no")
    assert "is not a GGUF file" in examine(tmp_path / "no.gguf", certify).reason


def test_how_recurrent_models_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = TINY_FAMILIES["mamba2"].write(tmp_path / "model.gguf")
    record = examine(path, certify)
    assert (record.outcome, record.goes_back) == (Outcome.BIT_EQUAL, GoesBack.CHECKPOINTS)
    monkeypatch.setattr(StateCheckpoints, "restore", lambda *_arguments: True)
    assert examine(path, certify).goes_back is GoesBack.NO


def test_rows_at_once_that_differ_bar_going_back_but_no_cut(tmp_path: Path) -> None:
    unlike = Difference(n_tokens=1, max_logit_diff=2e-7, is_bit_equal=False)

    def certified(_model: Path) -> EquivalenceReport:
        return EquivalenceReport("model.gguf", "mamba2", 4, (), unlike, with_checkpoints=unlike)

    record = examine(TINY_FAMILIES["mamba2"].write(tmp_path / "model.gguf"), certified)
    assert (record.outcome, record.goes_back) == (Outcome.BIT_EQUAL, GoesBack.NO)
    assert "differ by up to 2e-07" in record.why_no_checkpoints


def test_the_published_table_is_of_the_recorded_run() -> None:
    recorded = json.loads((ROOT / "tests/qualification/families_record.json").read_text(encoding="utf-8"))
    assert (ROOT / "FAMILIES.md").read_text(encoding="utf-8") == markdown(recorded)
    runs = {name: [from_json(saved) for saved in run] for name, run in recorded["runs"].items()}
    assert "d2" in runs
    for name, records in runs.items():
        wrong = {record.architecture for record in records if record.outcome is Outcome.WRONG}
        assert not wrong & FAMILIES.keys()
        assert all(record.reason for record in records if record.outcome is Outcome.REFUSED)
        ways = {record.architecture: record.goes_back for record in records if record.goes_back is not None}
        assert {name for name, way in ways.items() if way is GoesBack.NO} <= {"minimax-01"}
        for architecture, way in ways.items():
            is_recurrent = family_of(architecture).has_recurrent_state
            assert way in ({GoesBack.CHECKPOINTS, GoesBack.NO} if is_recurrent else {GoesBack.POSITION})
        least = 10 if name.endswith("-mtp") else 100
        assert sum(record.outcome is Outcome.BIT_EQUAL for record in records) > least


def test_whose_rules_allow_cuts_has_been_found_exact() -> None:
    recorded = json.loads((ROOT / "tests/qualification/families_record.json").read_text(encoding="utf-8"))
    exact = {
        saved["architecture"]
        for run in recorded["runs"].values()
        for saved in run
        if saved["outcome"] == Outcome.BIT_EQUAL
    }
    cuttable = {
        name
        for name, family in FAMILIES.items()
        if family.not_served is None and not any(rule.name == "in one piece" for rule in family.rules)
    }
    assert cuttable <= exact


def test_every_architecture_of_llama_cpp_has_a_model_or_a_reason() -> None:
    recorded = json.loads((ROOT / "tests/qualification/families_record.json").read_text(encoding="utf-8"))
    listed, without = set(recorded["architectures"]), set(recorded["without_model"])
    for name in ("d1", "d2"):
        with_model = {saved["architecture"] for saved in recorded["runs"][name]}
        assert with_model | without == listed, name
        assert not with_model & without, name
    assert recorded["without_model"] == dict(sorted(WITHOUT_MODEL.items()))


@pytest.mark.skipif(unpacked_source() is None, reason="no source of llama.cpp: see SPANMESH_LLAMA_CPP")
def test_the_recorded_list_is_that_of_llama_cpp() -> None:
    source = unpacked_source()
    assert source is not None
    recorded = json.loads((ROOT / "tests/qualification/families_record.json").read_text(encoding="utf-8"))
    assert recorded["llama_cpp_python"] == version("llama-cpp-python")
    assert tuple(recorded["architectures"]) == listed_architectures(source)


def test_a_source_without_a_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match=r"llama-arch\.cpp cannot be read"):
        listed_architectures(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/llama-arch.cpp").write_text("int main() {}")
    with pytest.raises(MeshError, match="has no list of architectures as it was known"):
        listed_architectures(tmp_path)


@pytest.mark.model
@pytest.mark.parametrize("name", OWN_MODELS)
def test_own_models_are_as_recorded(name: str, tmp_path: Path) -> None:
    recorded = json.loads((ROOT / "tests/qualification/families_record.json").read_text(encoding="utf-8"))
    model = OWN_MODELS[name](2).write(tmp_path / f"{name}.gguf")
    found = next(saved for saved in recorded["runs"]["d2"] if saved["model"] == model.name)
    assert json.loads(json.dumps(to_json(examine(model, certify)))) == found


@pytest.mark.parametrize("name", OWN_MODELS)
def test_own_models_have_no_matrices_that_fast_kernels_mistake(name: str, tmp_path: Path) -> None:
    header = read_header(OWN_MODELS[name](1).write(tmp_path / f"{name}.gguf"))
    widths = {tensor.shape[0] for tensor in header.tensors.values() if tensor.type.name == "Q8_0"}
    assert widths
    assert min(widths) >= 64


def test_the_generator_is_deepened_or_refused() -> None:
    source = (
        "static gguf_context_ptr get_gguf_ctx(const llm_arch arch, const bool moe) {\n"
        "    uint32_t n_layer = 2;\n"
        "    uint32_t n_head_kv = n_head;\n"
        "    ms.add_kv(LLM_KV_BLOCK_COUNT,               n_layer);\n"
        "    ms.add_kv(RATIOS, std::vector<uint32_t>({0, 0, 4, 128}));\n"
        "    ms.add_kv(LLM_KV_HRM_LAYERS_PER_STACK, uint32_t(1));\n}\n"
        "    model_params.progress_callback = silent_model_load_progress;\n"
    )
    deep = deepened(source)
    assert "    n_layer = n_layer * depth + n_prediction;\n    uint32_t n_head_kv" in deep
    assert "n_layer);\n    if (n_prediction > 0) { ms.add_kv(LLM_KV_NEXTN_PREDICT_LAYERS" in deep
    assert "progress;\n    model_params.load_mtp = n_prediction > 0;" in deep
    assert "repeated<uint32_t>({0, 0, 4, 128})" in deep
    assert "LLM_KV_HRM_LAYERS_PER_STACK, depth" in deep
    with pytest.raises(MeshError, match="its depth cannot be set"):
        deepened("int main() {}")
