"""Ray driver: creates, finds and ends actors on named hosts."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Any, Final

from mesh.cluster.ray_environment import become_driver
from spanmesh_proto.errors import ClusterError, MeshError, StageFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from mesh.cluster.ray_node import RayNode

_PID: Final = re.compile(r"^\s*pid: (\d+)", re.MULTILINE)
_DETAIL: Final = re.compile(r"exit detail: (.+?)(?= Some common causes| \(1\)|\n|$)", re.DOTALL)
_CONNECTION_LOST: Final = "connection error code 2"
_NODE_TIMEOUT_S: Final = 15.0
_POLL_S: Final = 0.2


class RayDriver:
    """The connection to Ray. One per process.

    Args:
        node: Ray node of this host.
        address: Address of the cluster, `host:port`.
        are_kept: Whether actors outlive this process, for another driver to `find`; otherwise they end with
            it.
    """

    def __init__(self, node: RayNode, address: str, *, are_kept: bool = False) -> None:
        become_driver(node.token_path)
        self._lifetime = "detached" if are_kept else None
        import ray  # noqa: PLC0415

        self._ray = ray
        try:
            ray.init(
                address=address,
                namespace="spanmesh",
                log_to_driver=False,
                logging_level="ERROR",
                _temp_dir=str(node.ray_dir),
                job_config=_job_without_paths(),
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ClusterError(f"cannot connect to Ray at {address}: {error}") from error

    async def create(
        self, kind: type, *arguments: object, ray_node_name: str, name: str | None = None
    ) -> Any:
        """Start an actor on one node.

        Args:
            kind: Class of the actor; importable on every host.
            arguments: Arguments of its constructor.
            ray_node_name: Name of the node's `RayNodeConfig`.
            name: Name by which it can be found, unique in the mesh.

        Returns:
            Ray's handle of the actor.

        Raises:
            ClusterError: If the node is not part of the cluster.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

        node_id = await self._node_id(ray_node_name)
        place = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        # No CPU: the plan decides how many threads compute, not Ray.
        remote = self._ray.remote(kind).options(
            num_cpus=0, max_restarts=0, scheduling_strategy=place, name=name, lifetime=self._lifetime
        )
        return remote.remote(*arguments)

    def find(self, name: str) -> Any:
        """Ray's handle of an actor that this driver or an earlier one created.

        Raises:
            StageFailed: If it has ended.
        """
        try:
            return self._ray.get_actor(name)
        except ValueError:
            raise StageFailed(f"the process {name} has ended") from None

    def names(self) -> list[str]:
        """Names of all running actors, of this driver or an earlier one."""
        from ray.util import list_named_actors  # noqa: PLC0415

        return [str(name) for name in list_named_actors()]

    def kill(self, actor: Any) -> None:
        """End an actor's process."""
        self._ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """Disconnect; running actors end, unless they are kept."""
        self._ray.shutdown()

    async def _node_id(self, ray_node_name: str) -> str:
        deadline_s = time.monotonic() + _NODE_TIMEOUT_S
        while time.monotonic() < deadline_s:
            for node in self._ray.nodes():
                if node["Alive"] and node["NodeName"] == ray_node_name:
                    return str(node["NodeID"])
            await asyncio.sleep(_POLL_S)
        raise ClusterError(f"Ray knows no node {ray_node_name} after {_NODE_TIMEOUT_S:g} s")


def exit_detail(text: str) -> str:
    """Reason for the end of an actor's process.

    Args:
        text: Text of Ray's `RayActorError`, several lines with advice.

    Returns:
        One line. Where Ray only saw a socket close, it lists the possible causes.
    """
    if "node has died" in text or "node was terminated" in text:
        return "its host's Ray node ended"
    found = _DETAIL.search(text)
    if found is None:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[0] if lines else "unknown reason"
    if _CONNECTION_LOST in found[1]:
        return "its process ended without a message: it was killed, ran out of memory, or crashed"
    return " ".join(found[1].split()).rstrip(".")


def exited_pid(text: str) -> int | None:
    """The process id that a `RayActorError` names."""
    found = _PID.search(text)
    return int(found[1]) if found else None


def _job_without_paths() -> Any:
    """Configuration of a job whose workers import what their own host has installed, and nothing else.

    Ray puts the driver's working directory and that of its program on the path of every worker, on all hosts,
    unless the job brings a folder of its own. There is no option for it.
    """
    from ray.job_config import JobConfig  # noqa: PLC0415

    job = JobConfig()
    job._runtime_env_has_working_dir = lambda: True  # noqa: SLF001
    return job


async def result_of(call: Awaitable[Any], who: str) -> Any:
    """Result of an actor's method.

    Args:
        call: Ray's object reference.
        who: Description of the actor, for messages.

    Raises:
        MeshError: The error of the method, if it is a `MeshError`.
        StageFailed: If it raised anything else, or the actor's process is gone.
    """
    from ray.exceptions import RayActorError, RayError, RayTaskError  # noqa: PLC0415

    try:
        return await call
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MeshError):
            raise cause from None
        raise StageFailed(f"{who} failed: {type(cause).__name__}: {cause}") from error
    except RayActorError as error:
        raise StageFailed(f"{who} went away: {exit_detail(str(error))}") from error
    except RayError as error:
        raise StageFailed(f"{who} failed: {_gist(error)}") from error


def _gist(error: Exception) -> str:
    """The significant line of one of Ray's long texts: the last of a traceback, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if any(line.startswith(("File ", "Traceback")) for line in lines) else lines[0]
