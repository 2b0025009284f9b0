"""From one head to the next: what a crashed `mesh serve` left, and what this one leaves should it crash."""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NoReturn

import structlog

from mesh.serve.head_state import (
    HeadState,
    HeadStateFile,
    default_state_path,
    fingerprint,
)
from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from spanmesh_proto.errors import ClusterError
from stages.cancellable_work import CancellableWork
from stages.gguf.reader import part_paths
from stages.weights.hashing import stamps_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mesh.serve.options import ServeOptions
    from mesh.serve.preflight import Preflight

log = structlog.get_logger()

_LOOK_S: Final = 0.5
# Between attempts to write, each twice as long as the one before.
_LONGEST_PAUSE_S: Final = 30.0
# So long the answer to an order that was carried out waits for that to be written down.
_PATIENCE_S: Final = 10.0


class Succession:
    """What one head knows of the one before it, and writes down for the one after it.

    Args:
        file: Where; None if nobody is to take over.
        former: What a head that crashed has left.
        term: Of this head.
        patience_s: How long `written` waits.

    Attributes:
        failure: Why the file is not up to date, for a person; None while it is.
    """

    def __init__(
        self,
        file: HeadStateFile | None,
        former: HeadState | None,
        term: int,
        *,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._file = file
        self._patience_s = patience_s
        self._is_asked = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self.former = former
        self.term = term
        self.failure: str | None = None

    async def keep(self, read: Callable[[], HeadState]) -> NoReturn:
        """Keep the file up to date until cancelled; what cannot be written is tried again.

        Args:
            read: Gives the state as it is now.
        """
        written: HeadState | None = None
        pause_s = _LOOK_S
        try:
            while True:
                self._is_asked.clear()
                waiting, self._waiting = self._waiting, []
                state = read()
                try:
                    if self._file is not None and state != written:
                        await self._write(self._file, state)
                        written = state
                except OSError as error:
                    self.failure = error.strerror or str(error)
                    log.warning("head_state_not_written", reason=self.failure, again_in_s=pause_s)
                    self._waiting = waiting + self._waiting
                    await self._asked_within(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    continue
                if self.failure is not None:
                    log.info("head_state_written_again")
                self.failure, pause_s = None, _LOOK_S
                for asked in waiting:
                    _settle(asked)
                await self._asked_within(_LOOK_S)
        finally:
            # From here on there is nothing to take over: the file is cleared.
            self._file = None
            for asked in (*waiting, *self._waiting):
                _settle(asked)

    async def written(self) -> None:
        """Return once the state as it is now is written down, and no crash of this head undoes it.

        Raises:
            ClusterError: If that takes too long; it is tried further.
        """
        if self._file is None:
            return
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(asked)
        self._is_asked.set()
        try:
            async with asyncio.timeout(self._patience_s):
                await asyncio.shield(asked)
        except TimeoutError:
            raise ClusterError(
                "that is done, but cannot be written down for a next `mesh serve` "
                f"({self.failure or 'the disk does not answer'}), which after a crash of this one would undo "
                f"it: make room for {self._file.path}, it is tried further"
            ) from None

    async def _write(self, file: HeadStateFile, state: HeadState) -> None:
        """In a thread, as a disk may take long; if cancelled, until that has ended."""
        await CancellableWork().run(lambda: file.save(state))

    async def _asked_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_asked.wait()


def _settle(asked: asyncio.Future[None]) -> None:
    if not asked.done():
        asked.set_result(None)


@contextmanager
def open_succession(options: ServeOptions) -> Iterator[Succession]:
    """Read what a former head has left; afterwards nothing is left, unless this process is killed.

    Args:
        options: What the user says.
    """
    # Grows from one start to the next even if nothing was left, as long as the clock does.
    term = time.time_ns() // 1_000_000
    path = options.state_path or default_state_path(options.name, options.advertise, options.join_port)
    try:
        file = HeadStateFile(path) if options.linger_s > 0 else None
    except OSError as error:
        log.warning("no_successor", reason=f"{path} cannot be used: {error}")
        file = None
    if file is None:
        yield Succession(None, None, term)
        return
    with file:
        former = file.load()
        if former is not None:
            log.info("former_head_found", term=former.term, stages=len(former.stages))
            term = max(term, former.term + 1)
        try:
            yield Succession(file, former, term)
        finally:
            file.clear()


def setup_of(options: ServeOptions, known: Preflight) -> str:
    """A fingerprint of all that the stages of a model are loaded with."""
    return fingerprint(
        model=str(options.model.resolve()),
        files=[(stamp.size_bytes, stamp.mtime_ns) for stamp in stamps_of(part_paths(options.model))],
        workload=known.workload,
        is_exact=options.is_exact,
        topology=options.topology,
        gpu_layers=options.gpu_layers,
        software=(SOFTWARE_VERSION, PROTOCOL_VERSION),
    )
