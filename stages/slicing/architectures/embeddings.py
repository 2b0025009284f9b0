"""Rules for architectures that read the token embedding again in later layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stages.gguf.header import Value, ValueType
from stages.slicing.architectures.rule_types import NO_BLANKS, Blanks, Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stages.gguf.header import GgufHeader
    from stages.layers import LayerRange

_PLE_TABLE: Final = "per_layer_token_embd.weight"


def embedding_again(applies: Callable[[GgufHeader], bool] = lambda _header: True) -> Rule:
    """The rule for families whose layers take the token's embedding besides the hidden state.

    Hidden states cannot replace the embedding then. They enter after a blank layer.

    Args:
        applies: Whether it applies to a model of the family.
    """

    def blanks(header: GgufHeader, layers: LayerRange) -> Blanks:
        return Blanks(before=1) if layers.start and applies(header) else NO_BLANKS

    return Rule(
        "embedding again",
        "layers take the token's embedding besides the hidden state: every stage gets token ids and "
        "embedding, and hidden states enter after a blank layer",
        blanks=blanks,
    )


def _shared_kv(header: GgufHeader) -> int:
    return header.integer(f"{header.architecture}.attention.shared_kv_layers", 0)


def _shared_kv_derived(header: GgufHeader, layers: LayerRange) -> Mapping[str, Value | None]:
    n_layers = header.integer(f"{header.architecture}.block_count")
    shared = _shared_kv(header) if layers.stop == n_layers else 0
    return {f"{header.architecture}.attention.shared_kv_layers": Value.of(ValueType.UINT32, shared)}


def _shared_kv_refused(header: GgufHeader) -> Mapping[int, str]:
    n_layers, shared = header.integer(f"{header.architecture}.block_count"), _shared_kv(header)
    # The last layer with a window and the last one without are used by the others.
    first = n_layers - shared - 2
    reason = f"the last {shared} layers share the KV caches of layers {first} and {first + 1}"
    return {cut: reason for cut in range(1, n_layers) if shared and cut > first}


def _shared_kv_blanks(header: GgufHeader, layers: LayerRange) -> Blanks:
    if len(layers) > 1:
        return NO_BLANKS
    n_layers = header.integer(f"{header.architecture}.block_count")
    return Blanks(after=1) if layers.stop < n_layers else Blanks(before=1)


SHARED_KV: Final = Rule(
    "shared KV",
    "the last layers have no KV cache of their own and read those of the two before them; llama.cpp "
    "requires two layers even if none shares a cache",
    derived=_shared_kv_derived,
    refused=_shared_kv_refused,
    blanks=_shared_kv_blanks,
)


def _ple_layers(header: GgufHeader) -> tuple[int, ...]:
    value = header.metadata.get(f"{header.architecture}.ple.layers")
    layers = () if value is None else value.decode()
    return tuple(int(layer) for layer in layers) if isinstance(layers, tuple) else ()


def has_ngram_layers(header: GgufHeader, layers: LayerRange) -> bool:
    """Whether one of these layers uses the last tokens."""
    return any(layers.start <= layer < layers.stop for layer in _ple_layers(header))


def _ngram_derived(header: GgufHeader, layers: LayerRange) -> Mapping[str, Value | None]:
    prefix = f"{header.architecture}.ple."
    if has_ngram_layers(header, layers):
        here = tuple(layer - layers.start for layer in _ple_layers(header))
        return {prefix + "layers": Value.array(ValueType.UINT32, here)}
    return {key: None for key in header.metadata if key.startswith(prefix)}


def _ngram_left_out(header: GgufHeader, layers: LayerRange) -> frozenset[str]:
    return frozenset() if has_ngram_layers(header, layers) else frozenset({_PLE_TABLE})


NGRAM_LAYER: Final = Rule(
    "n-gram layer",
    "one layer looks up the last tokens in a table of its own: only its stage has the table",
    derived=_ngram_derived,
    left_out=_ngram_left_out,
)


def _deepstack(header: GgufHeader) -> int:
    return header.integer(f"{header.architecture}.n_deepstack_layers", 0)


def _deepstack_derived(header: GgufHeader, layers: LayerRange) -> Mapping[str, Value | None]:
    if not layers.start or not _deepstack(header):
        return {}
    return {f"{header.architecture}.n_deepstack_layers": Value.of(ValueType.UINT32, 0)}


def _deepstack_refused(header: GgufHeader) -> Mapping[int, str]:
    n_layers, deep = header.integer(f"{header.architecture}.block_count"), _deepstack(header)
    reason = f"the first {deep} layers take what an image adds to the embedding"
    return dict.fromkeys(range(1, min(deep, n_layers)), reason)


DEEPSTACK: Final = Rule(
    "deepstack",
    "the first layers take what an image adds to the embedding: they stay in one stage",
    derived=_deepstack_derived,
    refused=_deepstack_refused,
)
