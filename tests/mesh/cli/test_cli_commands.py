"""Commands that need no mesh: completion, grouped help, plans on paper."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from mesh.cli.main import run
from mesh.cli.serve import serve
from mesh.cli.shared_options import DiskSize
from tests.qualification.own_models import OWN_MODELS
from tests.support.assistant_files import write_assistant
from tests.support.eagle3 import DRAFTER

MESH = str(Path(sys.executable).with_name("mesh"))


def test_help_is_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    printed = capsys.readouterr().out
    heads = [line for line in printed.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert heads[:3] == ["Options:", "Serve:", "Look:"]


def test_every_option_of_serve_stands_in_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help"]) == 0
    printed = capsys.readouterr().out
    for param in serve.params:
        if isinstance(param, click.Option):
            flag = max(param.opts, key=len)
            assert len(re.findall(rf"^  (?:-\w, )?{flag}(?![\w-])", printed, re.MULTILINE)) == 1, flag
    assert [line for line in printed.splitlines() if line.endswith(":") and not line.startswith(" ")] == [
        *("API:", "Placement:", "Sessions:", "Models on demand:", "Speculation:", "Joining hosts:"),
        *("Weights:", "After a crash:", "Others:"),
    ]


@pytest.mark.parametrize(("text", "size_bytes"), [("20G", 20 * 2**30), ("512M", 2**29), ("None", 0)])
def test_a_disk_has_a_size_or_none(text: str, size_bytes: int) -> None:
    assert DiskSize().convert(text, None, None) == size_bytes
    with pytest.raises(click.BadParameter, match="is not a memory size"):
        DiskSize().convert("0", None, None)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_ask_this_program(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    if shell == "bash" and shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    assert run(["completion", shell]) == 0
    assert "_MESH_COMPLETE=" in capsys.readouterr().out


def test_bash_completes_commands_and_flags() -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    script = (
        f'PATH="{Path(MESH).parent}:$PATH"; eval "$(mesh completion bash)"; '
        'COMP_WORDS=(mesh serve --top); COMP_CWORD=2; COMP_LINE="mesh serve --top"; COMP_POINT=16; '
        '_mesh_completion mesh; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ["--topology"], done.stderr


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.model
class TestPlans:
    def test_one_host_that_can_holds_everything(
        self, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = planned(capsys, str(smollm2_path), "--no-timing", "--memory", "8G", "--threads", "1")
        assert [stage["layers"] for stage in found["stages"]] == [[0, 30]]
        assert found["prediction"] is None
        assert found["basis"] == "no timing: --no-timing"
        (stage,) = found["stages"]
        parts = sum(stage[f"{part}_bytes"] for part in ("weight", "cache", "buffer"))
        head = found["head"]
        offered_bytes = 8 * 2**30 - head["worker_bytes"] - head["text_bytes"]
        assert parts < stage["total_bytes"] == offered_bytes - stage["free_after_bytes"]

    def test_a_context_is_chosen_unless_one_is_asked_for(
        self, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        asked = [str(smollm2_path), "--no-timing", "--threads", "1"]
        found = planned(capsys, *asked, "--memory", "8G")
        assert found["context"] == {
            "positions": 8192,
            "bound": "the model was trained for no more",
            "larger": None,
        }
        longest = found["stages"][0]["cache_bytes"]
        # 95 MiB of weights leave room for some more than the least.
        memory_bytes = str(800 * 2**20 + found["head"]["worker_bytes"] + found["head"]["text_bytes"])
        found = planned(capsys, *asked, "--memory", memory_bytes)
        assert 4096 <= found["context"]["positions"] < 8192
        assert found["context"]["larger"]["positions"] == 8192
        assert found["stages"][0]["cache_bytes"] < longest
        assert run(["plan", *asked, "--memory", memory_bytes]) == 0
        printed = capsys.readouterr().out
        assert re.search(r", the head: \d+\.\d MiB for processes that read texts and bodies, ", printed)
        assert "at most half of what the weights leave on " in printed
        assert "; --ctx-size 8192 would take " in printed
        assert planned(capsys, *asked, "--memory", "8G", "--ctx-size", "4096")["context"] is None

    def test_a_drafter_counts_on_the_head_and_an_assistant_at_the_last_stage(
        self, smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        common = ["--no-timing", "--ctx-size", "256", "--parallel", "2"]
        asked = [str(smollm2_path), *common, "--memory", "8G", "--threads", "1"]
        plain = planned(capsys, *asked)
        found = planned(capsys, *asked, "--draft", str(DRAFTER))
        taken = found["head"]["draft_bytes"]
        assert taken > DRAFTER.stat().st_size
        assert plain["head"]["draft_bytes"] == 0
        (before,), (stage,) = plain["stages"], found["stages"]
        assert stage["free_after_bytes"] == before["free_after_bytes"] - taken
        assert run(["plan", *asked, "--draft", str(DRAFTER)]) == 0
        assert " for the drafter\n" in capsys.readouterr().out

        model = str(OWN_MODELS["gemma4-dense"](2).write(tmp_path / "model.gguf"))
        assistant = write_assistant(tmp_path / "assistant.gguf")
        specs = ["--host-spec", "a:900M:20:1", "--host-spec", "b:900M:20:1", "--split", "4,2"]
        plain = planned(capsys, model, *common, *specs)
        found = planned(capsys, model, *common, *specs, "--draft", str(assistant))
        grown = [
            stage["total_bytes"] - before["total_bytes"]
            for before, stage in zip(plain["stages"], found["stages"], strict=True)
        ]
        assert grown[0] == found["head"]["draft_bytes"] == 0
        assert grown[1] > assistant.stat().st_size
        assert run(["plan", model, *common, "--draft", str(assistant), "--split", "5,1"]) == 1
        assert "assistant.gguf reads the last two layers" in capsys.readouterr().err

    def test_hosts_on_paper_get_shares_and_reasons(
        self, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        specs = ["--host-spec", "a:900M:20:1", "--host-spec", "b:450M:20:1", "--host-spec", "c:100M:20:1"]
        found = planned(
            capsys, str(smollm2_path), *specs, "--threads", "1", "--ctx-size", "512", "--parallel", "1",
            "--rtt-ms", "10", "--prompt-tokens", "32", "--stages", "2",
        )  # fmt: skip
        assert [stage["host"] for stage in found["stages"]] == ["a", "b"]
        assert found["left_out"] == [{"host": "c", "reason": found["left_out"][0]["reason"]}]
        assert "too small: it offers 100.0 MiB" in found["left_out"][0]["reason"]
        predicted = found["prediction"]
        # From the first host to the second and back.
        assert predicted["wire_ms"] == 10.0
        assert predicted["compute_ms"] == pytest.approx(
            sum(stage["row_ms"] for stage in found["stages"]), abs=0.01
        )
        whole_ms = predicted["compute_ms"] + predicted["wire_ms"] + predicted["handling_ms"]
        assert predicted["tokens_per_s"] == pytest.approx(1e3 / whole_ms, rel=0.01)

    def test_a_hosts_file_and_a_topology(
        self, smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hosts, locked = tmp_path / "hosts.toml", tmp_path / "topology.toml"
        hosts.write_text('[[host]]\nname = "a"\nmemory = "4G"\n[[host]]\nname = "b"\nmemory = "4G"\n')
        locked.write_text('[[stage]]\nhost = "b"\nlayers = "0:12"\n[[stage]]\nhost = "a"\nlayers = "12:30"\n')
        asked = [str(smollm2_path), "--hosts-file", str(hosts), "--topology", str(locked), "--no-timing"]
        found = planned(capsys, *asked)
        assert [(stage["host"], stage["layers"]) for stage in found["stages"]] == [
            ("b", [0, 12]),
            ("a", [12, 30]),
        ]
        assert run(["plan", *asked]) == 0
        assert "locked by --topology" in capsys.readouterr().out
        hosts.write_text('[[host]]\nname = "a"\nmemory = "4G"\n')
        assert run(["plan", *asked]) == 1
        assert "locks layers [0, 12) to host b, which is not ready" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "code", "says"),
        [
            (["--stages", "2", "--split", "10,20"], 2, "leave out all but one"),
            (["--host-spec", "a:1G", "--url", "http://127.0.0.1:1"], 2, "leave out all but one"),
            (["--host-spec", "a"], 1, "'a' is no host"),
            (["--host-spec", "a:1G:fast"], 1, "is no host"),
            (["--host-spec", "a:1G:0"], 1, "must be above 0"),
            (["--memory", "50M"], 1, "does not fit"),
            (["--url", "http://127.0.0.1:1"], 1, "no mesh answers"),
        ],
    )
    def test_what_cannot_be_is_said(
        self,
        arguments: list[str],
        code: int,
        says: str,
        smollm2_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert run(["plan", str(smollm2_path), "--no-timing", *arguments]) == code
        assert says in capsys.readouterr().err
