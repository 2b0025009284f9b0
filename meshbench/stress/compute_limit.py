"""Child process that measures what the processors can compute.

The limit of a mesh whose hosts share one machine's cores: as many workers as can be busy at once, which is
one for each core but no more than there are stages, each computing all stages one after the other for a batch
of sessions of its own, back to back. Every worker prefills its sessions' prompts and decodes all their
tokens, in batches of the given size, in the stages' own runtime with one thread; nothing is sent, queued,
detokenized or answered, and no worker ever waits. Their rates, added up, are what a mesh could answer at most
if its stages never lacked work and everything else cost nothing. All workers run at the same time, so that
what they cost each other, as two threads of one core do, is in the figure.

How large the batches are: a pipeline of S stages is full once S batches are on their way, so N sessions make
batches of N / S; with fewer cores than stages, C batches of N / C would do. The better one is the limit.

Run as a program it is one worker: it prepares, prints `ready`, waits for a line, works, prints its rate.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mesh.util.child_environment import module_command
from mesh.util.logs import set_up_logs
from meshbench.lab.host import Companion
from meshbench.paired_systems import PEERS, environment_for
from stages.layers import LayerRange
from stages.process_limits import num_usable
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.model_facts import read_model_facts
from stages.weights.virtual_stages import StageCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

_READY: Final = "ready"


def compute_limit(
    model: Path,
    edges: Sequence[int],
    *,
    num_sessions: int,
    prompt_tokens: int,
    answer_tokens: int,
    exact: bool,
    repacks: bool = True,
) -> dict[int, float]:
    """Tokens a second that all workers together compute.

    Args:
        model: A GGUF.
        edges: First layers of the stages, and the number of layers.
        num_sessions: Answered at once.
        prompt_tokens: Of each.
        answer_tokens: Of each.
        exact: Numeric mode.
        repacks: Whether weights may be repacked for faster kernels, and attention computed by spanmesh's.

    Returns:
        By the number of sessions in a batch.

    Raises:
        MeshError: If a worker ended.
    """
    num_stages = len(edges) - 1
    num_workers = min(num_usable(), num_stages)
    sizes = {ceil(num_sessions / num_stages), ceil(num_sessions / num_workers)}
    variables = {} if repacks else environment_for(PEERS)
    argv = ["env", *(f"{name}={value}" for name, value in variables.items())]
    argv += module_command("meshbench.stress.compute_limit", str(model))
    argv += ["--edges", ",".join(map(str, edges))]
    argv += ["--prompt-tokens", str(prompt_tokens), "--answer-tokens", str(answer_tokens)]
    argv += ["--exact"] * exact + ["--no-repack"] * (not repacks)
    rates: dict[int, float] = {}
    for size in sorted(sizes):
        workers = [
            Companion([*argv, "--sessions", str(size)], f"worker {number} of the compute limit")
            for number in range(num_workers)
        ]
        try:
            for worker in workers:
                worker.answer()
            for worker in workers:
                worker.tell("go")
            rates[size] = sum(float(worker.answer()) for worker in workers)
        finally:
            for worker in workers:
                worker.let_go()
                worker.wait()
    return rates


def back_to_back(
    stages: Sequence[StageRuntime], *, num_sessions: int, prompt_tokens: int, answer_tokens: int
) -> float:
    """Answer some sessions greedily in one batch, all stages one after the other; returns tokens a second."""
    # Which tokens these are makes no difference to the time.
    prompt = range(1, prompt_tokens + 1)
    lasts: list[int] = []
    start_s = time.perf_counter()
    for slot in range(num_sessions):
        for start in range(0, prompt_tokens, stages[0].max_rows):
            chunk = prompt[start : start + stages[0].max_rows]
            (logits,) = _through(stages, [Span(slot, start, chunk, num_outputs=1)])
        lasts.append(int(logits[-1].argmax()))
    for step in range(answer_tokens - 1):
        spans = [Span(slot, prompt_tokens + step, [token], num_outputs=1) for slot, token in enumerate(lasts)]
        lasts = [int(rows[-1].argmax()) for rows in _through(stages, spans)]
    return num_sessions * answer_tokens / (time.perf_counter() - start_s)


def _through(stages: Sequence[StageRuntime], spans: Sequence[Span]) -> list[NDArray[np.float32]]:
    outputs = stages[0].decode(spans)
    for stage in stages[1:]:
        outputs = stage.decode(
            [
                Span(span.slot, span.start, span.tokens, hidden, span.num_outputs)
                for span, hidden in zip(spans, outputs, strict=True)
            ]
        )
    return outputs


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--edges", required=True)
@click.option("--sessions", required=True, type=int)
@click.option("--prompt-tokens", required=True, type=int)
@click.option("--answer-tokens", required=True, type=int)
@click.option("--exact", is_flag=True)
@click.option("--no-repack", is_flag=True)
def main(
    model: Path,
    edges: str,
    sessions: int,
    prompt_tokens: int,
    answer_tokens: int,
    *,
    exact: bool,
    no_repack: bool,
) -> None:
    """One worker."""
    set_up_logs()  # to standard error: standard output is for the rate
    firsts = [int(word) for word in edges.split(",")]
    cache = StageCache()
    options = RuntimeOptions(
        num_slots=sessions,
        ctx_size=prompt_tokens + answer_tokens,
        num_threads=1,
        exact=exact,
        repacks=not no_repack,
    )
    if firsts[-1] != read_model_facts(model).n_layers:
        raise click.BadParameter(f"the last edge of {edges} is not the number of layers")
    stages = [
        StageRuntime(cache.cut(model, LayerRange(start, stop)).path, options)
        for start, stop in pairwise(firsts)
    ]
    # The first batches are slow: weights are still on disk.
    back_to_back(stages, num_sessions=sessions, prompt_tokens=prompt_tokens, answer_tokens=2)
    sys.stdout.write(f"{_READY}\n")
    sys.stdout.flush()
    sys.stdin.readline()
    rate = back_to_back(
        stages, num_sessions=sessions, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens
    )
    sys.stdout.write(f"{rate}\n")


if __name__ == "__main__":
    main()
