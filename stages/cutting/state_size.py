"""How large the recurrent state of a session is, as llama.cpp allocates it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stages.cutting.gguf_header import GgufHeader

_F32_BYTES: Final = 4
_USUAL_KERNEL: Final = 4


def state_bytes(header: GgufHeader) -> int:
    """Of one layer and session, at most; 0 if the metadata speak of none.

    Convolution and scan of state-space layers, gated delta layers and short convolutions, in float32.
    """
    prefix = f"{header.architecture}."

    def of(key: str, default: int = 0) -> int:
        return header.integer(prefix + key, default)

    width, heads = of("embedding_length"), _heads(header)
    kernel = max(of("ssm.conv_kernel", _USUAL_KERNEL), 1) - 1
    if lookback := of("shortconv.l_cache"):
        values = width * (lookback - 1)
    elif head := of("kda.head_dim"):
        values = 3 * kernel * heads * head + head * head * heads
    elif inner := of("ssm.inner_size"):
        size = of("ssm.state_size")
        values = kernel * (inner + 2 * of("ssm.group_count") * size) + size * inner
    else:
        head = width // heads if heads else 0
        values = head * head * heads
    return _F32_BYTES * values


def _heads(header: GgufHeader) -> int:
    key = f"{header.architecture}.attention.head_count"
    return max(header.per_layer(key, header.integer(f"{header.architecture}.block_count"), 0))
