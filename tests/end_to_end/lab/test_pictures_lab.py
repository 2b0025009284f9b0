"""Pictures over three hosts of a lab: answered as the words in their place, also while a stage is lost."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from meshbench.lab.network import Lab
from tests.support.colour_words import NUM_ROWS, image_url, write_colours
from tests.support.lab_fixtures import require_lab
from tests.support.lab_mesh import PATIENCE_S, Running, running_mesh

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.lab, pytest.mark.sweep, pytest.mark.timeout(1200)]

NUM_HOSTS = 5  # the head, which holds nothing, three hosts of stages, and a spare one
OPTIONS = ["--head-only", "--exact", "--stages", "3", "--ctx-size", "512", "--parallel", "2"]
ASK = {"type": "text", "text": "Tell me which colors you see, and then a story about them."}
POST = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.stdin.buffer.read(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=120).read().decode())
"""


def asked(mesh: Running, path: str, **body: Any) -> subprocess.Popen[bytes]:
    url = f"http://127.0.0.1:{mesh.system.port}{path}"
    body = {"temperature": 0, "max_tokens": 120, "return_token_ids": True, **body}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    client = mesh.lab.run(0, [sys.executable, "-S", "-c", POST, url], **pipes)
    assert client.stdin is not None
    client.stdin.write(json.dumps(body).encode())
    client.stdin.close()
    client.stdin = None
    return client


def answer_of(client: subprocess.Popen[bytes]) -> dict[str, Any]:
    output, errors = client.communicate(timeout=PATIENCE_S)
    assert client.returncode == 0, errors.decode()
    found: dict[str, Any] = json.loads(output)
    return found


def test_a_picture_is_answered_as_the_words_whatever_happens_to_a_stage(
    smollm2_path: Path, tmp_path: Path
) -> None:
    require_lab()
    projector = write_colours(tmp_path / "mmproj.gguf", smollm2_path)
    options = [*OPTIONS, "--mmproj", str(projector)]
    with (
        Lab(NUM_HOSTS, 5.0, shared=[tmp_path]) as lab,
        running_mesh(lab, smollm2_path, tmp_path, num_hosts=NUM_HOSTS, options=options) as mesh,
    ):
        messages = [{"role": "user", "content": [image_url(" red"), ASK]}]
        answer = answer_of(asked(mesh, "/v1/chat/completions", messages=messages))
        wanted = answer["choices"][0]["token_ids"]
        prompt = answer["prompt_token_ids"]
        assert prompt.count(-1) == NUM_ROWS
        word = answer_of(asked(mesh, "/tokenize", prompt=" red", add_special_tokens=False))["tokens"]
        ids = [word[0] if each == -1 else each for each in prompt]
        assert answer_of(asked(mesh, "/v1/completions", prompt=ids))["choices"][0]["token_ids"] == wanted
        for number, host in enumerate(mesh.stage_hosts(), 1):
            client = asked(mesh, "/v1/chat/completions", messages=messages, cache_prompt=False)
            mesh.until(
                lambda status: status.sessions is not None and status.sessions.running == 1, "nobody asks"
            )
            mesh.kill_stage(host)
            assert answer_of(client)["choices"][0]["token_ids"] == wanted
            mesh.until_repaired(number)


def encoders(mesh: Running, host: int) -> list[int]:
    """Processes of projectors on a host."""
    found = []
    for pid in mesh.lab.pids(host):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "mesh.vision.encoder_worker" in psutil.Process(pid).cmdline():
                found.append(pid)
    return found


def test_another_host_encodes_and_the_head_does_when_it_is_lost(smollm2_path: Path, tmp_path: Path) -> None:
    """Its files came over the network: the head shares none with it."""
    require_lab()
    projector = write_colours(tmp_path / "mmproj.gguf", smollm2_path)
    options = ["--head-only", "--exact", "--stages", "1", "--ctx-size", "512", "--parallel", "2"]
    options += ["--mmproj", str(projector), "--mmproj-host", "host2"]
    with (
        Lab(3, 5.0, shared=[tmp_path]) as lab,
        running_mesh(lab, smollm2_path, tmp_path, num_hosts=3, options=options) as mesh,
    ):
        mesh.until(lambda status: status.model.projector_host == "host2", "the projector is not on host2")
        (process,) = encoders(mesh, 2)

        def answered(*words: str) -> list[int]:
            messages = [{"role": "user", "content": [image_url(*words), ASK]}]
            answer = answer_of(asked(mesh, "/v1/chat/completions", messages=messages, max_tokens=24))
            found: list[int] = answer["choices"][0]["token_ids"]
            return found

        red = answered(" red")
        assert encoders(mesh, 0) == []
        # A process that is killed costs no answer, and is started again there.
        psutil.Process(process).kill()
        green = answered(" green")
        assert green != red
        assert encoders(mesh, 2) != [process]
        mesh.lab.kill(2)
        assert answered(" blue") not in (red, green)
        mesh.until(lambda status: status.model.projector_host is None, "the head does not encode")
        assert len(encoders(mesh, 0)) == 1
        # The same rows, wherever they were computed: what was cached is still found.
        assert answered(" red") == red
