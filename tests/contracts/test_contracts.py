"""The contracts as they were recorded; `python -m tests.contracts.record` records a wanted change."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contracts.documents import DOCUMENTS, differences, recorded
from tests.contracts.normal_form import shape_of
from tests.contracts.served import exchanges_with, metrics, openapi, served_mesh


def require_as_recorded(name: str, document: Any) -> None:
    different = "\n".join(differences(recorded(name), document))
    assert not different, f"{different}\n\nif this is wanted: python -m tests.contracts.record {name}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_is_as_recorded(name: str) -> None:
    require_as_recorded(name, DOCUMENTS[name]())


@pytest.mark.cluster
@pytest.mark.sociable
@pytest.mark.model
def test_a_mesh_answers_as_recorded(tmp_path: Path) -> None:
    with served_mesh(tmp_path) as http:
        require_as_recorded("exchanges", exchanges_with(http))
        require_as_recorded("openapi", openapi(http))
        require_as_recorded("metrics", metrics(http))
        _require_status(http)


def _require_status(http: httpx.Client) -> None:
    shape = shape_of(http.get("/mesh/status").raise_for_status().json())
    require_as_recorded("status", _where_known(recorded("status"), shape))


def _where_known(old: Any, new: Any) -> Any:
    """The new shape; where one of both has no value as yet, the old one."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: _where_known(old[key], each) if key in old else each for key, each in new.items()}
    if isinstance(old, list) and isinstance(new, list):
        return [_where_known(*pair) for pair in zip(old, new, strict=False)] if old and new else old
    return old if "NoneType" in (old, new) else new


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ({"a": 1}, {"a": 2}, ["~ a: 1 -> 2"]),
        ({"a": {"b": 1}}, {"a": {}}, ["- a.b: 1"]),
        ({}, {"a": []}, ["+ a: []"]),
        ([1, {"a": 1}], [1, {"a": "1"}], ['~ [1].a: 1 -> "1"']),
        (["x", "y"], ["y", "z"], ['- : "x"', '+ : "z"']),
        (["x", "y"], ["y", "x"], ["~ : another order"]),
        (None, [], ["~ : null -> []"]),
        ({"a": 1}, {"a": 1}, []),
    ],
)
def test_each_difference_is_a_line(old: Any, new: Any, told: list[str]) -> None:
    assert list(differences(old, new)) == told
