"""The status as a person reads it."""

import pytest

from mesh.cli.status import print_status
from mesh.status import read_status

HOST = {
    "name": "attic",
    "address": "10.0.0.2",
    "ready": True,
    "leaving": False,
    "layers": "",
    "copies": [],
    "memory_bytes": 2**30,
    "weights": {"reused_bytes": 0, "head_bytes": 3 * 2**20, "hub_bytes": 0, "wrong_pieces": 0},
    "threads": 4,
    "speed_gb_per_s": 20.0,
    "platform": "Linux x86_64",
}
FAILURE = {
    "at_s": 1.8e9,
    "host": "attic",
    "layers": "[0, 10)",
    "reason": "went away: GGML_ASSERT(x[0]) failed",
}


def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, **status: object) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    print_status(read_status(status))
    return capsys.readouterr().out


def test_hosts_that_hold_nothing_are_spares_and_their_copies_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [
        HOST,
        HOST | {"name": "b", "copies": ["[0, 10)", "[10, 30)"]},
        HOST | {"name": "c", "layers": "[0, 10)", "leaving": True},
        HOST | {"name": "d", "ready": False},
    ]
    said = shown(capsys, monkeypatch, hosts=hosts)
    rows = {
        line.split("│")[1].strip(): line.split("│")[3].strip() for line in said.splitlines() if "10.0" in line
    }
    assert rows == {
        "attic": "spare",
        "b": "replicas of [0, 10), [10, 30)",
        "c": "[0, 10); leaving",
        "d": "starting",
    }
    assert said.count("3.0 MiB sent") == len(hosts)


def test_embedding_models_are_told_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = {"index": 0, "host": "attic", "address": "10.0.0.2:1", "layers": [0, 2]}
    models = [
        {
            "name": "llama",
            "kind": "chat",
            "ready": True,
            "sessions": {"running": 1, "slots": 4, "waiting": 2},
        },
        {
            "name": "bert",
            "kind": "embeddings",
            "ready": True,
            "stages": [stage],
            "model": {"context": 512, "numeric_mode": "fast"},
            "embeddings": {"waiting": 3},
        },
    ]
    said = shown(capsys, monkeypatch, models=models)
    (row,) = (line for line in said.splitlines() if "bert" in line)
    assert [cell.strip() for cell in row.split("│")[1:6]] == [
        "bert",
        "ready",
        "attic[0, 2)",
        "embeddings, 3 waiting",
        "512",
    ]


def test_prompts_that_are_read_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = {
        "running": 1,
        "slots": 4,
        "paused": 0,
        "waiting": 0,
        "prefill": [{"read": 512, "prompt": 2048}],
    }
    said = shown(capsys, monkeypatch, sessions=sessions)
    assert "reading prompts: 512 of 2,048 tokens (25%)" in said


def test_failures_and_repairs_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    repairs = {"count": 3, "last_s": 2.25, "moves": 1}
    said = shown(capsys, monkeypatch, repairs=repairs, failures=[FAILURE] * 9)
    assert "repairs: 3, the last in 2.2 s; moves: 1" in said
    assert said.count("attic [0, 10): went away: GGML_ASSERT(x[0]) failed") == 5


def test_a_mesh_that_never_broke_says_nothing_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = shown(capsys, monkeypatch, repairs={"count": 0, "last_s": None, "moves": 0}, failures=[])
    assert "repairs" not in said


@pytest.mark.parametrize("is_on", [True, False])
def test_what_is_on_the_disks_is_told(
    is_on: bool,  # noqa: FBT001
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = {"files": 3, "bytes": 2**20, "damaged": 1}
    counts = {"fetched": 2, "fetched_tokens": 768, "failed": 1}
    said = shown(capsys, monkeypatch, kv_disk={"on": is_on, **counts, "stages": [disk, None, disk]})
    off = "" if is_on else "; not used"
    expected = "6 files, 2.0 MiB; 768 tokens of 2 requests restored, 1 fetches failed, 2 files damaged"
    assert f"kv disk: {expected}{off}\n" in said
    assert "kv disk" not in shown(capsys, monkeypatch, kv_disk=None)


def test_a_tuned_drafter_is_told_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"group": "staff", "state": "waiting for answers", "new_tokens": 1200, "new_prompts": 14}
    said = shown(capsys, monkeypatch, tuning=told)
    new = "1,200 new tokens, 14 new prompts"
    assert f"tuning: group staff is served with the untuned drafter; waiting for answers; {new};" in said
    assert "latest" not in said
    told |= {"state": "paused", "step": "learning: step 3 of 9, 33%", "drafter": "0002.gguf", "age_s": 5400}
    told |= {"gain": 0.125, "learned_tokens": 9000, "learned_prompts": 80, "chosen": 2, "refused": 1}
    said = shown(capsys, monkeypatch, tuning={**told, "latest": "0003 was refused: it cannot draft"})
    learned = "learned from 9,000 tokens of 80 prompts; paused, learning: step 3 of 9, 33%;"
    assert f"served with 0002.gguf, 1.5 hours old, +0.125 accepted a window, {learned}" in said
    assert "2 chosen, 1 refused, 0 gone back; latest: 0003 was refused: it cannot draft\n" in said
    assert "tuning" not in shown(capsys, monkeypatch, tuning=None)


def test_gpus_are_shown_with_what_they_bring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = {"name": "CUDA0", "free_bytes": 20 * 2**30, "speed_gb_per_s": 812.4}
    page = shown(capsys, monkeypatch, hosts=[HOST, HOST | {"name": "studio", "gpus": [gpu]}])
    assert "CUDA0: 20.0 GiB, 812 GB/s" in page


def test_brackets_in_names_and_reasons_are_shown_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"name": "tiny[v2] [/INST]", "layers": 30, "numeric_mode": "fast"}
    said = shown(capsys, monkeypatch, model=model, phase="waiting: [ipv4:10.0.0.2:1] is away", hosts=[HOST])
    assert "tiny[v2] [/INST], 30 layers, fast: waiting: [ipv4:10.0.0.2:1] is away" in said


def test_names_and_reasons_from_other_hosts_control_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = "x\x1b[2J\x9b2J\u202e"
    gpu = {"name": hostile, "free_bytes": 2**30, "speed_gb_per_s": 100.0}
    said = shown(
        capsys,
        monkeypatch,
        model={"name": hostile},
        plan=hostile,
        hosts=[HOST | {"name": hostile, "platform": hostile, "gpus": [gpu]}],
        failures=[FAILURE | {"host": hostile, "reason": hostile}],
        models=[{"name": hostile, "lost": hostile}, {"name": "b"}],
    )
    assert said.count(r"x\u001b[2J\u009b2J\u202e") == 9
    assert not {"\x1b", "\x9b", "\u202e"} & set(said)


def test_a_recording_is_told_with_what_it_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "recording" not in shown(capsys, monkeypatch)
    recording = {"conversations": 12, "tokens": 3400, "bytes": 12 * 2**20, "most_bytes": 10 * 2**30}
    said = shown(capsys, monkeypatch, recording=recording | {"left_out": 2, "erased": 1, "off": "disk full"})
    assert "recording: 12 answers of 3,400 tokens, 12.0 MiB of 10.0 GiB; 2 left out, 1 erased" in said
    assert "off: disk full" in said


def test_a_projector_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pictures: " not in shown(capsys, monkeypatch, model={"name": "m"})
    told = shown(capsys, monkeypatch, model={"name": "m", "projector": "mmproj-[m].gguf"})
    assert "pictures: mmproj-[m].gguf on the head\n" in told
