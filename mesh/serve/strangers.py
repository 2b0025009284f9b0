"""What a head that crashed was still loading: nobody knows it, and it holds memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from mesh.cluster.ray_driver import RayDriver
    from mesh.serve.head_state import HeadState, KeptRing

log = structlog.get_logger()


def end_strangers(driver: RayDriver, former: HeadState) -> None:
    """End all processes that the former head had started and did not write down.

    Args:
        driver: Connected to the former head's Ray; nothing was started by it yet.
        former: What that head wrote down.
    """
    rings: tuple[KeptRing, ...] = (former, *former.models)
    kept = {stage.actor for ring in rings for stage in (*ring.stages, *ring.copies)}
    for name in driver.names():
        if name not in kept:
            try:
                driver.kill(driver.find(name))
            except MeshError as error:
                log.debug("process_had_ended", reason=error.message)
            else:
                log.info("unfinished_process_ended", process=name)
