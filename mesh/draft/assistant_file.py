"""Assistants of Gemma 4: whether a file fits the model whose keys and values it reads.

An assistant has queries only. Its layers with a window look into the KV cache of the model's last layer with
one, its others into that of the last without; its first input is the model's embedding of a token beside the
head state of the row that the token was drawn from. llama.cpp drafts wrongly, without an error, where the
sizes or rotations of either side differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from mesh.draft.tensor_checks import check_shapes
from spanmesh_proto.errors import InvalidModel
from stages.gguf import read_header
from stages.slicing.model_facts import packing_bytes
from stages.slicing.tensor_names import EMBEDDING, OUTPUT_NORM, layer_of

if TYPE_CHECKING:
    from stages.gguf import GgufHeader
    from stages.slicing.model_facts import ModelFacts

ARCHITECTURE: Final = "gemma4-assistant"
"""`general.architecture` of its files."""
_TARGET: Final = "gemma4"
_ROPE_BASE: Final = 10_000.0
# Of the text of a token in a message.
_MOST_SHOWN: Final = 40


@dataclass(frozen=True)
class _Keys:
    """Keys of a layer, as its attention reads them."""

    is_windowed: bool
    """Whether it has a window."""
    window: int
    """Positions of the window; 0 without one."""
    heads: int
    """Heads with keys."""
    head: int
    """Values of each."""
    num_rotated: int
    """How many of them are rotated."""
    rope_base: float
    """Base of the rotations."""
    rope_scale: float
    """Factor by which they are stretched."""

    def __str__(self) -> str:
        kind = f"a window of {self.window}" if self.is_windowed else "no window"
        scale = "" if self.rope_scale == 1.0 else f" and factor {self.rope_scale:g}"
        return (
            f"{self.heads} heads of {self.head} values with {kind}, {self.num_rotated} rotated by base "
            f"{self.rope_base:g}{scale}"
        )


def check_assistant(header: GgufHeader, target: ModelFacts) -> None:
    """Check that an assistant was made for a model.

    Args:
        header: Header of the assistant's file.
        target: The model.

    Raises:
        InvalidModel: If it was not, or if the file is damaged.
    """
    name = header.path.name
    if target.architecture != _TARGET:
        raise InvalidModel(
            f"{name} is an assistant of Gemma 4, and {target.name} is {target.architecture}: it was made for "
            "another model"
        )
    width = header.integer(f"{ARCHITECTURE}.embedding_length_out")
    if width != target.n_embd:
        raise InvalidModel(
            f"{name} reads hidden states of {width} values, {target.name} has {target.n_embd}: it was made "
            "for another model"
        )
    of_target = read_header(target.path)
    _check_vocabulary(header, of_target, target)
    if not target.is_tied:
        raise InvalidModel(
            f"{name} takes embeddings of tokens from the last stage, and that of {target.name} has a head of "
            "its own in their place"
        )
    _check_keys(header, of_target, target)
    _check_tensors(header, target)


def beside_tail(model: ModelFacts, assistant: GgufHeader, num_sessions: int) -> ModelFacts:
    """Facts of a model whose last stage holds an assistant, too, and has the two layers that it reads.

    Args:
        model: The model.
        assistant: Header of the assistant's file.
        num_sessions: Sessions that draft together.
    """
    n_embd = assistant.integer(f"{ARCHITECTURE}.embedding_length")
    # Logits and states, and as much again for what llama.cpp computes between them.
    buffer_bytes = 2 * 4 * num_sessions * (model.n_vocab + 8 * (n_embd + model.n_embd))
    last = model.n_layers - 1
    reason = {last: f"{assistant.path.name} reads the last two layers, which have to be in one stage"}
    return replace(
        model,
        head_bytes=model.head_bytes + assistant.file_bytes + buffer_bytes,
        head_packing_bytes=model.head_packing_bytes + packing_bytes(assistant.tensors.values()),
        allowed_cuts=tuple(cut for cut in model.allowed_cuts if cut != last),
        refused_cuts={**(reason if last else {}), **model.refused_cuts},
    )


def _check_vocabulary(header: GgufHeader, of_target: GgufHeader, target: ModelFacts) -> None:
    key = "tokenizer.ggml.tokens"
    own, others = header.metadata.get(key), of_target.metadata.get(key)
    if own == others:
        return
    texts = () if own is None else own.decode()
    known = () if others is None else others.decode()
    if not isinstance(texts, tuple) or not isinstance(known, tuple):
        raise InvalidModel(f"{header.path.name}: metadata key {key!r} is no list; convert the drafter again")
    if len(texts) != len(known):
        raise InvalidModel(
            f"{header.path.name} has {len(texts)} tokens, {target.name} has {len(known)}: it was made for "
            "another model"
        )
    for token, (text, meant) in enumerate(zip(texts, known, strict=True)):
        if text != meant:
            shown, expected = (repr(str(each)[:_MOST_SHOWN]) for each in (text, meant))
            raise InvalidModel(
                f"{header.path.name} cannot draft for {target.name}: token {token} is {shown} in the "
                f"assistant, {expected} in the model"
            )


def _check_keys(header: GgufHeader, of_target: GgufHeader, target: ModelFacts) -> None:
    """Check that its layers read keys as the model's last two layers write them."""
    n_layers = _num_layers(header)
    written = _keys(of_target, target.n_layers)[-2:]
    if [keys.is_windowed for keys in written] != [True, False]:
        raise InvalidModel(
            f"{header.path.name} reads the KV caches of a layer with a window and one without behind it, "
            f"which the last two layers of {target.name} are not"
        )
    heads = header.per_layer(f"{ARCHITECTURE}.attention.head_count", n_layers, 0)
    for layer, keys in enumerate(_keys(header, n_layers)):
        meant = written[0 if keys.is_windowed else 1]
        if keys != meant:
            raise InvalidModel(
                f"layer {layer} of {header.path.name} reads keys of {keys}; {target.name} writes {meant}: "
                "it was made for another model"
            )
        if keys.heads < 1 or heads[layer] < 1 or heads[layer] % keys.heads:
            raise InvalidModel(
                f"layer {layer} of {header.path.name} has {heads[layer]} heads for {keys.heads} of keys; "
                "convert the drafter again"
            )


def _num_layers(header: GgufHeader) -> int:
    """Number of layers, which have tensors and are all for prediction."""
    n_layers = header.integer(f"{ARCHITECTURE}.block_count")
    n_drafting = header.integer(f"{ARCHITECTURE}.nextn_predict_layers", 0)
    n_found = len({layer_of(name) for name in header.tensors} - {None})
    if not n_layers == n_drafting == n_found or n_layers < 1:
        raise InvalidModel(
            f"{header.path.name} says that it has {n_layers} layers and drafts with {n_drafting}, and has "
            f"tensors of {n_found}; convert the drafter again"
        )
    return n_layers


def _keys(header: GgufHeader, n_layers: int) -> list[_Keys]:
    """Keys of each layer, by the metadata of a Gemma 4 or an assistant."""
    prefix = header.architecture
    head = header.integer(f"{prefix}.attention.key_length")
    full = _Keys(
        is_windowed=False,
        window=0,
        heads=0,
        head=head,
        num_rotated=header.integer(f"{prefix}.rope.dimension_count", head),
        rope_base=header.number(f"{prefix}.rope.freq_base", _ROPE_BASE),
        rope_scale=header.number(f"{prefix}.rope.scaling.factor", 1.0),
    )
    # What of layers with a window is not said is as in others.
    windowed = replace(
        full,
        is_windowed=True,
        window=header.integer(f"{prefix}.attention.sliding_window"),
        head=header.integer(f"{prefix}.attention.key_length_swa"),
        num_rotated=header.integer(f"{prefix}.rope.dimension_count_swa", full.num_rotated),
        rope_base=header.number(f"{prefix}.rope.freq_base_swa", full.rope_base),
    )
    windows = header.per_layer(f"{prefix}.attention.sliding_window_pattern", n_layers, 0)
    heads = header.per_layer(f"{prefix}.attention.head_count", n_layers, 0)
    heads_kv = header.per_layer(f"{prefix}.attention.head_count_kv", n_layers, -1)
    return [
        replace(windowed if is_windowed else full, heads=own if with_keys < 0 else with_keys)
        for is_windowed, own, with_keys in zip(windows, heads, heads_kv, strict=True)
    ]


def _check_tensors(header: GgufHeader, target: ModelFacts) -> None:
    n_layers = _num_layers(header)
    n_embd = header.integer(f"{ARCHITECTURE}.embedding_length")
    heads = header.per_layer(f"{ARCHITECTURE}.attention.head_count", n_layers, 0)
    n_ff = header.per_layer(f"{ARCHITECTURE}.feed_forward_length", n_layers, 0)
    if n_embd == target.n_embd:
        raise InvalidModel(
            f"{header.path.name} is as wide as {target.name}, {n_embd} values, which llama.cpp refuses"
        )
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (n_embd, target.n_vocab),
        OUTPUT_NORM: (n_embd,),
        "nextn.pre_projection.weight": (2 * target.n_embd, n_embd),
        "nextn.post_projection.weight": (n_embd, target.n_embd),
    }
    for layer, keys in enumerate(_keys(header, n_layers)):
        if not keys.is_windowed:
            shapes["rope_freqs.weight"] = (keys.head // 2,)
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm": (n_embd,),
            "attn_q": (n_embd, keys.head * heads[layer]),
            "attn_q_norm": (keys.head,),
            "attn_output": (keys.head * heads[layer], n_embd),
            "post_attention_norm": (n_embd,),
            "layer_output_scale": (1,),
            "ffn_norm": (n_embd,),
            "ffn_gate": (n_embd, n_ff[layer]),
            "ffn_up": (n_embd, n_ff[layer]),
            "ffn_down": (n_ff[layer], n_embd),
            "post_ffw_norm": (n_embd,),
        }
        shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    check_shapes(header, shapes)
