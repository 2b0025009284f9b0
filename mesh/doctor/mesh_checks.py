"""What a head says of its mesh. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mesh.doctor.check import Check, fail, ok, warn
from mesh.doctor.host_checks import agreement_checks, host_checks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_MB: Final = 10**6
# Logs and limits per minute become hard to read from here; certificates and join tokens fail from there.
_CLOCK_WARN_MS: Final = 2_000.0
_CLOCK_FAIL_MS: Final = 60_000.0


def mesh_checks(
    status: Mapping[str, Any], links: Mapping[str, Any], hosts: Sequence[Mapping[str, Any]]
) -> Iterator[Check]:
    """All that can be said of a running mesh.

    Args:
        status: Answer of `/mesh/status`.
        links: Answer of `/mesh/links`.
        hosts: Of the answer of `/mesh/examine`.
    """
    yield _state(status)
    for model in (status.get("models") or ())[1:]:
        yield _state_of(model["name"], model)
    if reason := status.get("state_not_written"):
        yield fail(
            "mesh",
            "takeover",
            f"what a next head would have to know is not written: {reason}",
            "make room on the head's disk, where `mesh serve --state` is",
        )
    for failure in (status.get("failures") or ())[-3:]:
        yield warn(
            failure["host"],
            "failure",
            f"layers {failure['layers']}: {failure['reason']}",
            "look into that host's log of that time",
        )
    head = links["head"]
    looks = {each["host"]: each["look"] for each in hosts if each["look"] is not None}
    reference = looks.get(head) or next(iter(looks.values()), None)
    for each in hosts:
        yield from _host(each, None if reference is None else reference["versions"])
    for link in links["links"]:
        yield _link(link)
    if not links["links"]:
        yield ok(head, "links", "no other host has joined")
    yield from _order(links)


def _state(status: Mapping[str, Any]) -> Check:
    return _state_of(status["model"]["name"], status)


def _state_of(model: str, status: Mapping[str, Any]) -> Check:
    if status["ready"]:
        return ok("mesh", "serving", f"{model} in {len(status['stages'])} stages")
    if status.get("lost"):
        return fail(
            "mesh", "serving", f"{model} is not served: {status['lost']}", "join a host that can hold it"
        )
    return warn("mesh", "serving", f"{model}: {status['phase']}", "wait, or join the hosts that it waits for")


def _host(found: Mapping[str, Any], reference: Mapping[str, str] | None) -> Iterator[Check]:
    where, look = found["host"], found["look"]
    if look is None:
        yield fail(
            where, "examination", found["failure"], "look into that host's log; does it answer at all?"
        )
        return
    yield from host_checks(where, look)
    if reference is not None:
        yield from agreement_checks(where, look["versions"], reference)
    ahead_ms, within_ms = found["clock_ahead_ms"], found["clock_within_ms"]
    detail = f"{ahead_ms:+.0f} ms from the head's, within {within_ms:.0f} ms"
    off_ms = abs(ahead_ms) - within_ms
    fix = "set the clock, and let NTP keep it: timedatectl set-ntp true"
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
            f"let TCP through the firewall on any port from {link['from']} to {link['to']}, and check that "
            f"{link['to']} joined with an address (--advertise) that {link['from']} reaches",
        )
    rate = link["bytes_per_s"]
    speed = "" if rate is None else f", {rate / _MB:.0f} MB/s"
    rtt_ms = link["rtt_ms"]
    return ok(where, "link", f"round trip {rtt_ms['p50']:.2f} ms (p99 {rtt_ms['p99']:.2f}){speed}")


def _order(links: Mapping[str, Any]) -> Iterator[Check]:
    found = links["round"]
    if found and found["best"] != found["order"]:
        way = " - ".join(found["best"])
        yield warn(
            "mesh",
            "order of stages",
            f"a token's round takes {found['order_ms']:.1f} ms, {found['best_ms']:.1f} ms by {way}",
            "start `mesh serve` again: it orders stages by their links",
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
