"""Head and three joined hosts 5 ms apart, each in its own namespaces: real processes, Ray nodes, streams."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from mesh.bench.mesh_system import COMMAND, MeshSystem
from mesh.bench.server_process import last_lines
from mesh.cluster.join_token import decode, encode
from mesh.lab import Lab
from tests.chat_prompts import CHAT_PROMPTS
from tests.lab_fixtures import require_lab
from tests.promptness import quickest_s

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]

DELAY_MS = 5.0
CONCURRENCY = 4
HEAD = 0
STRANGER = 4  # a host of the lab that no mesh waits for
NUM_MESH_HOSTS = 4
JOIN_MUST_FAIL_WITHIN_S = 5.0


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
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    require_lab()
    with Lab(NUM_MESH_HOSTS + 1, DELAY_MS, shared=[tmp_path_factory.getbasetemp()]) as running:
        yield running


@contextmanager
def whole_model(model: Path, folder: Path, questions: Questions) -> Iterator[subprocess.Popen[str]]:
    """Answers in a process of its own, so that a mesh can come up meanwhile; `texts_of` waits for it."""
    job_path = folder / "job.json"
    job_path.write_text(json.dumps({"model": str(model), **asdict(questions)}))
    with (
        job_path.open() as job,
        subprocess.Popen(
            [sys.executable, "-m", "tests.whole_model"],
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


@contextmanager
def running_mesh(lab: Lab, model: Path, logs: Path) -> Iterator[MeshSystem]:
    """A mesh of the first four hosts, with what it wrote printed if the test fails."""
    options = ["--exact", "--speculate", "ngram", "--parallel", str(CONCURRENCY), "--ctx-size", "1024"]
    mesh = MeshSystem(lab, model, logs, num_hosts=NUM_MESH_HOSTS, options=options)
    try:
        mesh.start()
        yield mesh
    except BaseException:
        for host in range(NUM_MESH_HOSTS):
            if mesh.log(host).exists():
                print(f"--- host{host}\n{last_lines(mesh.log(host), 60)}")
        raise
    finally:
        for host in range(lab.num_hosts):
            lab.kill(host)


def ask_everything(lab: Lab, mesh: MeshSystem, questions: Questions, mode: str) -> list[Text]:
    job = {
        # Nothing that an earlier answer left in the caches helps a later one.
        "fields": {"speculation": {"mode": mode}, "cache_prompt": False},
        "base_url": f"http://127.0.0.1:{mesh.port}/v1",
        **asdict(questions),
        "concurrency": CONCURRENCY,
    }
    client = lab.run(
        HEAD,
        [sys.executable, "-m", "tests.chat_client"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = client.communicate(json.dumps(job).encode(), timeout=600)
    assert client.returncode == 0, errors.decode()
    return [Text(**answer) for answer in json.loads(output)]


def try_to_join(lab: Lab, *arguments: str) -> tuple[int, str, float]:
    """Exit code, standard error and duration of a `mesh join` that is to fail."""
    start_s = time.monotonic()
    done = lab.exec(STRANGER, [COMMAND, "join", *arguments], timeout_s=120)
    return done.returncode, done.stderr, time.monotonic() - start_s


def assert_nothing_is_left(lab: Lab) -> None:
    assert [pid for host in range(lab.num_hosts) for pid in lab.pids(host)] == []
    for host in range(NUM_MESH_HOSTS):
        assert not [name for name in lab.exec(host, ["ls", "/tmp"]).stdout.split() if name.startswith("mesh")]


@pytest.mark.parametrize(
    "questions",
    [
        pytest.param(Questions(CHAT_PROMPTS[::4], 48), id="a few"),
        pytest.param(Questions(CHAT_PROMPTS, 128), id="all", marks=pytest.mark.sweep),
    ],
)
def test_staged_text_equals_the_whole_model_and_strangers_are_refused(
    lab: Lab, smollm2_path: Path, tmp_path: Path, questions: Questions
) -> None:
    with (
        whole_model(smollm2_path, tmp_path, questions) as whole,
        running_mesh(lab, smollm2_path, tmp_path) as mesh,
    ):
        wanted = texts_of(whole)
        assert ask_everything(lab, mesh, questions, "off") == wanted
        assert ask_everything(lab, mesh, questions, "ngram") == wanted
        check_that_a_wrong_token_is_refused(lab, mesh)
        check_that_an_expired_token_is_refused(lab, mesh)
        check_that_an_address_out_of_reach_is_refused(lab, mesh)
        assert lab.pids(STRANGER) == []
        # Ctrl-C in every terminal at once.
        assert mesh.stop() == [130] * NUM_MESH_HOSTS
        assert_nothing_is_left(lab)


def check_that_a_wrong_token_is_refused(lab: Lab, mesh: MeshSystem) -> None:
    token = decode(mesh.token_path.read_text())
    check_refusal(lab, encode(replace(token, secret="guessed")), "token")


def check_that_an_expired_token_is_refused(lab: Lab, mesh: MeshSystem) -> None:
    token = decode(mesh.token_path.read_text())
    check_refusal(lab, encode(replace(token, expires_at_s=int(time.time()) - 60)), "expired")


def check_refusal(lab: Lab, token: str, reason: str) -> None:
    def attempt() -> float:
        code, errors, took_s = try_to_join(lab, token, "--advertise", lab.address(STRANGER))
        assert code == 1
        assert reason in errors
        return took_s

    assert quickest_s(attempt, JOIN_MUST_FAIL_WITHIN_S) < JOIN_MUST_FAIL_WITHIN_S


def check_that_an_address_out_of_reach_is_refused(lab: Lab, mesh: MeshSystem) -> None:
    # The stranger has it and can listen there, but no packet to it finds the way.
    lab.exec(STRANGER, ["ip", "address", "add", "10.77.0.99/32", "dev", "lo"])
    code, errors, took_s = try_to_join(lab, "--token-file", str(mesh.token_path), "--advertise", "10.77.0.99")
    assert code == 1
    assert "10.77.0.99" in errors
    assert took_s < 15.0
