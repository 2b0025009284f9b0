"""Numeric modes: exact and fast, and the devices that may compute in exact mode.

llama.cpp chooses its kernels by batch shape, so a token verified in a span of four can be rounded differently
from the same token decoded alone. On a CPU, bit equality for every batch of fewer than 64 rows needs all of
these: flash attention on, no repacked weights, the tiled matrix product off (`GGML_CPU_TILED_MM=0`), no
lone row of ggml's own attention when several threads run (over 512 or more cached positions it is split by
threads; `stages/attention/` sums in the same order for any number of them), a cache of its own for each
sequence (in a shared one a sequence also gets cells that another has freed, and either attention sums in the
order of cells, not of positions), and, for F16 and BF16 weights, a build without llamafile kernels.

In `fast` mode sequences have caches of their own, too, unless there is a GPU. In a shared one ggml's
attention visits the cells of all sequences, idle ones included. On one CPU thread, with eight slots that held
1024 positions each, a stage of ten layers then took 1.5 times as long for a token, and 2.7 times as long for
a prefill chunk. The cost of separate caches, a decode for each run of slots with as many rows instead of one
for all, was less. A GPU reads all weights for every decode, so there one decode should count for more; that
is not measured.

Exact mode promises that a row does not depend on the rows that are computed with it. Backends choose their
kernels by the number of rows, so that is a matter of measurement:

    python -m tests.qualification.device_exactness
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterable

EXACT_MAX_ROWS: Final = 63
FAST_MAX_ROWS: Final = 128
# llama.cpp rounds sizes of caches up to multiples of this.
CELLS_AT_ONCE: Final = 256
_TILED_MM: Final = "GGML_CPU_TILED_MM"


@dataclass(frozen=True)
class Numerics:
    """Settings of llama.cpp for a numeric mode."""

    exact: bool
    """Whether a row's logits do not depend on its batch."""
    max_rows: int
    """Most rows of one batch. In `fast` mode this bounds memory: llama.cpp keeps a row of logits, n_vocab
    floats, for each."""
    use_repacked_weights: bool
    """llama.cpp's `use_extra_bufts`."""
    min_rows: int
    """Spans with fewer rows are padded, and the padding dropped."""
    has_shared_cache: bool
    """Whether sequences share one KV cache. If not, or with recurrent state, llama.cpp computes together only
    consecutive slots with equally many rows each."""

    @property
    def pads_for_speed(self) -> bool:
        """Whether batches are padded to sizes that kernels compute faster, see `stages.runtime.spans`.

        Only kernels for repacked weights have such sizes.
        """
        return self.use_repacked_weights and not self.has_shared_cache

    def num_cells(self, ctx_size: int, num_slots: int) -> int:
        """Positions of the KV cache for `num_slots` sequences of `ctx_size` positions each."""
        cells = self.num_cells_seen(ctx_size, num_slots)
        return cells if self.has_shared_cache else cells * num_slots

    def num_cells_seen(self, ctx_size: int, num_slots: int) -> int:
        """Most positions that one row's attention visits: those of all sequences if they share a cache."""
        cells = ctx_size + self.min_rows - 1
        return _whole_multiple(cells * num_slots if self.has_shared_cache else cells)


class _Process:
    """State of the switch that llama.cpp reads once per process, at its first matrix product."""

    is_tiled: bool | None = None
    """Its value; None before the first mode."""


@dataclass(frozen=True)
class Verdict:
    """Measurements of a backend."""

    is_exact: bool
    """Whether its rows do not depend on their batch."""
    reason: str
    """What was found, and on which device; a part of a sentence."""


UNKNOWN: Final = Verdict(
    is_exact=False,
    reason="whether its rows depend on their batch was not measured: `python -m "
    "tests.qualification.device_exactness` measures it",
)


VERDICTS: Final[dict[str, Verdict]] = {
    "Vulkan": Verdict(
        is_exact=False,
        reason="on Mesa's software device its rows depend on their batch; `python -m "
        "tests.qualification.device_exactness` measures a card",
    ),
}
"""Verdicts by backend, as llama.cpp's names of devices begin: `CUDA`, `MTL`, `Vulkan`."""


def numerics_for(
    *,
    exact: bool,
    num_threads: int,
    has_gpu: bool = False,
    repacks: bool = True,
    attention_version: int = 0,
) -> Numerics:
    """Settings of a mode for a context with `num_threads` threads.

    Args:
        exact: Whether it is the exact mode.
        num_threads: Threads of llama.cpp.
        has_gpu: Whether layers are on a GPU.
        repacks: Whether weights may be repacked for faster kernels, which only the fast mode does.
        attention_version: What computes attention, see `stages.runtime.llama_libraries`.
    """
    if exact:
        return Numerics(
            exact=True,
            max_rows=EXACT_MAX_ROWS,
            use_repacked_weights=False,
            min_rows=2 if num_threads > 1 and not attention_version else 1,
            has_shared_cache=False,
        )
    return Numerics(
        exact=False,
        max_rows=FAST_MAX_ROWS,
        use_repacked_weights=repacks,
        min_rows=1,
        has_shared_cache=has_gpu,
    )


def _whole_multiple(cells: int) -> int:
    return -(-cells // CELLS_AT_ONCE) * CELLS_AT_ONCE


def prepare_process(numerics: Numerics) -> None:
    """Set the switch that llama.cpp reads once per process. Call before each model load.

    Raises:
        ClusterError: If this process has computed in fast mode before; exact mode is then impossible.
    """
    if numerics.exact:
        if _Process.is_tiled:
            raise ClusterError(
                "exact mode was requested in a process that has run llama.cpp in fast mode: start a new "
                "process"
            )
        if _Process.is_tiled is None:
            os.environ[_TILED_MM] = "0"
            _Process.is_tiled = False
    elif _Process.is_tiled is None:
        _Process.is_tiled = os.environ.get(_TILED_MM) != "0"


def backend_of(device: str) -> str:
    """The backend of a device, from llama.cpp's name of it: `Vulkan0` is of `Vulkan`."""
    return device.rstrip("0123456789")


def verdict_on(device: str) -> Verdict:
    """Measurements of a device's backend.

    Args:
        device: llama.cpp's name of it.
    """
    return VERDICTS.get(backend_of(device), UNKNOWN)


def exact_reasons(devices: Iterable[str]) -> str:
    """Reasons why these devices do not compute in exact mode, one for each backend."""
    reasons = {backend_of(device): verdict_on(device) for device in devices}
    return "; ".join(f"{name}: {verdict.reason}" for name, verdict in reasons.items() if not verdict.is_exact)
