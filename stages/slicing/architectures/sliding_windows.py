"""Rules for sliding-window attention.

llama.cpp takes the pattern from the file, as one flag a layer, or counts it from layer 0. A stage that starts
elsewhere would count from its own first layer, hence one flag a layer, true for a window.

llama.cpp aborts on a model that has windows and no layer with one, which a stage may be: then a neighbour
with a window is added as a blank, unless a window of size 0 switches windows off.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from stages.gguf.header import Value, ValueType
from stages.slicing.architectures.rule_types import NO_BLANKS, Blanks, Rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stages.gguf.header import GgufHeader
    from stages.layers import LayerRange


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
