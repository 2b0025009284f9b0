"""Families that read pictures: stages compute the bits of libmtmd's evaluation, and the record says so."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from spanmesh_proto.errors import MeshError
from stages.runtime.row_positions import RowPositions
from tests.qualification.families import examine_all_pictures, main
from tests.qualification.families_table import Outcome, PictureRecord, markdown, to_json
from tests.qualification.picture_certification import certify_pictures, examine_refused
from tests.qualification.picture_families import PICTURE_FAMILIES, REFUSED_FAMILIES, RefusedFamily
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests/qualification/families_record.json"
# All of them are the sweep's: some of each kind, drawn once.
QUICK = sorted({"CogVLM", "Gemma 4 E", *random.Random(56).sample(sorted(PICTURE_FAMILIES), 5)})


@pytest.mark.model
@pytest.mark.parametrize("name", QUICK)
def test_stages_compute_what_libmtmd_does(name: str, tmp_path: Path) -> None:
    model, projector = PICTURE_FAMILIES[name].write(tmp_path)
    assert len(certify_pictures(model, projector, exact=True, most_cuts=2)) >= 2


@pytest.mark.model
@pytest.mark.sweep
def test_every_family_in_both_modes() -> None:
    records = examine_all_pictures([*PICTURE_FAMILIES, *REFUSED_FAMILIES], lambda _share: None)
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["pictures"]
    assert json.loads(json.dumps([to_json(record) for record in records])) == recorded


@pytest.mark.model
def test_a_row_in_the_wrong_place_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = RowPositions.parts

    def turned(self: RowPositions, start: int, num_rows: int) -> NDArray[np.int32]:
        return parts(self, start, num_rows)[[0, 2, 1, 3]]

    model, projector = PICTURE_FAMILIES["Qwen2-VL"].write(tmp_path)
    monkeypatch.setattr(RowPositions, "parts", turned)
    with pytest.raises(MeshError, match="differ from those of the whole model, cut at no place, 1, 1 and 3"):
        certify_pictures(model, projector, exact=True, most_cuts=1)


@pytest.mark.parametrize("name", REFUSED_FAMILIES)
def test_others_are_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    record = examine_refused(name, REFUSED_FAMILIES[name], tmp_path)
    assert record.outcome is Outcome.REFUSED
    assert record.reason


def test_what_is_not_refused_is_wrong(tmp_path: Path) -> None:
    family = RefusedFamily(TinyModel("llama", n_layers=2), "mlp")
    record = examine_refused("LLaVA", family, tmp_path)
    assert record.outcome is Outcome.WRONG
    assert record.reason == "neither its projector nor a cut is refused"


def test_the_record_has_every_family_and_none_is_wrong() -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["pictures"]
    records = [PictureRecord.of(saved) for saved in recorded]
    outcomes = {record.family: record.outcome for record in records}
    assert outcomes == {
        **dict.fromkeys(PICTURE_FAMILIES, Outcome.BIT_EQUAL),
        **dict.fromkeys(REFUSED_FAMILIES, Outcome.REFUSED),
    }
    assert all(record.allowed_cuts for record in records if record.outcome is Outcome.BIT_EQUAL)
    assert [json.loads(json.dumps(to_json(record))) for record in records] == recorded


def test_the_table_names_families_beside_their_architecture() -> None:
    records = [
        PictureRecord("A-VL", Outcome.BIT_EQUAL, "", "a", "clip", 4, (1, 3), (16, 16)),
        PictureRecord("B-VL", Outcome.REFUSED, "no reason", "a", "clap", 4, (), ()),
    ]
    model = {"model": "a-dense.gguf", "outcome": "bit-equal", "architecture": "a", "n_layers": 4}
    document = {
        "llama_cpp_python": "1",
        "runs": {"d1": [model]},
        "architectures": ["a"],
        "without_model": {},
        "pictures": [to_json(record) for record in records],
    }
    table = markdown(document)
    assert "\n| a-dense | 0 of 3 cuts |  |  | A-VL |  |\n" in table
    assert "\n- pictures: 2 models, 1 bit-equal, 1 refused, 0 wrong\n" in table
    assert "\n| A-VL | a | clip | 2 × 16 | 2 of 3 cuts |  |\n" in table
    assert "\n| B-VL | a | clap |  | refused | no reason |\n" in table


@pytest.mark.model
def test_the_command_writes_them_beside_what_was_recorded(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    output.write_text('{"runs": {"d1": []}}')
    result = CliRunner().invoke(main, ["--images", "--only", "CogVLM", "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "pictures: 1 models, 1 bit-equal, 0 refused, 0 wrong" in result.output
    document = json.loads(output.read_text(encoding="utf-8"))
    assert document["runs"] == {"d1": []}
    assert [saved["family"] for saved in document["pictures"]] == ["CogVLM"]
    assert "name folders of models" in CliRunner().invoke(main, []).output
