"""The habits of llama.cpp that rules respect, one by one, without llama.cpp."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from spanmesh_proto.errors import UncuttableModel
from stages.gguf import GgufHeader, Value, ValueType
from stages.graph_boundary import GraphBoundary
from stages.layers import LayerRange
from stages.slicing.architectures.cutting_rules import FAMILIES
from stages.slicing.architectures.rule_types import Blanks
from stages.slicing.source_model import SourceModel


def header(architecture: str, n_layers: int, **values: list[int] | float) -> GgufHeader:
    """Of a model with nothing but metadata; `__` in a name stands for a dot."""
    metadata = {
        "general.architecture": Value.of(ValueType.STRING, architecture),
        f"{architecture}.block_count": Value.of(ValueType.UINT32, n_layers),
        f"{architecture}.embedding_length": Value.of(ValueType.UINT32, 64),
    }
    for name, value in values.items():
        key = f"{architecture}.{name.replace('__', '.')}"
        if isinstance(value, list):
            metadata[key] = Value.array(ValueType.UINT32, tuple(value))
        else:
            kind = ValueType.FLOAT32 if isinstance(value, float) else ValueType.UINT32
            metadata[key] = Value.of(kind, value)
    return GgufHeader(Path("model.gguf"), 0, 32, metadata, {})


def model(architecture: str, n_layers: int, **values: list[int] | float) -> SourceModel:
    of = header(architecture, n_layers, **values)
    return SourceModel(of, FAMILIES[architecture], ((),) * n_layers)


def derived(source: SourceModel, layers: LayerRange, key: str) -> object:
    value = source.family.derived(source.header, layers).get(f"{source.header.architecture}.{key}")
    return None if value is None else value.decode()


PATTERN = "attention.sliding_window_pattern"


def test_windows_are_counted_from_the_model_s_first_layer() -> None:
    source = model("cohere2", 9, attention__sliding_window=8)
    assert derived(source, LayerRange(2, 6), PATTERN) == (True, False, True, True)
    dense_first = model("cohere2moe", 9, attention__sliding_window=8)
    assert derived(dense_first, LayerRange(2, 6), PATTERN) == (True, True, False, True)
    with_period = model("cohere2", 9, attention__sliding_window=8, attention__sliding_window_pattern=2)
    assert derived(with_period, LayerRange(2, 6), PATTERN) == (True, False, True, False)


@pytest.mark.parametrize(
    ("layers", "blanks"),
    [
        (LayerRange(0, 3), Blanks()),
        # The window behind it costs nothing; at the tail there is only the one before it.
        (LayerRange(3, 4), Blanks(after=1)),
        (LayerRange(7, 8), Blanks(before=1)),
    ],
)
def test_a_stage_without_windows_gets_a_neighbour_that_has_one(layers: LayerRange, blanks: Blanks) -> None:
    assert model("cohere2", 8, attention__sliding_window=8).blanks(layers) == blanks


def test_leading_dense_layers_are_what_is_left_of_them() -> None:
    source = model("deepseek2", 9, leading_dense_block_count=3, vocab_size=64)
    key = "leading_dense_block_count"
    assert [derived(source, LayerRange(start, 9), key) for start in (1, 3, 5)] == [2, 0, 0]
    assert derived(source, LayerRange(0, 4), key) is None


def test_every_nth_layer() -> None:
    source = model("smollm3", 12)
    assert source.allowed_cuts == (4, 8)
    assert "multiples of 4" in source.refused_cuts[3]
    assert source.blanks(LayerRange(4, 8)) == Blanks()
    short = model("smollm3", 3)
    assert short.allowed_cuts == (1, 2)
    assert short.blanks(LayerRange(2, 3)) == Blanks(before=2)


def test_llama4_steps_over_experts_and_positions() -> None:
    assert model("llama4", 12, interleave_moe_layer_step=2).allowed_cuts == (4, 8)
    assert model("llama4", 24, interleave_moe_layer_step=6).allowed_cuts == (12,)
    assert model("llama4", 24, attention__sliding_window=0, interleave_moe_layer_step=1).allowed_cuts == ()


def test_recurrent_layers_are_written_out() -> None:
    source = model("qwen3next", 8)
    expected = (True, False, True, True)
    assert derived(source, LayerRange(2, 6), "attention.recurrent_layers") == expected


def test_shared_indexers_stay_with_those_who_share() -> None:
    source = model("hy_v4", 6, attention__indexer__types=[1, 0, 0, 1, 0, 1], hyper_connection__count=4)
    assert source.allowed_cuts == (3, 5)
    entry = source.family.entry.handover(source.header, LayerRange(3, 5))
    assert (entry.row_width, entry.inlet) == (256, "hc_init")


def test_models_known_by_their_layers() -> None:
    assert model("exaone4", 64).allowed_cuts == ()
    assert len(model("exaone4", 30).allowed_cuts) == 29
    assert set(model("baichuan", 48).refused_lengths) == {32, 40}
    # Cut in two there one half would be such a model; with a further cut neither is.
    assert set(range(1, 48)) - set(model("baichuan", 48).lone_cuts) == {8, 16, 32, 40}
    assert set(model("deepseek2", 61, vocab_size=64).refused_lengths) == {26, 27}
    lite = model("deepseek2", 27, vocab_size=64)
    assert lite.refused_lengths == {}
    assert derived(lite, LayerRange(0, 9), "attention.q_lora_rank") == 0


def test_minicpm_is_told_what_llama_cpp_would_take_from_the_number_of_layers() -> None:
    assert derived(model("minicpm", 40), LayerRange(0, 9), "residual_scale") == pytest.approx(1.4 / 40**0.5)
    assert derived(model("minicpm", 40, residual_scale=0.5), LayerRange(0, 9), "residual_scale") is None


@pytest.mark.parametrize(("scale", "inlet"), [(0.0, None), (12.0, "embd")])
def test_hidden_states_pass_by_a_scale(scale: float, inlet: str | None) -> None:
    source = model("granite", 4, embedding_scale=scale)
    assert source.family.entry.handover(source.header, LayerRange(1, 4)).inlet == inlet
    assert source.family.entry.handover(source.header, LayerRange(0, 2)).inlet is None


def test_blanks_are_entered_behind() -> None:
    source = model("smollm3", 3)
    layers = LayerRange(2, 3)
    entry = source.family.entry.handover(source.header, layers, source.blanks(layers))
    assert entry.inlet == "l_out-1"
    assert entry.outlet_of(0) == "l_out-2"


def test_an_output_that_is_named_as_the_next_layer_s_input() -> None:
    source = model("step35", 6, attention__sliding_window_pattern=[0, 1, 1, 0, 1, 0])
    for layers, blanks, outlet, inlet in (
        (LayerRange(0, 3), Blanks(after=1), "attn_norm_in-3", None),
        (LayerRange(3, 5), Blanks(after=1), "attn_norm_in-2", None),
        # Without a window of its own: one before it, behind which hidden states enter.
        (LayerRange(5, 6), Blanks(before=1), "attn_norm_in-2", "attn_norm_in-1"),
    ):
        assert source.blanks(layers) == blanks
        boundary = source.family.entry.handover(source.header, layers, blanks)
        assert boundary.outlet_of(len(layers) - 1) == outlet
        assert boundary.inlet == inlet
        saved = {name: str(value) for name, value in boundary.to_metadata(64).items()}
        assert GraphBoundary.from_metadata(saved.get, 64) == boundary


def test_numbers_of_activations_go_with_their_layers() -> None:
    source = model("apertus", 4)
    numbers = Value.array(ValueType.FLOAT32, (1.0, 2.0, 3.0, 4.0))
    metadata = {
        **source.header.metadata,
        "xielu.alpha_n": numbers,
        "xielu.eps": Value.of(ValueType.FLOAT32, 0.5),
    }
    found = source.family.derived(replace(source.header, metadata=metadata), LayerRange(1, 3))
    assert {key: value.decode() for key, value in found.items() if value is not None} == {
        "xielu.alpha_n": (2.0, 3.0)
    }


def test_layers_that_share_caches_stay_with_those_that_have_them() -> None:
    source = model("gemma4", 12, attention__shared_kv_layers=4)
    assert source.allowed_cuts == (1, 2, 3, 4, 5, 6)
    assert source.refused_cuts[7] == "the last 4 layers share the KV caches of layers 6 and 7"
    assert derived(source, LayerRange(0, 6), "attention.shared_kv_layers") == 0
    assert derived(source, LayerRange(6, 12), "attention.shared_kv_layers") == 4
    with_own = model("gemma4", 12, attention__shared_kv_layers=0)
    assert with_own.allowed_cuts == tuple(range(1, 12))


def test_deepstack_layers_stay_together() -> None:
    source = model("qwen3vl", 6, n_deepstack_layers=3)
    assert source.allowed_cuts == (4, 5)
    assert "the first 3 layers take what an image adds" in source.refused_cuts[3]
    assert model("qwen3vl", 6).allowed_cuts == (1, 2, 3, 4, 5)
    assert derived(source, LayerRange(4, 6), "n_deepstack_layers") == 0
    assert model("granite", 4, deepstack_mapping=[0, 1, 0, 0]).allowed_cuts == ()
    assert model("granite", 4).allowed_cuts == (1, 2, 3)


def test_a_stage_has_company_of_every_kind_that_llama_cpp_wants() -> None:
    hybrid = model("jamba", 6, attention__head_count=[4] * 6, attention__head_count_kv=[0, 2, 0, 0, 2, 0])
    assert hybrid.blanks(LayerRange(0, 1)) == Blanks(after=1)
    assert hybrid.blanks(LayerRange(1, 3)) == Blanks()
    assert hybrid.blanks(LayerRange(5, 6)) == Blanks(before=1)
    ratios = [0, 0, 4, 128, 0, 0, 4, 128]
    compressed = model("deepseek4", 8, attention__compress_ratios=ratios, hyper_connection__count=4)
    assert compressed.blanks(LayerRange(0, 1)) == Blanks(after=3)
    assert compressed.blanks(LayerRange(7, 8)) == Blanks(before=1)
    interval = model("qwen3next", 8)
    assert interval.blanks(LayerRange(4, 6)) == Blanks(after=2)


def test_a_hybrid_stage_has_attention_and_recurrent_layers() -> None:
    interval = model("qwen3next", 8)
    assert interval.blanks(LayerRange(3, 4)) == Blanks(after=1)
    assert interval.blanks(LayerRange(7, 8)) == Blanks(before=1)
    assert interval.blanks(LayerRange(2, 4)) == Blanks()
    jamba = model("jamba", 4, attention__head_count=4, attention__head_count_kv=[0, 2, 2, 0])
    assert jamba.blanks(LayerRange(1, 2)) == Blanks(after=2)
    # Mamba, FFN, attention with KV heads of the FFN's own that nobody reads.
    kinds = {"attention__head_count_kv": [0, 2, 2, 0], "feed_forward_length": [0, 96, 0, 96]}
    nemotron = model("nemotron_h", 4, attention__head_count=4, **kinds)
    assert nemotron.blanks(LayerRange(1, 2)) == Blanks(before=1, after=1)
    assert nemotron.blanks(LayerRange(0, 2)) == Blanks(after=1)
    assert nemotron.blanks(LayerRange(3, 4)) == Blanks(before=3)


def test_a_model_whose_layers_know_their_number_stays_in_one_piece() -> None:
    assert model("minimax-01", 80).allowed_cuts == ()
    assert "forgets" in model("minimax-01", 80).refused_cuts[40]


def test_smallthinker_counts_its_layers() -> None:
    four = model("smallthinker", 4, attention__sliding_window=8)
    assert four.blanks(LayerRange(1, 2)) == Blanks(before=1, after=2)
    # A file of four layers would be another model, so a stage of four has a fifth; a tail cannot.
    longer = model("smallthinker", 32, attention__sliding_window=8)
    assert longer.allowed_cuts == (4, 8, 12, 16, 20, 24)
    assert longer.blanks(LayerRange(4, 8)) == Blanks(after=1)
    assert longer.blanks(LayerRange(4, 12)) == Blanks()
    assert "just 4 of them, as the tail would be" in longer.refused_cuts[28]
    # A tail without window would get a blank before it, and no longer begin at a fourth layer.
    odd = model("smallthinker", 33, attention__sliding_window=8)
    assert odd.allowed_cuts == (4, 8, 12, 16, 20, 24, 28)
    assert "a single layer" in odd.refused_cuts[32]
    assert len(model("smallthinker", 32).allowed_cuts) == 31


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_rules_allow_can_be_cut_at_any_number_of_layers(architecture: str) -> None:
    common = {"attention__head_count": 4, "attention__head_count_kv": 2, "attention__key_length": 16}
    values = common | {"feed_forward_length": 96, "vocab_size": 64, "context_length": 512}
    for n_layers, window in itertools.product((*range(1, 19), 27, 32, 33, 40, 41), (0, 8)):
        source = model(architecture, n_layers, **values, attention__sliding_window=window)
        periods = [re.search(r"multiples of (\d+)", reason) for reason in source.refused_cuts.values()]
        period = next((int(found[1]) for found in periods if found), 1)
        if not source.refused_lengths and period == 1:
            continue
        edges = (0, *source.allowed_cuts, n_layers)
        for layers in (LayerRange(*pair) for pair in itertools.combinations(edges, 2)):
            # What the planner knows of lengths is what cutting goes by.
            if len(layers) in source.refused_lengths and len(layers) < n_layers:
                with pytest.raises(UncuttableModel, match=f"cannot have a stage of {len(layers)} layers"):
                    source.check_range(layers)
            else:
                source.check_range(layers)
            # Whatever comes every so many layers is counted from the file's first.
            if len(layers) < n_layers:
                assert (layers.start - source.blanks(layers).before) % period == 0
        for cut in source.lone_cuts:
            source.check_range(LayerRange(0, cut))
            source.check_range(LayerRange(cut, n_layers))


def test_heads_of_layers_without_attention_are_filled_in() -> None:
    source = model("jamba", 3, attention__head_count=[4, 0, 4], attention__head_count_kv=[2, 0, 2])
    assert derived(source, LayerRange(1, 3), "attention.head_count") == (4, 4)
    assert model("deci", 3, attention__head_count=[4, 0, 4]).allowed_cuts == (2,)


def test_ngram_tables_go_with_their_layer() -> None:
    source = model("qwen4exp", 6, ple__layers=[1], ple__ngram_size=3, hyper_connection__count=4)
    table = frozenset({"per_layer_token_embd.weight"})
    assert source.family.left_out(source.header, LayerRange(2, 6)) == table
    assert source.family.left_out(source.header, LayerRange(1, 6)) == frozenset()
    assert derived(source, LayerRange(1, 6), "ple.layers") == (0,)
    assert source.family.derived(source.header, LayerRange(2, 6))["qwen4exp.ple.ngram_size"] is None
    assert source.family.entry.handover(source.header, LayerRange(1, 6)).takes_tokens
