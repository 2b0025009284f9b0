"""Hidden states that a drafter reads: which, and those of one session until its drafter takes them.

Each stage sends the features of a window's rows as soon as it has computed them, before anything is known of
the proposed tokens among them. A verdict says how many rows count.

A committed position may be computed more than once, in models that go back to checkpoints, and in a replay.
Whichever of its features are complete first are released; the others are the same, and are dropped.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from stages.transport.hidden_codec import HiddenType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

# Windows whose features may still be on their way, or wait for more; of older ones they are dropped.
_MOST_WINDOWS: Final = 64
# What is known of the features of a position: nothing, that they are wanted, that they were released.
_UNKNOWN, _WANTED, _RELEASED = range(3)


@dataclass(slots=True)
class _Window:
    """A window that asked for features."""

    start: int
    """Position of its first row."""
    has: list[int]
    """For each row a set of bits: the layers whose features are there."""
    rows: NDArray[np.float32] | None = None
    """float32 (rows, layers × n_embd); None until some are there."""
    num_valid: int | None = None
    """First rows that count; None before the verdict."""


@dataclass(frozen=True)
class FeatureRows:
    """Features of consecutive committed positions."""

    start: int
    """Position of the first row."""
    rows: NDArray[np.float32]
    """float32 (rows, layers × n_embd), the layers' features side by side."""


class FeatureStore:
    """Features of one session's windows.

    Args:
        layers: Layers whose features make a row, in the order in which the drafter reads them.
        n_embd: Values of a row of one layer.

    Attributes:
        num_wanted: Positions whose rows count, in judged windows that asked for features; each once.
        num_received: Those among them whose features arrived.
        num_known: Position up to which features of all positions arrived, from the first that was asked for.
    """

    def __init__(self, layers: Sequence[int], n_embd: int) -> None:
        self._index = {layer: index for index, layer in enumerate(layers)}
        self._n_embd = n_embd
        self._windows: OrderedDict[int, _Window] = OrderedDict()
        self._all_layers = (1 << len(layers)) - 1
        # By position. A window has few rows: loops over them cost less than calls of numpy.
        self._states = bytearray()
        self.num_wanted = 0
        self.num_received = 0
        self.num_known = 0
        self._has_begun = False
        # Runs behind a gap that earlier features may still fill: stop by start.
        self._behind_gap: dict[int, int] = {}

    def sent(self, window_id: int, start: int, num_rows: int) -> None:
        """Record a window that asks for features."""
        if not self._has_begun:
            self._has_begun, self.num_known = True, start
        self._windows[window_id] = _Window(start, [0] * num_rows)
        while len(self._windows) > _MOST_WINDOWS:
            self._windows.popitem(last=False)

    def judged(self, window_id: int, num_valid: int) -> list[FeatureRows]:
        """Record the verdict of a window; returns what is complete with it.

        Args:
            window_id: Id of the window; one that did not ask for features changes nothing.
            num_valid: Its first rows whose tokens are committed.
        """
        window = self._windows.get(window_id)
        if window is None:
            return []
        window.num_valid = min(num_valid, len(window.has))
        stop = window.start + window.num_valid
        if stop > len(self._states):
            self._states.extend(bytes(stop - len(self._states)))
        for position in range(window.start, stop):
            if self._states[position] == _UNKNOWN:
                self._states[position] = _WANTED
                self.num_wanted += 1
        return self._released(window_id, window)

    def add(
        self, window_id: int, start: int, features: Sequence[tuple[int, NDArray[np.float32]]]
    ) -> list[FeatureRows]:
        """Take features of some rows of a window; returns what is complete with them.

        Args:
            window_id: Id of the window; features of one that is void, or older than all kept, are dropped.
            start: Position of the first row.
            features: Layer and rows, float32 (rows, n_embd), for each layer of one stage.

        Raises:
            ValueError: If the rows are none of the window's, or the layer is not wanted.
        """
        window = self._windows.get(window_id)
        if window is None:
            return []
        if window.rows is None:
            window.rows = np.empty((len(window.has), len(self._index) * self._n_embd), np.float32)
        first = start - window.start
        for layer, rows in features:
            stop = first + len(rows)
            index = self._index.get(layer)
            if index is None or not 0 <= first < stop <= len(window.rows):
                raise ValueError(
                    f"features of layer {layer} at positions {start} to {start + len(rows)} were not wanted"
                )
            window.rows[first:stop, index * self._n_embd : (index + 1) * self._n_embd] = rows
            for row in range(first, stop):
                window.has[row] |= 1 << index
        return self._released(window_id, window)

    def void(self) -> None:
        """Drop windows without a verdict: they are void."""
        for window_id in [key for key, window in self._windows.items() if window.num_valid is None]:
            del self._windows[window_id]

    def _released(self, window_id: int, window: _Window) -> list[FeatureRows]:
        """Rows that count and are complete now, each position once."""
        num_valid, rows = window.num_valid, window.rows
        if num_valid is None or rows is None:
            return []
        is_new = [
            has == self._all_layers and self._states[position] != _RELEASED
            for position, has in enumerate(window.has[:num_valid], window.start)
        ]
        found = []
        for first, stop in _runs(is_new):
            found.append(FeatureRows(window.start + first, rows[first:stop]))
            self._states[window.start + first : window.start + stop] = bytes([_RELEASED]) * (stop - first)
            self.num_received += stop - first
        self._note_known(found)
        states = self._states[window.start : window.start + num_valid]
        if states.count(_RELEASED) == num_valid:
            del self._windows[window_id]
        return found

    def _note_known(self, runs: Sequence[FeatureRows]) -> None:
        for run in runs:
            self._behind_gap[run.start] = run.start + len(run.rows)
        for start in sorted(self._behind_gap):
            if start > self.num_known:
                break
            self.num_known = max(self.num_known, self._behind_gap.pop(start))
        if len(self._behind_gap) > _MOST_WINDOWS:
            # What is missing will not come any more.
            self.num_known = self._behind_gap.pop(min(self._behind_gap))


@dataclass(frozen=True)
class FeatureNeeds:
    """Features that a drafter reads."""

    layers: tuple[int, ...]
    """Layers whose outputs it reads, in its order; the number of the model's layers stands for the head
    state."""
    n_layers: int
    """Layers of the model."""
    n_embd: int
    """Values of a row of one layer."""
    hidden_type: HiddenType = HiddenType.F16
    """Format on the wire."""
    context: int = 512
    """Number of the prompt's last positions whose features are wanted."""

    def bytes_per_token(self) -> int:
        """Size of the features of one position."""
        return len(self.layers) * self.hidden_type.row_bytes(self.n_embd)


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Start and stop of each run of set flags."""
    stop = 0
    for is_set, run in itertools.groupby(flags):
        start, stop = stop, stop + sum(1 for _ in run)
        if is_set:
            yield start, stop
