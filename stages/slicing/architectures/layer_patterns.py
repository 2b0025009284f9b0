"""Rules by layer: leading and n-th layers, sliding windows, and layers that read the embedding again.

Of sliding windows llama.cpp takes the pattern from the file, as one flag a layer, or counts it from layer 0.
A stage that starts elsewhere would count from its own first layer, hence one flag a layer, true for a window.

llama.cpp aborts on a model that has windows and no layer with one, which a stage may be: then a neighbour
with a window is added as a blank, unless a window of size 0 switches windows off.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from stages.gguf import Value, ValueType
from stages.slicing.architectures.rule_types import NO_BLANKS, Blanks, Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from stages.gguf import GgufHeader
    from stages.layers import LayerRange

# Below the architecture's name: numbers of special leading layers.
_LEADING: Final = ("leading_dense_block_count", "hash_layer_count")
# Period of attention layers among recurrent ones, where the file has none.
_ATTENTION_INTERVAL: Final = 4
_BOTH: Final = "attention and recurrent layers"
_PLE_TABLE: Final = "per_layer_token_embd.weight"
_ACTIVATIONS: Final = "xielu."


class Bare(Enum):
    """Rule for a stage in which no layer has a window."""

    SWITCHED_OFF = "switched off"
    """The window's size is 0, which means no windows."""
    NEIGHBOUR = "neighbour"
    """The nearest layer with a window is added as a blank."""
    KEPT = "kept"
    """llama.cpp does not mind."""


@dataclass(frozen=True)
class _Windows:
    """The rule for one family."""

    period: int
    """Layers after which the pattern repeats, unless the file says otherwise."""
    dense_first: bool
    """The first layer of each period is the one without a window, else the last."""
    bare: Bare
    """What becomes of a stage without windows."""
    are_always_on: bool
    """A file without the window's size, or with 0, has windows all the same."""
    has_factors_elsewhere: bool
    """The rope factors are for layers without a window, and llama.cpp does not load a file that has them in
    vain."""

    def pattern(self, header: GgufHeader) -> tuple[bool, ...] | None:
        """For each layer of the model whether it has a window; None if the model has none."""
        prefix = f"{header.architecture}.attention.sliding_window"
        n_layers = header.integer(f"{header.architecture}.block_count")
        if not self.are_always_on and not header.integer(prefix, 0):
            return None
        key = prefix + "_pattern"
        given = header.metadata.get(key)
        if given is not None and given.count is not None:
            return tuple(bool(flag) for flag in header.per_layer(key, n_layers, 0))
        period = header.integer(key, self.period)
        bare = 0 if self.dense_first else period - 1
        return tuple(period == 0 or layer % period != bare for layer in range(n_layers))

    def derived(self, header: GgufHeader, layers: LayerRange) -> Mapping[str, Value | None]:
        whole = self.pattern(header)
        if whole is None:
            return {}
        pattern = whole[layers.start : layers.stop]
        prefix = f"{header.architecture}.attention.sliding_window"
        values: dict[str, Value | None] = {prefix + "_pattern": Value.array(ValueType.BOOL, pattern)}
        if not any(pattern) and self.bare is Bare.SWITCHED_OFF:
            values[prefix] = Value.of(ValueType.UINT32, 0)
        return values

    def left_out(self, header: GgufHeader, layers: LayerRange) -> frozenset[str]:
        pattern = self.pattern(header)
        is_vain = pattern is not None and all(pattern[layers.start : layers.stop])
        return frozenset({"rope_freqs.weight"}) if self.has_factors_elsewhere and is_vain else frozenset()

    def blanks(self, header: GgufHeader, layers: LayerRange) -> Blanks:
        pattern = self.pattern(header)
        if pattern is None or self.bare is not Bare.NEIGHBOUR or any(pattern[layers.start : layers.stop]):
            return NO_BLANKS
        # Behind the stage a blank costs nothing: the graph ends before it.
        if any(pattern[layers.stop :]):
            return Blanks(after=1 + pattern[layers.stop :].index(True))
        if any(pattern[: layers.start]):
            return Blanks(before=1 + pattern[: layers.start][::-1].index(True))
        return NO_BLANKS


def leading_layers(header: GgufHeader, layers: LayerRange) -> Mapping[str, Value | None]:
    """Number of special leading layers in a later stage."""
    values: dict[str, Value | None] = {}
    for name in _LEADING:
        key = f"{header.architecture}.{name}"
        value = header.metadata.get(key)
        if value is not None and value.count is None and layers.start and header.integer(key):
            left = max(0, header.integer(key) - layers.start)
            values[key] = Value.of(value.type, left)
    return values


LEADING_LAYERS: Final = Rule(
    "leading layers",
    "a number of first layers are dense; a later stage's metadata name how many of them it has",
    derived=leading_layers,
)


def every_nth(step: Callable[[GgufHeader], int], what: str, *, needs_one: bool = False) -> Rule:
    """The rule for a period of layers in llama.cpp's code, which no metadata can change.

    Cuts are multiples of the period. A model of no more layers has none; its stages get blanks before them,
    so that they count from layer 0, too.

    Args:
        step: Returns the period of a model; 1 and less is none.
        what: What happens every so many layers.
        needs_one: Whether llama.cpp requires such a layer in every file.
    """

    def has_multiples(header: GgufHeader) -> bool:
        return step(header) < header.integer(f"{header.architecture}.block_count")

    def refused(header: GgufHeader) -> Mapping[int, str]:
        period = step(header)
        if period <= 1 or not has_multiples(header):
            return {}
        reason = (
            f"{what} every {period} layers, counted from the file's first: cuts are multiples of {period}"
        )
        n_layers = header.integer(f"{header.architecture}.block_count")
        return {cut: reason for cut in range(1, n_layers) if cut % period}

    def blanks(header: GgufHeader, layers: LayerRange) -> Blanks:
        if step(header) <= 1 or has_multiples(header):
            return NO_BLANKS
        n_layers = header.integer(f"{header.architecture}.block_count")
        return Blanks(before=layers.start, after=n_layers - layers.stop if needs_one else 0)

    return Rule(
        "every n-th layer",
        f"{what} every n-th layer, which no metadata describe: cuts are multiples of n",
        refused=refused,
        blanks=blanks,
    )


def recurrent_flags(header: GgufHeader) -> tuple[bool, ...]:
    """Whether each layer of a model is recurrent, where every n-th has attention instead."""
    prefix = f"{header.architecture}."
    key = prefix + "attention.recurrent_layers"
    n_layers = header.integer(prefix + "block_count")
    given = header.metadata.get(key)
    if given is not None and given.count is not None:
        return tuple(bool(flag) for flag in header.per_layer(key, n_layers, 0))
    if given is not None:
        return (bool(given.decode()),) * n_layers
    interval = max(1, header.integer(prefix + "full_attention_interval", _ATTENTION_INTERVAL))
    return tuple((layer + 1) % interval != 0 for layer in range(n_layers))


def _recurrent_derived(header: GgufHeader, layers: LayerRange) -> Mapping[str, Value | None]:
    flags = recurrent_flags(header)[layers.start : layers.stop]
    return {f"{header.architecture}.attention.recurrent_layers": Value.array(ValueType.BOOL, flags)}


RECURRENT_LAYERS: Final = Rule(
    "recurrent layers",
    "every n-th layer has attention, the others a recurrent state; written out for the stage's layers",
    derived=_recurrent_derived,
)


def _heads_everywhere(header: GgufHeader, layers: LayerRange) -> Mapping[str, Value | None]:
    key = f"{header.architecture}.attention.head_count"
    value = header.metadata.get(key)
    if value is None or value.count is None:
        return {}
    heads = header.per_layer(key, header.integer(f"{header.architecture}.block_count"), 0)
    most = max(heads)
    here = heads[layers.start : layers.stop]
    return {key: Value.array(value.type, tuple(count or most for count in here))}


HEADS_EVERYWHERE: Final = Rule(
    "heads of the first layer",
    "the size of a head is taken from the first layer, which may have no attention in a stage; layers "
    "without attention are recognised by their KV heads",
    derived=_heads_everywhere,
)


def _must_start_with_heads(header: GgufHeader) -> Mapping[int, str]:
    n_layers = header.integer(f"{header.architecture}.block_count")
    heads = header.per_layer(f"{header.architecture}.attention.head_count", n_layers, 0)
    return {
        cut: "the size of a head is taken from the first layer, and this one has no attention"
        for cut in range(1, n_layers)
        if not heads[cut]
    }


STARTS_WITH_HEADS: Final = Rule(
    "heads of the first layer",
    "the size of a head is taken from the first layer, which must have attention",
    refused=_must_start_with_heads,
)


def _indexers(default: Callable[[GgufHeader, int], bool]) -> Callable[[GgufHeader], tuple[bool, ...]]:
    def flags(header: GgufHeader) -> tuple[bool, ...]:
        key = f"{header.architecture}.attention.indexer.types"
        n_layers = header.integer(f"{header.architecture}.block_count")
        given = header.metadata.get(key)
        if given is None:
            return tuple(default(header, layer) for layer in range(n_layers))
        return tuple(bool(flag) for flag in header.per_layer(key, n_layers, 0))

    return flags


def shared_indexers(
    default: Callable[[GgufHeader, int], bool], has_attention: Callable[[GgufHeader, int], bool]
) -> Rule:
    """The rule for layers that attend to the choice of an earlier layer's indexer.

    Args:
        default: Whether a layer has an indexer of its own where the file does not say.
        has_attention: Whether a layer has attention.
    """
    flags_of = _indexers(default)

    def derived(header: GgufHeader, layers: LayerRange) -> Mapping[str, Value | None]:
        flags = flags_of(header)[layers.start : layers.stop]
        key = f"{header.architecture}.attention.indexer.types"
        return {key: Value.array(ValueType.UINT32, tuple(int(flag) for flag in flags))}

    def refused(header: GgufHeader) -> Mapping[int, str]:
        flags = flags_of(header)
        reasons = {}
        for cut in range(1, len(flags)):
            after = (layer for layer in range(cut, len(flags)) if has_attention(header, layer))
            first = next(after, None)
            if first is not None and not flags[first]:
                reasons[cut] = (
                    "the first layer with attention takes over what an earlier layer's indexer chose"
                )
        return reasons

    return Rule(
        "shared indexers",
        "some layers attend to what an earlier layer's indexer chose, which must be in the same stage",
        derived=derived,
        refused=refused,
    )


# Without one llama.cpp fails on empty caches, or, in hybrid models, on unused inputs of its graph, which have
# no memory. A blank's inputs are in the graph, whether it is computed or not.
#
# A stage without one gets the nearest as a blank: after its layers where possible, since the graph ends
# before that.
def layer_patterns(kinds_of: Callable[[GgufHeader], Iterable[Sequence[bool]]], what: str) -> Rule:
    """The rule for kinds of layers that every stage must have.

    Args:
        kinds_of: Returns for each kind which layers of a model are of it.
        what: Names of the kinds.
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


# Layers without KV heads are recurrent.
HYBRID: Final = layer_patterns(_attention_and_recurrent, _BOTH)


# Those with an FFN are neither: they have nothing else.
HYBRID_WITH_FFN: Final = layer_patterns(_attention_and_mamba, _BOTH)


def _attention_by_interval(header: GgufHeader) -> Iterable[Sequence[bool]]:
    is_recurrent = recurrent_flags(header)
    return tuple(not flag for flag in is_recurrent), is_recurrent


# The metadata list recurrent layers, or every n-th is not recurrent.
HYBRID_BY_INTERVAL: Final = layer_patterns(_attention_by_interval, _BOTH)


def _sparse(header: GgufHeader) -> Iterable[Sequence[bool]]:
    leading = header.integer(f"{header.architecture}.leading_dense_block_count", 0)
    return (tuple(layer >= leading for layer in range(_n_layers(header))),)


SPARSE: Final = layer_patterns(_sparse, "sparse attention")


def _without_window(header: GgufHeader) -> Iterable[Sequence[bool]]:
    key = f"{header.architecture}.attention.sliding_window_pattern"
    return (tuple(not flag for flag in header.per_layer(key, _n_layers(header), 0)),)


NO_WINDOW: Final = layer_patterns(_without_window, "layers without window")


def _compressed(header: GgufHeader) -> Iterable[Sequence[bool]]:
    ratios = header.per_layer(f"{header.architecture}.attention.compress_ratios", _n_layers(header), 0)
    return (tuple(one == ratio for one in ratios) for ratio in sorted({*ratios} - {0}))


COMPRESSED: Final = layer_patterns(_compressed, "compressed attention of every kind")


def windows(
    period: int = 0,
    *,
    dense_first: bool = False,
    bare: Bare = Bare.NEIGHBOUR,
    are_always_on: bool = False,
    has_factors_elsewhere: bool = False,
) -> Rule:
    """The rule for sliding windows.

    Args:
        period: Layers after which the pattern repeats, unless the file says otherwise; 0 if it always does.
        dense_first: The first layer of each period is the one without a window, else the last.
        bare: What becomes of a stage without windows.
        are_always_on: A file without the window's size, or with 0, has windows all the same.
        has_factors_elsewhere: The rope factors are for layers without a window only.
    """
    habit = _Windows(period, dense_first, bare, are_always_on, has_factors_elsewhere)
    given = (
        f"counted from layer 0, with period {period} unless the file says so"
        if period
        else "one flag per layer"
    )
    return Rule(
        "windows",
        f"which layers have a sliding window is {given}: written out for the stage's layers",
        derived=habit.derived,
        left_out=habit.left_out,
        blanks=habit.blanks,
    )


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
    return header.integers(f"{header.architecture}.ple.layers") or ()


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
    reason = (
        f"the first {deep} layers take what an image adds to the embedding, and llama.cpp aborts where they "
        "are the last of a file"
    )
    # The addition is behind a layer's output, so a stage that ended with the last of them would lose it, too.
    return dict.fromkeys(range(1, min(deep + 1, n_layers)), reason) if deep else {}


DEEPSTACK: Final = Rule(
    "deepstack",
    "the first layers take what an image adds to the embedding: they stay in one stage",
    derived=_deepstack_derived,
    refused=_deepstack_refused,
)


def _activations(header: GgufHeader, layers: LayerRange) -> Mapping[str, Value | None]:
    n_layers = _n_layers(header)
    return {
        key: value.cut(layers.start, layers.stop)
        for key, value in header.metadata.items()
        if key.startswith(_ACTIVATIONS) and value.count == n_layers
    }


ACTIVATIONS: Final = Rule(
    "activations",
    "each layer's activation has numbers of its own, listed outside the architecture's metadata: a stage has "
    "those of its layers",
    derived=_activations,
)


def _before_last(header: GgufHeader, layers: LayerRange) -> Blanks:
    return Blanks(after=1) if layers.stop < _n_layers(header) else NO_BLANKS


LAST_LAYER_RENAMED: Final = Rule(
    "last layer renamed",
    "llama.cpp names a layer's output as the input of the next one, which the last layer of a file does not "
    "have: a blank layer follows those of a stage",
    blanks=_before_last,
)
