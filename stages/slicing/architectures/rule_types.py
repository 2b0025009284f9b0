"""Types of the rules of architectures."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from stages.graph_boundary import DEFAULT_OUTLET, GraphBoundary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from stages.gguf.header import GgufHeader, Value
    from stages.layers import LayerRange


@dataclass(frozen=True)
class Blanks:
    """Adjacent layers of a stage's file with zeros for weights, for llama.cpp to count.

    Their results are never used. Those before the stage's own layers are computed, and incoming hidden states
    replace their output; those after them are not even computed.

    Attributes:
        before: Number before the stage's own layers.
        after: Number after them; 0 at the tail.
    """

    before: int = 0
    after: int = 0

    def __or__(self, other: Blanks) -> Blanks:
        return Blanks(max(self.before, other.before), max(self.after, other.after))


NO_BLANKS: Final = Blanks()


@dataclass(frozen=True)
class Entry:
    """Entry and exit of hidden states in the graph of a family; see `stages.graph_boundary`.

    Attributes:
        inlet: Name of the tensor that they replace, by model; None if they go in as embeddings.
        outlet: Name of a layer's output.
        streams: Number of rows of the model's width that make one row of hidden states.
        takes_tokens: Whether layers of a stage use token ids.
        needs_embedding: Whether it needs their embeddings, too.
    """

    inlet: Callable[[GgufHeader], str | None] = field(default=lambda _header: None)
    outlet: str = DEFAULT_OUTLET
    streams: Callable[[GgufHeader], int] = field(default=lambda _header: 1)
    takes_tokens: Callable[[GgufHeader, LayerRange], bool] = field(default=lambda _header, _layers: False)
    needs_embedding: bool = False

    def rules(self, header: GgufHeader) -> tuple[Rule, ...]:
        """Its peculiarities, for display."""
        inlet, streams = self.inlet(header), self.streams(header)
        unusual = (
            (inlet is not None, f"enters at {inlet}", "hidden states replace this tensor"),
            (self.outlet != DEFAULT_OUTLET, f"leaves at {self.outlet}", "this tensor is a layer's output"),
            (streams > 1, f"{streams} streams", "one row of hidden states has this many widths of the model"),
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
        inlet = f"{self.outlet}-{blanks.before - 1}" if blanks.before else self.inlet(header)
        return GraphBoundary(
            row_width=header.integer(f"{header.architecture}.embedding_length") * self.streams(header),
            outlet=self.outlet,
            inlet=None if is_first else inlet,
            takes_tokens=not is_first and self.takes_tokens(header, layers),
            blanks_before=blanks.before,
            blanks_after=blanks.after,
        )


@dataclass(frozen=True)
class Family:
    """Rules of one architecture.

    Attributes:
        architecture: `general.architecture`.
        rules: Its habits.
        is_certified: Its rules have been found exact. One whose have not is cut after a self-check only.
        entry: How hidden states enter and leave its graph.
        has_uniform_layers: Every layer has the same kinds of tensors, so one that lacks a kind is damaged.
        head_falls_back_to_embedding: llama.cpp takes `token_embd.weight` as the head if there is no
            `output.weight`. Then no stage needs a filler: one without a head leaves `output.weight` out, and
            the tail stores the head under the embedding's name.
        head_rows_are_fixed: llama.cpp wants a head of just so many rows, in every stage.
        not_served: Why its models are not served at all, not even on one host; None if they are.
        has_recurrent_state: Its sessions have a state that goes back to checkpoints only.
        depends_on_batch: Rows that are computed together are rounded otherwise than one by one, in exact mode
            as well.
        per_layer_parts: Tensors outside the layers that have a part for each layer, by name: which dimension
            is cut, counted from the fastest.
    """

    architecture: str
    rules: tuple[Rule, ...] = ()
    entry: Entry = field(default_factory=Entry)
    is_certified: bool = True
    has_uniform_layers: bool = False
    head_falls_back_to_embedding: bool = False
    head_rows_are_fixed: bool = False
    not_served: str | None = None
    has_recurrent_state: bool = False
    depends_on_batch: bool = False
    per_layer_parts: Mapping[str, int] = field(default_factory=dict)

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
    """A property of llama.cpp that cutting must respect.

    Attributes:
        name: Name of a few words.
        reason: The property, in one sentence.
        derived: Metadata of a stage that differ from the generic rules'; None leaves a key out.
        refused: Cuts that cannot be exact, each with the reason.
        refused_lengths: Numbers of layers that a stage must not have, each with the reason; the whole model
            may.
        left_out: Tensors outside the layers that a stage must not have.
        blanks: Blank layers of a stage.
    """

    name: str
    reason: str
    derived: Callable[[GgufHeader, LayerRange], Mapping[str, Value | None]] = _nothing_derived
    refused: Callable[[GgufHeader], Mapping[int, str]] = _nothing_refused
    refused_lengths: Callable[[GgufHeader], Mapping[int, str]] = _nothing_refused
    left_out: Callable[[GgufHeader, LayerRange], frozenset[str]] = _nothing_left_out
    blanks: Callable[[GgufHeader, LayerRange], Blanks] = _no_blanks


def _first_reasons(refusals: Iterator[Mapping[int, str]]) -> Mapping[int, str]:
    reasons: dict[int, str] = {}
    for refused in refusals:
        for key, reason in refused.items():
            reasons.setdefault(key, reason)
    return reasons
