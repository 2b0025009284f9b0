"""`mesh top`: a running mesh, live."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import click

from mesh.commands.ask_head import ask_head
from mesh.commands.head_options import head_options, key_of
from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rich.console import RenderableType

# Links change slowly, and measuring them is not free.
_LINKS_EVERY_S: Final = 30.0
_LINKS_TIMEOUT_S: Final = 60.0
_NUM_PROBES: Final = 5


@click.command()
@head_options
@click.option(
    "--every",
    "interval_s",
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(0.2, 60.0),
    help="How often to look.",
)
@click.option("--no-links", is_flag=True, help="Do not have the hosts measure their links now and then.")
@click.option(
    "--once", is_flag=True, help="Print one picture of that long, and end; for any terminal or file."
)
def top(url: str, api_key_file: Path | None, interval_s: float, *, no_links: bool, once: bool) -> None:
    """Watch a running mesh: what each stage computes and waits, links, acceptance, sessions.

    Ctrl-C ends it; the mesh does not notice.
    """
    from rich.console import Console  # noqa: PLC0415 - keeps --help quick
    from rich.live import Live  # noqa: PLC0415

    watch = _Watch(url.rstrip("/"), key_of(api_key_file), has_links=not no_links)
    console = Console()
    picture = watch.look()
    if once:
        time.sleep(interval_s)
        console.print(watch.look(), highlight=False)
        return
    if not console.is_terminal or console.is_dumb_terminal:
        raise click.UsageError("this is no terminal that can be drawn on: use --once")
    try:
        with Live(picture, console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                live.update(watch.look(), refresh=True)
    except KeyboardInterrupt:
        return


class _Watch:
    """Asks the head, and remembers what it said before.

    Args:
        url: Of the API.
        key: If the mesh wants one.
        has_links: Whether links are measured.
    """

    def __init__(self, url: str, key: str | None, *, has_links: bool) -> None:
        self._url = url
        self._key = key
        self._has_links = has_links
        self._before: Mapping[str, Any] | None = None
        self._before_s = 0.0
        self._hops_ms: dict[tuple[str, str], float] = {}
        self._head = ""
        self._linked_s: float | None = None

    def look(self) -> RenderableType:
        """The picture as it is now.

        Raises:
            MeshError: If the head does not answer the first time; later the picture says so.
        """
        from rich.text import Text  # noqa: PLC0415 - keeps --help quick

        from mesh.commands.mesh_pace import pace_between  # noqa: PLC0415
        from mesh.commands.top_view import view  # noqa: PLC0415

        try:
            status = ask_head(f"{self._url}/mesh/status", self._key)
        except ClusterError as error:
            if self._before is None:
                raise
            return Text(error.message)
        now_s = time.monotonic()
        pace = pace_between(self._before, status, now_s - self._before_s)
        self._before, self._before_s = status, now_s
        self._measure_links(now_s)
        return view(status, pace, self._hops_ms, self._head)

    def _measure_links(self, now_s: float) -> None:
        is_due = self._linked_s is None or now_s - self._linked_s >= _LINKS_EVERY_S
        if not self._has_links or not is_due:
            return
        self._linked_s = now_s
        try:
            found = ask_head(
                f"{self._url}/mesh/links?probes={_NUM_PROBES}&bulk_bytes=0",
                self._key,
                method="POST",
                timeout_s=_LINKS_TIMEOUT_S,
            )
        except ClusterError:
            # The head is still starting: what was measured before stays.
            return
        self._head = found["head"]
        self._hops_ms = {
            (link["from"], link["to"]): link["hop_ms"]
            for link in found["links"]
            if link["hop_ms"] is not None
        }
