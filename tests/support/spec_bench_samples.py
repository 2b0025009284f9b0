"""Samples of a speculation benchmark, made up."""

from typing import Any

from meshbench.speculation_results import MESH, DraftCounts, Sample


def sample(turn: int = 0, setting: str = "off", tokens_per_s: float = 10.0, **fields: Any) -> Sample:
    """An answer of 11 tokens, in 10 even steps after the first."""
    step_ms = 1e3 / tokens_per_s
    where = {
        "system": MESH,
        "server": "auto with draft",
        "workload": "writing",
        "question": "81",
        "delay_ms": 5.0,
        "is_raw": False,
        "is_warm": False,
        "temperature": 0.0,
        "text": "It was a dark and stormy night.",
        "counts": DraftCounts(),
    }
    return Sample(
        turn=turn,
        setting=setting,
        num_tokens=11,
        arrivals_ms=tuple(100.0 + step_ms * step for step in range(11)),
        **{**where, **fields},
    )
