"""Looks at this host, before it serves or joins anything."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from mesh.cluster.addresses import (
    LOOPBACK,
    advertised,
    check_port_free,
    free_port,
    is_loopback,
    primary_address,
)
from mesh.doctor.check import Check, fail, ok, warn
from mesh.doctor.host_checks import host_checks
from mesh.util.child_environment import inherited_environment
from spanmesh_proto.errors import MeshError
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOOK_TIMEOUT_S: Final = 120.0
_CONNECT_TIMEOUT_S: Final = 2.0
_GPU_DEVICES: Final = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def this_host_checks(
    name: str, *, port: int, advertise: str | None, model: Path | None, url: str | None = None
) -> Iterator[Check]:
    """All that can be known without a mesh.

    Args:
        name: What to call this host.
        port: Where the API would listen.
        advertise: Where others would reach this host, or None for the address towards the default route.
        model: A model to look at, too.
        url: Of a mesh that is looked at besides, or None: it may well be what has the port.
    """
    yield _packages(name)
    look = _look()
    if isinstance(look, str):
        yield fail(name, "llama.cpp", look, "install llama-cpp-python again: make environment")
    else:
        has_gpu = any(device.exists() for device in _GPU_DEVICES)
        yield from host_checks(name, look, has_gpu_hardware=has_gpu)
    yield _api_port(name, port, url)
    yield _address(name, advertise)
    if model is not None:
        yield from _model(name, model, None if isinstance(look, str) else look["free_disk_bytes"])


def token_checks(name: str, text: str) -> Iterator[Check]:
    """Whether a head is where a join token says, seen from here; nothing joins.

    Args:
        name: What to call this host.
        text: The token.
    """
    import time  # noqa: PLC0415

    from mesh.cluster.join_token import decode  # noqa: PLC0415 - brings grpc
    from mesh.cluster.membership_client import find_head  # noqa: PLC0415

    try:
        token = decode(text)
        token.check_expiry(time.time())
        head = asyncio.run(find_head(token))
    except MeshError as error:
        yield fail(
            name,
            "join token",
            error.message,
            "have the head print a new one, let TCP through to it, and check that both clocks are right",
        )
    else:
        yield ok(name, "join token", f"the head answers at {head.address} and proves to be the token's")


def _packages(name: str) -> Check:
    """Whether everything that is needed is installed, new enough."""
    from packaging.requirements import Requirement  # noqa: PLC0415

    missing = []
    for text in requires("spanmesh") or ():
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            missing.append(f"{wanted.name} is not installed")
            continue
        if found not in wanted.specifier:
            missing.append(f"{wanted.name} {found}, needed is {wanted.specifier}")
    if missing:
        return fail(name, "packages", "; ".join(missing), "install them: make environment")
    return ok(name, "packages", "all that are needed are here")


def _look() -> dict[str, Any] | str:
    """What `stages.host.host_report` finds, or why it does not, in a child: llama.cpp may end it."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "stages.host.host_report"],
            env=inherited_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=_LOOK_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        return f"it cannot be used: {lines[-1]}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _api_port(name: str, port: int, url: str | None) -> Check:
    what = f"port {port}"
    if url is not None and _is_here(url, port):
        return ok(name, what, f"is that of the mesh at {url}")
    try:
        check_port_free(LOOPBACK, port, "--port")
    except MeshError as error:
        return warn(
            name, what, error.message, "if that is a mesh of yours, look at it with --url; else end it"
        )
    return ok(name, what, "is free for the API")


def _is_here(url: str, port: int) -> bool:
    """Whether a URL is that of a server on this host, at this port."""
    parts = urlsplit(url)
    return parts.port == port and is_loopback(parts.hostname or "")


def _address(name: str, advertise: str | None) -> Check:
    """Whether packets to the address where others would reach this host come back here."""
    fix = "name an address of this host that the others reach, with --advertise"
    try:
        address = advertised(advertise) if advertise else primary_address()
    except MeshError as error:
        return fail(name, "address", error.message, fix)
    if address == LOOPBACK:
        return warn(name, "address", "no way leads out of this host, so that no other can join", fix)
    try:
        port = free_port(address)
        with (
            socket.create_server((address, port), family=_family(address)),
            socket.create_connection((address, port), _CONNECT_TIMEOUT_S),
        ):
            return ok(name, "address", f"{address} can be listened on and reached from here")
    except (OSError, MeshError) as error:
        reason = error.message if isinstance(error, MeshError) else error.strerror or str(error)
        return fail(name, "address", f"{address}: {reason}", fix)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _model(name: str, path: Path, free_disk_bytes: int | None) -> Iterator[Check]:
    from stages.slicing.model_facts import read_model_facts  # noqa: PLC0415 - brings numpy

    what = f"model {path.name}"
    try:
        facts = read_model_facts(path)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        yield fail(name, what, f"{path} cannot be read: {error.strerror or error}", "look after its disk")
        return
    except MeshError as error:
        yield fail(name, what, error.message, "fetch it again")
        return
    cuts = f"{len(facts.allowed_cuts)} places to cut at" if facts.allowed_cuts else "cannot be cut"
    yield ok(name, what, f"{facts.architecture}, {facts.n_layers} layers, {cuts}; sha256 {sha256}")
    if free_disk_bytes is not None and free_disk_bytes < facts.file_bytes:
        yield warn(
            name,
            "disk",
            f"{format_size(free_disk_bytes)} free, cutting takes up to {format_size(facts.file_bytes)}",
            "make room, or set XDG_CACHE_HOME to a larger disk",
        )
