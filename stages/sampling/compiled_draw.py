"""Draws in compiled code: the ids that the arrays of `stages.sampling.sampler` give, in less time.

The code is `row_sampler.c`, compiled at installation. Where it is missing, as in a plain copy of the sources,
and where a result hangs on rounding, there is no draw, and the sampler takes its arrays.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import structlog

from stages.compiled_extension import REMEDY, load_extension

if TYPE_CHECKING:
    from numpy.typing import NDArray

_EXTENSION: Final = "stages._row_sampler"

log = structlog.get_logger()


def draw(
    logits: NDArray[np.float32], key: int, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> int | None:
    """The id that wins the race among the tokens that pass the filters.

    A race of all ids comes first where there is no top-k. If its winner is not in the nucleus, which one sum
    over the row tells, nothing that ranks below it is either, and the rest races again. So no row is sorted.

    Args:
        logits: float32, shape (n_vocab,). Minus infinity excludes a token.
        key: From `stages.sampling.gumbel.position_key`.
        temperature: Above 0.
        top_k: A filter, see `stages.sampling.sampler.SamplingParams`.
        top_p: A filter.
        min_p: A filter.

    Returns:
        None if it was not decided here.
    """
    choose = _function()
    if choose is None or logits.dtype != np.float32 or not logits.flags.c_contiguous:
        return None
    log_min_p = math.log(min_p) if min_p > 0.0 else -math.inf
    token: int = choose(
        logits.ctypes.data,
        logits.size,
        key,
        temperature,
        min(top_k, logits.size),
        top_p,
        log_min_p,
    )
    return None if token < 0 else token


@functools.cache
def _function() -> Any:
    try:
        function = load_extension(_EXTENSION).row_sampler_choose
    except (ImportError, AttributeError) as error:
        log.warning("slow_sampling", reason=str(error), remedy=REMEDY)
        return None
    number = ctypes.c_double
    function.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, number, ctypes.c_size_t, number, number,
    )  # fmt: skip
    function.restype = ctypes.c_int64
    return function
