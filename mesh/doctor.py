"""Checks of `mesh doctor`: of this host, of hosts and of a mesh."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import subprocess
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from mesh.cluster.addresses import (
    LOOPBACK,
    advertised,
    check_port_free,
    free_port,
    is_of_this_machine,
    own_addresses,
)
from mesh.cluster.host_facts import try_llama_cpp
from mesh.cluster.port_plan import plan_ports
from mesh.status import ChatModelStatus
from mesh.util.child_environment import inherited_environment, module_command, relative_entries
from mesh.vision.projectors import library_state, projectors_beside
from spanmesh_proto.addresses import PortRange, is_loopback
from spanmesh_proto.errors import MeshError
from stages.host.gpu_backends import CARDS
from stages.units import format_duration, format_size
from stages.weights.disk_cache import default_root

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mesh.status import EmbeddingModelStatus, MeshStatus

_GIB: Final = 2**30
# Less leaves no room for a useful stage.
_LITTLE_MEMORY_BYTES: Final = _GIB
_LITTLE_DISK_BYTES: Final = 2 * _GIB
_GPU_KINDS: Final = frozenset({"gpu", "integrated gpu"})
# Versions that must agree, and the effect if they do not.
_MUST_AGREE: Final = {
    "spanmesh": "install the same spanmesh on both",
    "protocol": "install the same spanmesh on both",
    "ray": "install the same ray on both: pip install -c constraints.txt ray",
    "python": "use the same minor version of Python on both",
}
_MB: Final = 10**6
# From here logs and limits per minute become confusing; from there certificates of hosts end too early.
_CLOCK_WARN_MS: Final = 2_000.0
_CLOCK_FAIL_MS: Final = 10 * 86_400_000.0
_MINUTE_MS: Final = 60_000.0
_REPORT_TIMEOUT_S: Final = 120.0
_CONNECT_TIMEOUT_S: Final = 2.0
# Of Linux; of IPv6 as well.
_OUTGOING_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Outcome(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """Result of one check, with a remedy."""

    where: str
    """The host, or both ends of a link."""
    what: str
    """Subject, in a word or two."""
    outcome: Outcome
    """A warning costs speed, now or later; a failure keeps a mesh from working."""
    detail: str
    """Finding."""
    fix: str = ""
    """Remedy; empty if all is well."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {
            "where": self.where,
            "what": self.what,
            "outcome": str(self.outcome),
            "detail": self.detail,
            "fix": self.fix or None,
        }


def ok(where: str, what: str, detail: str) -> Check:
    """A passed check."""
    return Check(where, what, Outcome.OK, detail)


def warn(where: str, what: str, detail: str, fix: str) -> Check:
    """A warning."""
    return Check(where, what, Outcome.WARN, detail, fix)


def fail(where: str, what: str, detail: str, fix: str) -> Check:
    """A failure."""
    return Check(where, what, Outcome.FAIL, detail, fix)


def exit_code(checks: Iterable[Check]) -> int:
    """1 if anything failed."""
    return int(any(check.outcome is Outcome.FAIL for check in checks))


def host_checks(where: str, report: Mapping[str, Any]) -> Iterator[Check]:
    """Versions, devices, memory, disk, quota, processors, stage files.

    Args:
        where: Name of the host.
        report: Report of `stages.host.host_report.HostSelfReport`, from JSON.
    """
    versions = report["versions"]
    yield ok(where, "versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
    yield _devices(where, report)
    yield _room(
        where,
        "memory",
        report["free_memory_bytes"],
        _LITTLE_MEMORY_BYTES,
        "end other processes there, or serve with --head-only if it is the head",
    )
    yield _room(
        where,
        f"disk at {report['cache_dir']}",
        report["free_disk_bytes"],
        _LITTLE_DISK_BYTES,
        "remove stage files there that are not needed, or set XDG_CACHE_HOME to a larger disk",
    )
    yield from _quota(where, report)
    yield _idle_states(where, report)
    yield from _files(where, report["files"])


def _quota(where: str, report: Mapping[str, Any]) -> Iterator[Check]:
    """A control group's limit of processor time, as containers and services have, if there is one."""
    quota, available = report["processor_quota"], report["num_processors"]
    if quota is None:
        return
    detail = f"a control group allows the time of {quota:g} of {available} processors"
    if quota < 1:
        yield warn(
            where,
            "quota",
            f"{detail}: even one thread stands still for a part of each period",
            "allow that container or service one processor at least",
        )
    else:
        yield ok(where, "quota", f"{detail}; without --threads no more threads than that compute")


def _idle_states(where: str, report: Mapping[str, Any]) -> Check:
    if report["can_stay_awake"]:
        return ok(where, "processors", "can be kept out of idle states while requests run")
    detail = "may enter idle states between two tokens"
    if report["has_latency_device"]:
        return warn(
            where,
            "processors",
            detail,
            "allow the user to write /dev/cpu_dma_latency, by a udev rule or as root",
        )
    if report["platform"].startswith("Linux"):
        return warn(
            where,
            "processors",
            f"{detail}: there is no /dev/cpu_dma_latency",
            "if this is a container, start it with that device",
        )
    return ok(where, "processors", f"{detail}: only Linux can be asked not to")


def agreement_checks(where: str, versions: Mapping[str, str], head: Mapping[str, str]) -> Iterator[Check]:
    """Whether a host has the head's versions."""
    for name, fix in _MUST_AGREE.items():
        here, there = _shortened(name, versions[name]), _shortened(name, head[name])
        if here != there:
            yield fail(where, name, f"{here} on this host, {there} on the head", fix)
    if versions["llama_cpp"] != head["llama_cpp"]:
        yield warn(
            where,
            "llama.cpp",
            f"{versions['llama_cpp']} on this host, {head['llama_cpp']} on the head: texts may "
            f"differ in near-ties",
            "install the same llama-cpp-python on both",
        )
    elif versions["attention"] != head["attention"]:
        yield warn(
            where,
            "attention",
            f"by {versions['attention']} on this host, by {head['attention']} on the head: texts may "
            "differ in near-ties, and --exact uses hosts of one of them only",
            "none is needed in fast mode; compile llama.cpp on both: make environment",
        )


def _shortened(name: str, version: str) -> str:
    """Only the minor version of Python matters."""
    return ".".join(version.split(".")[:2]) if name == "python" else version


def _devices(where: str, report: Mapping[str, Any]) -> Check:
    """Devices that llama.cpp has, and GPUs that it cannot use."""
    devices, backends = report["devices"], report["backends"]
    if not devices:
        return fail(where, "device", "llama.cpp finds no device", "install llama-cpp-python again")
    found = (
        f"llama.cpp computes on {', '.join(map(_shown_device, devices))}; its backends: "
        f"{', '.join(('cpu', *backends))}"
    )
    cards = [CARDS[vendor] for vendor in report["cards"] if vendor in CARDS]
    if not cards or any(device["kind"] in _GPU_KINDS for device in devices):
        return ok(where, "device", found)
    vendors = " and ".join(card.vendor for card in cards)
    wanted = [name for card in cards for name in card.backends]
    usable = [name for name in wanted if name in backends]
    if usable:
        return warn(
            where,
            "device",
            f"{found}; {usable[0]} finds no device, though there is a GPU of {vendors}",
            f"install {cards[0].driver}, and let this user open the GPU's device files",
        )
    beside = [folder for name, folder in report["builds_beside"].items() if name in wanted]
    fix = (
        f"have processes load the build that is there: export LLAMA_CPP_LIB_PATH={beside[0]}"
        if beside
        else f"make environment BACKEND={' or BACKEND='.join(cards[0].backends)}, which says what is missing"
    )
    return warn(where, "device", f"{found}; none for the GPU of {vendors}", fix)


def _shown_device(device: Mapping[str, Any]) -> str:
    memory = (
        f", {format_size(device['free_bytes'])} of {format_size(device['total_bytes'])} free"
        if device["kind"] in _GPU_KINDS and device["total_bytes"]
        else ""
    )
    return f"{device['name']} ({device['description'].strip()}{memory})"


def _room(where: str, what: str, free_bytes: int, little_bytes: int, fix: str) -> Check:
    detail = f"{format_size(free_bytes)} free"
    return ok(where, what, detail) if free_bytes >= little_bytes else warn(where, what, detail, fix)


def _files(where: str, files: Mapping[str, bool | None]) -> Iterator[Check]:
    for sha256, is_whole in files.items():
        name = f"stage file {sha256[:12]}"
        if is_whole is None:
            yield warn(where, name, "is missing from the disk", "nothing: it is fetched again when needed")
        elif not is_whole:
            yield fail(where, name, "does not match its hash", "remove it, and check that disk")
        else:
            yield ok(where, name, "matches its hash")


def mesh_checks(
    status: MeshStatus, links: Mapping[str, Any], hosts: Sequence[Mapping[str, Any]]
) -> Iterator[Check]:
    """Checks of a running mesh.

    Args:
        status: Its status.
        links: Answer of `/mesh/links`.
        hosts: Hosts of `/mesh/examine`'s answer.
    """
    yield _state(status.model.name, status)
    for model in status.models[1:]:
        yield _state(model.name, model)
    if reason := status.state_not_written:
        yield fail(
            "mesh",
            "takeover",
            f"the state for a restart of the head is not written: {reason}",
            "free space on the head's disk, at `mesh serve --state`",
        )
    for failure in status.failures[-3:]:
        yield warn(
            failure.host,
            "failure",
            f"layers {failure.layers}: {failure.reason}",
            "read that host's log of that time",
        )
    head = links["head"]
    reports = {each["host"]: each["look"] for each in hosts if each["look"] is not None}
    reference = reports.get(head) or next(iter(reports.values()), None)
    for each in hosts:
        yield from _host(each, None if reference is None else reference["versions"])
    for link in links["links"]:
        yield _link(link)
        yield from _ports_of(link)
    if not links["links"]:
        yield ok(head, "links", "no other host has joined")
    yield from _order(links)


def format_checks(where: str, models: Mapping[str, Any]) -> Iterator[Check]:
    """How models write calls and reasoning.

    Args:
        where: Where that was found out.
        models: What `/v1/models` tells.
    """
    for model in models["data"]:
        if (told := model.get("answer_format")) is not None:
            yield from _format(where, model["id"], told)


def _format(where: str, model: str, told: Mapping[str, Any]) -> Iterator[Check]:
    """How a model writes calls and reasoning.

    Args:
        where: Where that was found out.
        model: The model.
        told: What `AnswerFormat.shown` tells.
    """
    call = json.dumps(told["call"], ensure_ascii=False)
    yield ok(
        where,
        f"calls of {model}",
        f"written as {call}"
        if told["is_found"]
        else f"nothing certain is found in the chat template: a note of ours asks for them as {call}",
    )
    reasoning = " or ".join(json.dumps(each, ensure_ascii=False) for each in told["reasoning"])
    # Of a model whose own marks are not known, several are read.
    is_found = len(told["reasoning"]) < 2
    yield ok(
        where,
        f"reasoning of {model}",
        f"written as {reasoning}"
        if is_found
        else f"nothing certain is found in the chat template: {reasoning} would be read as reasoning",
    )


def _state(name: str, model: ChatModelStatus | EmbeddingModelStatus) -> Check:
    if model.ready:
        return ok("mesh", "serving", f"{name} in {len(model.stages)} stages")
    if isinstance(model, ChatModelStatus) and model.lost:
        return fail("mesh", "serving", f"{name} is not served: {model.lost}", "join a host that can hold it")
    return warn("mesh", "serving", f"{name}: {model.phase}", "wait, or join the missing hosts")


def _host(found: Mapping[str, Any], reference: Mapping[str, str] | None) -> Iterator[Check]:
    where, report = found["host"], found["look"]
    if report is None:
        yield fail(where, "examination", found["failure"], "check that the host answers, and read its log")
        return
    yield from host_checks(where, report)
    if reference is not None:
        yield from agreement_checks(where, report["versions"], reference)
    ahead_ms, within_ms = found["clock_ahead_ms"], found["clock_within_ms"]
    detail = f"{ahead_ms:+.0f} ms from the head's, within {within_ms:.0f} ms"
    off_ms = abs(ahead_ms) - within_ms
    if off_ms > _MINUTE_MS:
        detail = f"{format_duration(off_ms / 1000)} {'ahead of' if ahead_ms > 0 else 'behind'} the head's"
    fix = "set the clock and enable NTP, on Linux with timedatectl set-ntp true"
    if off_ms > _CLOCK_FAIL_MS:
        yield fail(where, "clock", detail, fix)
    elif off_ms > _CLOCK_WARN_MS:
        yield warn(where, "clock", detail, fix)
    else:
        yield ok(where, "clock", detail)


def _link(link: Mapping[str, Any]) -> Check:
    where = f"{link['from']} to {link['to']}"
    if link["failure"]:
        return fail(
            where,
            "link",
            link["failure"],
            f"allow TCP through the firewall from {link['from']} to {link['to']}, to any port or to the "
            f"--port-range of {link['to']}, and check that {link['to']} joined with an address (--advertise) "
            f"that {link['from']} reaches",
        )
    rate = link["bytes_per_s"]
    speed = "" if rate is None else f", {rate / _MB:.0f} MB/s"
    rtt_ms = link["rtt_ms"]
    return ok(where, "link", f"round trip {rtt_ms['p50']:.2f} ms (p99 {rtt_ms['p99']:.2f}){speed}")


def _ports_of(link: Mapping[str, Any]) -> Iterator[Check]:
    """Whether ports of the range of a link's far end can be reached, if it has one and they were tried."""
    where, ports, closed = f"{link['from']} to {link['to']}", link.get("ports"), link.get("closed_ports")
    if not ports:
        return
    if closed:
        yield fail(
            where,
            "ports",
            f"TCP to {', '.join(map(str, closed))} of --port-range {ports} does not arrive",
            f"let TCP to {ports} from {link['from']} through the firewall of {link['to']}, or start "
            f"{link['to']} with the ports that it lets through",
        )
    else:
        yield ok(where, "ports", f"--port-range {ports} can be reached")


def _order(links: Mapping[str, Any]) -> Iterator[Check]:
    found = links["round"]
    if found and found["best"] != found["order"]:
        way = " - ".join(found["best"])
        yield warn(
            "mesh",
            "order of stages",
            f"a token's round takes {found['order_ms']:.1f} ms, {found['best_ms']:.1f} ms by {way}",
            "restart `mesh serve`: it orders stages by their links",
        )
    for wire in links["wires"]:
        if wire["proposed"] != "f32":
            yield warn(
                f"{wire['from']} to {wire['to']}",
                "bandwidth",
                f"a row takes {wire['row_transfer_ms']:.1f} ms on the wire, "
                f"{wire['row_compute_ms']:.1f} ms at a stage",
                f"serve with --wire {wire['proposed']}",
            )


def this_host_checks(
    name: str,
    *,
    port: int,
    advertise: str | None,
    model: Path | None,
    url: str | None = None,
    port_range: PortRange | None = None,
) -> Iterator[Check]:
    """Checks without a mesh.

    Args:
        name: Name of this host.
        port: Port for the API.
        advertise: Address of this host for others, or None for that of the default route.
        model: A model to check as well.
        url: URL of a mesh that is checked as well, or None: it may be what has the ports.
        port_range: Ports that the mesh is to use here, or None for any free ones.
    """
    yield _packages(name)
    yield from _python_path(name)
    try:
        default_root()
    except MeshError as error:
        yield fail(name, "home", error.message, "set HOME")
        return
    fault = try_llama_cpp().fault
    report = _self_report() if fault is None else fault.reason
    if isinstance(report, str):
        remedy = "install llama-cpp-python again: make environment" if fault is None else fault.remedy
        yield fail(name, "llama.cpp", report, remedy)
    else:
        yield from host_checks(name, report)
        yield ok(name, "pictures", library_state())
    yield _api_port(name, port, url)
    yield _address(name, advertise)
    if port_range is not None:
        yield from _range(name, port_range, is_in_use=url is not None)
    if model is not None:
        yield from _model(name, model, None if isinstance(report, str) else report["free_disk_bytes"])


def token_checks(name: str, text: str) -> Iterator[Check]:
    """Whether a join token leads to its head from here; nothing joins.

    Args:
        name: Name of this host.
        text: The token.
    """
    import time  # noqa: PLC0415

    from mesh.cluster.join_token import decode  # noqa: PLC0415 - brings grpc
    from mesh.cluster.membership_client import find_head  # noqa: PLC0415

    try:
        token = decode(text)
    except MeshError as error:
        yield fail(name, "join token", error.message, "copy the whole line that the head printed")
        return
    doubt = token.doubt(time.time())
    try:
        head = asyncio.run(find_head(token))
    except MeshError as error:
        yield fail(
            name,
            "join token",
            f"{error.message}; {doubt}" if doubt else error.message,
            "use a new token of the head, allow TCP to it through the firewall, and check both clocks",
        )
    else:
        found = f"the head answers at {head.address} with the token's certificate"
        if doubt:
            yield warn(name, "join token", f"{found}; {doubt}", "the head's clock counts: check both clocks")
        else:
            yield ok(name, "join token", found)


def _packages(name: str) -> Check:
    """Whether all required packages are installed, in sufficient versions."""
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
            missing.append(f"{wanted.name} {found}, required is {wanted.specifier}")
    if missing:
        return fail(name, "packages", "; ".join(missing), "install them: make environment")
    return ok(name, "packages", "all required are installed")


def _python_path(name: str) -> Iterator[Check]:
    """Warning of a `PYTHONPATH` by which Python runs files of the folder where it is started."""
    if entries := relative_entries():
        yield warn(
            name,
            "PYTHONPATH",
            f"has entries that depend on the working directory ({', '.join(map(repr, entries))}): `mesh` may "
            "run files that lie there; what it starts leaves them out",
            "leave out empty entries, as of a colon at either end, and write the others as absolute paths",
        )


def _self_report() -> dict[str, Any] | str:
    """Report of `stages.host.host_report`, or its failure, from a child: llama.cpp may abort."""
    try:
        done = subprocess.run(
            module_command("stages.host.host_report"),
            env=inherited_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=_REPORT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"it exited with code {done.returncode}"]
        return f"it cannot be used: {lines[-1]}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _api_port(name: str, port: int, url: str | None) -> Check:
    what = f"port {port}"
    if url is not None and _is_here(url, port):
        return ok(name, what, f"is in use by the mesh at {url}")
    try:
        check_port_free(LOOPBACK, port, "--port")
    except MeshError as error:
        return warn(
            name, what, error.message, "if that is your mesh, check it with --url; otherwise end that process"
        )
    return ok(name, what, "is free for the API")


def _is_here(url: str, port: int) -> bool:
    """Whether a URL is that of a server on this host and port."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return parts.port == port and (is_loopback(host) or is_of_this_machine(host))


def _range(name: str, port_range: PortRange, *, is_in_use: bool) -> Iterator[Check]:
    """Whether enough ports of a range are free here, and are not given to outgoing connections."""
    what = f"ports {port_range}"
    if not is_in_use:
        try:
            plan_ports(port_range)
        except MeshError as error:
            yield fail(name, what, error.message, "end what listens there, or give another --port-range")
            return
        yield ok(name, what, f"enough of these {len(port_range)} ports are free")
    outgoing = _outgoing_ports()
    if outgoing is not None and port_range.first <= outgoing.last and outgoing.first <= port_range.last:
        yield warn(
            name,
            what,
            f"outgoing connections of this host are given ports {outgoing}, which may be among these",
            f"give a --port-range below {outgoing.first}",
        )


def _outgoing_ports() -> PortRange | None:
    """Ports that the system gives to outgoing connections; None where it does not say."""
    try:
        first, last = _OUTGOING_PORTS.read_text().split()
        return PortRange(int(first), int(last))
    except (OSError, ValueError, MeshError):
        return None


def _address(name: str, advertise: str | None) -> Check:
    """Whether packets to this host's addresses for others come back here."""
    fix = "give an address of this host that the others reach, with --advertise"
    try:
        addresses = (advertised(advertise),) if advertise else own_addresses(must_be_clear=True)
    except MeshError as error:
        return (
            warn(name, "address", error.message, fix)
            if advertise is None
            else fail(name, "address", error.message, fix)
        )
    if addresses == (LOOPBACK,):
        return warn(name, "address", "this host has no route to a network, so no other can join", fix)
    for address in addresses:
        try:
            port = free_port(address)
            with (
                socket.create_server((address, port), family=_family(address)),
                socket.create_connection((address, port), _CONNECT_TIMEOUT_S),
            ):
                pass
        except (OSError, MeshError) as error:
            reason = error.message if isinstance(error, MeshError) else error.strerror or str(error)
            return fail(name, "address", f"{address}: {reason}", fix)
    first, *others = addresses
    if not others:
        return ok(name, "address", f"{first} is usable and reachable from this host")
    return ok(
        name,
        "address",
        f"{first}, of the default route, and {', '.join(others)} are usable and reachable from this host: a "
        "join token of it names them all, and hosts take the one that they reach",
    )


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _model(name: str, path: Path, free_disk_bytes: int | None) -> Iterator[Check]:
    from mesh.draft.pairs import command_with_model, drafters_beside  # noqa: PLC0415 - brings numpy
    from stages.slicing.model_facts import read_model_facts  # noqa: PLC0415

    what = f"model {path.name}"
    try:
        facts = read_model_facts(path)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        yield fail(name, what, f"{path} cannot be read: {error.strerror or error}", "check its disk")
        return
    except MeshError as error:
        yield fail(name, what, error.message, command_with_model(path) or "fetch it again")
        return
    cuts = f"{len(facts.allowed_cuts)} places to cut at" if facts.allowed_cuts else "cannot be cut"
    yield ok(name, what, f"{facts.architecture}, {facts.layer_count}, {cuts}; sha256 {sha256}")
    if free_disk_bytes is not None and free_disk_bytes < facts.file_bytes:
        yield warn(
            name,
            "disk",
            f"{format_size(free_disk_bytes)} free, cutting takes up to {format_size(facts.file_bytes)}",
            "make room, or set XDG_CACHE_HOME to a larger disk",
        )
    for called, found in projectors_beside(path):
        yield ok(name, f"projector {called}", found)
    for drafter in drafters_beside(facts):
        yield ok(name, f"drafter {drafter.path.name}", drafter.told_for(path))


def hub_checks(name: str, model: str, drafters: Mapping[str, str]) -> Iterator[Check]:
    """Drafters in the repository of a model.

    Args:
        name: Name of this host.
        model: Reference of the model.
        drafters: References of what has the name of a drafter there, by that name.
    """
    for called, reference in drafters.items():
        detail = f"the name of a drafter: mesh draft check {reference} --for {model} says whether it fits"
        yield ok(name, f"drafter {called}", detail)
