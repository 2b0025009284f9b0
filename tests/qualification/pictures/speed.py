"""First token behind a picture, in turn with llama-server's, which has the same model and projector.

    python -m tests.qualification.pictures.speed

Both run on this machine with the same number of threads, one of them stopped while the other one answers.
Each round shows a picture that neither has seen to both, and then once more. llama-server is compiled once,
from the source of the installed llama-cpp-python.
"""

from __future__ import annotations

import subprocess
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Final

import click
import psutil
import structlog

from mesh.cli.own_mesh import own_mesh
from mesh.cli.shared_options import int_option
from mesh.cluster.addresses import free_port
from mesh.serve.options import demo_model
from mesh.util.child_environment import inherited_environment
from meshbench.experiment import experiment
from meshbench.lab.llama_cpp_build import build_llama_rpc
from meshbench.lab.systems import health_watcher, wait_until
from meshbench.load_client.client import LoadClient
from meshbench.load_client.schedule import Request
from meshbench.report_tools import Line, PairedRatio, Report, table_section
from meshbench.shared_options import json_option, logs_folder, logs_option, serve_option
from stages.openmp_tuning import SPIN_COUNT
from stages.process_limits import num_usable, processor_name
from tests.qualification.bounded_report import bounded_report
from tests.qualification.pictures.real_sizes import SIDE, asked, write_real_sizes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.qualification.pictures.real_sizes import VisionFiles

_MOST_RATIO: Final = 1.15
_MOST_AGAIN: Final = 0.2
_CTX_SIZE: Final = 1024
_START_S: Final = 180.0

log = structlog.get_logger()


@dataclass(frozen=True)
class System:
    """A server of OpenAI's API on this machine."""

    name: str
    """What it is called."""
    url: str
    """URL of its API, without a path."""
    pid: int
    """Its process, to which all others of it belong."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have it run for the block; it is stopped before and behind it."""
        for process in self._tree():
            process.resume()
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop all its processes, so that they take no processor time."""
        for process in self._tree():
            process.suspend()

    def resume(self) -> None:
        """Continue all its processes."""
        for process in self._tree():
            process.resume()

    def _tree(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.pid)
            return [top, *top.children(recursive=True)]
        return []


@dataclass(frozen=True)
class Round:
    """Times to the first token, in milliseconds: of a picture, and of the same once more."""

    mesh_ms: tuple[float, float]
    """Ours."""
    peer_ms: tuple[float, float]
    """llama-server's."""


@contextmanager
def llama_server(files: VisionFiles, folder: Path, num_threads: int) -> Iterator[System]:
    """Run llama-server for the block.

    Raises:
        MeshError: If it cannot be built, or does not come up.
    """
    port = free_port("127.0.0.1")
    argv = [str(build_llama_rpc().server), "--model", str(files.model), "--mmproj", str(files.projector)]
    argv += ["--port", str(port), "--threads", str(num_threads), "--parallel", "1"]
    argv += ["--ctx-size", str(_CTX_SIZE), "--offline", "--no-ui"]
    # As users run it: what spanmesh sets for its own threads is not for these.
    environment = {name: value for name, value in inherited_environment().items() if name != SPIN_COUNT}
    path = folder / "llama-server.log"
    with path.open("wb") as output:
        server = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
    try:
        with subprocess.Popen(health_watcher(port)) as watcher:
            try:
                wait_until(lambda: watcher.poll() == 0, "llama-server", server, path, _START_S)
            finally:
                watcher.kill()
        yield System("llama-server", f"http://127.0.0.1:{port}", server.pid)
    finally:
        server.kill()
        server.wait()


def measure(folder: Path, num_rounds: int, num_threads: int, options: Sequence[str]) -> list[Round]:
    """Serve the model with both, and take all rounds.

    Args:
        folder: For files and logs.
        num_rounds: Pictures.
        num_threads: Of each program.
        options: Further ones of `mesh serve`.

    Raises:
        MeshError: If one does not come up, or a request fails.
    """
    files = write_real_sizes(demo_model(), folder)
    arguments = [
        *(str(files.model), "--mmproj", str(files.projector), "--speculate", "off", "--parallel", "1"),
        *("--ctx-size", str(_CTX_SIZE), "--threads", str(num_threads), *options),
    ]
    with (
        (folder / "mesh.log").open("w+b") as mesh_log,
        own_mesh(arguments, mesh_log) as own,
        llama_server(files, folder, num_threads) as peer,
        LoadClient(None) as client,
    ):
        mesh = System("the mesh", own.url, own.process.pid)
        try:
            mesh.stop()
            peer.stop()
            # Nothing measured is a first time.
            for system in (mesh, peer):
                _first_tokens_ms(client, system, 0)
            return [_round(client, mesh, peer, 1 + number) for number in range(num_rounds)]
        finally:
            mesh.resume()


def _round(client: LoadClient, mesh: System, peer: System, seed: int) -> Round:
    ask = partial(_first_tokens_ms, client, seed=seed)
    if seed % 2:
        ours, theirs = ask(mesh), ask(peer)
    else:
        theirs, ours = ask(peer), ask(mesh)
    log.info("round_done", picture=seed, mesh_ms=ours, peer_ms=theirs, ratio=round(ours[0] / theirs[0], 3))
    return Round(ours, theirs)


def _first_tokens_ms(client: LoadClient, system: System, seed: int) -> tuple[float, float]:
    request = Request.streamed({**asked(seed, 2), "cache_prompt": True})
    with system.running():
        first, again = client.answer(system.url, (request, request)).answers
    return round(first.ttft_ms, 1), round(again.ttft_ms, 1)


def lines(rounds: Sequence[Round]) -> list[Line]:
    """The figures with their bounds."""
    firsts = [(each.mesh_ms[0], each.peer_ms[0]) for each in rounds]
    ratio = PairedRatio.of(firsts)
    again = PairedRatio.of([(each.mesh_ms[1], each.mesh_ms[0]) for each in rounds])
    ratios = [own / other for own, other in firsts]
    between = f"of {len(rounds)} rounds"
    return [
        Line(
            "first token behind a picture, over llama-server's",
            ratio.ratio,
            _MOST_RATIO,
            is_ceiling=True,
            note=f"95 % interval {ratio.low:.3f} to {ratio.high:.3f} {between}, median {median(ratios):.3f}",
        ),
        Line(
            "the same picture again, over the first time",
            again.ratio,
            _MOST_AGAIN,
            is_ceiling=True,
            note=f"95 % interval {again.low:.3f} to {again.high:.3f} {between}",
        ),
        Line("first token behind a picture, ms", median(own for own, _ in firsts), None),
        Line("llama-server's, ms", median(other for _, other in firsts), None),
    ]


def report(rounds: Sequence[Round], num_threads: int, options: Sequence[str]) -> Report:
    """The rounds, and the figures with their bounds."""
    conditions = {
        "picture": f"{SIDE} × {SIDE} pixels",
        "threads of each program": num_threads,
        "options": " ".join(options),
        "cores": num_usable(),
        "processor": processor_name(),
    }
    rows = [
        (
            str(number),
            *(f"{time_ms:.0f}" for time_ms in (*each.mesh_ms, *each.peer_ms)),
            f"{each.mesh_ms[0] / each.peer_ms[0]:.3f}",
        )
        for number, each in enumerate(rounds, 1)
    ]
    heads = ("round", "mesh, ms", "again", "llama-server, ms", "again", "ratio")
    return bounded_report(
        "First token behind a picture", conditions, lines(rounds), table_section("## Rounds", heads, rows)
    )


@click.command()
@int_option("--rounds", "num_rounds", default=12, metavar="N", help="Pictures.")
@int_option("--threads", "num_threads", default=num_usable(), metavar="N", help="Of each program.")
@serve_option
@logs_option()
@json_option
@experiment
def main(*, num_rounds: int, num_threads: int, serve_options: tuple[str, ...], logs: Path | None) -> Report:
    """Measure the first token behind a picture, in turn with llama-server on this machine.

    Prints it with its bounds, and exits with 1 if one is missed.
    """
    with logs_folder(logs) as folder:
        return report(measure(folder, num_rounds, num_threads, serve_options), num_threads, serve_options)


if __name__ == "__main__":
    main()
