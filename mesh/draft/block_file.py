"""Block drafters' files: DFlash, DSpark or DFlash2, which layers they read, and whether they fit the model.

llama.cpp calls all of them `dflash`. A head with predecessors (`markov_w1`) makes one DSpark, a selector
DFlash2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mesh.draft.tensor_checks import check_d2t, check_heads, check_shapes, end_shapes
from spanmesh_proto.errors import InvalidModel, UncuttableModel
from speculative.draft.kinds import MOST_IN_BLOCK
from speculative.proposer import DrafterKind
from stages.slicing.tensor_names import EMBEDDING, OUTPUT, OUTPUT_NORM

if TYPE_CHECKING:
    from stages.gguf import GgufHeader
    from stages.slicing.model_facts import ModelFacts

ARCHITECTURE: Final = "dflash"
# llama.cpp's, for files that do not say.
_BLOCK_SIZE: Final = 16
_MASK_TOKEN: Final = "tokenizer.ggml.mask_token_id"  # noqa: S105 - the name of a key
_PREDECESSORS: Final = "markov_w1.weight"
_SUCCESSORS: Final = "markov_w2.weight"
_CONFIDENCE: Final = "conf_proj.weight"
_SELECTOR: Final = "selector_hidden.weight"

_Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class BlockFile:
    """A block drafter that fits its target."""

    kind: DrafterKind
    """DFLASH, DSPARK or DFLASH2."""
    layers: tuple[int, ...]
    """Layers of the target whose outputs it reads, in its order."""
    lacks: tuple[str, ...]
    """Tensors that it takes from the target."""
    most_drafted: int
    """Most tokens of a block."""


def check_block_file(header: GgufHeader, target: ModelFacts) -> BlockFile:
    """What a file of architecture `dflash` is.

    Args:
        header: Its header.
        target: The served model, whose hidden states a drafter can read.

    Raises:
        InvalidModel: If it was made for another model, or is damaged.
        UncuttableModel: If it is a drafter for DeepSeek V4, whose hidden states have streams.
    """
    name = header.path.name
    if header.integer("dflash.hyper_connection_count", 0):
        raise UncuttableModel(
            f"{name} is a drafter for DeepSeek V4, whose streams of hidden states cannot be read yet; "
            "use another drafter, or none"
        )
    n_embd = header.integer("dflash.embedding_length")
    if n_embd != target.n_embd:
        raise InvalidModel(
            f"{name} reads hidden states of {n_embd} values, {target.name} has {target.n_embd}: it was made "
            "for another model"
        )
    layers = _layers(header, target)
    mask = header.integer(_MASK_TOKEN, -1)
    if not 0 <= mask < target.n_vocab:
        shown = "no mask token" if mask < 0 else f"the mask token {mask}"
        raise InvalidModel(
            f"{name} has {shown}, and {target.name} {target.n_vocab} tokens: convert the drafter again"
        )
    kind = _kind(header)
    rows = check_d2t(header, target)
    check_shapes(
        header,
        _layer_shapes(header, n_embd)
        | _kind_shapes(header, kind, target, rows)
        | end_shapes(header, target, n_embd, rows)
        | {
            "fc.weight": (len(layers) * n_embd, n_embd),
            "enc.output_norm.weight": (n_embd,),
            OUTPUT_NORM: (n_embd,),
        },
    )
    return BlockFile(kind, layers, _lacks(header, target, rows), _most_drafted(header, kind))


def _layers(header: GgufHeader, target: ModelFacts) -> tuple[int, ...]:
    """Layers of the target whose outputs are read."""
    # llama.cpp counts the layers that read the hidden states, so the layer before gives them.
    layers = tuple(layer - 1 for layer in header.integers("dflash.target_layers") or ())
    is_each_known = all(0 <= layer < target.n_layers - 1 for layer in layers)
    if not layers or not is_each_known or len(set(layers)) < len(layers):
        shown = ", ".join(str(layer + 1) for layer in layers) or "that it does not list"
        raise InvalidModel(
            f"{header.path.name} reads hidden states before layers {shown}, of which {target.name} has 1 to "
            f"{target.n_layers - 1}, each once: it was made for another model"
        )
    return layers


def _kind(header: GgufHeader) -> DrafterKind:
    is_dspark, is_dflash2 = _PREDECESSORS in header.tensors, _SELECTOR in header.tensors
    if is_dspark and is_dflash2:
        raise InvalidModel(
            f"{header.path.name} has both {_PREDECESSORS} and {_SELECTOR}: convert the drafter again"
        )
    if is_dspark:
        return DrafterKind.DSPARK
    return DrafterKind.DFLASH2 if is_dflash2 else DrafterKind.DFLASH


def _most_drafted(header: GgufHeader, kind: DrafterKind) -> int:
    """Most tokens of a block; the first row of most kinds foretells none."""
    block_size = header.integer("dflash.block_size", _BLOCK_SIZE)
    anchor = header.metadata.get("dflash.sample_from_anchor")
    is_anchored = kind is DrafterKind.DSPARK and (anchor is None or anchor.decode() is True)
    most_drafted = block_size - (not is_anchored)
    if not 1 <= most_drafted <= MOST_IN_BLOCK:
        raise InvalidModel(
            f"{header.path.name} drafts {most_drafted} tokens in blocks of {block_size} rows, not 1 "
            f"to {MOST_IN_BLOCK}: convert the drafter again"
        )
    return most_drafted


def _layer_shapes(header: GgufHeader, n_embd: int) -> _Shapes:
    n_layers = header.integer("dflash.block_count")
    if not 1 <= n_layers <= len(header.tensors):
        raise InvalidModel(f"{header.path.name} has {n_layers} layers")
    heads, heads_kv, head = check_heads(header, n_embd)
    value = header.integer("dflash.attention.value_length", n_embd // heads)
    if value != head:
        raise InvalidModel(
            f"{header.path.name} has keys of {head} values and values of {value}, which must be as many"
        )
    n_ff = header.integer("dflash.feed_forward_length")
    shapes: _Shapes = {}
    for layer in range(n_layers):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (n_embd,),
            f"blk.{layer}.attn_q.weight": (n_embd, head * heads),
            f"blk.{layer}.attn_k.weight": (n_embd, head * heads_kv),
            f"blk.{layer}.attn_output.weight": (head * heads, n_embd),
            f"blk.{layer}.attn_q_norm.weight": (head,),
            f"blk.{layer}.attn_k_norm.weight": (head,),
            f"blk.{layer}.ffn_norm.weight": (n_embd,),
            f"blk.{layer}.ffn_gate.weight": (n_embd, n_ff),
            f"blk.{layer}.ffn_up.weight": (n_embd, n_ff),
            f"blk.{layer}.ffn_down.weight": (n_ff, n_embd),
        }
        # Without it, keys are values.
        if (name := f"blk.{layer}.attn_v.weight") in header.tensors:
            shapes[name] = (n_embd, head * heads_kv)
    return shapes


def _kind_shapes(header: GgufHeader, kind: DrafterKind, target: ModelFacts, num_own_tokens: int) -> _Shapes:
    if kind is DrafterKind.DSPARK:
        rank = header.tensors[_PREDECESSORS].shape[0]
        shapes: _Shapes = {_PREDECESSORS: (rank, target.n_vocab), _SUCCESSORS: (rank, num_own_tokens)}
        # As llama.cpp reads it. Without the tensor, what would be read as confidences is not written.
        says = header.metadata.get("dflash.has_confidence_head")
        if _CONFIDENCE in header.tensors or says is None or says.decode() is True:
            shapes[_CONFIDENCE] = (target.n_embd + rank, 1)
        return shapes
    if kind is DrafterKind.DFLASH2:
        return _selector_shapes(header, target)
    return {}


def _selector_shapes(header: GgufHeader, target: ModelFacts) -> _Shapes:
    name, n_embd = header.path.name, target.n_embd
    rank = header.integer("dflash.selector_rank")
    count = header.integer("dflash.selector_top_k")
    # llama.cpp packs candidates and scores into a row of hidden states.
    if not 1 <= count * (count + 1) <= min(n_embd, target.n_vocab):
        raise InvalidModel(f"{name} chooses among {count} candidates, too many for rows of {n_embd} values")
    kernel = header.integer("dflash.conv_kernel_size")
    group = header.integer("dflash.conv_group_size")
    if kernel < 1 or group < 1 or n_embd % group:
        raise InvalidModel(f"{name} convolves {kernel} rows in groups of {group} of {n_embd} values")
    shapes: _Shapes = {
        "selector_predecessor.weight": (rank, target.n_vocab),
        "selector_successor.weight": (rank, target.n_vocab),
        _SELECTOR: (n_embd, rank),
    }
    for layer in range(header.integer("dflash.block_count")):
        for part in ("attn", "ffn"):
            shapes[f"blk.{layer}.{part}_conv_base"] = (n_embd, kernel, 2)
            shapes[f"blk.{layer}.{part}_conv_proj.weight"] = (n_embd, 2 * kernel * (n_embd // group))
    return shapes


def _lacks(header: GgufHeader, target: ModelFacts, num_own_tokens: int) -> tuple[str, ...]:
    """Tensors that the target has to give: a drafter with an embedding alone uses it as its head."""
    if OUTPUT in header.tensors:
        return () if EMBEDDING in header.tensors else (EMBEDDING,)
    if num_own_tokens != target.n_vocab or "d2t" in header.tensors:
        raise InvalidModel(
            f"{header.path.name} has {num_own_tokens} tokens of its own but no {OUTPUT} for them"
        )
    return () if EMBEDDING in header.tensors else (EMBEDDING, OUTPUT)
