"""Time that the tail takes to draw a token, with arrays of numpy and in compiled code, in one run.

    python -m tests.qualification.sampling_time

Rows have a broad hump of logits and a few likely tokens, as those of models do. Each row is drawn both ways,
one after the other; ids that differ end the program with 1.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Final

import click
import numpy as np

from meshbench.report_tools import markdown_table
from stages.sampling.gumbel import position_key
from stages.sampling.sampler import SamplingParams, draw_by_arrays, draw_compiled

_VOCABULARIES: Final = (49_152, 151_936, 262_144)
_FILTERS: Final = {
    "none": SamplingParams(1.0),
    "top-k 40": SamplingParams(1.0, top_k=40),
    "top-p 0.95": SamplingParams(1.0, top_p=0.95),
    "min-p 0.05": SamplingParams(1.0, min_p=0.05),
    "all three": SamplingParams(1.0, top_k=40, top_p=0.95, min_p=0.05),
}
_NUM_ROWS: Final = 8


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--draws", "num_draws", type=click.IntRange(1), default=200, show_default=True)
def main(num_draws: int) -> None:
    """Print medians in ms, and whether all ids were the same."""
    table = []
    num_different = num_undecided = 0
    for n_vocab in _VOCABULARIES:
        random = np.random.default_rng(n_vocab)
        rows = (3.0 * random.standard_normal((_NUM_ROWS, n_vocab))).astype(np.float32)
        for row in rows:
            row[random.integers(0, n_vocab, 30)] += (15.0 * random.random(30)).astype(np.float32)
        for name, sampling in _FILTERS.items():
            arrays_ms, compiled_ms = [], []
            for position in range(num_draws):
                row, key = rows[position % _NUM_ROWS], position_key(1, position)
                start_s = time.perf_counter()
                expected = draw_by_arrays(row, float(row.max()), key, sampling)
                middle_s = time.perf_counter()
                drawn = draw_compiled(row, key, sampling)
                compiled_ms.append(1e3 * (time.perf_counter() - middle_s))
                arrays_ms.append(1e3 * (middle_s - start_s))
                num_undecided += drawn is None
                num_different += drawn not in (None, expected)
            slow, fast = median(arrays_ms), median(compiled_ms)
            table.append([f"{n_vocab:,}", name, f"{slow:.2f}", f"{fast:.2f}", f"{fast / slow:.2f}"])
    click.echo(markdown_table(["vocabulary", "filters", "arrays ms", "compiled ms", "ratio"], table))
    num_all = num_draws * len(table)
    click.echo(f"\n{num_all} draws: {num_different} different, {num_undecided} left to the arrays")
    sys.exit(num_different > 0)


if __name__ == "__main__":
    main()
