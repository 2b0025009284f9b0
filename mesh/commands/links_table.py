"""The answer of `/mesh/links` as a table for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

_MB = 10**6


def print_links(found: Mapping[str, Any]) -> None:
    """Links, then what they mean for the stages' order."""
    # What went wrong may have any brackets in it.
    console = Console(markup=False)
    if not found["links"]:
        console.print("no other host has joined: there is no link to measure", highlight=False)
        return
    hidden = f"{found['hidden_bytes']} B"
    table = Table("from", "to", "64 B ms", "p99", f"{hidden} ms", "p99", "one way ms", "MB/s")
    for link in found["links"]:
        table.add_row(link["from"], link["to"], *_figures(link))
    console.print(table)
    console.print(
        f"round trips: 64 B; one row of hidden states ({hidden}) there, 64 B back. One way: such a row",
        highlight=False,
    )
    for link in found["links"]:
        if link["failure"]:
            console.print(f"{link['from']} to {link['to']}: {link['failure']}", highlight=False)
    if found["round"]:
        _print_round(console, found["head"], found["round"])
    for wire in found["wires"]:
        _print_wire(console, wire)


def _figures(link: Mapping[str, Any]) -> list[str]:
    if link["failure"]:
        return ["-"] * 6
    small, hidden, rate = link["rtt_ms"], link["hidden_rtt_ms"], link["bytes_per_s"]
    times = (small["p50"], small["p99"], hidden["p50"], hidden["p99"], link["hop_ms"])
    return [*(f"{time:.2f}" for time in times), "-" if rate is None else f"{rate / _MB:.1f}"]


def _print_round(console: Console, head: str, found: Mapping[str, Any]) -> None:
    console.print(
        f"a token's round: {_way(head, found['order'])}: {found['order_ms']:.2f} ms", highlight=False
    )
    if found["best"] != found["order"]:
        shorter = f"shorter: {_way(head, found['best'])}: {found['best_ms']:.2f} ms"
        console.print(f"{shorter}; start `mesh serve` again to have that order", highlight=False)


def _print_wire(console: Console, wire: Mapping[str, Any]) -> None:
    if wire["proposed"] == "f32":
        return
    takes = f"takes {wire['row_transfer_ms']:.2f} ms on the wire, {wire['row_compute_ms']:.2f} ms at a stage"
    console.print(
        f"{wire['from']} to {wire['to']}: a row {takes}; `mesh serve --wire {wire['proposed']}` would help",
        highlight=False,
    )


def _way(head: str, order: list[str]) -> str:
    return " - ".join([head, *order, head])
