"""The two numeric modes: `exact`, where a row's logits do not depend on its batch, and `fast`.

llama.cpp picks its kernels by batch shape, so a token verified in a span of four can round differently from
the same token decoded alone. On a CPU, bit-equality for every batch of fewer than 64 rows needs all of these:
flash attention on, no repacked weights, the tiled matrix product off (`GGML_CPU_TILED_MM=0`), never a lone
row when several threads run (a lone row over 512 or more cached positions splits its attention by threads), a
cache of its own for each sequence (in a shared one a sequence also gets cells that another has freed, and
attention sums in the order of cells, not of positions), and, for F16 and BF16 weights, a build without
llamafile kernels.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from spanmesh_proto.errors import ClusterError

EXACT_MAX_ROWS: Final = 63
FAST_MAX_ROWS: Final = 128

# llama.cpp makes caches of whole multiples of this.
_CELLS_AT_ONCE: Final = 256
_TILED_MM: Final = "GGML_CPU_TILED_MM"


@dataclass(frozen=True)
class Numerics:
    """What a numeric mode asks of llama.cpp.

    Attributes:
        exact: Whether a row's logits must not depend on the batch that it is in.
        max_rows: Most rows of one batch. In `fast` this bounds memory: llama.cpp keeps a row of logits,
            n_vocab floats, for each.
        use_repacked_weights: llama.cpp's `use_extra_bufts`.
        min_rows: Spans with fewer rows are filled up, and the surplus forgotten.
        has_shared_cache: Whether sequences share one KV cache. If not, llama.cpp computes together only slots
            that follow one another with equally many rows each.
    """

    exact: bool
    max_rows: int
    use_repacked_weights: bool
    min_rows: int
    has_shared_cache: bool

    def num_cells(self, ctx_size: int, num_slots: int) -> int:
        """Positions that the KV cache must have for `num_slots` sequences of `ctx_size` positions each."""
        of_one = ctx_size + self.min_rows - 1
        if self.has_shared_cache:
            return _whole_multiple(of_one * num_slots)
        return _whole_multiple(of_one) * num_slots


def numerics_for(*, exact: bool, num_threads: int) -> Numerics:
    """The settings of a mode for a context that computes with `num_threads` threads."""
    if exact:
        return Numerics(
            exact=True,
            max_rows=EXACT_MAX_ROWS,
            use_repacked_weights=False,
            min_rows=2 if num_threads > 1 else 1,
            has_shared_cache=False,
        )
    return Numerics(
        exact=False, max_rows=FAST_MAX_ROWS, use_repacked_weights=True, min_rows=1, has_shared_cache=True
    )


def _whole_multiple(cells: int) -> int:
    return -(-cells // _CELLS_AT_ONCE) * _CELLS_AT_ONCE


class _Process:
    """llama.cpp reads the switch once, at its first matrix product, for the life of the process."""

    has_computed_with_tiles = False


def prepare_process(numerics: Numerics) -> None:
    """Set what llama.cpp reads once per process. Call before each model load.

    Raises:
        ClusterError: If this process has computed in fast mode before; exact mode is then out of reach.
    """
    if numerics.exact:
        if _Process.has_computed_with_tiles:
            raise ClusterError(
                "exact mode asked for in a process that has run llama.cpp in fast mode: start a new process"
            )
        os.environ[_TILED_MM] = "0"
    elif os.environ.get(_TILED_MM) != "0":
        _Process.has_computed_with_tiles = True
