"""Course of a command that measures: logs and signals, the measurement, its report, the exit code."""

from __future__ import annotations

import signal
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from mesh.util.logs import set_up_logs
from mesh.util.printable import say
from meshbench.shared_options import logs_folder
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from meshbench.report_tools import Report


def experiment(measure: Callable[..., Report]) -> Callable[..., None]:
    """Function of a command that prints what `measure` finds, and exits with 1 unless it is good.

    Args:
        measure: Takes the command's parameters but `is_json`; writes the report to `output` if it has that.

    Raises:
        MeshError: If nothing could be measured; in a program of its own an error of click.
    """

    @wraps(measure)
    def command(*arguments: Any, is_json: bool = False, **options: Any) -> None:
        # `mesh` sets up logs and tells errors itself.
        is_subcommand = click.get_current_context().parent is not None
        if not is_subcommand:
            set_up_logs()
        end_on_sigterm()
        try:
            report = measure(*arguments, **options)
        except MeshError as error:
            if is_subcommand:
                raise
            raise click.ClickException(error.message) from error
        show(report, is_json=is_json, folder=options.get("output"))
        if not report.is_good:
            click.get_current_context().exit(1)

    return command


def lab_experiment(measure: Callable[..., Report]) -> Callable[..., None]:
    """As `experiment`, for a program that measures in the lab; its `logs` are a folder in any case."""

    @wraps(measure)
    def measure_in_lab(*, logs: Path | None, **options: Any) -> Report:
        from meshbench.lab.network import require_lab  # noqa: PLC0415 - keeps --help quick

        require_lab()
        with logs_folder(logs) as folder:
            return measure(logs=folder, **options)

    return experiment(measure_in_lab)


def show(report: Report, *, is_json: bool, folder: Path | None) -> None:
    """Print a report, and the place of its page if it has a folder."""
    say(report.json() if is_json else report.text())
    if folder is not None:
        say(f"report: {folder / 'report.md'}", err=is_json)


def end_on_sigterm() -> None:
    """Treat SIGTERM as Ctrl-C: with a time limit, too, all is removed, and what was measured is reported."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
