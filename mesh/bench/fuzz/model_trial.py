"""One model file on its way from disk to the first token, in a process of its own with little memory."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import MeshError
from stages.certification.isolated import cut_stage
from stages.layers import LayerRange
from stages.runtime.stage_runtime import RuntimeOptions, Span, StageRuntime
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext
    from pathlib import Path

Step = Literal["reading", "vocabulary", "cutting", "loading", "done"]

_PATIENCE_S: Final = 60.0


@dataclass(frozen=True)
class Trial:
    """How far a file came.

    Attributes:
        step: What was going on at the end; `done` if the model computed something.
        error: The name of our error that ended it; None if none did.
        raised: Another exception with its traceback; None if there was none.
        exit_code: Of the process, if it ended without a word; negative for a signal.
        is_hung: Whether it had to be killed.
    """

    step: Step
    error: str | None = None
    raised: str | None = None
    exit_code: int | None = None
    is_hung: bool = False


def trials() -> ForkServerContext:
    """Where processes for trials come from: forked from one that has imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def try_model(context: ForkServerContext, path: Path, folder: Path, memory_bytes: int) -> Trial:
    """Read, cut and load a file, and compute a few rows with its first layer.

    Args:
        context: From `trials`.
        path: The file.
        folder: For the stage file.
        memory_bytes: What the process may map at most.
    """
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_attempt, args=(sender, path, folder, memory_bytes))
    process.start()
    sender.close()
    step: Step = "reading"
    try:
        while receiver.poll(_PATIENCE_S):
            match receiver.recv():
                case Trial() as trial:
                    return trial
                case said:
                    step = said
        return Trial(step, is_hung=True)
    except EOFError:
        process.join()
        return Trial(step, exit_code=process.exitcode)
    finally:
        process.kill()
        process.join()
        receiver.close()


def _attempt(sender: Connection, path: Path, folder: Path, memory_bytes: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ["GGML_NO_BACKTRACE"] = "1"  # or an abort starts a debugger
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    step: Step = "reading"

    def tell(next_step: Step) -> None:
        nonlocal step
        step = next_step
        sender.send(step)

    try:
        read_model_facts(path)
        tell("vocabulary")
        Tokenizer(path)
        tell("cutting")
        stage = folder / "stage.gguf"
        cut_stage(path, LayerRange(0, 1), stage)
        tell("loading")
        runtime = StageRuntime(stage, RuntimeOptions(ctx_size=64))
        runtime.decode([Span(0, 0, [1, 2, 3], num_outputs=1 if runtime.info.is_tail else 0)])
        runtime.close()
    except MeshError as error:
        sender.send(Trial(step, error=type(error).__name__))
    except BaseException:  # noqa: BLE001 - whatever it is, it is what we look for
        sender.send(Trial(step, raised=traceback.format_exc()))
    else:
        sender.send(Trial("done"))
