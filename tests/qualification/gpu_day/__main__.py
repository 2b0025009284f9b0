"""Command for a day with a real card; resumes where it was interrupted.

Random models are made on the spot. Whole in one process, and as 1, 2 and 4 stages on the card, they are timed
with several numbers of sessions; prefill, speculation, parity with the processor, memory, experts on the
processor, ways to end a graph, and the dependence of rows on their batch follow. Each phase runs in a process
of its own and ends within its time. FOLDER holds models, results and the report.

It needs numpy, grpcio and protobuf on the machine, and what `--carry` copies: gguf and other packages in
Python, and llama.cpp's libraries, which LLAMA_CPP_LIB_PATH names. It needs no network, no Ray and no packaged
model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, NoReturn

import click

from mesh.util.logs import set_up_logs
from spanmesh_proto.errors import MeshError
from stages.process_limits import num_usable
from tests.qualification.gpu_day.carry import carry
from tests.qualification.gpu_day.phases import Bench
from tests.qualification.gpu_day.report import markdown
from tests.qualification.gpu_day.runner import PhaseResult, ResultStore, run_all, run_here
from tests.qualification.gpu_day.scale import DAY, SCALES, phases_of

# What a phase may take: machines are lent by the quarter of an hour.
_LIMIT_S: Final = 480.0
_NAME: Final = "tests.qualification.gpu_day"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--scale", type=click.Choice(list(SCALES)), default=DAY.name, show_default=True)
@click.option("--device", help="llama.cpp's name of the device; the first one unless given.")
@click.option("--phase", "wanted", multiple=True, metavar="NAME", help="Only this phase; may be repeated.")
@click.option("--list", "is_list", is_flag=True, help="List the phases, and which are done.")
@click.option(
    "--limit-s",
    type=click.FloatRange(1),
    default=_LIMIT_S,
    show_default=True,
    help="Longest time of a phase.",
)
@click.option("--budget-s", type=click.FloatRange(1), help="Begin no phase that might end later than that.")
@click.option(
    "--threads", type=click.IntRange(1), help="Threads of the processor; one per core unless given."
)
@click.option("--keep-models", is_flag=True, help="Leave models on the disk when their phases are done.")
@click.option("--here", is_flag=True, help="Run one phase in this process.")
@click.option("--carry", "is_carry", is_flag=True, help="Make FOLDER to carry to a machine, and run nothing.")
def main(
    *,
    folder: Path,
    scale: str,
    device: str | None,
    wanted: tuple[str, ...],
    is_list: bool,
    limit_s: float,
    budget_s: float | None,
    threads: int | None,
    keep_models: bool,
    here: bool,
    is_carry: bool,
) -> None:
    """Run the protocol in FOLDER, and write report.md there; 1 if a phase failed."""
    set_up_logs()
    try:
        if is_carry:
            carry(folder)
            click.echo(f"{folder} is ready; there: LLAMA_CPP_LIB_PATH=$PWD/lib python3 -m {_NAME} FOLDER")
            return
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder.resolve(), SCALES[scale], device, threads or num_usable())
        phases = {phase.name: phase for phase in phases_of(bench.scale)}
        unknown = [name for name in wanted if name not in phases]
        if unknown:
            raise click.UsageError(f"there is no phase {unknown[0]}; there are {', '.join(phases)}")
        store = ResultStore(bench.folder)
        if is_list:
            for name, phase in phases.items():
                click.echo(f"{'done' if store.is_done(phase) else 'to do':>6}  {name}")
            return
        if here:
            (name,) = wanted
            _exit_after([run_here(phases[name], bench)])
        results = run_all(bench, wanted=wanted, limit_s=limit_s, budget_s=budget_s, keeps_models=keep_models)
    except MeshError as error:
        raise click.ClickException(error.message) from error
    known = {name: result for name, phase in phases.items() if (result := store.of(phase)) is not None}
    report = markdown(bench.scale, known)
    (folder / "report.md").write_text(report, encoding="utf-8")
    click.echo(report)
    _exit_after(results)


def _exit_after(results: list[PhaseResult]) -> NoReturn:
    for result in results:
        if result.failure:
            click.echo(f"{result.name} failed: {result.failure}", err=True)
    sys.exit(any(result.failure for result in results))


if __name__ == "__main__":
    main()
