"""Pictures over three hosts, and what becomes of answers when stages and processes for pictures are lost.

    python -m tests.qualification.pictures.losses

Six hosts in the lab: a head without layers, three with a third of them each, and two spare ones. The
projector makes of each patch the embedding of its colour's word, so a picture must be answered as the words
in its place. Exact mode; every text is compared token by token.

- *The oracle*: answers to colours, against those to words; further turns while the processes for pictures
  stand still, so that nothing can be encoded; another picture under the same text, with the first one's KV
  rows in memory, on disk, behind a repair, and in a replica.
- *Losses of stages*: before, within and behind pictures, each stage in turn.
- *Losses of the processes for pictures*: while they work, between requests, and beside other streams.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import click
import psutil
import structlog

from mesh.cli.shared_options import int_option
from mesh.serve.options import demo_model
from meshbench.experiment import lab_experiment
from meshbench.lab.memory_watch import role_of
from meshbench.lab.network import Lab
from meshbench.lab.systems import MeshSystem
from meshbench.load_client.client import LoadClient
from meshbench.load_client.schedule import Request, Schedule
from meshbench.report_tools import Line, Report, table_section
from meshbench.shared_options import json_option, logs_option
from spanmesh_proto.errors import MeshError
from stages.process_limits import num_usable
from tests.qualification.bounded_report import bounded_report
from tests.support.colour_words import NUM_ROWS, image_url, write_colours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from meshbench.load_client.client import MeshSnapshot, RunningLoad

_NUM_STAGES: Final = 3
_NUM_SPARES: Final = 2
_DELAY_MS: Final = 5.0
_PATIENCE_S: Final = 240.0
_POLL_S: Final = 0.01
_SETTLE_S: Final = 0.5
_COLOURS: Final = (" red", " green", " blue", " white", " black", " yellow", " pink", " cyan")
_OTHERS: Final = 3
_OTHER_TOKENS: Final = 160
_TOKENS: Final = 48
_BEFORE: Final = "before the pictures"
_WITHIN: Final = "within the pictures"
_BEHIND: Final = "behind the pictures"
PLACES: Final = (_BEFORE, _WITHIN, _BEHIND)
ENCODER: Final = "mesh.vision.encoder_worker"
DECODER: Final = "mesh.vision.picture_worker"
_TRIES: Final = 8
_NUM_PAIRS: Final = 3
_SEED: Final = 56
# Reads a request from its input, and prints the answer.
_POST: Final = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.stdin.buffer.read(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=240).read().decode())
"""

log = structlog.get_logger()


@dataclass
class Findings:
    """What came out, counted."""

    good: Counter[str] = field(default_factory=Counter)
    """By the title of a line: answers that are as they must be."""
    all: Counter[str] = field(default_factory=Counter)
    """Likewise, all of them."""
    bad: list[tuple[str, str]] = field(default_factory=list)
    """Title, and what is wrong."""

    def note(self, title: str, is_good: bool, detail: object = "") -> None:  # noqa: FBT001 - the verdict
        """Count an answer."""
        self.all[title] += 1
        self.good[title] += is_good
        if not is_good:
            self.bad.append((title, str(detail)[:300]))
        log.info("checked", what=title, good=is_good, number=self.all[title])

    def lines(self) -> list[Line]:
        """For each title how many were wrong."""
        return [
            Line(f"{title}: wrong", count - self.good[title], 0, is_ceiling=True, note=f"of {count}")
            for title, count in self.all.items()
        ]


class Bed:
    """A mesh in the lab with its client.

    Args:
        lab: The hosts.
        mesh: On them.
        client: On the head.
    """

    def __init__(self, lab: Lab, mesh: MeshSystem, client: LoadClient) -> None:
        self._lab = lab
        self.mesh = mesh
        self.client = client

    def snapshot(self) -> MeshSnapshot:
        """State of the mesh and of the requests."""
        return self.client.snapshot(self.mesh.url)

    def until(self, is_so: Callable[[MeshSnapshot], object], what: str) -> MeshSnapshot:
        """Wait for a state.

        Raises:
            MeshError: If it takes too long.
        """
        deadline_s = time.monotonic() + _PATIENCE_S
        while not is_so(snapshot := self.snapshot()):
            if time.monotonic() > deadline_s:
                raise MeshError(f"the mesh is not {what} after {_PATIENCE_S:g} s")
            time.sleep(0.2)
        return snapshot

    def wait_whole(self) -> None:
        """Wait until all stages serve, each with a replica that is loaded."""

        def is_whole(snapshot: MeshSnapshot) -> bool:
            status = snapshot.status
            return (
                status is not None
                and bool(status.ready)
                and len(status.stages) == _NUM_STAGES
                and not snapshot.layers_without_replica
            )

        self.until(is_whole, "whole, with replicas")

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer to a request, in one piece.

        Raises:
            MeshError: If it is refused.
        """
        return self.answer_of(self.asking(path, body))

    def asking(self, path: str, body: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Begin a request; `answer_of` waits for its answer."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        client = self._lab.run(0, [sys.executable, "-I", "-S", "-c", _POST, self.mesh.url + path], **pipes)
        assert client.stdin is not None
        client.stdin.write(json.dumps(body).encode())
        client.stdin.close()
        client.stdin = None
        return client

    def answer_of(self, client: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Answer to a request that was begun."""
        output, errors = client.communicate(timeout=_PATIENCE_S)
        if client.returncode != 0:
            raise MeshError(f"a request failed: {errors.decode()[-300:]}")
        found: dict[str, Any] = json.loads(output)
        return found

    def begin(self, requests: Sequence[Request]) -> RunningLoad:
        """Begin streams, all at once."""
        return self.client.start(Schedule.once(self.mesh.url, requests, len(requests)))

    def kill_stage(self, index: int) -> None:
        """End the process of a stage, not its Ray node."""
        host = self.snapshot().stage_hosts[index]
        for pid in self._lab.pids(int(host.removeprefix("host"))):
            if role_of(psutil.Process(pid).cmdline()) == "stage":
                os.kill(pid, signal.SIGKILL)

    def picture_processes(self, module: str) -> list[psutil.Process]:
        """Processes of the head with that module."""
        return [process for pid in self._lab.pids(0) if module in (process := psutil.Process(pid)).cmdline()]

    @contextmanager
    def standing_still(self, *modules: str) -> Iterator[list[psutil.Process]]:
        """Stop these processes for the block; those that it kills stay dead."""
        stopped = [process for module in modules for process in self.picture_processes(module)]
        for process in stopped:
            process.suspend()
        try:
            yield stopped
        finally:
            for process in stopped:
                if process.is_running():
                    process.resume()


def chat(*content: Any, **fields: Any) -> dict[str, Any]:
    """Body of a chat of one message."""
    messages = [{"role": "user", "content": [*content]}]
    asked = {"model": "default", "temperature": 0, "max_tokens": _TOKENS, "return_token_ids": True}
    return {**asked, "messages": messages, **fields}


def text(words: str) -> dict[str, Any]:
    """A text as a part of a chat's message."""
    return {"type": "text", "text": words}


def tokens_of(answer: Mapping[str, Any]) -> list[int]:
    """Token ids of an answer in one piece."""
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def num_cached(answer: Mapping[str, Any]) -> int:
    """Tokens of its prompt that were in a cache."""
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


_SHOWS: Final = text("The picture shows:")
_ASK: Final = text(".\nWhich color is it? Answer with one word.")


def shown(*words: str, **fields: Any) -> dict[str, Any]:
    """A chat about a picture of one colour, or of one for each patch."""
    return chat(_SHOWS, image_url(*words), _ASK, **fields)


class Oracle:
    """Answers to pictures against those to words, wherever KV rows are.

    Args:
        bed: The mesh.
        findings: Take the results.
    """

    def __init__(self, bed: Bed, findings: Findings) -> None:
        self._bed = bed
        self._findings = findings
        self._tokens: dict[str, int] = {}
        self._random = random.Random(_SEED)

    def words(self) -> None:
        """Each colour, and the words in its place."""
        texts = set()
        for word in _COLOURS:
            answer = self._bed.post("/v1/chat/completions", shown(word))
            wanted = self._wanted(answer, [word] * NUM_ROWS)
            said = answer["choices"][0]["message"]["content"]
            texts.add(said)
            is_same = tokens_of(answer) == wanted
            self._findings.note("answers to pictures, by those to words in their place", is_same, said)
            self._findings.note("colours that are named", word.strip() in said.lower(), said)
        self._findings.note("answers to different pictures that differ", len(texts) > 1, texts)

    def second_turns(self) -> None:
        """With all processes for pictures standing still."""
        for word in _COLOURS[:4]:
            first = self._bed.post("/v1/chat/completions", shown(word))
            body = shown(word)
            body["messages"] += [
                {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
                {"role": "user", "content": "Thank you."},
            ]
            with self._bed.standing_still(ENCODER, DECODER):
                answer = self._bed.post("/v1/chat/completions", body)
            is_cached = num_cached(answer) >= len(first["prompt_token_ids"]) - 1
            self._findings.note("second turns that encode nothing", is_cached, num_cached(answer))

    def other_pictures(self, where: str, between: Callable[[], None]) -> None:
        """A picture, something in between, and another picture under the same text; then the first again.

        Args:
            where: Where the rows of the first picture are then.
            between: What happens in between.
        """
        for _ in range(_NUM_PAIRS):
            first, other = (self._random.choices(_COLOURS, k=NUM_ROWS) for _ in range(2))
            self._bed.post("/v1/chat/completions", shown(*first))
            between()
            answer = self._bed.post("/v1/chat/completions", shown(*other))
            is_unlike = num_cached(answer) <= answer["prompt_token_ids"].index(-1)
            self._findings.note(
                f"another picture under the same text, first one's rows {where}",
                is_unlike and tokens_of(answer) == self._wanted(answer, other),
                (num_cached(answer), tokens_of(answer)),
            )
            again = self._bed.post("/v1/chat/completions", shown(*first))
            is_same = tokens_of(again) == self._wanted(again, first)
            title = f"the first picture again, its rows {where}"
            self._findings.note(title, is_same, (num_cached(again), tokens_of(again)))

    def _wanted(self, answer: Mapping[str, Any], words: Sequence[str]) -> list[int]:
        """Answer to the words in place of the rows of a picture."""
        for word in set(words) - self._tokens.keys():
            body = {"prompt": word, "add_special_tokens": False}
            (self._tokens[word],) = self._bed.post("/tokenize", body)["tokens"]
        rest = iter(words)
        ids = [self._tokens[next(rest)] if each == -1 else each for each in answer["prompt_token_ids"]]
        asked = {"prompt": ids, "temperature": 0, "max_tokens": _TOKENS, "return_token_ids": True}
        return tokens_of(self._bed.post("/v1/completions", {**asked, "cache_prompt": False}))

    def displace(self) -> None:
        """Other texts for all slots, so that what they held is on disk only."""
        bodies = [chat(text(f"Count to {number} and back."), max_tokens=4) for number in range(8)]
        for client in [self._bed.asking("/v1/chat/completions", body) for body in bodies]:
            self._bed.answer_of(client)
        time.sleep(_SETTLE_S)

    def lose_a_stage(self) -> None:
        """Have a replica take the place of the second stage."""
        self._bed.wait_whole()
        # News of the latest rows are on their way.
        time.sleep(2 * _SETTLE_S)
        before = self._bed.snapshot().status
        self._bed.kill_stage(1)
        repairs = 0 if before is None else before.repairs.count
        self._bed.until(
            lambda now: now.status is not None and now.status.ready and now.status.repairs.count > repairs,
            "repaired",
        )


class StageLosses:
    """A stage is killed while a prompt with many pictures is read, or answered.

    Args:
        bed: The mesh.
        findings: Take the results.
    """

    def __init__(self, bed: Bed, findings: Findings) -> None:
        self._bed = bed
        self._findings = findings
        content = [text("Tell me of each color in turn. " * 30), *map(image_url, _COLOURS), _ASK]
        body = chat(*content, max_tokens=2 * _TOKENS, cache_prompt=False, ignore_eos=True)
        answer = bed.post("/v1/chat/completions", body)
        self._request = Request.streamed(body)
        self._wanted = tuple(tokens_of(answer))
        ids = answer["prompt_token_ids"]
        self._first = ids.index(-1)
        self._stop = len(ids) - ids[::-1].index(-1)

    def run(self, count: int) -> None:
        """Lose stages, so many at each place."""
        for place in PLACES:
            for number in range(count):
                self._lose(place, number % _NUM_STAGES)

    def _lose(self, place: str, stage: int) -> None:
        for _ in range(_TRIES):
            self._bed.wait_whole()
            load = self._bed.begin((self._request,))
            is_killed = self._kill_at(place, stage, load)
            (answer,) = load.wait(_PATIENCE_S).answers
            if is_killed:
                title = f"answers whose stage was killed {place}"
                is_good = answer.record.failure is None and answer.token_ids == self._wanted
                self._findings.note(title, is_good, answer.record.failure or answer.text)
                return
        raise MeshError(f"no moment {place} was met in {_TRIES} answers")

    def _kill_at(self, place: str, stage: int, load: RunningLoad) -> bool:
        """Kill the stage when the request is there; False if it was over sooner."""
        while not load.is_over:
            snapshot = self._bed.snapshot()
            if self._place(snapshot) == place:
                self._bed.kill_stage(stage)
                return True
            time.sleep(_POLL_S)
        return False

    def _place(self, snapshot: MeshSnapshot) -> str | None:
        if any(each.last_s is not None for each in snapshot.running):
            return _BEHIND
        sessions = None if snapshot.status is None else snapshot.status.sessions
        if sessions is None or not sessions.prefill:
            return None
        read = sessions.prefill[0].read
        if read < self._first:
            return _BEFORE
        return _WITHIN if read < self._stop else None


class ProcessLosses:
    """A process for pictures is killed.

    Args:
        bed: The mesh.
        findings: Take the results.
    """

    def __init__(self, bed: Bed, findings: Findings) -> None:
        self._bed = bed
        self._findings = findings
        self._body = shown(" red", cache_prompt=False)
        self._wanted = tokens_of(bed.post("/v1/chat/completions", self._body))
        self._others = [
            Request.streamed(
                chat(
                    text(f"Tell me a story of {number} friends."),
                    max_tokens=_OTHER_TOKENS,
                    ignore_eos=True,
                )
            )
            for number in range(2, 2 + _OTHERS)
        ]
        self._other_tokens = self._answers_of(bed.begin(self._others))

    def run(self, count: int) -> None:
        """Kill each kind so often in each way."""
        for name, module in (("encoder", ENCODER), ("decoder", DECODER)):
            for _ in range(count):
                self._while_it_works(name, module)
                self._between(name, module)
                self._beside_streams(name, module)

    def _while_it_works(self, name: str, module: str) -> None:
        with self._bed.standing_still(module) as stopped:
            client = self._bed.asking("/v1/chat/completions", self._body)
            # It arrives meanwhile at the process that stands still.
            time.sleep(2 * _SETTLE_S)
            for process in stopped:
                process.kill()
        self._check(f"answers whose {name} was killed while it worked", client)

    def _between(self, name: str, module: str) -> None:
        for process in self._bed.picture_processes(module):
            process.kill()
        self._check(f"answers behind the end of their {name}", self._asking())

    def _beside_streams(self, name: str, module: str) -> None:
        load = self._bed.begin(self._others)
        self._bed.until(lambda now: sum(each.last_s is not None for each in now.running) == _OTHERS, "busy")
        client = self._asking()
        for process in self._bed.picture_processes(module):
            process.kill()
        self._check(f"answers whose {name} was killed beside other streams", client)
        title = f"other streams beside the end of the {name}"
        for found, wanted in zip(self._answers_of(load), self._other_tokens, strict=True):
            self._findings.note(title, found == wanted, found)

    def _asking(self) -> subprocess.Popen[bytes]:
        return self._bed.asking("/v1/chat/completions", self._body)

    def _check(self, title: str, client: subprocess.Popen[bytes]) -> None:
        found = tokens_of(self._bed.answer_of(client))
        self._findings.note(title, found == self._wanted, found)

    def _answers_of(self, load: RunningLoad) -> list[tuple[int, ...]]:
        answers = load.wait(_PATIENCE_S).complete("the mesh").answers
        ordered = sorted(answers, key=lambda one: one.record.number)
        return [one.token_ids for one in ordered]


@contextmanager
def running_bed(folder: Path) -> Iterator[Bed]:
    """A whole mesh that reads pictures of colours, for the block.

    Raises:
        MeshError: If it does not start.
    """
    model = demo_model()
    projector = write_colours(folder / "mmproj.gguf", model)
    options = ["--exact", "--ctx-size", "768", "--parallel", "4", "--mmproj", str(projector)]
    options += ["--kv-disk", "1G", "--state", str(folder / "state.json")]
    with ExitStack() as stack:
        shared = [folder, model.resolve().parent]
        lab = stack.enter_context(Lab(1 + _NUM_STAGES + _NUM_SPARES, shared=shared))
        mesh = MeshSystem(lab, model, folder, num_spares=_NUM_SPARES, num_threads=1, options=options)
        stack.callback(mesh.kill)
        mesh.start()
        lab.set_delay_ms(_DELAY_MS)
        bed = Bed(lab, mesh, stack.enter_context(LoadClient(lab)))
        bed.wait_whole()
        yield bed
        mesh.stop()


def measure(folder: Path, count: int) -> Findings:
    """All of it.

    Args:
        folder: For files and logs.
        count: Losses at each place and of each kind.
    """
    findings = Findings()
    with running_bed(folder) as bed:
        oracle = Oracle(bed, findings)
        oracle.words()
        oracle.second_turns()
        oracle.other_pictures("in memory", lambda: None)
        oracle.other_pictures("on disk", oracle.displace)
        oracle.other_pictures("in a replica, and behind a repair", oracle.lose_a_stage)
        ProcessLosses(bed, findings).run(count)
        StageLosses(bed, findings).run(count)
    return findings


def report(findings: Findings, count: int) -> Report:
    """All counts, and what is wrong."""
    conditions = {
        "stage hosts": _NUM_STAGES,
        "spare hosts": _NUM_SPARES,
        "one-way delay, ms": _DELAY_MS,
        "losses of each kind": count,
        "numeric mode": "exact",
        "cores": num_usable(),
    }
    bad = table_section("## Wrong answers", ("what", "found"), findings.bad)
    return bounded_report("Pictures, and losses beside them", conditions, findings.lines(), bad)


@click.command()
@int_option("--losses", "count", default=10, metavar="N", help="Losses at each place and of each kind.")
@logs_option()
@json_option
@lab_experiment
def main(*, count: int, logs: Path) -> Report:
    """Lose stages and processes for pictures in the lab, and compare every answer. Needs root.

    Prints counts, and exits with 1 if an answer is wrong.
    """
    return report(measure(logs, count), count)


if __name__ == "__main__":
    main()
