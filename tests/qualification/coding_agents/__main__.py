"""Command that lets coding agents take a turn each, with nothing but a mesh to talk to.

    python -m tests.qualification.coding_agents --install ~/agents

Claude Code, Codex and OpenCode each take a plain turn, with the demo model on a real mesh, and turns with a
tool, with scripted models behind the same HTTP server: one that is told of tools by the server's note, one
with the template of gpt-oss (Harmony), and one with Gemma 4's. They are started by `mesh agent`, in a network
of loopback alone. The templates are those of llama.cpp's source; `SPANMESH_LLAMA_CPP` names its folder.
"""

from __future__ import annotations

import datetime as dt
from contextlib import closing
from typing import TYPE_CHECKING

import click

from mesh.cli.shared_options import float_option, int_option
from meshbench.experiment import experiment
from meshbench.lab.network import require_lab
from meshbench.shared_options import FOLDER, json_option, output_option
from spanmesh_proto import SOFTWARE_VERSION
from spanmesh_proto.errors import MeshError
from stages.process_limits import processor_name
from tests.qualification.coding_agents.agents import PROGRAMS
from tests.qualification.coding_agents.model_kinds import MODEL_KINDS
from tests.qualification.coding_agents.npm_install import (
    install,
    installed_version,
    require_installed,
    require_tools,
)
from tests.qualification.coding_agents.report import agents_report
from tests.qualification.coding_agents.turns import TurnKind, TurnOptions, take_turns

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from meshbench.report_tools import Report
    from tests.qualification.coding_agents.agents import AgentProgram
    from tests.qualification.coding_agents.turns import Turn


@click.command()
@click.argument("folder", type=FOLDER)
@click.option("--install", "is_installing", is_flag=True, help="First install the agents in FOLDER, by npm.")
@click.option(
    "--only",
    "names",
    multiple=True,
    type=click.Choice(sorted(PROGRAMS)),
    help="Only this agent; may be given several times.",
)
@click.option(
    "--turn",
    "kinds",
    multiple=True,
    type=click.Choice([kind.name.lower() for kind in TurnKind]),
    help="Only this kind of turn.",
)
@click.option(
    "--template",
    "models",
    multiple=True,
    type=click.Choice(list(MODEL_KINDS)),
    help="Only this kind of scripted model; may be given several times.",
)
@int_option("--ctx-size", default=65_536, metavar="N", help="Positions of a session of the real mesh.")
@float_option("--time-limit", default=1800.0, help="Longest turn, in seconds.")
@output_option("coding-agents", "Folder of the report, the recordings and the logs.")
@json_option
@experiment
def main(
    *,
    folder: Path,
    is_installing: bool,
    names: tuple[str, ...],
    kinds: tuple[str, ...],
    models: tuple[str, ...],
    ctx_size: int,
    time_limit: float,
    output: Path,
) -> Report:
    """Try the agents that are installed in FOLDER; exit with 1 if a check fails."""
    folder, output = folder.resolve(), output.resolve()
    programs = [PROGRAMS[name] for name in names or PROGRAMS]
    _prepare(folder, programs, is_installing=is_installing)
    output.mkdir(parents=True, exist_ok=True)
    options = TurnOptions(
        agents=folder,
        output=output,
        ctx_size=ctx_size,
        time_limit_s=time_limit,
        kinds=[kind for kind in TurnKind if not kinds or kind.name.lower() in kinds],
        models=[MODEL_KINDS[name] for name in models or MODEL_KINDS],
    )
    turns, failures = _all_turns(programs, options)
    conditions = {
        "spanmesh": SOFTWARE_VERSION,
        "date": dt.datetime.now().astimezone().date().isoformat(),
        "processor": processor_name(),
        "context of the real mesh": ctx_size,
    }
    versions = {program.package: installed_version(folder, program.package) for program in programs}
    report = agents_report(turns, versions, conditions, failures)
    report.write(output)
    return report


def _prepare(folder: Path, programs: Sequence[AgentProgram], *, is_installing: bool) -> None:
    """Check what turns need, and install the agents if that is wanted.

    Raises:
        MeshError: If something is missing.
    """
    require_lab()
    if is_installing:
        install(folder)
    require_tools()
    require_installed(folder, programs)


def _all_turns(programs: Sequence[AgentProgram], options: TurnOptions) -> tuple[list[Turn], list[str]]:
    """Turns of all agents, and why others could not be taken."""
    turns: list[Turn] = []
    failures: list[str] = []
    for program in programs:
        with closing(take_turns(program, options)) as coming:
            try:
                turns.extend(coming)
            except MeshError as error:
                failures.append(f"{program.title}: {error.message}")
    return turns, failures


if __name__ == "__main__":
    main()
