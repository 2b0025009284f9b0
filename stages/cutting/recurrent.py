"""What recurrent layers keep of a sequence, whatever its length, as llama.cpp lays it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stages.gguf.header import GgufHeader, TensorInfo

# Names of tensors, after `blk.<layer>.`, that only layers with such a state have: Mamba and the gated delta
# rules, RWKV, short convolutions.
_MARKS: Final = ("ssm_", "time_mix_", "shortconv.")
# MiniMax's lightning attention has a state, but no tensors of its own: all layers but each eighth.
_MINIMAX: Final = "minimax-01"
_MINIMAX_INTERVAL: Final = 8
_TOKEN_SHIFTS: Final = 2
_KDA_KERNEL: Final = 4


def state_widths(header: GgufHeader, layers: Sequence[Sequence[TensorInfo]]) -> tuple[int, ...]:
    """Float32 elements that one sequence takes in each layer; 0 for those with attention alone.

    The formulas are those of llama.cpp's `llama_hparams::n_embd_r` and `n_embd_s`: what a convolution must
    remember of the rows before, and the state proper.

    Args:
        header: Of the file.
        layers: The tensors of each layer.
    """
    width = _convolution_width(header) + _state_width(header)
    return tuple(width if _is_recurrent(header, index, layer) else 0 for index, layer in enumerate(layers))


def _is_recurrent(header: GgufHeader, index: int, layer: Sequence[TensorInfo]) -> bool:
    if header.architecture == _MINIMAX:
        interval = header.integer(f"{_MINIMAX}.full_attention_interval", _MINIMAX_INTERVAL)
        return (index + 1) % max(interval, 1) != 0
    # blk.<layer>.<kind>
    return any(tensor.name.split(".", 2)[-1].startswith(_MARKS) for tensor in layer)


def _convolution_width(header: GgufHeader) -> int:
    n_embd, kernel = _number(header, "embedding_length"), _number(header, "ssm.conv_kernel")
    if _number(header, "wkv.head_size"):
        return _number(header, "token_shift_count", _TOKEN_SHIFTS) * n_embd
    if _number(header, "shortconv.l_cache"):
        return n_embd * (_number(header, "shortconv.l_cache") - 1)
    if _number(header, "kda.head_dim"):
        return 3 * ((kernel or _KDA_KERNEL) - 1) * _n_heads(header) * _number(header, "kda.head_dim")
    groups = 2 * _number(header, "ssm.group_count") * _number(header, "ssm.state_size")
    return max(kernel - 1, 0) * (_number(header, "ssm.inner_size") + groups)


def _state_width(header: GgufHeader) -> int:
    n_embd, n_heads = _number(header, "embedding_length"), _n_heads(header)
    if _number(header, "wkv.head_size"):
        return n_embd * _number(header, "wkv.head_size")
    if _number(header, "kda.head_dim"):
        return _number(header, "kda.head_dim") ** 2 * n_heads
    if header.architecture == _MINIMAX:
        return _number(header, "attention.key_length", n_embd // max(n_heads, 1)) ** 2 * n_heads
    return _number(header, "ssm.state_size") * _number(header, "ssm.inner_size")


def _number(header: GgufHeader, key: str, default: int = 0) -> int:
    """Of the model's own metadata."""
    return header.integer(f"{header.architecture}.{key}", default)


def _n_heads(header: GgufHeader) -> int:
    """Of the first layer, as llama.cpp takes them for this; of the one with most if they differ."""
    key = f"{header.architecture}.attention.head_count"
    value = header.metadata.get(key)
    if value is None or value.count is None:
        return header.integer(key, 0)
    return max(header.per_layer(key, value.count, 0), default=0)
