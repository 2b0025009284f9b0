"""When an open loop sends. Pure."""

from __future__ import annotations

import math

import numpy as np


def arrival_times_s(count: int, rate: float, burstiness: float, seed: int) -> tuple[float, ...]:
    """Times of arrival, in seconds from the start, ascending.

    The gaps are drawn from a gamma distribution with shape `burstiness`: 1 makes a Poisson process, less
    makes bursts, more makes the load even, infinity makes it constant. They are then stretched so that all
    requests arrive within `count / rate` seconds, whatever the seed. Both as in vLLM's `bench serve`.

    Args:
        count: Requests.
        rate: Requests a second; infinity lets all arrive at once.
        burstiness: Above 0.
        seed: The same seed, the same times.
    """
    if math.isinf(rate):
        return (0.0,) * count
    if math.isinf(burstiness):
        gaps = np.ones(count)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, size=count)
    times = np.cumsum(gaps)
    # So bursty a load that every gap is too small for a float comes at once, at the end of its time.
    shares = times / times[-1] if times[-1] > 0 else np.ones(count)
    return tuple((shares * (count / rate)).tolist())
