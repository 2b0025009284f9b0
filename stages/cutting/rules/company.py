"""Kinds of layers of which llama.cpp wants at least one in a file.

Without one it fails on caches that are empty, or, in hybrid models, on inputs of its graph that nothing reads
and that have no memory therefore. A blank's inputs are the graph's, whether it is computed or not.

A stage without one gets the nearest as a blank: behind it where it can, since the graph ends before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stages.cutting.family import Blanks, Rule
from stages.cutting.rules.counted import recurrent_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from stages.gguf.header import GgufHeader
    from stages.layers import LayerRange


def company(kinds_of: Callable[[GgufHeader], Iterable[Sequence[bool]]], what: str) -> Rule:
    """The rule for kinds of layers that no stage may lack.

    Args:
        kinds_of: For each kind, which layers of a model are of it.
        what: What they are called.
    """

    def blanks(header: GgufHeader, layers: LayerRange) -> Blanks:
        before = after = 0
        for flags in kinds_of(header):
            above, below = list(flags[layers.stop :]), list(flags[: layers.start])[::-1]
            if any(flags[layers.start : layers.stop]):
                continue
            if any(above):
                after = max(after, 1 + above.index(True))
            elif any(below):
                before = max(before, 1 + below.index(True))
        return Blanks(before, after)

    return Rule(
        f"needs {what}",
        f"llama.cpp fails on a file without {what}: the nearest is added as a blank",
        blanks=blanks,
    )


def _n_layers(header: GgufHeader) -> int:
    return header.integer(f"{header.architecture}.block_count")


def _kv_heads(header: GgufHeader) -> tuple[int, ...]:
    return header.per_layer(f"{header.architecture}.attention.head_count_kv", _n_layers(header), 1)


def _attention_and_recurrent(header: GgufHeader) -> Iterable[Sequence[bool]]:
    attends = tuple(count > 0 for count in _kv_heads(header))
    return attends, tuple(not flag for flag in attends)


def _attention_and_mamba(header: GgufHeader) -> Iterable[Sequence[bool]]:
    widths = header.per_layer(f"{header.architecture}.feed_forward_length", _n_layers(header), 0)
    heads = tuple(zip(_kv_heads(header), widths, strict=True))
    return (
        tuple(bool(count) and not width for count, width in heads),
        tuple(not count and not width for count, width in heads),
    )


_BOTH: Final = "attention and recurrent layers"
# Layers without KV heads are recurrent.
HYBRID: Final = company(_attention_and_recurrent, _BOTH)
# Those that have an FFN are neither: it is all there is to them.
HYBRID_WITH_FFN: Final = company(_attention_and_mamba, _BOTH)


def _attention_by_interval(header: GgufHeader) -> Iterable[Sequence[bool]]:
    is_recurrent = recurrent_flags(header)
    return tuple(not flag for flag in is_recurrent), is_recurrent


# Metadata say which layers are recurrent, or every n-th is not.
HYBRID_BY_INTERVAL: Final = company(_attention_by_interval, _BOTH)


def _sparse(header: GgufHeader) -> Iterable[Sequence[bool]]:
    leading = header.integer(f"{header.architecture}.leading_dense_block_count", 0)
    return (tuple(layer >= leading for layer in range(_n_layers(header))),)


SPARSE: Final = company(_sparse, "sparse attention")


def _without_window(header: GgufHeader) -> Iterable[Sequence[bool]]:
    key = f"{header.architecture}.attention.sliding_window_pattern"
    return (tuple(not flag for flag in header.per_layer(key, _n_layers(header), 0)),)


NO_WINDOW: Final = company(_without_window, "layers without window")


def _compressed(header: GgufHeader) -> Iterable[Sequence[bool]]:
    ratios = header.per_layer(f"{header.architecture}.attention.compress_ratios", _n_layers(header), 0)
    return (tuple(one == ratio for one in ratios) for ratio in sorted({*ratios} - {0}))


COMPRESSED: Final = company(_compressed, "compressed attention of every kind")
