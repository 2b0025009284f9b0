"""What benches take, and what wrong options get."""

import signal
from pathlib import Path
from typing import Any

import pytest

from mesh.cli.main import run
from meshbench.http_client import parse_url
from meshbench.serving_metrics import Slo
from meshbench.under_test.options import RemoteTarget
from spanmesh_proto.errors import MeshError

URL = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--delay-ms", "5,fast"], "'5,fast' is not a list of numbers"),
        (["--delay-ms", "-1"], "-1.0 is below 0.0"),
        (["--draft-max", "0,4"], "0 is below 1"),
        (["--draft-max", "2.5"], "'2.5' is not a list of numbers"),
        (["--proposers", "ngram,oracle"], "'oracle' is not a proposer; there are ngram, draft, auto, replay"),
        (["--preset", "acceptance"], "name their file with --spec-bench"),
        (["--quick", "--preset", "acceptance"], "leave out --preset"),
        (["--tokens", "1"], "--tokens"),
        (["--draft", "nowhere.gguf"], "nowhere.gguf"),
    ],
)
def test_wrong_options_are_named(
    arguments: list[str], words: str, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "spec", str(smollm2_path), *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bench", "arguments", "words"),
    [
        ("stress", ["--hang-ups", "1.5"], "1.5 is not in the range 0.0<=x<=1.0"),
        ("stress", ["--keys", "0"], "0 is not in the range 1<=x<=64"),
        ("stress", ["--keys", "2", "--preset", "acceptance"], "leave out --preset, --peer"),
        ("stress", ["--hang-ups", "0.3", "--soak", "1"], "leave out --preset, --peer"),
        ("stress", ["--keys", "2", "--duration-s", "9"], "as many requests as --requests says"),
        ("chaos", ["--hang-ups", "-0.1"], "-0.1 is not in the range 0.0<=x<=1.0"),
    ],
)
def test_wrong_hang_ups_are_named(
    bench: str, arguments: list[str], words: str, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", bench, str(smollm2_path), *arguments]) == 2
    # Lines break where the terminal ends.
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("bench", "runner", "arguments", "fields"),
    [
        (
            "stress",
            "meshbench.stress.run.run_stress",
            (
                "--lines itl,crowd --contexts 8,900 --hosts 5 --delay-ms 2 --jitter-ms 1 --loss .01 --mbit 50"
                " --pin-hosts"
                " --concurrency 2,5 --duration-s 3 --soak 2 --chats 4"
                " --soak-concurrency 6 --seed 9 --exact --ctx-size 400 --parallel 9 --kv-type q8_0"
                " --threads 2 --speculate ngram --serve --insecure --peer rpc --rounds 1 -o out --logs logs"
                " --goodput e2el:900"
            ),
            {
                "preset": "ramp",
                "lines": ("crowd", "itl"),
                "contexts": (8, 900),
                "num_stages": 5,
                "delay_ms": 2.0,
                "jitter_ms": 1.0,
                "loss": 0.01,
                "mbit_per_s": 50.0,
                "is_pinned": True,
                "concurrency": (2, 5),
                "num_requests": None,
                "duration_s": 3.0,
                "soak_minutes": 2.0,
                "soak_concurrency": 6,
                "num_scripts": 4,
                "is_short": False,
                "seed": 9,
                "exact": True,
                "ctx_size": 400,
                "num_slots": 9,
                "kv_type": "q8_0",
                "num_threads": 2,
                "speculate": "ngram",
                "serve_options": ("--insecure",),
                "num_keys": 0,
                "with_clients": False,
                "hang_up_share": 0.0,
                "with_rpc": True,
                "against": None,
                "rounds": 1,
                "slos": (Slo("e2el", 900.0),),
                "output": Path("out"),
                "logs": Path("logs"),
            },
        ),
        (
            "chaos",
            "meshbench.chaos.run.run_chaos",
            (
                "--scenario head --quick --faults 3 --kinds stop,first --seed 4 --stages 4 --spares 0"
                " --streams 3 --fast --hang-ups .2 --delay-ms 1 --ctx-size 512 --threads 2 --speculate off"
                " --serve --insecure --whole-timeout-s 4 -o out --logs logs --against /usr"
            ),
            {
                "scenarios": ("head",),
                "num_stages": 4,
                "num_spares": 0,
                "delay_ms": 1.0,
                "jitter_ms": 0.0,
                "loss": 0.0,
                "mbit_per_s": None,
                "is_pinned": False,
                "num_streams": 3,
                "num_faults": 3,
                "kinds": ("first", "stop"),
                "is_short": True,
                "awaits_replicas": True,
                "hang_up_share": 0.2,
                "seed": 4,
                "exact": False,
                "num_questions": 6,
                "answer_tokens": (32, 48, 64),
                "ctx_size": 512,
                "num_threads": 2,
                "speculate": "off",
                "serve_options": ("--insecure",),
                "whole_timeout_s": 4.0,
                "against": Path("/usr"),
                "output": Path("out"),
                "logs": Path("logs"),
            },
        ),
        (
            "spec",
            "meshbench.speculation_run.run_spec",
            (
                "--workloads a,b --proposers auto,ngram --draft-max 2 --delay-ms 1,2 --questions 2 --tokens 9"
                " --context 70"
                " --threads 2 --draft-type none --exact --rpc --seed 3 --replay-rates 0.5,0.25"
                " -o out --logs logs --against /usr"
            ),
            {
                "draft_model": None,
                "other_draft": None,
                "draft_type": None,
                "preset": "sweep",
                "spec_bench": None,
                "workloads": ("a", "b"),
                "modes": ("ngram", "auto"),
                "widths": (2,),
                "delays_ms": (1.0, 2.0),
                "replay_rates": (0.5, 0.25),
                "per_workload": 2,
                "num_tokens": 9,
                "context_words": 70,
                "num_threads": 2,
                "exact": True,
                "with_rpc": True,
                "against": Path("/usr"),
                "seed": 3,
                "output": Path("out"),
                "logs": Path("logs"),
                "command": "mesh bench spec SmolLM2-135M-Instruct.Q4_1.gguf --workloads a,b"
                " --proposers ngram,auto --draft-max 2 --delay-ms 1,2 --replay-rates 0.5,0.25 --questions 2"
                " --tokens 9 --context 70 --threads 2 --draft-type none --exact --rpc --against usr --seed 3",
            },
        ),
    ],
)
def test_every_option_arrives(
    bench: str,
    runner: str,
    arguments: str,
    fields: dict[str, Any],
    smollm2_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrived = options_that_arrive(
        runner, ["bench", bench, str(smollm2_path), *arguments.split()], monkeypatch
    )
    assert vars(arrived) == {"model": smollm2_path, **fields}


def test_two_drafters_arrive(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, questions = (tmp_path / name for name in ("first.gguf", "second.gguf", "question.jsonl"))
    for path in (first, second, questions):
        path.touch()
    named = ["--draft", str(first), "--draft", str(second)]
    words = [
        "bench",
        "spec",
        str(smollm2_path),
        "--preset",
        "features",
        "--spec-bench",
        str(questions),
        *named,
    ]
    arrived = options_that_arrive("meshbench.speculation_run.run_spec", words, monkeypatch)
    assert (arrived.other_draft, arrived.draft_model) == (first, second)
    assert arrived.command.endswith("--draft first.gguf --draft second.gguf")


def options_that_arrive(runner: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the command hands to the function of that name, which does not run."""
    arrived: list[Any] = []

    def stop(options: object) -> None:
        arrived.append(options)
        raise MeshError("that is all")

    monkeypatch.setattr(runner, stop)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert run(arguments) == 1
    finally:
        signal.signal(signal.SIGTERM, handler)
    return arrived[0]


@pytest.mark.parametrize(
    ("bench", "arguments", "words"),
    [
        (
            "stress",
            ["--url", URL, "--peer", "rpc", "--pin-hosts", "--delay-ms", "5", "--hosts", "3"],
            "leave out what is for one started in the lab, --hosts, --delay-ms, --pin-hosts, --peer",
        ),
        ("stress", ["--url", URL, "--keys", "2", "--exact"], "started in the lab, --keys, --exact"),
        ("spec", ["--url", URL, "--no-rpc", "--draft-type", "none"], "in the lab, --draft-type, --rpc"),
        ("spec", ["--url", URL, "--preset", "sweep"], "started in the lab, --preset"),
        ("stress", ["--model", "m"], "without --url, the address of a running mesh, leave out --model"),
        ("spec", ["--api-key-file", "keys"], "leave out --api-key-file"),
        ("stress", ["--url", "ftp://somewhere"], "'ftp://somewhere' is not an address"),
        ("spec", ["--draft", __file__, "--draft", __file__], "are compared with --preset features"),
    ],
)
def test_options_of_a_lab_and_of_a_running_mesh_exclude_each_other(
    bench: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", bench, *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("bench", "runner", "arguments", "fields"),
    [
        (
            "stress",
            "meshbench.stress.remote_run.run_remote_stress",
            "--concurrency 2,3 --requests 7 --hang-ups 0.5 --goodput ttft:500 --seed 4",
            {
                "concurrency": (2, 3),
                "fits_slots": False,
                "num_requests": 7,
                "with_clients": True,
                "hang_up_share": 0.5,
                "slos": (Slo("ttft", 500.0),),
                "speculate": "auto",
                "seed": 4,
            },
        ),
        (
            "stress",
            "meshbench.stress.remote_run.run_remote_stress",
            "--quick --lines itl",
            {"concurrency": (1, 4), "fits_slots": True, "speculate": "off", "lines": ("itl",)},
        ),
        (
            "spec",
            "meshbench.speculation_run.run_remote_spec",
            "--proposers ngram --draft-max 2 --tokens 9 --workloads a,b",
            {"modes": ("ngram",), "widths": (2,), "num_tokens": 9, "workloads": ("a", "b")},
        ),
    ],
)
def test_a_running_mesh_arrives_with_what_is_asked_of_it(
    bench: str,
    runner: str,
    arguments: str,
    fields: dict[str, Any],
    smollm2_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice sk-of-alice\n")
    where = ["--url", URL, "--model", "m", "--api-key-file", str(keys), "--net", str(smollm2_path)]
    command = ["bench", bench, str(smollm2_path), *where, *arguments.split(), "-o", "out"]
    arrived = vars(options_that_arrive(runner, command, monkeypatch))
    assert arrived["target"] == RemoteTarget(
        parse_url(URL), "sk-of-alice", "m", model_file=smollm2_path, links_file=smollm2_path
    )
    assert arrived["target"].server.base_url == "http://127.0.0.1:9"
    assert arrived["output"] == Path("out")
    assert {name: arrived[name] for name in fields} == fields
    # A report names the command, and no key.
    assert "sk-of-alice" not in arrived.get("command", "")
