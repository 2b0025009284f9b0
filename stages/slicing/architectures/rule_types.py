"""Types of the rules of architectures."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from stages.graph_boundary import DEFAULT_OUTLET, GraphBoundary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from stages.gguf import GgufHeader, Value
    from stages.layers import LayerRange


@dataclass(frozen=True)
class Blanks:
    """Adjacent layers of a stage's file with zeros for weights, for llama.cpp to count.

    Their results are never used. Those before the stage's own layers are computed, and incoming hidden states
    replace their output; those after them are not even computed.
    """

    before: int = 0
    """Number before the stage's own layers."""
    after: int = 0
    """Number after them; 0 at the tail."""

    def __or__(self, other: Blanks) -> Blanks:
        return Blanks(max(self.before, other.before), max(self.after, other.after))


NO_BLANKS: Final = Blanks()


@dataclass(frozen=True)
class Entry:
    """Entry and exit of hidden states in the graph of a family; see `stages.graph_boundary`."""

    inlet: Callable[[GgufHeader], str | None] = field(default=lambda _header: None)
    """Name of the tensor that they replace, by model; None if they go in as embeddings."""
    outlet: str = DEFAULT_OUTLET
    """Name of a layer's output."""
    outlet_shift: int = 0
    """1 if it has the number of the next layer, as the input of which llama.cpp names it."""
    streams: Callable[[GgufHeader], int] = field(default=lambda _header: 1)
    """Number of rows of the model's width that make one row of hidden states."""
    takes_tokens: Callable[[GgufHeader, LayerRange], bool] = field(default=lambda _header, _layers: False)
    """Whether layers of a stage use token ids."""
    needs_embedding: bool = False
    """Whether it needs their embeddings, too."""
    takes_rows: bool = False
    """Whether rows that are no tokens, as they entered the first stage, go in there in place of token ids."""
    barred_tokens: range = range(0)
    """Tokens that llama.cpp bars from being sampled, in the first row of a batch only."""
    marks_all_rows: bool = False
    """Whether its head does not gather the rows that are marked as outputs."""

    def rules(self, header: GgufHeader) -> tuple[Rule, ...]:
        """Its peculiarities, for display."""
        inlet, streams = self.inlet(header), self.streams(header)
        unusual = (
            (inlet is not None, f"enters at {inlet}", "hidden states replace this tensor"),
            (self.outlet != DEFAULT_OUTLET, f"leaves at {self.outlet}", "this tensor is a layer's output"),
            (streams > 1, f"{streams} streams", "one row of hidden states has this many widths of the model"),
            (bool(self.barred_tokens), "barred tokens", "llama.cpp bars them in the first row only"),
            (self.marks_all_rows, "all rows are outputs", "the head does not gather marked rows"),
        )
        return tuple(Rule(name, reason) for is_unusual, name, reason in unusual if is_unusual)

    def handover(self, header: GgufHeader, layers: LayerRange, blanks: Blanks = NO_BLANKS) -> GraphBoundary:
        """Of a stage of these layers.

        Args:
            header: Of the whole model.
            layers: Which of its layers.
            blanks: What the stage's file holds besides.
        """
        is_first = layers.start == 0
        after_blanks = f"{self.outlet}-{blanks.before - 1 + self.outlet_shift}"
        inlet = after_blanks if blanks.before else self.inlet(header)
        n_layers = header.integer(f"{header.architecture}.block_count")
        uses_tokens = self.takes_tokens(header, layers)
        return GraphBoundary(
            row_width=header.integer(f"{header.architecture}.embedding_length") * self.streams(header),
            outlet=self.outlet,
            outlet_shift=self.outlet_shift,
            inlet=None if is_first else inlet,
            takes_tokens=not is_first and uses_tokens,
            takes_rows=not is_first and uses_tokens and self.takes_rows,
            hands_on_rows=layers.stop < n_layers and uses_tokens and self.takes_rows,
            marks_all_rows=self.marks_all_rows,
            barred_from=self.barred_tokens.start,
            barred_to=self.barred_tokens.stop,
            blanks_before=blanks.before,
            blanks_after=blanks.after,
        )


@dataclass(frozen=True)
class Family:
    """Rules of one architecture."""

    architecture: str
    """`general.architecture`."""
    rules: tuple[Rule, ...] = ()
    """Its habits."""
    entry: Entry = field(default_factory=Entry)
    """How hidden states enter and leave its graph."""
    has_uniform_layers: bool = False
    """Every layer has the same kinds of tensors, so one that lacks a kind is damaged."""
    head_falls_back_to_embedding: bool = False
    """llama.cpp takes `token_embd.weight` as the head if there is no `output.weight`. Then no stage needs a
    filler: one without a head leaves `output.weight` out, and the tail stores the head under the embedding's
    name."""
    head_rows_are_fixed: bool = False
    """llama.cpp wants a head of just so many rows, in every stage."""
    not_served: str | None = None
    """Why its models are not served at all, not even on one host; None if they are."""
    has_recurrent_state: bool = False
    """Its sessions have a state that goes back to checkpoints only."""
    depends_on_batch: bool = False
    """Rows that are computed together are rounded otherwise than one by one, in exact mode as well."""
    per_layer_parts: Mapping[str, int] = field(default_factory=dict)
    """Tensors outside the layers that have a part for each layer, by name: which dimension is cut, counted
    from the fastest."""

    def derived(self, header: GgufHeader, layers: LayerRange) -> Mapping[str, Value | None]:
        """Metadata of a stage by the rules, None for what is left out."""
        return dict(item for rule in self.rules for item in rule.derived(header, layers).items())

    def refused(self, header: GgufHeader) -> Mapping[int, str]:
        """Cuts of a model that cannot be exact, each with the first reason."""
        return _first_reasons(rule.refused(header) for rule in self.rules)

    def refused_lengths(self, header: GgufHeader) -> Mapping[int, str]:
        """Numbers of layers that no stage of a model may have, each with the first reason."""
        return _first_reasons(rule.refused_lengths(header) for rule in self.rules)

    def blanks(self, header: GgufHeader, layers: LayerRange) -> Blanks:
        """Layers that a stage's file needs besides its own."""
        return functools.reduce(
            Blanks.__or__, (rule.blanks(header, layers) for rule in self.rules), NO_BLANKS
        )

    def left_out(self, header: GgufHeader, layers: LayerRange) -> frozenset[str]:
        """Tensors outside the layers that a stage must not have."""
        return frozenset[str]().union(*(rule.left_out(header, layers) for rule in self.rules))


def _nothing_derived(_header: GgufHeader, _layers: LayerRange) -> Mapping[str, Value | None]:
    return {}


def _nothing_refused(_header: GgufHeader) -> Mapping[int, str]:
    return {}


def _no_blanks(_header: GgufHeader, _layers: LayerRange) -> Blanks:
    return NO_BLANKS


def _nothing_left_out(_header: GgufHeader, _layers: LayerRange) -> frozenset[str]:
    return frozenset()


@dataclass(frozen=True)
class Rule:
    """A property of llama.cpp that cutting must respect."""

    name: str
    """Name of a few words."""
    reason: str
    """The property, in one sentence."""
    derived: Callable[[GgufHeader, LayerRange], Mapping[str, Value | None]] = _nothing_derived
    """Metadata of a stage that differ from the generic rules'; None leaves a key out."""
    refused: Callable[[GgufHeader], Mapping[int, str]] = _nothing_refused
    """Cuts that cannot be exact, each with the reason."""
    refused_lengths: Callable[[GgufHeader], Mapping[int, str]] = _nothing_refused
    """Numbers of layers that a stage must not have, each with the reason; the whole model may."""
    left_out: Callable[[GgufHeader, LayerRange], frozenset[str]] = _nothing_left_out
    """Tensors outside the layers that a stage must not have."""
    blanks: Callable[[GgufHeader, LayerRange], Blanks] = _no_blanks
    """Blank layers of a stage."""


def _first_reasons(refusals: Iterator[Mapping[int, str]]) -> Mapping[int, str]:
    reasons: dict[int, str] = {}
    for refused in refusals:
        for key, reason in refused.items():
            reasons.setdefault(key, reason)
    return reasons
