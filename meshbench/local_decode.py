"""Child process that decodes with a whole model.

Run as a program: prints milliseconds per token.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

import click

from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime

_PROMPT_TOKENS: Final = 64


def decode_ms_per_token(
    model: Path, *, num_tokens: int, num_threads: int, exact: bool, repacks: bool
) -> float:
    """Decode greedily after a prompt of 64 tokens, in the stages' own runtime.

    Args:
        model: A GGUF that was not cut.
        num_tokens: Decode steps to time.
        num_threads: Of llama.cpp.
        exact: Numeric mode.
        repacks: Whether weights may be repacked for faster kernels.
    """
    ctx_size = _PROMPT_TOKENS + num_tokens
    options = RuntimeOptions(ctx_size=ctx_size, num_threads=num_threads, exact=exact, repacks=repacks)
    runtime = StageRuntime(model, options)
    try:
        first = runtime.max_rows // 2
        position = 0
        token = 1
        # Which tokens these are makes no difference to the time.
        while position < _PROMPT_TOKENS:
            rows = min(first, _PROMPT_TOKENS - position)
            span = Span(slot=0, start=position, tokens=range(1, rows + 1), num_outputs=1)
            token = int(runtime.decode([span])[0][-1].argmax())
            position += rows
        start_s = time.perf_counter()
        for step in range(num_tokens):
            span = Span(slot=0, start=position + step, tokens=[token], num_outputs=1)
            token = int(runtime.decode([span])[0][-1].argmax())
        return (time.perf_counter() - start_s) * 1e3 / num_tokens
    finally:
        runtime.close()


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--tokens", default=128, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--exact", is_flag=True)
@click.option("--no-repack", "repacks", is_flag=True, flag_value=False, default=True)
def main(model: Path, tokens: int, threads: int, *, exact: bool, repacks: bool) -> None:
    """Print milliseconds per token of MODEL in one process."""
    took_ms = decode_ms_per_token(model, num_tokens=tokens, num_threads=threads, exact=exact, repacks=repacks)
    sys.stdout.write(f"{took_ms}\n")


if __name__ == "__main__":
    main()
