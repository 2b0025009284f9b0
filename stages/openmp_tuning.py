"""OpenMP tuning: how long llama.cpp's threads compute nothing while they wait for one another.

They meet some hundred times a token. libgomp lets a thread spin for milliseconds before it sleeps, which
suits machines that do nothing else. Where another program computes, a thread that spins takes the processor
from the one that it waits for: on 2 processors beside two busy programs a token took 933 ms, and 55 where
threads sleep after a short wait. Where nothing else runs, that costs some percent. Both are printed by
`python -m tests.qualification.busy_processors`.

libgomp counts steps, of 1 to 45 ns by processor, and reads the number when it is loaded. A variable that is
already set keeps the user's value.
"""

import ctypes
import os
from contextlib import suppress
from typing import Final

from stages.compiled_extension import load_extension

SPIN_COUNT: Final = "GOMP_SPINCOUNT"
_WAIT_POLICY: Final = "OMP_WAIT_POLICY"
# Threads with equal parts of a matrix wait less for one another; to wake a sleeping one takes longer.
_SPIN_US: Final = 50.0


def spin_count() -> int:
    """Steps of libgomp's loop that take 50 µs on this processor.

    Raises:
        ImportError: Without the compiled extension.
    """
    measure = load_extension("stages._spin_wait").nanoseconds_per_spin
    measure.restype = ctypes.c_double
    step_ns: float = measure()
    return max(1, round(_SPIN_US * 1000 / step_ns))


if SPIN_COUNT not in os.environ and _WAIT_POLICY not in os.environ:
    with suppress(ImportError):
        os.environ[SPIN_COUNT] = str(spin_count())
