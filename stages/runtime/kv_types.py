"""KV cache formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class KvType:
    """Format of keys and values."""

    name: str
    """llama.cpp's name."""
    number: int
    """`ggml_type` in llama.cpp and GGUF files."""
    block_width: int
    """Elements that are packed together; a head must consist of whole blocks."""
    block_bytes: int
    """Size of a block."""

    @property
    def is_quantised(self) -> bool:
        """Whether elements share a scale."""
        return self.block_width > 1

    def num_bytes(self, width: int) -> int:
        """Size of `width` elements, whole blocks of them."""
        return width // self.block_width * self.block_bytes


_TABLE: Final = (
    KvType("f32", 0, 1, 4),
    KvType("f16", 1, 1, 2),
    KvType("bf16", 30, 1, 2),
    KvType("q8_0", 8, 32, 34),
    KvType("q5_1", 7, 32, 24),
    KvType("q5_0", 6, 32, 22),
    KvType("q4_1", 3, 32, 20),
    KvType("q4_0", 2, 32, 18),
    KvType("iq4_nl", 20, 32, 18),
)

KV_TYPES: Final[Mapping[str, KvType]] = {kv_type.name: kv_type for kv_type in _TABLE}
"""By name, the most exact first."""


def check_kv_type(name: str, model: str, head_widths: tuple[int, ...], *, option: str) -> None:
    """Check that a model's heads can have a format.

    Args:
        name: Name of the format.
        model: Name of the model, for the message.
        head_widths: Elements of a key head and of a value head.
        option: Option with the format, for the message.

    Raises:
        ClusterError: If there is no such format, or a head is not a whole number of its blocks.
    """
    if name not in KV_TYPES:
        raise ClusterError(f"{option} is {name}: it must be one of {', '.join(KV_TYPES)}", param=option)
    if fits_heads(KV_TYPES[name], head_widths):
        return
    block_width = KV_TYPES[name].block_width
    odd = next(width for width in head_widths if width % block_width)
    fitting = [each.name for each in _TABLE if fits_heads(each, head_widths)]
    raise ClusterError(
        f"{option} {name} packs {block_width} elements together, but a head of {model} has {odd}: choose "
        f"{', '.join(fitting[:-1])} or {fitting[-1]}",
        param=option,
    )


def fits_heads(kv_type: KvType, head_widths: tuple[int, ...]) -> bool:
    """Whether heads of these widths are whole numbers of blocks."""
    return all(width % kv_type.block_width == 0 for width in head_widths)
