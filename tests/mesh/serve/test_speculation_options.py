"""What a server's options and a request's field say about speculation, put together."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from mesh.cli.main import mesh
from mesh.coordinator.speculation import narrowed
from mesh.engine import SpeculationLimits, SpeculationMode
from mesh.options.model import ModelOptions
from mesh.serve.proposers import narrower
from spanmesh_proto.errors import InvalidRequest
from speculative.controller import ControllerOptions

NOWHERE = Path("nowhere")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--draft-max", "0"], "'--draft-max': 0 is not in the range"),
        (["--draft-max", "-1"], "'--draft-max': -1 is not in the range"),
        (["--draft-min", "0"], "'--draft-min': 0 is not in the range"),
        (["--p-min", "1.01"], "'--p-min': 1.01 is not in the range"),
        (["--p-min", "-0.1"], "'--p-min': -0.1 is not in the range"),
        (["--set", "spec-depth=0"], "'--spec-depth': 0 is not in the range"),
        (["--set", "spec-width=-1"], "'--spec-width': -1 is not in the range"),
        (["--draft-kv-type", "q9"], "'q9' is not one of"),
        (["--draft-threads", "0"], "'--draft-threads': 0 is not in the range"),
        (["--draft-gpu-layers", "-2"], "'--draft-gpu-layers': -2 is not in the range"),
        (["--speculate", "sometimes"], "'sometimes' is not one of"),
        (["--set", "groups"], "'groups' sets nothing: write KEY=VALUE"),
        (["--set", "group=1"], "did you mean groups?"),
        (["--set", "hub-first=perhaps"], "'perhaps' is not true or false"),
        (["--groups", "2"], "--groups is given as --set groups=VALUE"),
        (["--hub-first"], "--hub-first is given as --set hub-first=true"),
    ],
)
def test_values_out_of_range_are_refused(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(mesh, ["serve", *arguments])
    assert result.exit_code == 2
    assert text in result.output


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"speculate": "replay"}, "replay_path", "--set replay-file=PATH"),
        ({"replay_rates": (0.5,)}, "replay_rates", "--set replay-file=PATH"),
        (
            {"draft_max": 4, "draft_min": 5},
            "draft_min",
            "it must be from 1 to --draft-max, 4",
        ),
        ({"stages": 2, "split": (1, 2)}, "stages", "--split gives the number of stages"),
    ],
)
def test_options_that_contradict_one_another_are_refused(
    fields: dict[str, Any], param: str, text: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ModelOptions(**fields).require_consistent()
    assert refused.value.param == param
    assert text in refused.value.message


@pytest.mark.parametrize(
    "fields", [{"p_min": float("nan")}, {"draft_kv_type": "f8"}, {"draft_threads": 0}, {"unknown": 1}]
)
def test_values_that_no_option_has_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields))):
        ModelOptions(**fields)


def test_a_draft_that_nobody_may_ask_is_not_loaded() -> None:
    assert ModelOptions(speculate="auto", draft_path=NOWHERE).may_draft
    assert ModelOptions(speculate="draft", draft_head=False, draft_path=NOWHERE).may_draft
    assert ModelOptions(speculate="auto").may_draft, "with the model's own head"
    assert not ModelOptions(speculate="auto", draft_head=False).may_draft
    assert not ModelOptions(speculate="ngram", draft_path=NOWHERE).may_draft
    assert not ModelOptions(speculate="off", draft_path=NOWHERE).may_draft


@pytest.mark.parametrize(
    ("server", "wanted", "mode"),
    [
        ("auto", None, "auto"),
        ("auto", "auto", "auto"),
        ("auto", "draft", "draft"),
        ("auto", "off", "off"),
        ("ngram", "auto", "ngram"),
        ("ngram", "ngram", "ngram"),
        ("ngram", "draft", "off"),
        ("replay", None, "replay"),
        ("off", "auto", "off"),
        ("off", "ngram", "off"),
    ],
)
def test_a_request_narrows_and_never_widens(
    server: SpeculationMode, wanted: SpeculationMode | None, mode: SpeculationMode
) -> None:
    assert narrower(server, wanted) == mode


class TestLimits:
    def test_a_request_without_limits_leaves_the_server_s(self) -> None:
        options = ControllerOptions(max_width=8, fixed_depth=3)
        assert narrowed(options, SpeculationLimits()) == options

    @pytest.mark.parametrize(("wanted", "width"), [(3, 3), (8, 8), (99, 8)])
    def test_the_smaller_bound_holds(self, wanted: int, width: int) -> None:
        options = narrowed(
            ControllerOptions(max_width=8, max_depth=8), SpeculationLimits(None, wanted, wanted)
        )
        assert options is not None
        assert (options.max_width, options.max_depth) == (width, width)
        assert (options.fixed_width, options.fixed_depth) == (None, None)

    def test_fixed_values_are_bounded_too(self) -> None:
        options = narrowed(ControllerOptions(fixed_width=4, fixed_depth=4), SpeculationLimits(None, 2, 1))
        assert options is not None
        assert (options.fixed_width, options.fixed_depth) == (2, 1)

    @pytest.mark.parametrize(
        ("options", "limits"),
        [
            (ControllerOptions(), SpeculationLimits("off")),
            (ControllerOptions(), SpeculationLimits(max_width=0)),
            (ControllerOptions(fixed_width=0), SpeculationLimits()),
        ],
    )
    def test_nothing_may_be_proposed(self, options: ControllerOptions, limits: SpeculationLimits) -> None:
        assert narrowed(options, limits) is None
