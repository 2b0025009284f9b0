"""Features of a stage: the one place that makes their plugs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from spanmesh_proto.errors import MeshError
from stages.runtime.assistant import Assistant
from stages.serving.feature_outlet import FeatureOutlet
from stages.serving.image_input import ImageInput
from stages.serving.kv_disk import KvDisk
from stages.serving.kv_replication import Replication, pause_s
from stages.serving.tail_drafts import TailDrafts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from stages.runtime.stage_runtime import StageRuntime
    from stages.serving.block_store import BlockStore
    from stages.serving.plugs import StagePlug
    from stages.transport.channels import Identity

log = structlog.get_logger()


@dataclass(frozen=True)
class PlugOptions:
    """Options of plugs."""

    pause_s: Callable[[float], float] = pause_s
    """Returns the pause between updates of replicas, in seconds, from the duration of the last one."""
    open_store: Callable[[], Awaitable[BlockStore]] | None = None
    """Opens files for blocks of KV rows, beside serving; None to keep none."""
    assistant: Assistant | MeshError | None = None
    """Drafts beside the tail, or why it cannot; None at other stages, and without one."""


def plugs_of(
    runtime: StageRuntime, identity: Callable[[], Identity] | None, options: PlugOptions
) -> Iterator[StagePlug]:
    """The plugs of a stage.

    Args:
        runtime: The loaded stage.
        identity: Returns its TLS identity for connections to other stages; None within one process.
        options: Their options.
    """
    yield FeatureOutlet(runtime)
    yield Replication(identity, options.pause_s)
    yield KvDisk(options.open_store)
    yield ImageInput(runtime)
    if options.assistant is not None:
        yield TailDrafts(runtime, options.assistant)


def assistant_beside(runtime: StageRuntime, path: Path) -> Assistant | MeshError:
    """The assistant in a file, beside a tail that has computed nothing yet, or why it cannot be loaded.

    The mesh then serves without drafts.
    """
    try:
        return Assistant(path, runtime)
    except MeshError as error:
        log.warning("assistant_failed", reason=error.message)
        return error
