"""Trial of a file in a process of its own, which it may end."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext

    from tests.qualification.fuzz.report import Tally

_PATIENCE_S: Final = 60.0
_MODULES: Final = ("tests.qualification.fuzz.gguf_fuzz", "tests.qualification.fuzz.drafter_fuzz")


@dataclass(frozen=True)
class Trial:
    """Result of a trial."""

    step: str
    """The last step that began; `done` if all ended well."""
    error: str | None = None
    """Name of our error that ended it; None if none did."""
    raised: str | None = None
    """Another exception with its traceback; None if there was none."""
    exit_code: int | None = None
    """Of the process, if it ended without a message; negative for a signal."""
    is_hung: bool = False
    """Whether it had to be killed."""


def trials() -> ForkServerContext:
    """Context of the processes for trials: forked from one that has imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_MODULES))
    return context


def run_trial(
    context: ForkServerContext,
    attempt: Callable[..., None],
    arguments: tuple[Any, ...],
    *,
    memory_bytes: int,
) -> Trial:
    """Run an attempt in a process of its own.

    Args:
        context: From `trials`.
        attempt: A function of a module: takes a function to be called with the name of each step as it
            begins, and the arguments.
        arguments: Its arguments.
        memory_bytes: Most that the process may map.
    """
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, attempt, arguments, memory_bytes))
    process.start()
    sender.close()
    step = "starting"
    try:
        while receiver.poll(_PATIENCE_S):
            match receiver.recv():
                case Trial() as trial:
                    return trial
                case message:
                    step = message
        return Trial(step, is_hung=True)
    except EOFError:
        process.join()
        return Trial(step, exit_code=process.exitcode)
    finally:
        process.kill()
        process.join()
        receiver.close()


def _run(
    sender: Connection, attempt: Callable[..., None], arguments: tuple[Any, ...], memory_bytes: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ["GGML_NO_BACKTRACE"] = "1"  # or an abort starts a debugger
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    step = "starting"

    def begin(next_step: str) -> None:
        nonlocal step
        step = next_step
        sender.send(step)

    try:
        attempt(begin, *arguments)
    except MeshError as error:
        sender.send(Trial(step, error=type(error).__name__))
    except BaseException:  # noqa: BLE001 - whatever it is, it is a finding
        sender.send(Trial(step, raised=traceback.format_exc()))
    else:
        sender.send(Trial("done"))


def judge(tally: Tally, trial: Trial, data: bytes, may_end_in: Collection[str] = ("loading",)) -> None:
    """Count a trial, and record a failure.

    Args:
        tally: Counts of the run.
        trial: The trial.
        data: The file.
        may_end_in: Steps that the product does in a process of its own and for a limited time, so that the
            end or a standstill of llama.cpp is reported in one line, and is no failure.
    """
    if trial.step == "done":
        tally.count("loaded")
    elif trial.error is not None:
        tally.count(f"{trial.error} ({trial.step})")
    elif trial.is_hung:
        tally.count(f"hang ({trial.step})")
        if trial.step not in may_end_in:
            tally.fail("hang", data, f"no answer while {trial.step}")
    elif trial.raised is not None:
        tally.count(f"exception ({trial.step})")
        tally.fail("crash", data, trial.raised)
    else:
        tally.count(f"llama.cpp aborts ({trial.step})")
        if trial.step not in may_end_in:
            tally.fail("crash", data, f"exit code {trial.exit_code} while {trial.step}")
