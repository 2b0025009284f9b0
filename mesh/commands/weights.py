"""Options about how weights travel and are kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mesh.commands.options import MemorySize

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.hub import PulledModel
    from mesh.serve.options import WeightsOptions
    from stages.weights.store import Keeping

Command = TypeVar("Command", bound="Callable[..., Any]")

_KEEPING = (
    click.option(
        "--models",
        "models_dir",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        metavar="DIR",
        help="GGUF files of this host: layers that are in them need not be sent.",
    ),
    click.option(
        "--cache-size",
        "cache_bytes",
        type=MemorySize(),
        metavar="SIZE",
        help="What stage files may take of this host's disk; those not used for longest go first.",
    ),
)
_SENDING = (
    click.option(
        "--transfer-rate",
        type=MemorySize(),
        metavar="SIZE",
        help="Bytes a second that hosts are sent at most, all together, such as 50M.",
    ),
    click.option(
        "--hub-first",
        is_flag=True,
        help="Let hosts fetch from the hub before they ask this host, if the model came from there.",
    ),
)


def keeping_options(command: Command) -> Command:
    """Options of every host."""
    for option in reversed(_KEEPING):
        command = option(command)
    return command


def weights_options(command: Command) -> Command:
    """Options of the head."""
    for option in reversed((*_SENDING, *_KEEPING)):
        command = option(command)
    return command


def keeping_from(*, models_dir: Path | None, cache_bytes: int | None) -> Keeping:
    """What the user says; processes that are started from now on know it."""
    from stages.weights.store import Keeping  # noqa: PLC0415 - keeps --help quick

    keeping = Keeping(models_dir.resolve() if models_dir is not None else None, cache_bytes)
    keeping.to_environment()
    return keeping


def weights_from(
    pulled: PulledModel,
    *,
    models_dir: Path | None,
    cache_bytes: int | None,
    transfer_rate: int | None,
    hub_first: bool,
) -> WeightsOptions:
    """What the user of `mesh serve` says."""
    from mesh.serve.options import WeightsOptions  # noqa: PLC0415 - keeps --help quick

    keeping_from(models_dir=models_dir, cache_bytes=cache_bytes)
    return WeightsOptions(transfer_rate, pulled.hub, hub_first)
