"""`mesh models`."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mesh.cli.shared_options import MemorySize, local_model
from mesh.util.printable import say
from spanmesh_proto.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.hub import CachedModel, HubLibrary
    from stages.weights.disk_cache import StageStore, StoredStage

_LEAST_PREFIX = 6


@dataclass(frozen=True)
class _Entry:
    """A line of the list."""

    name: str
    """Name for commands."""
    kind: str
    """`model` or `stage`, possibly partial."""
    what: str
    """Model of a stage."""
    size_bytes: int
    """Size on disk."""
    used_at_s: float
    """When it was last used, Unix seconds."""
    remove: Callable[[], bool]
    """Removes it; returns whether it did."""

    @property
    def is_whole(self) -> bool:
        """Whether it is complete."""
        return not self.kind.startswith("part")


@click.group()
def models() -> None:
    """List, remove and fetch the weights stored on this host: models from the hub, and stages."""


@models.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def list_(*, as_json: bool) -> None:
    """List models and stages."""
    entries = _entries()
    if as_json:
        lines = [
            {
                "name": entry.name,
                "kind": entry.kind,
                "what": entry.what,
                "size_bytes": entry.size_bytes,
                "used_at_s": round(entry.used_at_s, 3),
            }
            for entry in entries
        ]
        say(json.dumps({"models": lines}))
        return
    _print(entries)


@models.command()
@click.argument("reference")
def pull(reference: str) -> None:
    """Fetch a model from the hub: hf:org/repo:QUANT."""
    from mesh.hub import parse_reference  # noqa: PLC0415 - keeps --help quick

    parse_reference(reference)
    say(local_model(Path(reference)).path)


@models.command()
@click.argument("names", nargs=-1, required=True)
def rm(names: tuple[str, ...]) -> None:
    """Remove models or stages, by the names of `mesh models list` or unique prefixes of them."""
    from stages.units import format_size  # noqa: PLC0415 - keeps --help quick

    for name in names:
        entry = _named(_entries(), name)
        if not entry.remove():
            raise ModelError(f"{entry.name} is in use: first end the process that loads or fetches it")
        say(f"removed {entry.name}, {format_size(entry.size_bytes)}")


@models.command()
@click.option(
    "--cache-size",
    "limit_bytes",
    type=MemorySize(),
    metavar="SIZE",
    help="Also remove stages, least recently used first, until the rest fits in this size.",
)
def prune(limit_bytes: int | None) -> None:
    """Remove incomplete files, except those that are loaded or being fetched."""
    from stages.units import format_size  # noqa: PLC0415 - keeps --help quick
    from stages.weights.disk_cache import make_room, stage_store  # noqa: PLC0415

    freed_bytes = sum(entry.size_bytes for entry in _entries() if not entry.is_whole and entry.remove())
    freed_bytes += stage_store().remove_leftovers(before_s=time.time() - 3600)
    freed_bytes += make_room(stage_store(), 0, limit_bytes)
    say(f"freed {format_size(freed_bytes)}")


def _entries() -> list[_Entry]:
    from mesh.hub import HubLibrary  # noqa: PLC0415 - keeps --help quick
    from stages.weights.disk_cache import default_root, stage_store  # noqa: PLC0415

    library, store = HubLibrary(default_root()), stage_store()
    return [
        *(_model_entry(library, model) for model in library.models()),
        *(_stage_entry(store, stage) for stage in store.stages()),
    ]


def _model_entry(library: HubLibrary, model: CachedModel) -> _Entry:
    kind, content = _content(model.paths[0]) if model.is_whole else ("part of a model", "")
    return _Entry(
        model.name,
        kind,
        content,
        model.size_bytes,
        model.used_at_s,
        lambda: library.remove(model),
    )


def _content(path: Path) -> tuple[str, str]:
    """Kind of a file, and architecture and layers of a model that can be served, or what a drafter is."""
    from stages.gguf import read_header  # noqa: PLC0415 - keeps --help quick
    from stages.slicing.drafter_files import drafter_label  # noqa: PLC0415
    from stages.slicing.model_facts import read_model_facts  # noqa: PLC0415

    try:
        if label := drafter_label(read_header(path)):
            return "drafter", label
        facts = read_model_facts(path)
    except (ModelError, OSError):
        return "model", ""
    return "model", f"{facts.architecture}, {facts.layer_count}"


def _stage_entry(store: StageStore, stage: StoredStage) -> _Entry:
    recipe = store.recipe(stage.sha256)
    return _Entry(
        stage.sha256[:12],
        "stage" if stage.is_whole else "part of a stage",
        "" if recipe is None else f"{recipe.model} {recipe.layers} of {recipe.n_layers}",
        stage.size_bytes,
        stage.used_at_s,
        lambda: store.remove(stage),
    )


def _named(entries: Sequence[_Entry], name: str) -> _Entry:
    found = [entry for entry in entries if entry.name == name]
    if not found and len(name) >= _LEAST_PREFIX:
        found = [entry for entry in entries if entry.name.startswith(name)]
    if len(found) != 1:
        trouble = "nothing" if not found else f"{len(found)} entries"
        raise ModelError(f"{name!r} names {trouble} here; `mesh models list` shows all")
    return found[0]


def _print(entries: Sequence[_Entry]) -> None:
    from rich.table import Table  # noqa: PLC0415 - keeps --help quick

    from mesh.util.terminal import PrintableConsole  # noqa: PLC0415 - keeps --help quick
    from stages.units import format_size  # noqa: PLC0415

    table = Table("name", "kind", "holds", "size", "last used")
    for entry in entries:
        used = datetime.fromtimestamp(entry.used_at_s).astimezone().strftime("%Y-%m-%d %H:%M")
        table.add_row(entry.name, entry.kind, entry.what, format_size(entry.size_bytes), used)
    PrintableConsole(markup=False).print(table)
    total_bytes = sum(entry.size_bytes for entry in entries)
    say(f"{len(entries)} entries, {format_size(total_bytes)} in all")
