"""Hosts that exist on paper only: named on the command line, or in a file."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any, Final

from mesh.cluster.host_facts import parse_size
from mesh.cluster.members import check_name
from mesh.forecast.surroundings import KnownHost
from mesh.placement.host_capacity import HostCapacity
from mesh.placement.links import Link, Links
from spanmesh_proto.errors import ClusterError, MeshError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_FORM: Final = "NAME:MEMORY[:GB/s[:THREADS]], such as alpha:16G:40:8"
_FIELDS: Final = {"name", "memory", "speed_gb_per_s", "threads"}


def parse_host_spec(text: str, *, speed_gb_per_s: float, num_threads: int) -> KnownHost:
    """A host from `alpha:16G:40:8`.

    Args:
        text: Name, memory, and if they are told how fast memory is read and how many threads compute.
        speed_gb_per_s: Unless told.
        num_threads: Unless told.

    Raises:
        ClusterError: If it is none.
    """
    parts = text.split(":")
    if not 2 <= len(parts) <= 4:
        raise ClusterError(f"{text!r} is no host; write {_FORM}", param="--host-spec")
    fields: dict[str, Any] = dict(zip(("name", "memory", "speed_gb_per_s", "threads"), parts, strict=False))
    return _host(fields, text, speed_gb_per_s=speed_gb_per_s, num_threads=num_threads)


def read_hosts_file(path: Path, *, speed_gb_per_s: float, num_threads: int) -> tuple[KnownHost, ...]:
    """Hosts from a TOML file with a table `[[host]]` for each: name, memory, speed_gb_per_s, threads.

    Raises:
        ClusterError: If it cannot be read, or one of them is none.
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not TOML: {error}"
        raise ClusterError(f"the hosts file {path} cannot be used: {reason}", param="--hosts-file") from error
    entries = fields.get("host")
    if set(fields) != {"host"} or not isinstance(entries, list):
        raise ClusterError(
            f"the hosts file {path} is to have tables [[host]] and nothing else", param="--hosts-file"
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
    """Every two of them joined by a link with this round trip."""
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
