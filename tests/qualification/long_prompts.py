"""Command that reads a very long prompt over three hosts: memory, a neighbour's pace, and its cancellation.

Four hosts in the lab: a head without layers and three with a third of the model each, greedy, no speculation.
A prompt of random tokens is read in one slot while another answers; then its client hangs up in the middle of
the same prompt. Held against bounds are the memory of every stage's process, by what was foretold for it, the
neighbour's time between tokens, by its time alone, and the chunks that stages compute behind the hang-up.

    python -m tests.qualification.long_prompts
    python -m tests.qualification.long_prompts --model gemma.gguf
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np
import structlog

from mesh.cli.shared_options import int_option
from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.status import read_status
from mesh.util.completion_stream import COMPLETION_PATH
from meshbench.experiment import lab_experiment
from meshbench.lab.line_process import LineProcess, write_line
from meshbench.lab.memory_watch import MemoryWatch
from meshbench.lab.network import Lab
from meshbench.lab.systems import MeshSystem, get_status
from meshbench.load_client.client import LoadClient
from meshbench.load_client.schedule import Request
from meshbench.paired_systems import even_split
from meshbench.report_tools import Line, Report, table_section
from meshbench.shared_options import FILE, json_option, logs_option
from meshbench.stress.memory import footprints
from spanmesh_proto.errors import MeshError
from stages.layers import LayerRange
from stages.process_limits import num_usable, processor_name
from stages.slicing.model_facts import read_model_facts
from tests.qualification.bounded_report import bounded_report
from tests.qualification.programs import program_command
from tests.qualification.random_model import Shape, write_random_gguf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mesh.status import StageStatus
    from meshbench.lab.memory_watch import MemorySample
    from meshbench.load_client.answers import AnswerRecord
    from stages.slicing.model_facts import ModelFacts

_NUM_STAGES: Final = 3
_NUM_SLOTS: Final = 2
# Positions behind the prompt.
_ROOM: Final = 256
_LOOK_S: Final = 1.0
_SHORT_PROMPT: Final = 16
_SEED: Final = 24
_FIRST_TOKEN: Final = 300
# Of a model that is given, and of the random one.
_MOST_TOKENS: Final = 32_768
_RANDOM_TOKENS: Final = 131_072
# A layer for each stage, few and narrow heads: a row behind 100,000 others takes a millisecond or so.
_RANDOM: Final = Shape(3, 64, 128, 2, 1, 320, is_tied=False)
# The client hangs up behind this part of the prompt.
_HANG_UP_PART: Final = 4
_FEWEST_GAPS: Final = 8
_MOST_OF_FORETOLD: Final = 1.0
_MOST_PACE: Final = 4.0
_MOST_CHUNKS: Final = 1
# The prompt itself, as text, as numbers, and in messages.
_MOST_GROWTH_MIB: Final = 64.0
_MIB: Final = 2**20
_COMMENT: Final = re.compile(rb": prefill (\d+)/(\d+) tokens")
_SILENCE_S: Final = 60.0
# Longer than any chunk takes.
_QUIET_S: Final = 5.0
_TRIES: Final = 10

log = structlog.get_logger()


@dataclass(frozen=True)
class Settings:
    """Sizes of the measurement."""

    model: Path
    """The GGUF."""
    num_tokens: int
    """Tokens of the long prompt."""
    answer_tokens: int
    """Tokens of the neighbour's answers."""
    num_threads: int
    """Threads of each stage."""

    @property
    def workload(self) -> Workload:
        """What stages hold besides weights."""
        return Workload(self.num_tokens + _ROOM, _NUM_SLOTS)


@dataclass(frozen=True)
class StageMemory:
    """Memory of one stage's process."""

    host: str
    """Its host."""
    layers: str
    """Its layers, for display."""
    foretold_bytes: int
    """What the plan counts for it."""
    process_bytes: int
    """Most that it took while the prompt was read."""


@dataclass(frozen=True)
class HangUp:
    """End of a prompt whose client left."""

    num_read: int
    """Tokens of the prompt that had been read, as the stream told last."""
    chunks: tuple[int, ...]
    """Chunks that each stage computed afterwards, in pipeline order; one that it was at counts."""
    counted_after_ms: float
    """From the hang-up to the first look at the stages' counters."""


@dataclass(frozen=True)
class Findings:
    """Result of the measurement."""

    stages: tuple[StageMemory, ...]
    """Memory of each stage."""
    growth_bytes: int
    """Growth of the coordinator while the prompt was read."""
    prefill_s: float
    """From the request to the first token of the long prompt."""
    alone_ms: tuple[float, ...]
    """Times between tokens of the neighbour, alone."""
    beside_ms: tuple[float, ...]
    """The same while the prompt was read."""
    hang_up: HangUp
    """The prompt whose client left."""


def gaps_ms(answer: AnswerRecord, until_ms: float) -> tuple[float, ...]:
    """Times between the arrivals of an answer's parts up to a time, both counted from the request."""
    arrivals_ms = [arrival_ms for arrival_ms in answer.arrivals_ms if arrival_ms <= until_ms]
    return tuple(later - earlier for earlier, later in pairwise(arrivals_ms))


def made_up_tokens(facts: ModelFacts, count: int, seed: int) -> list[int]:
    """Random token ids, without the first ones of the vocabulary, which often have a meaning of their own."""
    first = min(_FIRST_TOKEN, facts.n_vocab // 2)
    tokens: list[int] = np.random.default_rng(seed).integers(first, facts.n_vocab, count).tolist()
    return tokens


def measure(settings: Settings, folder: Path) -> Findings:
    """Bring up a mesh, read the prompt, and hang up on it.

    Args:
        settings: Sizes.
        folder: For logs, on all hosts.

    Raises:
        MeshError: If the mesh does not come up, or does not answer.
    """
    facts = read_model_facts(settings.model)
    prompt = made_up_tokens(facts, settings.num_tokens, _SEED)
    short = made_up_tokens(facts, _SHORT_PROMPT, _SEED + 1)
    with (
        Lab(1 + _NUM_STAGES, shared=[folder, settings.model.resolve().parent]) as lab,
        LoadClient(lab) as client,
        LineProcess(lab, 0, __spec__.name, "--hang-up", command=program_command) as leaver,
    ):
        mesh = _mesh(lab, settings, facts, folder)
        try:
            mesh.start()
            stages = get_status(lab, mesh.port).stages
            request = Request.streamed(
                _fields(short, settings.answer_tokens, return_token_ids=True), COMPLETION_PATH
            )
            # Nothing measured is a first time.
            client.answer(mesh.url, (request,))
            (alone,) = client.answer(mesh.url, (request,)).answers
            log.info("reading", tokens=settings.num_tokens)
            with MemoryWatch(lab, _LOOK_S) as watch:
                time.sleep(2 * _LOOK_S)
                begun_s = time.perf_counter()
                requests = (Request.streamed(_fields(prompt, 1), COMPLETION_PATH), request)
                long, beside = client.answer(mesh.url, requests, num_at_once=2).answers
                time.sleep(2 * _LOOK_S)
            log.info("hanging_up", behind=settings.num_tokens // _HANG_UP_PART)
            hang_up = _hung_up(leaver, mesh.port, prompt, settings.num_tokens // _HANG_UP_PART)
            mesh.stop()
        finally:
            mesh.kill()
    sizes = StageSizes(facts, settings.workload)
    return Findings(
        stages=_stage_memories(stages, sizes, watch.samples),
        growth_bytes=coordinator_growth(watch.samples, begun_s),
        prefill_s=long.ttft_ms / 1e3,
        alone_ms=gaps_ms(alone, alone.arrivals_ms[-1]),
        beside_ms=gaps_ms(beside, long.ttft_ms),
        hang_up=hang_up,
    )


def _mesh(lab: Lab, settings: Settings, facts: ModelFacts, folder: Path) -> MeshSystem:
    workload = settings.workload
    sizes = ["--parallel", str(workload.num_slots), "--ctx-size", str(workload.ctx_size)]
    return MeshSystem(
        lab,
        settings.model,
        folder,
        num_threads=settings.num_threads,
        split=even_split(facts.n_layers, _NUM_STAGES),
        options=["--speculate", "off", *sizes],
    )


def _fields(prompt: Sequence[int], max_tokens: int, **more: object) -> dict[str, Any]:
    return {"prompt": [*prompt], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


def _stage_memories(
    stages: Sequence[StageStatus], sizes: StageSizes, samples: Sequence[MemorySample]
) -> tuple[StageMemory, ...]:
    hosts = [int(stage.host.removeprefix("host")) for stage in stages]
    found = footprints(stages, hosts, sizes, samples)
    return tuple(
        StageMemory(
            each.host,
            str(layers),
            sizes.memory(layers).total_bytes,
            each.process_bytes,
        )
        for each, layers in zip(found, (LayerRange(*stage.layers) for stage in stages), strict=True)
    )


def coordinator_growth(samples: Sequence[MemorySample], begun_s: float) -> int:
    """Most memory of the coordinator beyond what it had before.

    Args:
        samples: Of all processes.
        begun_s: When the prompt was sent, by `time.perf_counter`.
    """
    own = [sample for sample in samples if sample.role == "coordinator"]
    before = max((sample.own_bytes for sample in own if sample.at_s < begun_s), default=0)
    since = max((sample.own_bytes for sample in own if sample.at_s >= begun_s), default=before)
    return since - before


def _hung_up(leaver: LineProcess, port: int, prompt: Sequence[int], behind: int) -> HangUp:
    leaver.send({"port": port, "prompt": [*prompt], "behind": behind})
    reply = next(leaver.received(), None)
    if reply is None:
        raise leaver.ended()
    if "error" in reply:
        raise MeshError(reply["error"])
    return HangUp(reply["read"], tuple(reply["chunks"]), reply["counted_after_ms"])


# In a process on the head, which sees the counters at once.


def _hang_up(fields: dict[str, Any]) -> dict[str, Any]:
    """Hang up behind a part of a prompt, and count what stages still compute."""
    port, behind = fields["port"], fields["behind"]
    body = json.dumps({**_fields(fields["prompt"], 1), "stream": True, "cache_prompt": False})
    connection = HTTPConnection("127.0.0.1", port, timeout=_SILENCE_S)
    try:
        connection.request("POST", COMPLETION_PATH, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        read = 0
        while read < behind:
            line = response.readline()
            if not line or line.startswith(b"data"):
                return {"error": f"the stream tells no progress beyond {read} of {behind} tokens"}
            found = _COMMENT.match(line)
            read = read if found is None else int(found[1])
        response.close()
        connection.close()
        left_s = time.perf_counter()
        at_once = latest = _decodes(port)
        counted_after_ms = (time.perf_counter() - left_s) * 1e3
        while (now := _later(port)) != latest:
            latest = now
    except (OSError, HTTPException) as error:
        return {"error": f"the mesh breaks off: {error!r}"}
    finally:
        connection.close()
    chunks = [last - first for first, last in zip(at_once, latest, strict=True)]
    return {"read": read, "chunks": chunks, "counted_after_ms": counted_after_ms}


def _later(port: int) -> list[int]:
    time.sleep(_QUIET_S)
    return _decodes(port)


def _decodes(port: int) -> list[int]:
    """Batches that each stage has computed.

    Raises:
        OSError: If the head or a stage does not answer.
        HTTPException: If the head answers with something else.
    """
    for _ in range(_TRIES):
        connection = HTTPConnection("127.0.0.1", port, timeout=_SILENCE_S)
        try:
            connection.request("GET", "/mesh/status")
            stages = read_status(json.loads(connection.getresponse().read())).stages
        finally:
            connection.close()
        # Without them if a stage was too busy to answer.
        decodes = [stage.decodes for stage in stages if stage.decodes is not None]
        if len(decodes) == len(stages):
            return decodes
    raise ConnectionError("a stage does not tell its counters")


def lines(found: Findings, num_tokens: int) -> list[Line]:
    """The figures with their bounds."""
    all_lines = [
        Line(
            f"memory of {stage.host}'s stage over what was foretold",
            stage.process_bytes / stage.foretold_bytes,
            _MOST_OF_FORETOLD,
            is_ceiling=True,
        )
        for stage in found.stages
    ]
    alone, beside = found.alone_ms, found.beside_ms
    is_enough = min(len(alone), len(beside)) >= _FEWEST_GAPS
    pace: float | None = None
    note = f"{len(beside)} tokens while the prompt was read: too few"
    if is_enough:
        pace = median(beside) / median(alone)
        note = (
            f"{median(alone):.1f} and {median(beside):.1f} ms; of one in 20 at least "
            f"{_slow_ms(alone):.1f} and {_slow_ms(beside):.1f} ms"
        )
    left = found.hang_up
    all_lines += [
        Line("growth of the coordinator, MiB", found.growth_bytes / _MIB, _MOST_GROWTH_MIB, is_ceiling=True),
        Line("a neighbour's time between tokens over alone", pace, _MOST_PACE, is_ceiling=True, note=note),
        Line(
            "chunks that a stage computed after the client had left",
            max(left.chunks),
            _MOST_CHUNKS,
            is_ceiling=True,
            note=f"behind {left.num_read} tokens: {', '.join(map(str, left.chunks))} by stage, "
            f"counted from {left.counted_after_ms:.0f} ms later on",
        ),
        Line("tokens read per second", num_tokens / found.prefill_s, None),
    ]
    return all_lines


def _slow_ms(gaps: Sequence[float]) -> float:
    return quantiles(gaps, n=20)[-1]


def report(settings: Settings, found: Findings) -> Report:
    """Memory of the stages, and the figures with their bounds."""
    facts = read_model_facts(settings.model)
    conditions = {
        "model": facts.name,
        "layers": facts.n_layers,
        "prompt_tokens": settings.num_tokens,
        "stage_hosts": _NUM_STAGES,
        "threads_per_stage": settings.num_threads,
        "cores": num_usable(),
        "processor": processor_name(),
    }
    rows = [
        (each.host, each.layers, f"{each.foretold_bytes / _MIB:.0f}", f"{each.process_bytes / _MIB:.0f}")
        for each in found.stages
    ]
    memory = table_section("## Memory", ("host", "layers", "foretold, MiB", "taken at most"), rows)
    return bounded_report("A very long prompt", conditions, lines(found, settings.num_tokens), memory)


@click.command()
@click.option("--model", type=FILE, help="A model; a tiny random one unless given.")
@int_option(
    "--tokens",
    "num_tokens",
    least=1024,
    metavar="N",
    help="Tokens of the prompt.  [default: 131072, or as many as a given model takes, at most 32768]",
)
@int_option("--answer-tokens", least=16, default=64, metavar="N", help="Tokens of the neighbour's answer.")
@int_option("--threads", "num_threads", default=1, metavar="N", help="Threads of each stage.")
@logs_option()
@json_option
@lab_experiment
def main(
    *,
    model: Path | None,
    num_tokens: int | None,
    answer_tokens: int,
    num_threads: int,
    logs: Path,
) -> Report:
    """Read a very long prompt over three hosts in the lab, beside an answer, and hang up on it.

    Prints figures with their bounds, and exits with 1 if one is missed. Needs root.
    """
    if model is None:
        num_tokens = num_tokens or _RANDOM_TOKENS
        model = logs / "random.gguf"
        write_random_gguf(model, _RANDOM, "Q8_0", n_ctx_train=num_tokens + _ROOM)
    if num_tokens is None:
        num_tokens = min(read_model_facts(model).n_ctx_train, _MOST_TOKENS) - _ROOM
    settings = Settings(model, num_tokens, answer_tokens, num_threads)
    return report(settings, measure(settings, logs))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--hang-up"]:
        write_line(_hang_up(json.loads(sys.stdin.readline())))
    else:
        main()
