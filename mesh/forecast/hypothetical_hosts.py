"""Hosts of a forecast: hypothetical ones, this host, or those of a running mesh."""

from __future__ import annotations

import json
import subprocess
import tomllib
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from mesh.cluster.host_facts import parse_size
from mesh.cluster.members import check_name
from mesh.forecast.dry_run import HostProfile, KnownHost, PlanningContext
from mesh.placement.gpu_layers import parse_gpu_layers
from mesh.placement.host_capacity import Gpu, HostCapacity
from mesh.placement.links import Link, Links
from mesh.status import read_status
from mesh.util.child_environment import inherited_environment, module_command
from spanmesh_proto.errors import ClusterError, MeshError
from stages.host.profile_request import StageTiming

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from mesh.cluster.host_facts import HostFacts
    from mesh.status import HostStatus
    from stages.host.profile_request import ProfileRequest

    # From path, body and timeout in seconds to the answer; a path without a body is requested with GET.
    Ask = Callable[[str, Mapping[str, Any] | None, str, float], Mapping[str, Any]]

_FORM: Final = "NAME:MEMORY[:GB/s[:THREADS]], such as alpha:16G:40:8"
_FIELDS: Final = {"name", "memory", "speed_gb_per_s", "threads"}
_TIMEOUT_S: Final = 120.0
_NUM_PROBES: Final = 20
_PATIENCE_S: Final = 600.0


def parse_host_spec(text: str, *, speed_gb_per_s: float, num_threads: int) -> KnownHost:
    """A host from `alpha:16G:40:8`.

    Args:
        text: Name and memory, and optionally memory read speed and number of threads.
        speed_gb_per_s: Default speed.
        num_threads: Default number of threads.

    Raises:
        ClusterError: If it is malformed.
    """
    parts = text.split(":")
    if not 2 <= len(parts) <= 4:
        raise ClusterError(f"{text!r} is no host; write {_FORM}", param="--host-spec")
    fields: dict[str, Any] = dict(zip(("name", "memory", "speed_gb_per_s", "threads"), parts, strict=False))
    return _host(fields, text, speed_gb_per_s=speed_gb_per_s, num_threads=num_threads)


def read_hosts_file(path: Path, *, speed_gb_per_s: float, num_threads: int) -> tuple[KnownHost, ...]:
    """Hosts from a TOML file with a table `[[host]]` for each: name, memory, speed_gb_per_s, threads.

    Raises:
        ClusterError: If it cannot be read or is malformed.
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not TOML: {error}"
        raise ClusterError(f"the hosts file {path} cannot be used: {reason}", param="--hosts-file") from error
    entries = fields.get("host")
    if set(fields) != {"host"} or not isinstance(entries, list):
        raise ClusterError(
            f"the hosts file {path} must have tables [[host]] and nothing else", param="--hosts-file"
        )
    hosts = []
    for entry in entries:
        unknown = set(entry) - _FIELDS
        if unknown or not {"name", "memory"} <= set(entry):
            what = f"{min(unknown)!r} is unknown" if unknown else "name and memory are needed"
            known = ", ".join(sorted(_FIELDS))
            raise ClusterError(f"{path}: a [[host]] has {known}; {what}", param="--hosts-file")
        hosts.append(_host(entry, str(entry), speed_gb_per_s=speed_gb_per_s, num_threads=num_threads))
    return tuple(hosts)


def equal_links(hosts: Sequence[KnownHost], rtt_ms: float) -> Links:
    """Links of this round trip time between all hosts."""
    names = [host.capacity.name for host in hosts]
    return Links(
        tuple(
            Link(source, target, small_ms=(rtt_ms,), hidden_ms=(rtt_ms,))
            for source in names
            for target in names
            if source != target
        )
    )


def _host(fields: dict[str, Any], shown: str, *, speed_gb_per_s: float, num_threads: int) -> KnownHost:
    try:
        name = str(fields["name"])
        check_name(name)
        capacity = HostCapacity(
            name,
            parse_size(str(fields["memory"])),
            float(fields.get("speed_gb_per_s", speed_gb_per_s)),
        )
        threads = int(fields.get("threads", num_threads))
    except MeshError as error:
        raise ClusterError(f"{shown}: {error.message}", param="--host-spec") from None
    except ValueError:
        raise ClusterError(f"{shown!r} is no host; write {_FORM}", param="--host-spec") from None
    if not 0 < capacity.speed_gb_per_s < float("inf") or threads < 1:
        raise ClusterError(f"{shown!r}: speed and threads must be above 0", param="--host-spec")
    return KnownHost(capacity, threads)


def this_host(name: str, facts: HostFacts) -> PlanningContext:
    """This host alone."""
    return PlanningContext(
        hosts=(KnownHost(facts.capacity(name), facts.num_threads),),
        head=name,
        links=Links(()),
        timer=_profile_here,
        basis="computing was timed on this host",
    )


def hosts_on_paper(hosts: Sequence[KnownHost], links: Links, facts: HostFacts) -> PlanningContext:
    """Hypothetical hosts; the first of them is the head.

    Args:
        hosts: At least one.
        links: Links between them.
        facts: Facts of this host, where stages are timed; results are scaled by the memory read speed. The
            others compute attention as it does.
    """
    speeds = {host.capacity.name: host.capacity.speed_gb_per_s for host in hosts}

    def timer(wanted: Mapping[str, Sequence[ProfileRequest]]) -> Mapping[str, HostProfile]:
        # With this host's own threads, by whose speed the result is scaled.
        here = {
            host: [replace(request, num_threads=facts.num_threads) for request in requests]
            for host, requests in wanted.items()
        }
        return {
            host: _scaled(profile, facts.speed_gb_per_s / speeds[host])
            for host, profile in _profile_here(here).items()
        }

    alike = [
        replace(host, capacity=replace(host.capacity, attention_version=facts.attention_version))
        for host in hosts
    ]
    return PlanningContext(
        hosts=tuple(alike),
        head=hosts[0].capacity.name,
        links=links,
        timer=timer,
        basis="computing was timed on this host and scaled by the memory speed of the hosts named",
    )


def _scaled(profile: HostProfile, factor: float) -> HostProfile:
    return replace(
        profile,
        timings=tuple(
            replace(timing, row_ms=timing.row_ms * factor, chunk_ms=timing.chunk_ms * factor)
            for timing in profile.timings
        ),
    )


def _profile_here(wanted: Mapping[str, Sequence[ProfileRequest]]) -> Mapping[str, HostProfile]:
    return {host: _in_a_child(requests) for host, requests in wanted.items()}


def _in_a_child(requests: Sequence[ProfileRequest]) -> HostProfile:
    timings = []
    for request in requests:
        try:
            done = subprocess.run(
                module_command("stages.host.profiler"),
                input=json.dumps(request.as_dict()),
                env=inherited_environment(),
                capture_output=True,
                text=True,
                check=False,
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return HostProfile(failure=f"timing a stage took longer than {_TIMEOUT_S:g} s")
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"it exited with code {done.returncode}"]
            return HostProfile(failure=f"this host cannot time a stage: {lines[-1]}")
        timings.append(StageTiming(**json.loads(done.stdout)))
    return HostProfile(tuple(timings))


def running_mesh(ask: Ask) -> PlanningContext:
    """Hosts and links of a running mesh; its hosts time blank stages on request.

    Args:
        ask: Sends a request to its head: path, body, method, timeout in seconds.

    Raises:
        MeshError: If the head does not answer.
    """
    status = read_status(ask("/mesh/status", None, "GET", _PATIENCE_S))
    found = ask(f"/mesh/links?probes={_NUM_PROBES}&bulk_bytes=0", None, "POST", _PATIENCE_S)

    def timer(wanted: Mapping[str, Sequence[ProfileRequest]]) -> Mapping[str, HostProfile]:
        body = {
            "hosts": [
                {"host": host, "orders": [request.as_dict() for request in requests]}
                for host, requests in wanted.items()
            ]
        }
        answer = ask("/mesh/rehearse", body, "POST", _PATIENCE_S)
        return {
            each["host"]: HostProfile(
                tuple(StageTiming(**timing) for timing in each["timings"]), each["failure"] or ""
            )
            for each in answer["hosts"]
        }

    return PlanningContext(
        hosts=tuple(map(_running_host, status.hosts)),
        head=found["head"],
        links=Links(tuple(map(_link, found["links"]))),
        timer=timer,
        basis="computing was timed on every host, links were measured between them",
    )


def _running_host(host: HostStatus) -> KnownHost:
    absent = "it is leaving" if host.leaving else "" if host.ready else "it is still starting"
    capacity = HostCapacity(
        host.name,
        host.memory_bytes,
        host.speed_gb_per_s,
        gpus=tuple(Gpu(**asdict(gpu)) for gpu in host.gpus),
        gpu_layers=parse_gpu_layers(host.gpu_layers),
        cpu_moe_layers=parse_gpu_layers(host.cpu_moe_layers),
        attention_version=host.attention_version,
    )
    return KnownHost(capacity, host.threads, absent)


def _link(fields: Mapping[str, Any]) -> Link:
    """Only the fields for the time of a hop."""
    hop_ms = fields["hop_ms"]
    if hop_ms is None:
        return Link(fields["from"], fields["to"], failure=fields["failure"] or "not measured")
    return Link(fields["from"], fields["to"], small_ms=(2 * hop_ms,), hidden_ms=(2 * hop_ms,))
