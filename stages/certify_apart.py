"""Certifying in a process of its own: for a model that it was not made for, llama.cpp may abort.

The process hands its progress and its result back through a pipe; what it prints goes to a file, whose last
line tells why llama.cpp aborted, if it did.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import MeshError, UncuttableModel
from stages.certify import CertifyOptions, certify

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from stages.certificate import Certificate

_OUTPUT: Final = "output.txt"


def certify_apart(
    model: Path,
    cuts: Sequence[int] | None = None,
    options: CertifyOptions | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Certificate:
    """`certify` in a process of its own. Whatever becomes of it, no file and no process stays.

    Args:
        model: A whole model, a GGUF file.
        cuts: As for `certify`.
        options: As for `certify`.
        progress: Called with decodes done and decodes in all.

    Raises:
        MeshError: As `certify` does.
        UncuttableModel: If llama.cpp aborts.
    """
    spawning = multiprocessing.get_context("spawn")
    receiver, sender = spawning.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="spanmesh-certify-") as folder:
        process = spawning.Process(
            target=_certify_and_tell,
            args=(sender, model, cuts, options or CertifyOptions(), Path(folder)),
            daemon=True,
        )
        _start_deaf_to_ctrl_c(process)
        sender.close()
        try:
            return _listen(receiver, progress)
        except EOFError:
            process.join()
            raise UncuttableModel(_last_words(model, process.exitcode, Path(folder))) from None
        finally:
            process.kill()
            process.join()
            receiver.close()


def _start_deaf_to_ctrl_c(process: BaseProcess) -> None:
    """Ctrl-C reaches the whole process group: this process hears it, ends that one and cleans up."""
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)


def _listen(receiver: Connection, progress: Callable[[int, int], None] | None) -> Certificate:
    while True:
        match receiver.recv():
            case (int(done), int(total)):
                if progress is not None:
                    progress(done, total)
            case MeshError() as error:
                raise error
            case result:
                certificate: Certificate = result
                return certificate


def _last_words(model: Path, exit_code: int | None, folder: Path) -> str:
    with suppress(OSError):
        lines = (folder / _OUTPUT).read_text(errors="replace").split("\n")
        said = [line.strip() for line in lines if "GGML_ASSERT" in line or "error" in line.lower()]
        if said:
            return f"llama.cpp aborts on {model.name}, whole or cut: {Path(said[-1]).name}"
    return f"llama.cpp aborts on {model.name}, whole or cut, with exit code {exit_code}"


def _certify_and_tell(
    sender: Connection, model: Path, cuts: Sequence[int] | None, options: CertifyOptions, folder: Path
) -> None:
    """What the process does. A parent that is gone breaks the pipe, which ends it too."""
    os.environ["GGML_NO_BACKTRACE"] = "1"  # or an abort starts a debugger
    output = os.open(folder / _OUTPUT, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)

    def tell(done: int, total: int) -> None:
        sender.send((done, total))

    with suppress(BrokenPipeError):
        try:
            sender.send(certify(model, cuts, options, folder=folder, progress=tell))
        except MeshError as error:
            sender.send(error)
