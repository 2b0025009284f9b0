"""Registry of architectures, with the rules for cutting each.

The generic rules (`stages.slicing.layout`) renumber layers and cut per-layer metadata. They suffice where
llama.cpp uses a layer's own tensors and metadata only. A family that is not in this table is cut by them
after a self-check that compares the cut model with the whole one.

Entries are certified, see `tests.qualification.families`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from stages.slicing.architectures.layer_counts import (
    DEEPSEEK2_LITE,
    FOUR_LAYERS,
    MINICPM_RESIDUAL,
    attention_scale,
    in_one_piece,
    known_by_layers,
)
from stages.slicing.architectures.layer_patterns import (
    ACTIVATIONS,
    COMPRESSED,
    DEEPSTACK,
    HEADS_EVERYWHERE,
    HYBRID,
    HYBRID_BY_INTERVAL,
    HYBRID_WITH_FFN,
    LAST_LAYER_RENAMED,
    LEADING_LAYERS,
    NGRAM_LAYER,
    NO_WINDOW,
    RECURRENT_LAYERS,
    SHARED_KV,
    SPARSE,
    STARTS_WITH_HEADS,
    Bare,
    embedding_again,
    every_nth,
    has_ngram_layers,
    shared_indexers,
    windows,
)
from stages.slicing.architectures.rule_types import Entry, Family

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stages.gguf import GgufHeader
    from stages.layers import LayerRange

_EMBEDDING: Final = "embd"
_IF_SCALED: Final = Entry(inlet=lambda header: _EMBEDDING if _scales_embedding(header) else None)
_IF_MROPE: Final = Entry(inlet=lambda header: _EMBEDDING if _has_mrope(header) else None)
_NEMOTRON_H: Final = Entry(outlet="nemotron_h_block_out")
_DIFFUSION: Final = "a diffusion model does not answer token by token"
# Layers without dependence on others: the generic rules suffice.
_PLAIN: Final = (
    "arcee",
    "arctic",
    "bailingmoe",
    "bailingmoe2",
    "bitnet",
    "chatglm",
    "codeshell",
    "command-r",
    "dbrx",
    "deepseek",
    "deepseek2-ocr",
    "deepseek32",
    "dots1",
    "ernie4_5",
    "exaone",
    "falcon",
    "gptneox",
    "grovemoe",
    "hunyuan-dense",
    "hunyuan-moe",
    "hy_v3",
    "internlm2",
    "jais",
    "jais2",
    "maincoder",
    "minimax-m2",
    "mistral3",
    "nemotron",
    "olmo",
    "olmoe",
    "openelm",
    "orion",
    "pangu-embedded",
    "phi2",
    "phi3",
    "phimoe",
    "plamo",
    "pockettts",
    "qwen",
    "qwen2moe",
    "qwen3moe",
    "refact",
    "seed_oss",
    "stablelm",
    "starcoder2",
    "xverse",
)


def _enters_at(name: str, **more: object) -> Entry:
    return Entry(inlet=lambda _header: name, **more)  # type: ignore[arg-type]


def _streams(header: GgufHeader) -> int:
    return header.integer(f"{header.architecture}.hyper_connection.count")


def _scales_embedding(header: GgufHeader) -> bool:
    return header.number(f"{header.architecture}.embedding_scale", 0.0) != 0.0


def _has_mrope(header: GgufHeader) -> bool:
    """As llama.cpp detects it: the first two sections of positions are not empty."""
    sections = header.integers(f"{header.architecture}.rope.dimension_sections") or ()
    return len(sections) > 1 and all(part > 0 for part in sections[:2])


def _has_per_layer_embedding(header: GgufHeader) -> bool:
    return header.integer(f"{header.architecture}.embedding_length_per_layer_input", 0) > 0


def _has_hash_layers(header: GgufHeader, layers: LayerRange) -> bool:
    return layers.start < header.integer(f"{header.architecture}.hash_layer_count", 0)


def _rope_step(header: GgufHeader) -> int:
    """Every 4th layer has no positions, where layers have windows."""
    return 4 if header.integer(f"{header.architecture}.attention.sliding_window", 0) else 1


def _llama4_step(header: GgufHeader) -> int:
    # Without the key llama.cpp assumes windows.
    windowed = header.integer(f"{header.architecture}.attention.sliding_window", 1) > 0
    moe_step = header.integer(f"{header.architecture}.interleave_moe_layer_step", 1)
    return math.lcm(4 if windowed else 1, max(1, moe_step))


def _moe_step(header: GgufHeader) -> int:
    return header.integer(f"{header.architecture}.interleave_moe_layer_step", 1)


def _no_windows(header: GgufHeader) -> bool:
    return header.integer(f"{header.architecture}.attention.sliding_window", 1) == 0


def _has_deepstack_mapping(header: GgufHeader) -> bool:
    return any(source >= 0 for source in header.integers(f"{header.architecture}.deepstack_mapping") or ())


def _loops(header: GgufHeader) -> bool:
    return header.integer(f"{header.architecture}.num_loops", 1) > 1


def _has_kv_heads(header: GgufHeader, layer: int) -> bool:
    key = f"{header.architecture}.attention.head_count_kv"
    return bool(header.per_layer(key, header.integer(f"{header.architecture}.block_count"), 1)[layer])


def _glm_dsa_indexer(header: GgufHeader, layer: int) -> bool:
    """GLM 5.2, recognised by its long context, has one every fourth layer; earlier models in each."""
    is_5_2 = header.integer(f"{header.architecture}.context_length") >= 1_048_576
    return not is_5_2 or layer < 2 or (layer - 2) % 4 == 0


# Where any input is scaled as an embedding, or positions of hidden states have four parts.
_AT_EMBEDDING: Final = _enters_at(_EMBEDDING)
_DEEP_ANYWHERE: Final = in_one_piece(
    "any layer may take what an image adds to the embedding", _has_deepstack_mapping
)
_MODEL_INPUT: Final = _enters_at("model.input_embed")
_TABLE: Final = (
    # All layers are alike and independent of others.
    Family("llama", has_uniform_layers=True, head_falls_back_to_embedding=True),
    Family("qwen2", has_uniform_layers=True, head_falls_back_to_embedding=True),
    Family("qwen3", has_uniform_layers=True, head_falls_back_to_embedding=True),
    # Windows. The scale of the embedding, sqrt(n_embd), is applied to token ids only.
    Family(
        "gemma3",
        (windows(6, bare=Bare.SWITCHED_OFF), attention_scale(62)),
        has_uniform_layers=True,
        head_falls_back_to_embedding=True,
    ),
    Family(
        "gemma4",
        (windows(has_factors_elsewhere=True), SHARED_KV, embedding_again(_has_per_layer_embedding)),
        Entry(
            takes_tokens=lambda header, _layers: _has_per_layer_embedding(header),
            needs_embedding=True,
            takes_rows=True,
        ),
        per_layer_parts={"per_layer_token_embd.weight": 0, "per_layer_model_proj.weight": 1},
    ),
    Family("olmo2", (windows(4),)),
    Family("mellum", (windows(4),)),
    Family("plamo3", (windows(8),)),
    Family("laguna", (windows(4, dense_first=True),)),
    Family("gpt-oss", (windows(2, are_always_on=True),)),
    Family("cohere2", (windows(4, are_always_on=True),)),
    Family("cohere2moe", (windows(4, dense_first=True, are_always_on=True),)),
    Family("exaone-moe", (windows(4, are_always_on=True),)),
    Family("mimo2", (windows(are_always_on=True),)),
    Family(
        "step35",
        (windows(are_always_on=True), LAST_LAYER_RENAMED),
        Entry(outlet="attn_norm_in", outlet_shift=1),
    ),
    Family("spark2_5", (windows(are_always_on=True),)),
    Family("maple", (windows(are_always_on=True),)),
    Family("dots3note", (windows(are_always_on=True), NO_WINDOW)),
    Family("minimax-m3", (SPARSE,)),
    Family("granite_swa", (windows(are_always_on=True), _DEEP_ANYWHERE), _IF_SCALED),
    # What is applied to the embedding would be applied to hidden states again, or be skipped.
    Family("gemma", (), _enters_at("inp_scaled")),
    Family("gemma2", (windows(2, are_always_on=True), attention_scale(46)), _enters_at("inp_scaled")),
    Family("granite", (_DEEP_ANYWHERE,), _IF_SCALED),
    Family("granitemoe", (_DEEP_ANYWHERE,), _IF_SCALED),
    Family("grok", (), _IF_SCALED),
    Family("minicpm", (MINICPM_RESIDUAL,), _AT_EMBEDDING),
    Family("bloom", (), _enters_at("inp_norm-0")),
    Family("gpt2", (), _enters_at("inpL")),
    Family("starcoder", (), _enters_at("inpL")),
    Family(
        "mpt", (), Entry(inlet=lambda header: "inpL" if "position_embd.weight" in header.tensors else None)
    ),
    Family("cogvlm", (), _enters_at(_EMBEDDING, marks_all_rows=True)),
    # Tokens of pictures, hard-coded.
    Family("chameleon", (), Entry(barred_tokens=range(4, 8196)), head_rows_are_fixed=True),
    Family("muse-glimmer", (windows(4, are_always_on=True),), _enters_at("embd_norm")),
    # Positions have four parts, which only token ids make of one.
    Family("qwen2vl", (), _AT_EMBEDDING),
    Family("qwen3vl", (DEEPSTACK,), _AT_EMBEDDING),
    Family("qwen3vlmoe", (DEEPSTACK,), _AT_EMBEDDING),
    Family("qwen3tts", (DEEPSTACK,), _AT_EMBEDDING, head_rows_are_fixed=True),
    Family("paddleocr", (), _AT_EMBEDDING),
    # Without M-RoPE llama.cpp aborts on embeddings as input.
    Family("glm4", (), _AT_EMBEDDING),
    Family("glm4moe", (), _AT_EMBEDDING),
    Family("hunyuan_vl", (), _IF_MROPE),
    # Every n-th layer differs, by hard-coded numbers.
    Family("smollm3", (every_nth(lambda _header: 4, "layers have no positions"),)),
    Family(
        "afmoe",
        (every_nth(lambda _header: 4, "layers have no positions"), windows(4)),
        _enters_at("inp_embd_scaled"),
    ),
    Family(
        "smallthinker",
        (
            every_nth(_rope_step, "layers have no positions"),
            windows(4, dense_first=True),
            FOUR_LAYERS,
        ),
    ),
    Family(
        "llama4",
        (
            in_one_piece(
                "without windows llama.cpp leaves the positions out of the file's last layer", _no_windows
            ),
            # The scale of layers without positions is an input of every graph, and must be used by one.
            every_nth(_llama4_step, "layers have no positions, or experts,", needs_one=True),
            windows(4, are_always_on=True),
        ),
    ),
    Family("ernie4_5-moe", (every_nth(_moe_step, "layers have experts"),)),
    # Recognised by the number of layers.
    Family("baichuan", (known_by_layers((32, 40), "chooses how to encode positions"),)),
    Family("exaone4", (known_by_layers((64,), "uses sliding windows"),)),
    Family("deepseek2", (DEEPSEEK2_LITE,)),
    Family("mistral4", (DEEPSEEK2_LITE,)),
    # Layers that attend to the choice of an earlier one.
    Family("glm-dsa", (shared_indexers(_glm_dsa_indexer, lambda _header, _layer: True),)),
    Family(
        "hy_v4",
        (shared_indexers(lambda _header, _layer: False, lambda _header, _layer: True),),
        _enters_at("hc_init", streams=_streams),
    ),
    Family(
        "glm5-next",
        (shared_indexers(lambda _header, _layer: True, _has_kv_heads), HYBRID),
        _enters_at("hc_init", streams=_streams),
        has_recurrent_state=True,
    ),
    Family(
        "deepseek4",
        (COMPRESSED,),
        _enters_at("hc_init", outlet="l_last", streams=_streams, takes_tokens=_has_hash_layers),
        has_recurrent_state=True,
    ),
    Family(
        "qwen4exp",
        (RECURRENT_LAYERS, HYBRID_BY_INTERVAL, NGRAM_LAYER),
        _enters_at("hc_init", outlet="l_last", streams=_streams, takes_tokens=has_ngram_layers),
        has_recurrent_state=True,
    ),
    # Recurrent state.
    Family("mamba", has_recurrent_state=True),
    Family("mamba2", has_recurrent_state=True),
    Family("jamba", (HEADS_EVERYWHERE, HYBRID), has_recurrent_state=True),
    Family("falcon-h1", has_recurrent_state=True),
    Family("plamo2", (HEADS_EVERYWHERE, HYBRID), Entry(outlet="ffn_residual"), has_recurrent_state=True),
    Family("granitehybrid", (HEADS_EVERYWHERE, HYBRID), _IF_SCALED, has_recurrent_state=True),
    Family("lfm2", (HEADS_EVERYWHERE, HYBRID), has_recurrent_state=True),
    Family("lfm2moe", (HEADS_EVERYWHERE, HYBRID), has_recurrent_state=True),
    Family("nemotron_h", (HEADS_EVERYWHERE, HYBRID_WITH_FFN), _NEMOTRON_H, has_recurrent_state=True),
    Family("nemotron_h_moe", (HEADS_EVERYWHERE, HYBRID_WITH_FFN), _NEMOTRON_H, has_recurrent_state=True),
    Family("kimi-linear", (HEADS_EVERYWHERE, HYBRID), has_recurrent_state=True),
    Family("bailingmoe3", (HEADS_EVERYWHERE, HYBRID), _MODEL_INPUT, has_recurrent_state=True),
    Family("qwen3next", (RECURRENT_LAYERS, HYBRID_BY_INTERVAL), has_recurrent_state=True),
    Family("qwen35", (RECURRENT_LAYERS, HYBRID_BY_INTERVAL), _MODEL_INPUT, has_recurrent_state=True),
    Family("qwen35moe", (RECURRENT_LAYERS, HYBRID_BY_INTERVAL), _MODEL_INPUT, has_recurrent_state=True),
    Family("rwkv6qwen2", has_recurrent_state=True),
    # The first layer determines the size of a head.
    Family("deci", (STARTS_WITH_HEADS,)),
    # Layers take the token's embedding again.
    Family(
        "talkie",
        (embedding_again(),),
        Entry(takes_tokens=lambda _header, _layers: True, needs_embedding=True),
    ),
    # The graph looks up tokens itself, and chooses adapters by them in a layer of its own.
    Family(
        "graniteswitch",
        (),
        _enters_at("inp_embd", takes_tokens=lambda _header, _layers: True, needs_embedding=True),
    ),
    Family("apertus", (ACTIVATIONS,)),
    # Uncuttable models.
    Family("nanbeige", (in_one_piece("it runs through all its layers several times", _loops),)),
    Family("hrm_text", (in_one_piece("it runs through its two stacks of layers several times"),)),
    Family(
        "gemma3n", (in_one_piece("layers from 20 on share the KV caches of 18 and 19, which is hard-coded"),)
    ),
    Family("minicpm3", (in_one_piece("the residual scale is taken from the number of layers, hard-coded"),)),
    Family(
        "minimax-01",
        (in_one_piece("how fast a layer forgets is taken from its number among all layers, hard-coded"),),
        has_recurrent_state=True,
        depends_on_batch=True,
    ),
    Family(
        "kimi-k3",
        (in_one_piece("layers mix in what earlier ones put aside, which does not leave the graph"),),
        has_recurrent_state=True,
    ),
    Family(
        "rwkv6",
        (
            in_one_piece(
                "the embedding is normed, in a tensor without a name that hidden states could replace"
            ),
        ),
        has_recurrent_state=True,
    ),
    *(
        Family(
            name,
            (in_one_piece("every layer mixes in the values of the first one"),),
            has_recurrent_state=True,
        )
        for name in ("rwkv7", "arwkv7")
    ),
    *(Family(name) for name in _PLAIN),
    # Unsupported models.
    Family("dream", not_served=_DIFFUSION),
    Family("llada", not_served=_DIFFUSION),
    Family("llada-moe", not_served=_DIFFUSION),
    Family("rnd1", not_served=_DIFFUSION),
    Family(
        "plm",
        not_served="llama.cpp aborts on it: its graph gives values a shape that the KV cache does not take",
    ),
    Family("t5", not_served="an encoder-decoder model reads all of its input before it answers"),
    Family("t5encoder", not_served="it is an encoder only and writes no text"),
    Family("clip", not_served="it encodes pictures for a model beside it"),
    Family("wavtokenizer-dec", not_served="it makes sound of codes, and no text"),
    Family("gptj", not_served="llama.cpp has the name of this architecture only"),
)
FAMILIES: Final[Mapping[str, Family]] = {
    family.architecture: replace(family, rules=(LEADING_LAYERS, *family.rules)) for family in _TABLE
}


def family_of(architecture: str) -> Family:
    """Rules of the family, or the generic ones for an architecture that is not in the table."""
    return FAMILIES.get(architecture, Family(architecture, (LEADING_LAYERS,)))
