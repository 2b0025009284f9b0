"""Speculation is off where nothing that was rejected can be taken back."""

from dataclasses import replace
from pathlib import Path

import pytest

from mesh.serve.options import fitted_to, speculation_refusal
from spanmesh_proto.errors import ClusterError
from tests.mesh.placement.test_planner import model
from tests.mesh.serve.test_preflight import options

OPTIONS = options(Path("model.gguf"))
WITHOUT = OPTIONS.changed(checkpoints=0)
RECURRENT = replace(model(), architecture="mamba2", can_trim=False)


def test_nothing_changes_where_sessions_can_go_back() -> None:
    assert fitted_to(OPTIONS, model()) is OPTIONS
    assert speculation_refusal(model(), 0, is_exact=True) is None


def test_recurrent_models_speculate_with_checkpoints() -> None:
    assert fitted_to(OPTIONS, RECURRENT) is OPTIONS
    assert speculation_refusal(RECURRENT, 8, is_exact=True) is None


def test_auto_becomes_off_and_the_reason_is_known() -> None:
    assert fitted_to(WITHOUT, RECURRENT).speculate == "off"
    assert "mamba2 keeps a recurrent state" in str(speculation_refusal(RECURRENT, 0, is_exact=False))


def test_exact_mode_speculates_only_where_rows_do_not_depend_on_their_batch() -> None:
    dependent = replace(RECURRENT, architecture="minimax-01", depends_on_batch=True)
    assert fitted_to(OPTIONS, dependent) is OPTIONS
    exact = OPTIONS.changed(exact=True)
    assert fitted_to(exact, dependent).speculate == "off"
    assert fitted_to(exact, RECURRENT) is exact
    insisting = exact.changed(speculate="ngram")
    with pytest.raises(ClusterError, match="--speculate ngram: in exact mode minimax-01 still rounds"):
        fitted_to(insisting, dependent)


def test_who_insists_is_told() -> None:
    insisting = WITHOUT.changed(speculate="ngram")
    with pytest.raises(ClusterError, match=r"--speculate ngram: mamba2 keeps .*; leave one of them out"):
        fitted_to(insisting, RECURRENT)
    off = WITHOUT.changed(speculate="off")
    assert fitted_to(off, RECURRENT) is off
