"""From one head to the next: what a crashed `mesh serve` left, and what this one leaves should it crash."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NoReturn

import structlog

from mesh.serve.head_state import (
    HeadState,
    HeadStateFile,
    KeptModel,
    KeptStage,
    default_state_path,
    fingerprint,
)
from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from spanmesh_proto.addresses import split_address
from stages.cutting.gguf_parts import part_paths
from stages.weights.file_stamp import stamps_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mesh.serve.fleet import Fleet
    from mesh.serve.head import Head
    from mesh.serve.options import ServeOptions
    from mesh.serve.preflight import Preflight
    from mesh.serve.served_model import ServedModel
    from mesh.serve.stage_handle import StageHandle

log = structlog.get_logger()

_LOOK_S: Final = 0.5


class Succession:
    """What one head knows of the one before it, and writes down for the one after it.

    Args:
        file: Where; None if nobody is to take over.
        former: What a head that crashed has left.
        term: Of this head.
    """

    def __init__(self, file: HeadStateFile | None, former: HeadState | None, term: int) -> None:
        self._file = file
        self.former = former
        self.term = term

    async def note(
        self, head: Head, first: ServedModel, others: Callable[[], Iterable[ServedModel]]
    ) -> NoReturn:
        """Keep the file up to date until cancelled.

        Args:
            head: Open.
            first: The model that `mesh serve` was started with.
            others: Gives those that were loaded beside it and answer by now.
        """
        noted = None
        while True:
            state = self._state(head, first, tuple(others()))
            if self._file is not None and state != noted:
                try:
                    # Not in a thread: that would go on after this was cancelled, and the file was cleared.
                    self._file.save(state)
                except OSError as error:
                    log.warning("head_state_not_written", reason=str(error))
                noted = state
            await asyncio.sleep(_LOOK_S)

    def _state(self, head: Head, first: ServedModel, others: Iterable[ServedModel]) -> HeadState:
        token = head.service.token
        return HeadState(
            term=self.term,
            ray=head.node.record,
            secret=token.secret,
            expires_at_s=token.expires_at_s,
            join_port=split_address(token.addresses[0])[1],
            certificate_pem=head.certificate.certificate_pem.decode(),
            private_key_pem=head.certificate.private_key_pem.decode(),
            setup=first.setup,
            stages=_ring(first.fleet),
            copies=_copies(first.fleet),
            models=tuple(
                KeptModel(model.order.as_dict(), model.setup, _ring(model.fleet), _copies(model.fleet))
                for model in others
                if model.order is not None
            ),
        )


def _ring(fleet: Fleet) -> tuple[KeptStage, ...]:
    return tuple(_kept(handle) for handle in fleet.handles if handle.serves_at is not None)


def _copies(fleet: Fleet) -> tuple[KeptStage, ...]:
    return tuple(_kept(handle) for handle in fleet.copies)


def _kept(handle: StageHandle) -> KeptStage:
    config = handle.config
    return KeptStage(
        actor=handle.actor_name,
        host=handle.member.name,
        ray_node=handle.member.ray_node_name,
        start=config.layers.start,
        stop=config.layers.stop,
        num_threads=config.options.num_threads,
        wire=str(config.hidden_type),
        address=handle.serves_at,
    )


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
