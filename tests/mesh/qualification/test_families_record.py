"""What a run over many models becomes: counts, a table. And the published table is of a recorded run."""

import json
from pathlib import Path

import pytest

from mesh.qualification.families import examine
from mesh.qualification.families_table import FamilyRecord, Outcome, counts, from_json, markdown, to_json
from mesh.qualification.tiny_models import deepened
from spanmesh_proto.errors import MeshError
from stages.certification.certify import certify
from stages.slicing.architectures.registry import FAMILIES, family_of
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TinyModel

ROOT = Path(__file__).parents[3]


def test_a_record_survives_the_file() -> None:
    record = FamilyRecord("a.gguf", Outcome.BIT_EQUAL, rules=("windows",), allowed_cuts=(1, 2), n_layers=3)
    assert from_json(json.loads(json.dumps(to_json(record)))) == record


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


def test_the_published_table_is_of_the_recorded_run() -> None:
    recorded = json.loads((ROOT / "mesh/qualification/families_record.json").read_text(encoding="utf-8"))
    assert (ROOT / "FAMILIES.md").read_text(encoding="utf-8") == markdown(recorded)
    runs = {name: [from_json(saved) for saved in run] for name, run in recorded["runs"].items()}
    assert "d2" in runs
    for name, records in runs.items():
        wrong = {record.architecture for record in records if record.outcome is Outcome.WRONG}
        # What a run found wrong may be written anew, and is then cut after a self-check until the next run.
        assert not any(family_of(architecture).is_certified for architecture in wrong)
        assert all(record.reason for record in records if record.outcome is Outcome.REFUSED)
        least = 10 if name.endswith("-mtp") else 100
        assert sum(record.outcome is Outcome.BIT_EQUAL for record in records) > least


def test_who_is_certified_has_been_found_exact() -> None:
    recorded = json.loads((ROOT / "mesh/qualification/families_record.json").read_text(encoding="utf-8"))
    exact = {
        saved["architecture"]
        for run in recorded["runs"].values()
        for saved in run
        if saved["outcome"] == Outcome.BIT_EQUAL
    } | {tiny.architecture for tiny in TINY_FAMILIES.values()}
    cuttable = {
        name
        for name, family in FAMILIES.items()
        if family.not_served is None and not any(rule.name == "in one piece" for rule in family.rules)
    }
    assert {name for name in cuttable if family_of(name).is_certified} == cuttable & exact


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
