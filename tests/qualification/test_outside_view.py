"""What is made of a mesh's figures from inside the lab and from outside."""

from typing import Any

import pytest

from spanmesh_proto.errors import MeshError
from tests.qualification.outside_view import StepFigures, comparison_lines, comparison_table, step_figures


def steps(*rates: float) -> list[StepFigures]:
    return [StepFigures(4, rate, 250.0, 31.5) for rate in rates]


def report(**fields: Any) -> dict[str, Any]:
    figures = {"ttft_ms": {"median": 250.0}, "itl_ms": {"median": 31.5}}
    return {
        "good": True,
        "checks": [],
        "failures": [],
        "steps": [{"concurrency": 4, "tokens_per_s": 80.0, "figures": figures}],
        **fields,
    }


def test_the_difference_is_bounded_by_what_the_lab_differs_from_itself() -> None:
    found = {"lab": steps(100.0, 50.0), "from outside": steps(104.0, 52.0), "lab again": steps(100.0, 52.0)}
    difference, noise = comparison_lines(found)
    # A drift between the lab's two loads counts half.
    assert difference.measured == pytest.approx((1.04 * 52 / (50 * 52) ** 0.5) ** 0.5 - 1)
    assert (difference.wanted, difference.verdict) == (0.09, "met")
    assert noise.note == "ratios 1.00, 1.04"
    found["from outside"] = steps(80.0, 40.0)
    assert comparison_lines(found)[0].verdict == "missed"
    found["from outside"] = steps(125.0, 65.0)
    assert comparison_lines(found)[0].verdict == "missed"
    assert "| 4 | 100.0 | 125.0 | 100.0 | 250 | 250 | 250 | 31.5 | 31.5 | 31.5 |" in comparison_table(found)


def test_figures_of_a_load_that_failed_are_not_compared() -> None:
    assert step_figures(report()) == (StepFigures(4, 80.0, 250.0, 31.5),)
    failed = {"good": False, "checks": [{"name": "every answer sound", "holds": False}]}
    with pytest.raises(MeshError, match="a load failed: no answer; every answer sound"):
        step_figures(report(failures=["no answer"], **failed))
