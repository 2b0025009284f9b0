"""The contracts as they were recorded; `python -m tests.contracts.record` records a wanted change."""

from pathlib import Path
from typing import Any

import pytest

from tests.contracts.documents import DOCUMENTS, differences, recorded
from tests.contracts.served import SERVED, client_of_a_mesh


def require_as_recorded(name: str, document: Any) -> None:
    different = "\n".join(differences(recorded(name), document))
    assert not different, f"{different}\n\nif this is wanted: python -m tests.contracts.record {name}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_is_as_recorded(name: str) -> None:
    require_as_recorded(name, DOCUMENTS[name]())


@pytest.mark.cluster
@pytest.mark.sociable
@pytest.mark.model
@pytest.mark.usefixtures("cut_stages")
def test_a_mesh_answers_as_recorded(tmp_path: Path) -> None:
    with client_of_a_mesh(tmp_path) as http:
        for name, ask in SERVED.items():
            document = ask(http)
            require_as_recorded(
                name, _where_known(recorded(name), document) if name == "status" else document
            )


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
        (["x", "y"], ["y", "x"], ["~ : in another order, or repeated"]),
        (["x", "x", "y"], ["x", "y", "y"], ["~ : in another order, or repeated"]),
        (None, [], ["~ : null -> []"]),
        ({"a": 1}, {"a": 1}, []),
    ],
)
def test_each_difference_is_a_line(old: Any, new: Any, told: list[str]) -> None:
    assert list(differences(old, new)) == told
