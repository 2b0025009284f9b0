"""Links between the hosts of a running mesh: measurement by its head, and tables of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from mesh.cli.head_client import ask_head
from mesh.util.terminal import PrintableConsole
from meshbench.report_tools import Section, markdown_table
from spanmesh_proto.errors import InvalidRequest, MeshError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from meshbench.under_test.options import RemoteTarget

_MB: Final = 10**6
_TIMEOUT_S: Final = 600.0
# As `mesh bench net` without options.
NUM_PROBES: Final = 50
BULK_MB: Final = 8
_ALONE: Final = "no other host has joined: there is no link to measure"


@dataclass(frozen=True)
class KnownLinks:
    """Links of a mesh under test, as far as they are known."""

    found: Mapping[str, Any] | None
    """Answer of `/mesh/links`; None without one."""
    source: str
    """Where it comes from, for a report."""
    missing: tuple[str, ...] = ()
    """What is not known, and why."""


def measure_links(url: str, key: str | None, *, num_probes: int, bulk_mb: int) -> dict[str, Any]:
    """Have the head measure the links between all hosts.

    Args:
        url: URL of the mesh's API without `/v1`.
        key: API key, if the mesh needs one.
        num_probes: Round trips of each size on each link.
        bulk_mb: Megabytes sent over each link, twice, to measure its bandwidth; 0 leaves that out.

    Returns:
        Answer of `/mesh/links`.

    Raises:
        MeshError: If the head does not answer, or refuses.
    """
    wanted = f"/mesh/links?probes={num_probes}&bulk_bytes={bulk_mb * _MB}"
    return ask_head(url + wanted, key, method="POST", timeout_s=_TIMEOUT_S)


def known_links(target: RemoteTarget) -> KnownLinks:
    """Links from the named file, or measured now; a mesh that does not measure them is no error.

    Raises:
        InvalidRequest: If the file is not what `mesh bench net --json` prints.
    """
    if target.links_file is not None:
        return KnownLinks(read_links(target.links_file), f"from {target.links_file.name}")
    url, key = target.server.base_url, target.api_key
    source = "measured before the load"
    try:
        found = measure_links(url, key, num_probes=NUM_PROBES, bulk_mb=BULK_MB)
    except MeshError as refusal:
        # Bandwidths are measured from the head's own machine only.
        try:
            found = measure_links(url, key, num_probes=NUM_PROBES, bulk_mb=0)
        except MeshError as error:
            return KnownLinks(None, "", (f"links: {error.message}",))
        return KnownLinks(
            found,
            source,
            (f"bandwidths of the links: {refusal.message}; --net takes what `mesh bench net --json` prints",),
        )
    return KnownLinks(found, source)


def read_links(path: Path) -> dict[str, Any]:
    """What `mesh bench net --json` printed.

    Raises:
        InvalidRequest: If the file is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not {"head", "links", "round", "wires", "hidden_bytes"} <= found.keys():
        raise InvalidRequest(f"{path} is not what `mesh bench net --json` prints", param="--net")
    return found


def hop_ms(found: Mapping[str, Any] | None) -> float | None:
    """Mean one-way time of the links that a token's round takes; None if they were not measured."""
    whole = None if found is None else found["round"]
    if whole is None:
        return None
    return float(whole["order_ms"]) / (len(whole["order"]) + 1)


def are_measured(found: Mapping[str, Any]) -> bool:
    """Whether every link was measured."""
    return not any(link["failure"] for link in found["links"])


def links_section(links: KnownLinks | None) -> Section:
    """A section of a report; without a body if no links are known."""
    heading, found = "## Links between the hosts", None if links is None else links.found
    if links is None or found is None:
        return Section(heading, "")
    if not found["links"]:
        return Section(heading, _ALONE)
    parts = [
        markdown_table(
            _heads(found), [(link["from"], link["to"], *_figures(link)) for link in found["links"]]
        ),
        f"As `mesh bench net` measures them, {links.source}. {_explanation(found)}.",
        *_remarks(found),
    ]
    return Section(heading, "\n\n".join(parts))


def print_links(found: Mapping[str, Any]) -> None:
    """Print the links, then their effect on the stages' order."""
    # What went wrong may have any brackets in it.
    console = PrintableConsole(markup=False)
    if not found["links"]:
        console.print(_ALONE, highlight=False)
        return
    table = Table(*_heads(found))
    for link in found["links"]:
        table.add_row(link["from"], link["to"], *_figures(link))
    console.print(table)
    for line in (_explanation(found), *_remarks(found)):
        console.print(line, highlight=False)


def _heads(found: Mapping[str, Any]) -> tuple[str, ...]:
    return ("from", "to", "64 B ms", "p99", f"{found['hidden_bytes']} B ms", "p99", "one way ms", "MB/s")


def _explanation(found: Mapping[str, Any]) -> str:
    hidden = f"{found['hidden_bytes']} B"
    return f"round trips: 64 B; one row of hidden states ({hidden}) there, 64 B back. One way: such a row"


def _figures(link: Mapping[str, Any]) -> list[str]:
    if link["failure"]:
        return ["-"] * 6
    small, hidden, rate = link["rtt_ms"], link["hidden_rtt_ms"], link["bytes_per_s"]
    times = (small["p50"], small["p99"], hidden["p50"], hidden["p99"], link["hop_ms"])
    return [*(f"{time:.2f}" for time in times), "-" if rate is None else f"{rate / _MB:.1f}"]


def _remarks(found: Mapping[str, Any]) -> list[str]:
    """Failures, a token's round, and formats of hidden states that would help."""
    lines = [
        f"{link['from']} to {link['to']}: {link['failure']}" for link in found["links"] if link["failure"]
    ]
    if (whole := found["round"]) is not None:
        lines.append(f"a token's round: {_way(found['head'], whole['order'])}: {whole['order_ms']:.2f} ms")
        if whole["best"] != whole["order"]:
            shorter = f"shorter: {_way(found['head'], whole['best'])}: {whole['best_ms']:.2f} ms"
            lines.append(f"{shorter}; start `mesh serve` again to have that order")
    for wire in found["wires"]:
        if wire["proposed"] != "f32":
            times = (wire["row_transfer_ms"], wire["row_compute_ms"])
            takes = "takes {:.2f} ms on the wire, {:.2f} ms at a stage".format(*times)
            would_help = f"`mesh serve --wire {wire['proposed']}` would help"
            lines.append(f"{wire['from']} to {wire['to']}: a row {takes}; {would_help}")
    return lines


def _way(head: str, order: Sequence[str]) -> str:
    return " - ".join([head, *order, head])
