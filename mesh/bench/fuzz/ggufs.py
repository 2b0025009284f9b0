"""Damaged model files: ours to read and cut, llama.cpp's to load, each in a process of its own."""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

from mesh.bench.fuzz.gguf_files import hostile_files
from mesh.bench.fuzz.model_trial import Trial, trials, try_model
from mesh.bench.fuzz.small_model import small_layout, write_layout
from mesh.bench.fuzz.tally import Tally

if TYPE_CHECKING:
    from mesh.bench.fuzz.options import FuzzOptions
    from mesh.bench.fuzz.report import FuzzReport

_NUM_LAYERS: Final = 2
_NUM_TOKENS: Final = 1024
# Far more than the good file takes, far less than what a lying count asks for.
_MEMORY_BYTES: Final = 4 * 2**30


def fuzz_ggufs(options: FuzzOptions) -> FuzzReport:
    """Whatever a file says, it loads or is refused with one of our errors.

    llama.cpp may abort on a file that got past our own checks: its process is the stage's, or one made for
    the purpose, and its end is told in one line. That is counted apart, and is no failure.

    Args:
        options: What the user says; files are made from the first layers of its model.
    """
    tally = Tally("gguf", options, time.monotonic)
    # Not for secrets: the same seed must make the same files.
    random = Random(options.seed)  # noqa: S311
    context = trials()
    layout = small_layout(options.model, num_layers=_NUM_LAYERS, num_tokens=_NUM_TOKENS)
    with tempfile.TemporaryDirectory(prefix="spanmesh-fuzz-") as name:
        folder = Path(name)
        path = folder / "model.gguf"
        write_layout(options.model, layout, path)
        good = path.read_bytes()
        for data in itertools.islice(hostile_files(good, layout, random), options.num_cases):
            path.write_bytes(data)
            _judge(tally, try_model(context, path, folder, _MEMORY_BYTES), data)
    return tally.report()


def _judge(tally: Tally, trial: Trial, data: bytes) -> None:
    if trial.step == "done":
        tally.count("loaded")
    elif trial.error is not None:
        tally.count(f"{trial.error} ({trial.step})")
    elif trial.is_hung:
        tally.count(f"hang ({trial.step})")
        tally.fail("hang", data, f"no answer while {trial.step}")
    elif trial.raised is not None:
        tally.count(f"exception ({trial.step})")
        tally.fail("crash", data, trial.raised)
    else:
        tally.count(f"llama.cpp aborts ({trial.step})")
        if trial.step != "loading":
            tally.fail("crash", data, f"exit code {trial.exit_code} while {trial.step}")
