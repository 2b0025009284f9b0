"""Times of a token beside busy programs: `python -m tests.qualification.busy_processors`.

One process decodes with all processors of this machine, by turns with the waits that `stages.openmp_tuning`
sets and with those of libgomp.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Final

import click

from mesh.serve.options import demo_model
from mesh.util.child_environment import module_command
from mesh.util.printable import say
from meshbench.shared_options import model_argument
from stages.openmp_tuning import SPIN_COUNT, spin_count
from stages.process_limits import num_usable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NUM_TOKENS: Final = 40
# Where no variable is set.
_LIBGOMP_COUNT: Final = 300_000
_BUSY: Final = ("sh", "-c", "while :; do :; done")


@contextmanager
def busy_programs(number: int) -> Iterator[None]:
    """So many processes that always compute, during the block."""
    running = [subprocess.Popen(_BUSY) for _ in range(number)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def _ms_per_token(model: Path, spin_steps: int) -> float:
    arguments = (str(model), "--tokens", str(_NUM_TOKENS), "--threads", str(num_usable()))
    done = subprocess.run(
        module_command("meshbench.local_decode", *arguments),
        env={**os.environ, SPIN_COUNT: str(spin_steps)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    return float(done.stdout)


@click.command()
@model_argument
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
def main(*, model: Path | None, rounds: int) -> None:
    """Print medians for MODEL, or the demo's, beside 0, 1 and as many busy programs as processors."""
    counts = (spin_count(), _LIBGOMP_COUNT)
    for number in sorted({0, 1, num_usable()}):
        with busy_programs(number):
            pairs = [[_ms_per_token(model or demo_model(), count) for count in counts] for _ in range(rounds)]
        ours_ms, theirs_ms = (median(times) for times in zip(*pairs, strict=True))
        ratio = median(theirs / ours for ours, theirs in pairs)
        say(
            f"{number} busy programs: {ours_ms:.1f} ms a token, {theirs_ms:.1f} with libgomp's waits,"
            f" ratio {ratio:.2f}"
        )


if __name__ == "__main__":
    main()
