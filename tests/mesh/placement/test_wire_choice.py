"""Which wire type a link asks for."""

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.options.model import WireType
from mesh.placement.link_choices import WireChoice, planned_wires, transfer_ms, wire_choices
from mesh.placement.links import Link, Links
from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.placement.planner import Plan, StagePlacement
from stages.layers import LayerRange
from stages.slicing.model_facts import read_model_facts
from stages.transport.hidden_codec import HiddenType
from tests.support.tiny_models import TinyModel

N_EMBD = 1000
RATES = st.floats(1e2, 1e12)


def choice(rate: float | None, compute_ms: float = 4.0) -> WireChoice | None:
    first, last = wire_choices(("a", "b"), (1.0, compute_ms), N_EMBD, lambda _source, _target: rate)
    assert last is None
    return first


@pytest.mark.parametrize(
    ("rate", "proposed"),
    # A row takes 4000, 2000 or 1064 bytes, and the slowest stage 4 ms.
    [(1_000_001, "f32"), (999_999, "f16"), (500_001, "f16"), (499_999, "q8"), (266_001, "q8"), (9, "q8")],
)
def test_the_most_exact_type_that_holds_nobody_up(rate: float, proposed: str) -> None:
    found = choice(rate)
    assert found is not None
    assert found.proposed == proposed
    assert found.is_bottleneck == (proposed != "f32")
    assert found.as_dict() == {
        "from": "a",
        "to": "b",
        "row_transfer_ms": pytest.approx(4e6 / rate),
        "row_compute_ms": 4.0,
        "proposed": proposed,
    }


@given(RATES, RATES, st.floats(1e-3, 1e3))
def test_a_faster_link_never_asks_for_a_smaller_type(rate: float, other: float, compute_ms: float) -> None:
    slow, fast = (choice(each, compute_ms) for each in sorted((rate, other)))
    assert slow is not None
    assert fast is not None
    assert fast.proposed.row_bytes(N_EMBD) >= slow.proposed.row_bytes(N_EMBD)
    if fast.proposed is not HiddenType.Q8:
        assert transfer_ms(fast.proposed, N_EMBD, max(rate, other)) <= max(compute_ms, 1.0)


def test_each_link_is_looked_at_alone() -> None:
    rates = {("a", "b"): 1e9, ("b", "c"): 1e3}
    found = wire_choices(
        ("a", "a", "b", "c", "d"), (1.0,) * 5, N_EMBD, lambda source, target: rates.get((source, target))
    )
    assert [None if each is None else (each.source, each.target, str(each.proposed)) for each in found] == [
        None,  # a to itself
        ("a", "b", "f32"),
        ("b", "c", "q8"),
        None,  # nobody has measured c to d
        None,  # the tail
    ]


def test_a_plan_compares_links_with_its_slowest_stage(tmp_path: Path) -> None:
    model = read_model_facts(TinyModel("llama").write(tmp_path / "tiny.gguf"))
    sizes = StageSizes(model, Workload(ctx_size=64, num_slots=1))
    parts = {"slow": LayerRange(0, 3), "fast": LayerRange(3, 6)}
    stages = tuple(StagePlacement(host, layers, sizes.memory(layers)) for host, layers in parts.items())
    # A row takes 4 ms at the slow host and 1 ms at the fast one.
    speeds = {"slow": sizes.read_bytes(parts["slow"]) / 4e6, "fast": sizes.read_bytes(parts["fast"]) / 1e6}
    rate = HiddenType.F32.row_bytes(model.n_embd) / 6e-3
    links = Links((Link("slow", "fast", bytes_per_s=rate), Link("fast", "slow", bytes_per_s=1.0)))
    first, last = planned_wires(Plan(stages, ""), sizes, speeds, links)
    assert last is None
    assert first is not None
    assert (first.source, first.target, first.proposed) == ("slow", "fast", HiddenType.F16)
    assert first.transfer_ms == pytest.approx(6.0)
    assert first.compute_ms == pytest.approx(4.0)


def test_options_name_every_wire_type() -> None:
    assert get_args(WireType) == tuple(HiddenType)
