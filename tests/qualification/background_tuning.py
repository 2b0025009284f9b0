"""Tuning in the background as it is served: a load with pauses, a swap, texts, and what requests feel of it.

    python -m tests.qualification.background_tuning --draft mesh/draft/smollm2-135m-eagle3.gguf

A mesh of two stages on this machine, in exact mode, which drafts always. Alice's questions about tables are
recorded, and her drafter is tuned on the answers; Bob's key is of no group. All that is compared comes from
this one run:

- *texts*: the same questions before and after the swap, and once a training was killed, of both
  keys, byte for byte;
- *acceptance*: of the same questions before and after the swap, as served;
- *first token* and *time between tokens* of requests that come while the training computes, over those that
  come while it stands still, taken in turn;
- *a worse candidate*: noise takes the place of what is recorded; what learns it is not served.

It takes six minutes on two cores.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import click
import httpx
import numpy as np
import psutil
import structlog

from mesh.api.api_keys import KeyRecord, add_key, digest_of
from mesh.cli.own_mesh import own_mesh
from mesh.serve.options import demo_model
from mesh.tuning.conversation_file import read_conversation, write_conversation
from mesh.tuning.recording import conversation_path, conversation_paths, read_recording_header
from meshbench.experiment import experiment
from meshbench.report_tools import Line, Report
from meshbench.shared_options import FILE, json_option, logs_folder, logs_option
from spanmesh_proto.errors import MeshError
from stages.process_limits import num_usable
from tests.qualification.bounded_report import bounded_report

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from mesh.cli.own_mesh import OwnMesh

ALICE, BOB, GROUP = "sk-of-alice", "sk-of-bob", "staff"
_TABLES: Final = {
    "orders": ("customer", "status", "total", "created_at"),
    "employees": ("name", "department", "salary", "hired_at"),
    "books": ("title", "author", "pages", "published"),
    "flights": ("origin", "destination", "price", "departs_at"),
    "students": ("name", "grade", "score", "born_on"),
    "products": ("label", "category", "price", "stocked_on"),
    "invoices": ("client", "branch", "amount", "due_on"),
    "movies": ("title", "director", "rating", "released"),
    "houses": ("street", "city", "rooms", "built_on"),
    "players": ("name", "team", "goals", "joined_on"),
    "recipes": ("title", "cuisine", "minutes", "written_on"),
    "sensors": ("location", "kind", "reading", "read_at"),
}
# Of those that are asked before and after: no answer about them is learned.
_HELD_TABLES: Final = {
    "patients": ("surname", "ward", "weight", "admitted_on"),
    "ships": ("vessel", "harbour", "tonnage", "arrived_on"),
    "trees": ("species", "park", "girth", "planted_on"),
}
_QUESTIONS: Final = (
    "How many rows are there for each {b}?",
    "What is the average {c} per {b}?",
    "List all rows where {c} is above {n}, newest first.",
    "Find the {k} rows with the highest {c}.",
    "Which {b} has the largest total {c}?",
    "Delete the rows where {d} is before {y}-01-01.",
    "Set {c} to {n} where {a} is 'Miller'.",
    "Show the distinct values of {b} in alphabetical order.",
    "Count the rows of {y}, by month of {d}.",
    "Show {a} and {c} of the rows whose {b} begins with 'M'.",
)
_MOST_TOKENS: Final = 96
_NUM_LEARNED: Final = 130
_NUM_HELD: Final = 18
_NUM_PAIRS: Final = 8
# A key may use all slots but one.
_MOST_AT_ONCE: Final = 3
_IDLE_S: Final = 5.0
# So long a training computes before a request comes.
_COMPUTING_S: Final = 1.5
_POLL_S: Final = 0.1
_TRAINING_S: Final = 600.0
_NUM_NOISY: Final = 80
# Behind all that the mesh records.
_FIRST_NOISY: Final = 90_000_000
_MOST_RATIO: Final = 1.3
_NICENESS: Final = 15

log = structlog.get_logger()


@dataclass(frozen=True)
class Answer:
    """An answer with its times."""

    text: str
    """The answer."""
    first_ms: float
    """From the request to its first token."""
    gaps_ms: tuple[float, ...]
    """Between its parts."""


@dataclass(frozen=True)
class Drafting:
    """Drafts for some answers."""

    num_windows: int
    """Windows that were drafted for."""
    num_first: int
    """Those whose first drafted token was accepted."""
    took_s: float
    """Time of all answers."""

    @property
    def rate(self) -> float:
        """Acceptance of the first drafted token."""
        return self.num_first / self.num_windows


@dataclass(frozen=True)
class Figures:
    """What was measured."""

    swaps: int
    """Drafters chosen before noise was put in."""
    acceptance: tuple[float, float]
    """Of the first drafted token, before and after."""
    gain: float
    """Accepted tokens of a window, on held-out answers."""
    others_moved: int
    """Bob's windows that a tuned drafter had."""
    others: tuple[Drafting, Drafting]
    """What Bob can see of the same questions, before and after the swap."""
    different: int
    """Texts that differ."""
    texts: int
    """Texts that were compared."""
    first_ms: tuple[tuple[float, float], ...]
    """Pairs of times to the first token: while it computes, and while it stands still."""
    gaps_ms: tuple[tuple[float, ...], tuple[float, ...]]
    """Times between parts of answers, likewise."""
    refused: str
    """What became of the candidate that learned noise."""
    is_left_alone: bool
    """Whether the group was served with the same drafter then."""
    trained_s: float
    """From the beginning of the training to the swap."""

    def lines(self) -> list[Line]:
        """The figures, with their bounds."""
        pairs = [computing / still for computing, still in self.first_ms]
        computing, still = (float(np.percentile(each, 99)) for each in self.gaps_ms)
        before, after = self.acceptance
        return [
            Line("swaps", self.swaps, 1, note="at least one"),
            Line("swaps, at most", self.swaps, 1, is_ceiling=True),
            Line("first token accepted before, as served", before, None),
            Line("first token accepted after", after, None),
            Line("difference", after - before, 0.05),
            Line("gain on held-out answers, accepted a window", self.gain, 0.0),
            Line("texts that differ", self.different, 0, is_ceiling=True, note=f"of {self.texts}"),
            Line("windows of another key with a tuned drafter", self.others_moved, 0, is_ceiling=True),
            Line(
                "first token accepted of another key, after less before",
                self.others[1].rate - self.others[0].rate,
                None,
                note=f"of {self.others[0].num_windows} and {self.others[1].num_windows} windows",
            ),
            Line(
                "time of another key's answers, after over before",
                self.others[1].took_s / self.others[0].took_s,
                None,
            ),
            Line(
                "first token while it computes, over while it stands still",
                median(pairs),
                _MOST_RATIO,
                is_ceiling=True,
                note=f"median of {len(pairs)} pairs",
            ),
            Line(
                "p99 between tokens, likewise",
                computing / still,
                _MOST_RATIO,
                is_ceiling=True,
                note=f"{computing:.1f} over {still:.1f} ms",
            ),
            Line(
                "candidate of noise served",
                int(not self.is_left_alone),
                0,
                is_ceiling=True,
                note=self.refused,
            ),
            Line("training and pauses, s", self.trained_s, None),
        ]


class Client:
    """Requests to a mesh.

    Args:
        url: Of its API.
    """

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120.0, trust_env=False)

    def ask(self, question: str, key: str = ALICE, **fields: Any) -> Answer:
        """A streamed answer."""
        body = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": _MOST_TOKENS,
            "stream": True,
            **fields,
        }
        headers = {"authorization": f"Bearer {key}"}
        sent_s, times_s, parts = time.perf_counter(), [], []
        with self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                response.read()
                raise MeshError(f"a request was answered with {response.status_code}: {response.text}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    if text := choice["delta"].get("content"):
                        times_s.append(time.perf_counter())
                        parts.append(text)
        if not parts:
            raise MeshError(f"the answer to {question!r} is empty")
        gaps_ms = tuple(1e3 * (after - before) for before, after in itertools.pairwise(times_s))
        return Answer("".join(parts), 1e3 * (times_s[0] - sent_s), gaps_ms)

    def status(self) -> dict[str, Any]:
        """Body of `/mesh/status`."""
        found: dict[str, Any] = self._http.get(
            "/mesh/status", headers={"authorization": f"Bearer {BOB}"}
        ).json()
        return found

    def tuning(self) -> dict[str, Any]:
        """What it says of tuning."""
        found: dict[str, Any] = self.status()["tuning"]
        return found

    def until(
        self, is_so: Callable[[dict[str, Any]], object], within_s: float = _TRAINING_S
    ) -> dict[str, Any]:
        """Wait until tuning is in a state.

        Raises:
            MeshError: If it takes too long.
        """
        end_s = time.monotonic() + within_s
        while not is_so(found := self.tuning()):
            if time.monotonic() > end_s:
                raise MeshError(f"tuning does not come on: {found}")
            time.sleep(_POLL_S)
        return found


class Measurement:
    """The course of the run.

    Args:
        mesh: The mesh.
        recording: Its recording.
    """

    def __init__(self, mesh: OwnMesh, recording: Path) -> None:
        self._mesh = mesh
        self._client = Client(mesh.url)
        self._recording = recording
        self._held = questions(_HELD_TABLES, _NUM_HELD, seed=2)
        self._texts: list[list[str]] = []
        self._others: list[Drafting] = []

    def run(self) -> Figures:
        """All figures."""
        client = self._client
        self._compare()
        before = self._rate("eagle3/0")
        ask = partial(client.ask, temperature=0.7)
        with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
            asked = list(pool.map(ask, questions(_TABLES, _NUM_LEARNED, seed=1)))
        log.info("recorded", answers=len(asked))
        client.until(lambda tuning: tuning["state"] == "tuning")
        begun_s = time.monotonic()
        computing, still = self._pairs()
        tuning = client.until(lambda tuning: tuning["chosen"] or tuning["refused"])
        trained_s = time.monotonic() - begun_s
        log.info("tuned", **tuning)
        if not tuning["chosen"]:
            raise MeshError(f"no drafter was chosen: {tuning['latest']}")
        self._compare()
        after = self._rate("eagle3/1")
        counts = self._client.status()["speculation"]["proposers"]
        for question in self._held:
            client.ask(question, BOB, temperature=0, max_tokens=16)
        moved = self._client.status()["speculation"]["proposers"]
        self._add_noise(_FIRST_NOISY)
        left = client.until(lambda tuning: tuning["refused"] or tuning["chosen"] > 1)
        log.info("noise_learned", **left)
        self._add_noise(_FIRST_NOISY + _NUM_NOISY)
        client.until(_is_learning)
        self._kill_training()
        killed = client.until(lambda tuning: tuning["refused"] > 1 or tuning["chosen"] > 1)
        log.info("training_killed", **killed)
        self._compare()
        different = sum(texts != self._texts[0] for texts in self._texts)
        return Figures(
            swaps=tuning["chosen"],
            acceptance=(before, after),
            gain=tuning["gain"],
            others_moved=moved["eagle3/1"]["drafts"] - counts["eagle3/1"]["drafts"],
            others=(self._others[0], self._others[1]),
            different=different,
            texts=len(self._texts) * len(self._texts[0]),
            first_ms=tuple(
                (one.first_ms, other.first_ms) for one, other in zip(computing, still, strict=True)
            ),
            gaps_ms=(
                tuple(itertools.chain(*(each.gaps_ms for each in computing))),
                tuple(itertools.chain(*(each.gaps_ms for each in still))),
            ),
            refused=str(left["latest"]),
            is_left_alone=killed["chosen"] == 1 and killed["drafter"] == "0001.gguf",
            trained_s=trained_s,
        )

    def _compare(self) -> None:
        """Ask the same again, with both keys, and keep the texts; nothing of it is recorded."""
        for key in (ALICE, BOB):
            windows, first = self._drafts("eagle3")
            begun_s = time.monotonic()
            ask = partial(self._client.ask, key=key, temperature=0, record=False)
            with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
                self._texts.append([each.text for each in pool.map(ask, self._held)])
            took_s = time.monotonic() - begun_s
        now = self._drafts("eagle3")
        self._others.append(Drafting(now[0] - windows, now[1] - first, took_s))

    def _drafts(self, proposer: str) -> tuple[int, int]:
        """Windows that a proposer has drafted for, and those whose first drafted token was accepted."""
        found = self._client.status()["speculation"]["proposers"].get(proposer)
        if not found or not found["drafts"]:
            return 0, 0
        return found["drafted_per_position"][0], found["accepted_per_position"][0]

    def _rate(self, proposer: str) -> float:
        """Share of first drafted tokens that were accepted, as served so far."""
        found = self._client.status()["speculation"]["proposers"][proposer]
        log.info("served", proposer=proposer, **found)
        num_windows, num_first = self._drafts(proposer)
        return num_first / num_windows

    def _pairs(self) -> tuple[list[Answer], list[Answer]]:
        """Answers to requests that come while the training computes, and while it stands still."""
        computing: list[Answer] = []
        still: list[Answer] = []
        asked = iter(questions(_TABLES, 2 * _NUM_PAIRS, seed=3))
        for _ in range(_NUM_PAIRS):
            begun_s = time.monotonic()
            while time.monotonic() - begun_s < _COMPUTING_S:
                tuning = self._client.tuning()
                if tuning["chosen"] or tuning["refused"]:
                    if not computing:
                        raise MeshError(
                            "the training was over before a request came: raise the number of answers"
                        )
                    return computing, still
                if not _is_learning(tuning):
                    begun_s = time.monotonic()
                time.sleep(_POLL_S)
            pair = []
            for _ in range(2):
                pair.append(self._client.ask(next(asked), temperature=0, record=False, cache_prompt=False))
                if self._client.tuning()["state"] != "paused":
                    raise MeshError("a training computes while requests run")
                time.sleep(1.0)
            computing.append(pair[0])
            still.append(pair[1])
            log.info("pair", computing_ms=round(pair[0].first_ms, 1), still_ms=round(pair[1].first_ms, 1))
        return computing, still

    def _kill_training(self) -> None:
        """End the process that computes, which alone has a group of its own and yields to all others."""
        children = psutil.Process(self._mesh.process.pid).children()
        (training,) = (
            each for each in children if os.getpgid(each.pid) == each.pid and each.nice() >= _NICENESS
        )
        log.info("killed", resident_bytes=training.memory_info().rss)
        training.kill()

    def _add_noise(self, first: int) -> None:
        """Replace what is recorded by answers whose tokens have nothing to do with their hidden states.

        Args:
            first: Number of the first of them.
        """
        header = read_recording_header(self._recording)
        noise = np.random.default_rng(first)
        for number, path in enumerate(conversation_paths(self._recording)):
            if number < _NUM_NOISY:
                found = read_conversation(path, header.shape)
                tokens = found.token_ids.copy()
                start = found.info.answer_start
                tokens[start:] = noise.integers(100, header.shape.n_vocab, len(tokens) - start)
                info = replace(found.info, prompt_id=f"noise {first + number}", time_s=time.time())
                noisy = replace(found, info=info, token_ids=tokens)
                write_conversation(conversation_path(self._recording, first + number), noisy)
            path.unlink()


def _is_learning(tuning: dict[str, Any]) -> bool:
    return tuning["state"] == "tuning" and (tuning["step"] or "").startswith("learning")


def questions(tables: Mapping[str, tuple[str, ...]], number: int, *, seed: int) -> list[str]:
    """Questions about tables, all of them different."""
    draw = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < number:
        name = draw.choice(sorted(tables))
        a, b, c, d = tables[name]
        numbers = {"n": draw.randrange(5, 500), "k": draw.randrange(3, 30), "y": draw.randrange(2001, 2024)}
        question = draw.choice(_QUESTIONS).format(a=a, b=b, c=c, d=d, **numbers)
        found[
            f"The table {name} has the columns id, {a}, {b}, {c}, {d}. Write one SQL statement. {question}"
        ] = None
    return list(found)


def measure(draft: Path, folder: Path) -> Figures:
    """Serve the demo's model, and measure everything."""
    keys = folder / "keys"
    add_key(keys, KeyRecord("alice", digest_of(ALICE), may_record=True, group=GROUP))
    add_key(keys, KeyRecord("bob", digest_of(BOB)))
    arguments = [
        *(str(demo_model()), "--stages", "2", "--threads", "1", "--exact", "--ctx-size", "512"),
        *("--parallel", "4", "--draft", str(draft), "--speculate", "draft"),
        *("--set", "spec-width=3", "--set", "spec-depth=1", "--set", f"tune-idle={_IDLE_S:g}"),
        *("--api-key-file", str(keys), "--record", str(folder / "recording"), "--record-limit", "2G"),
        *("--tune", GROUP),
    ]
    with (folder / "mesh.log").open("w+b") as log, own_mesh(arguments, log) as mesh:
        return Measurement(mesh, folder / "recording").run()


def report(figures: Figures) -> Report:
    """The figures with their bounds."""
    conditions = {
        "stages": 2,
        "answers learned": _NUM_LEARNED,
        "idle time, s": _IDLE_S,
        "cores": num_usable(),
    }
    return bounded_report("Tuning in the background", conditions, figures.lines(), figures=figures)


@click.command()
@click.option(
    "--draft", type=FILE, required=True, metavar="FILE", help="EAGLE-3 drafter of the demo's model."
)
@logs_option()
@json_option
@experiment
def main(*, draft: Path, logs: Path | None) -> Report:
    """Measure tuning in the background on a mesh of this machine.

    Prints figures with their bounds, and exits with 1 if one is missed.
    """
    with logs_folder(logs) as folder:
        return report(measure(draft, folder))


if __name__ == "__main__":
    main()
