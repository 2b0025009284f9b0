"""Hostile pictures through all three APIs: a reason for each, bounded memory, and other streams that go on.

    python -m tests.qualification.pictures.hostile

A mesh on this machine with a projector of colours. Streams decode all the time. In each round a part of the
pictures comes (bombs, cut and changed files, false sizes, other formats, strips), two at once, to
`/v1/chat/completions`, `/v1/responses` and `/v1/messages` in turn, and then as long none. A picture that was
changed may be a valid one still: it is answered.
"""

from __future__ import annotations

import base64
import itertools
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import click
import httpx
import psutil
import structlog

from mesh.cli.own_mesh import own_mesh
from mesh.cli.shared_options import int_option
from mesh.serve.options import demo_model
from meshbench.experiment import experiment
from meshbench.lab.memory_watch import role_of
from meshbench.load_client.client import LoadClient
from meshbench.report_tools import Line, Report, table_section
from meshbench.shared_options import json_option, logs_folder, logs_option, seed_option, serve_option
from spanmesh_proto.errors import MeshError
from stages.process_limits import num_usable, processor_name
from tests.qualification.bounded_report import bounded_report
from tests.qualification.pictures.losses import DECODER, ENCODER
from tests.qualification.pictures.streams import Streams, p99, ratio_line
from tests.support.colour_words import png, write_colours
from tests.support.hostile_pictures import REFUSED, changed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_AT_ONCE: Final = 2
_STREAMS: Final = 3
_SETTLE_S: Final = 1.0
_LOOK_S: Final = 1.0
_MOST_RATIO: Final = 2.0
_MIB: Final = 2**20
# The largest picture that is sent, in base64 and in JSON, is there a few times while it is read.
_MOST_HEAD_MIB: Final = 256.0
_MOST_ENCODER_MIB: Final = 16.0
_DECODERS: Final = "decoders"
_HEAD: Final = "head"
_REFUSED_STATUS: Final = frozenset({400, 413})

log = structlog.get_logger()


def _chat(picture: str) -> dict[str, Any]:
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    return {"messages": [{"role": "user", "content": [shown]}], "max_tokens": 1}


def _response(picture: str) -> dict[str, Any]:
    shown = {"type": "input_image", "image_url": f"data:image/png;base64,{picture}"}
    return {"input": [{"role": "user", "content": [shown]}], "max_output_tokens": 1, "store": False}


def _message(picture: str) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": picture}
    return {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}], "max_tokens": 1}


_APIS: Final[dict[str, Callable[[str], dict[str, Any]]]] = {
    "/v1/chat/completions": _chat,
    "/v1/responses": _response,
    "/v1/messages": _message,
}


@dataclass
class Findings:
    """What came out."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By endpoint and HTTP status."""
    wrong: list[tuple[str, str]] = field(default_factory=list)
    """Pictures without a reason, and what came instead."""
    pairs: list[tuple[float, float]] = field(default_factory=list)
    """99th percentiles of each round, in milliseconds: beside the pictures, and alone."""
    most_bytes: Counter[str] = field(default_factory=Counter)
    """Most memory of processes, by what they are."""
    begin_bytes: Counter[str] = field(default_factory=Counter)
    """Memory before the first picture."""
    num_restarted: int = 0
    """Processes for pictures that were replaced."""
    is_alive: bool = False
    """Whether a valid picture is answered afterwards, by the same head and encoder."""


def pictures(seed: int) -> Iterator[tuple[str, bytes]]:
    """Hostile pictures without end, with their names: of each kind that is refused, among changed ones."""
    kinds = [(name, make()) for name, (make, _) in REFUSED.items()]
    of_seed = changed(seed)
    for kind in itertools.cycle(kinds):
        yield kind
        for _ in range(3):
            yield "changed", next(of_seed)


class Attack:
    """Sends pictures, and notes what becomes of them.

    Args:
        http: Client of the mesh.
        process: The head.
        findings: Take the results.
    """

    def __init__(self, http: httpx.Client, process: psutil.Process, findings: Findings) -> None:
        self._http = http
        self._process = process
        self._findings = findings
        self._endpoints = itertools.cycle(_APIS)
        self._pids: set[int] = set()

    def send(self, chosen: Sequence[tuple[str, bytes]]) -> tuple[float, float]:
        """Send pictures; returns when it began and when all were answered, by `time.perf_counter`."""
        # Made ready before, since the same processors serve the streams.
        ready = []
        for name, data in chosen:
            path = next(self._endpoints)
            body = {"model": "default", "temperature": 0, **_APIS[path](base64.b64encode(data).decode())}
            ready.append((name, path, json.dumps(body).encode()))
        begun_s = time.perf_counter()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = [pool.submit(self._send, each) for each in ready]
            while wait(answers, _LOOK_S).not_done:
                self.look()
        return begun_s, time.perf_counter()

    def look(self) -> None:
        """Note the memory of the processes."""
        now: Counter[str] = Counter()
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                command = process.cmdline()
                is_head = process == self._process or role_of(command) == "coordinator"
                name = _HEAD if is_head else ENCODER if ENCODER in command else None
                name = _DECODERS if DECODER in command else name
                if name is not None:
                    now[name] += process.memory_full_info().uss
                if name in {ENCODER, _DECODERS}:
                    self._pids.add(process.pid)
            except psutil.Error:
                continue
        self._findings.begin_bytes = self._findings.begin_bytes or now
        self._findings.most_bytes |= now
        self._findings.num_restarted = len(self._pids) - 3

    def is_answered(self, path: str = "/v1/chat/completions") -> bool:
        """Whether a valid picture is."""
        body = {"model": "default", **_chat(base64.b64encode(png(" red")).decode())}
        return self._http.post(path, json=body).status_code == 200

    def _send(self, ready: tuple[str, str, bytes]) -> None:
        name, path, body = ready
        try:
            answer = self._http.post(path, content=body, headers={"content-type": "application/json"})
        except httpx.HTTPError as error:
            self._findings.wrong.append((name, repr(error)))
            return
        self._findings.statuses[path, answer.status_code] += 1
        is_told = answer.status_code in _REFUSED_STATUS and bool(_reason(answer))
        if not is_told and not (answer.status_code == 200 and name == "changed"):
            self._findings.wrong.append((name, f"{answer.status_code} {answer.text[:200]}"))


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def measure(folder: Path, num_pictures: int, num_rounds: int, seed: int, options: Sequence[str]) -> Findings:
    """Serve a model, and send all pictures in rounds.

    Args:
        folder: For files and logs.
        num_pictures: Of all rounds.
        num_rounds: Rounds.
        seed: Of changed pictures.
        options: Further ones of `mesh serve`.

    Raises:
        MeshError: If the mesh does not come up, or a stream fails.
    """
    model = demo_model()
    arguments = [str(model), "--mmproj", str(write_colours(folder / "mmproj.gguf", model))]
    arguments += [
        "--speculate",
        "off",
        "--ctx-size",
        "1024",
        "--parallel",
        str(_STREAMS + _AT_ONCE),
        *options,
    ]
    findings, streams, source = Findings(), Streams(_STREAMS), pictures(seed)
    times = []
    with (
        (folder / "mesh.log").open("w+b") as mesh_log,
        own_mesh(arguments, mesh_log) as mesh,
        LoadClient(None) as client,
        httpx.Client(base_url=mesh.url, timeout=120.0, trust_env=False) as http,
    ):
        attack = Attack(http, psutil.Process(mesh.process.pid), findings)
        if not attack.is_answered():
            raise MeshError("the mesh does not read a valid picture")
        # Nothing measured is a first time; two decoders, and what they need.
        attack.send([("changed", png(" red"))] * (2 * _AT_ONCE))
        findings.statuses.clear()
        attack.look()
        with streams.running(client, mesh.url):
            time.sleep(2 * _SETTLE_S)
            for number in range(num_rounds):
                chosen = list(itertools.islice(source, num_pictures // num_rounds))
                begun_s, ended_s = attack.send(chosen)
                attack.look()
                time.sleep(_SETTLE_S)
                alone_s = time.perf_counter()
                time.sleep(ended_s - begun_s + _SETTLE_S)
                times.append((begun_s, ended_s, alone_s))
                log.info("round_done", number=number, seconds=round(ended_s - begun_s, 2))
        findings.is_alive = attack.is_answered() and mesh.process.poll() is None
    between = streams.between
    for begun_s, ended_s, alone_s in times:
        alone = between(alone_s, alone_s + ended_s - begun_s)
        findings.pairs.append((p99(between(begun_s, ended_s)), p99(alone)))
    return findings


def lines(findings: Findings) -> list[Line]:
    """The figures with their bounds."""

    def grown(name: str, most_mib: float) -> Line:
        begin, most = findings.begin_bytes[name] / _MIB, findings.most_bytes[name] / _MIB
        title = f"memory of the {name.rpartition('.')[2]} beyond its beginning, MiB"
        return Line(title, most - begin, most_mib, is_ceiling=True, note=f"{begin:.0f} at first")

    total = sum(findings.statuses.values())
    refused = sum(count for (_, status), count in findings.statuses.items() if status != 200)
    return [
        Line("pictures without a reason", len(findings.wrong), 0, is_ceiling=True, note=f"of {total}"),
        Line("pictures that were refused", refused, None),
        Line("a valid picture is answered afterwards", int(findings.is_alive), 1),
        Line("processes for pictures that were replaced", findings.num_restarted, None),
        grown(_HEAD, _MOST_HEAD_MIB),
        grown(ENCODER, _MOST_ENCODER_MIB),
        grown(_DECODERS, _MOST_HEAD_MIB),
        ratio_line("p99 between tokens of others beside them, over without", findings.pairs, _MOST_RATIO),
    ]


def report(findings: Findings, seed: int, options: Sequence[str]) -> Report:
    """Statuses, what is wrong, and the figures with their bounds."""
    conditions = {
        "streams": _STREAMS,
        "pictures at once": _AT_ONCE,
        "seed": seed,
        "options": " ".join(options),
        "cores": num_usable(),
        "processor": processor_name(),
    }
    rows = [(path, str(status), str(count)) for (path, status), count in sorted(findings.statuses.items())]
    return bounded_report(
        "Hostile pictures",
        conditions,
        lines(findings),
        table_section("## Answers", ("endpoint", "status", "answers"), rows),
        table_section("## Without a reason", ("picture", "answer"), findings.wrong),
    )


@click.command()
@int_option("--pictures", "num_pictures", least=1, default=1000, metavar="N", help="Pictures of all rounds.")
@int_option("--rounds", "num_rounds", default=10, metavar="N", help="Rounds.")
@seed_option("Of changed pictures.")
@serve_option
@logs_option()
@json_option
@experiment
def main(
    *, num_pictures: int, num_rounds: int, seed: int, serve_options: tuple[str, ...], logs: Path | None
) -> Report:
    """Send hostile pictures to a mesh of this machine beside streams.

    Prints counts and figures with their bounds, and exits with 1 if one is missed.
    """
    with logs_folder(logs) as folder:
        findings = measure(folder, num_pictures, num_rounds, seed, serve_options)
        return report(findings, seed, serve_options)


if __name__ == "__main__":
    main()
