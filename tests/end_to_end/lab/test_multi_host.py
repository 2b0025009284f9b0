"""Head, stages and a spare on hosts of their own, milliseconds apart: real processes, Ray nodes, streams.

Their text is the whole model's, strangers are refused, and streams do not notice that hosts are lost, or that
the head was killed and started again.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from mesh.cluster.join_token import decode, encode
from meshbench.chaos.results import WARM_PAUSE_S
from meshbench.lab.network import Lab
from meshbench.lab.systems import COMMAND, last_lines
from tests.support.chat_prompts import CHAT_PROMPTS
from tests.support.lab_fixtures import require_lab
from tests.support.lab_mesh import PATIENCE_S, Running, running_mesh
from tests.support.promptness import quickest_s

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]

NUM_HOSTS = 5  # the head, three stages, one spare
STRANGER = 5  # a host of the lab that no mesh waits for
DELAY_MS = 3.0
# From the loss of a stage until the head knows, as docs/failures.md says.
NOTICED_S = 2.0
JOIN_MUST_FAIL_WITHIN_S = 5.0
OPTIONS = ["--exact", "--speculate", "ngram", "--parallel", "4", "--ctx-size", "1024", "--stages", "3"]


@dataclass(frozen=True)
class Questions:
    prompts: tuple[str, ...]
    max_tokens: int


@dataclass(frozen=True)
class Text:
    text: str
    num_tokens: int
    finish: str


@pytest.fixture(scope="module")
def mesh(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    require_lab()
    logs = tmp_path_factory.mktemp("logs")
    with (
        Lab(NUM_HOSTS + 1, DELAY_MS, shared=[tmp_path_factory.getbasetemp()]) as lab,
        running_mesh(lab, smollm2_path, logs, num_hosts=NUM_HOSTS, options=OPTIONS) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def undisturbed(mesh: Running) -> list[dict[str, Any]]:
    """What four questions are answered while nothing happens."""
    answers = mesh.answers(mesh.ask())
    assert len({answer["text"] for answer in answers}) == 4
    return answers


@contextmanager
def whole_model(model: Path, folder: Path, questions: Questions) -> Iterator[subprocess.Popen[str]]:
    """Answers in a process of its own, so that a mesh can come up meanwhile; `texts_of` waits for it."""
    job_path = folder / "job.json"
    job_path.write_text(json.dumps({"model": str(model), **asdict(questions)}))
    with (
        job_path.open() as job,
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.whole_model"],
            stdin=job,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def texts_of(process: subprocess.Popen[str]) -> list[Text]:
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return [Text(**answer) for answer in json.loads(output)]


def try_to_join(lab: Lab, *arguments: str) -> tuple[int, str, float]:
    """Exit code, standard error and duration of a `mesh join` that is to fail."""
    start_s = time.monotonic()
    done = lab.exec(STRANGER, [COMMAND, "join", *arguments], timeout_s=120)
    return done.returncode, done.stderr, time.monotonic() - start_s


@pytest.mark.parametrize(
    "questions",
    [
        pytest.param(Questions(CHAT_PROMPTS[::4], 48), id="a few"),
        pytest.param(Questions(CHAT_PROMPTS, 128), id="all", marks=pytest.mark.sweep),
    ],
)
def test_staged_text_equals_the_whole_model(
    mesh: Running, smollm2_path: Path, tmp_path: Path, questions: Questions
) -> None:
    with whole_model(smollm2_path, tmp_path, questions) as whole:
        wanted = texts_of(whole)
    for mode in ("off", "ngram"):
        # Nothing that an earlier answer left in the caches helps a later one.
        fields = {"speculation": {"mode": mode}, "cache_prompt": False}
        client = mesh.ask(questions.prompts, questions.max_tokens, **fields)
        assert [Text(**answer) for answer in mesh.answers(client)] == wanted


def test_strangers_are_refused(mesh: Running) -> None:
    check_that_a_wrong_token_is_refused(mesh)
    check_that_an_address_out_of_reach_is_refused(mesh)
    assert mesh.lab.pids(STRANGER) == []


def check_that_a_wrong_token_is_refused(mesh: Running) -> None:
    token = decode(mesh.system.token_path.read_text())
    check_refusal(mesh.lab, encode(replace(token, secret="guessed")), "token")


def check_refusal(lab: Lab, token: str, reason: str) -> None:
    def attempt() -> float:
        code, errors, took_s = try_to_join(lab, token, "--advertise", lab.address(STRANGER))
        assert code == 1
        assert reason in errors
        return took_s

    assert quickest_s(attempt, JOIN_MUST_FAIL_WITHIN_S) < JOIN_MUST_FAIL_WITHIN_S


def check_that_an_address_out_of_reach_is_refused(mesh: Running) -> None:
    # The stranger has it and can listen there, but no packet to it finds the way.
    mesh.lab.exec(STRANGER, ["ip", "address", "add", "10.77.0.99/32", "dev", "lo"])
    code, errors, took_s = try_to_join(
        mesh.lab, "--token-file", str(mesh.system.token_path), "--advertise", "10.77.0.99"
    )
    assert code == 1
    assert "10.77.0.99" in errors
    assert took_s < 15.0


def test_a_head_that_was_killed_takes_its_stages_over(
    mesh: Running, undisturbed: list[dict[str, Any]]
) -> None:
    mesh.until_replicas_are_loaded()
    stages = mesh.stage_processes()
    log = mesh.system.log(0)
    before = log.read_text()
    mesh.until(
        lambda status: len(json.loads(mesh.state.read_text())["copies"]) == len(status.stages),
        "copies are not written down",
    )

    mesh.system.process(0).send_signal(signal.SIGKILL)
    mesh.system.process(0).wait()
    mesh.system.start_head()
    mesh.system.wait_healthy(timeout_s=PATIENCE_S)

    assert mesh.answers(mesh.ask()) == undisturbed
    assert mesh.stage_processes() == stages, last_lines(log, 60)
    since = log.read_text().removeprefix(before)
    assert "stages_taken_over" in since, last_lines(log, 40)
    assert '"stage_loaded"' not in since
    assert '"stage_sent"' not in since


def test_a_killed_stage_is_noticed_at_once_and_its_copy_takes_over(
    mesh: Running, undisturbed: list[dict[str, Any]]
) -> None:
    mesh.until_replicas_are_loaded()
    num_repairs = mesh.status().repairs.count
    victim = mesh.stage_hosts()[0]
    with mesh.streams(undisturbed):
        killed_s = time.time()
        mesh.kill_stage(victim)
    status = mesh.until_repaired(num_repairs + 1)
    failure = status.failures[-1]
    assert failure.host == f"host{victim}"
    assert 0.0 < failure.at_s - killed_s <= NOTICED_S
    assert status.repairs.last_s is not None
    assert status.repairs.last_s <= WARM_PAUSE_S


def test_a_silent_stage_is_noticed_within_two_seconds(
    mesh: Running, undisturbed: list[dict[str, Any]]
) -> None:
    mesh.until_replicas_are_loaded()
    num_repairs = mesh.status().repairs.count
    victim = mesh.stage_hosts()[-1]
    with mesh.streams(undisturbed):
        silent_s = time.time()
        mesh.lab.lose_packets(victim)
        status = mesh.until_repaired(num_repairs + 1)
        mesh.lab.deliver_packets(victim)
    failure = status.failures[-1]
    assert failure.host == f"host{victim}"
    assert 0.0 < failure.at_s - silent_s <= NOTICED_S


def test_nothing_is_left_after_ctrl_c_in_every_terminal(mesh: Running) -> None:
    mesh.until_replicas_are_loaded()
    assert mesh.system.stop() == [128 + signal.SIGINT] * NUM_HOSTS
    assert [pid for host in range(NUM_HOSTS + 1) for pid in mesh.lab.pids(host)] == []
    for host in range(NUM_HOSTS):
        left = mesh.lab.exec(host, ["ls", "/tmp"]).stdout.split()
        assert not [name for name in left if name.startswith("mesh")]


@pytest.mark.sweep
def test_streams_go_on_whatever_happens_to_hosts(smollm2_path: Path, tmp_path: Path) -> None:
    require_lab()
    num_hosts, options = NUM_HOSTS - 1, [*OPTIONS, "--stages", "2"]
    with (
        Lab(num_hosts, DELAY_MS, shared=[tmp_path]) as lab,
        running_mesh(lab, smollm2_path, tmp_path, num_hosts=num_hosts, options=options) as mesh,
    ):
        lose_hosts_one_by_one(mesh, mesh.answers(mesh.ask()))


def lose_hosts_one_by_one(mesh: Running, undisturbed: list[dict[str, Any]]) -> None:
    mesh.until_replicas_are_loaded()
    before = mesh.status()
    num_failures, num_repairs = len(before.failures), before.repairs.count

    with mesh.streams(undisturbed):
        mesh.kill_stage(mesh.stage_hosts()[0])
    mesh.until_replicas_are_loaded()

    victim = mesh.stage_hosts()[-1]
    with mesh.streams(undisturbed):
        mesh.lab.lose_packets(victim)
        mesh.until_repaired(num_repairs + 2)
        mesh.lab.deliver_packets(victim)
    # It finds its way back by itself.
    mesh.until_replicas_are_loaded()

    drained = mesh.stage_hosts()[0]
    with mesh.streams(undisturbed):
        mesh.order("drain", f"host{drained}")
    status = mesh.status()
    assert f"host{drained}" not in {host.name for host in status.hosts}
    assert (status.repairs.count, status.repairs.moves) == (num_repairs + 2, 1)
    assert len(status.failures) == num_failures + 2

    evicted = mesh.stage_hosts()[-1]
    with mesh.streams(undisturbed):
        mesh.order("evict", f"host{evicted}")
    assert mesh.stage_hosts() == [({1, 2, 3} - {drained, evicted}).pop()] * 2
    # The token in the file is the new one; the evicted host's name is not let in with it.
    done = mesh.lab.exec(evicted, [COMMAND, *mesh.system.join_argv(evicted)], timeout_s=120)
    assert done.returncode == 1
    assert "evicted" in done.stderr
    # All that are left go when the head does.
    assert mesh.system.stop(hosts=[0])[0] == 128 + signal.SIGINT
