"""Keys and tokens stay where they belong: no command line, log, answer or child has them."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from mesh.api.api_keys import KeyRecord, add_key, digest_of
from mesh.cluster.addresses import free_port
from mesh.cluster.join_token import decode
from tests.support.api_harness import NO_AUTHORITIES

pytestmark = [pytest.mark.cluster, pytest.mark.sociable, pytest.mark.model]

MESH = str(Path(sys.executable).with_name("mesh"))
KEY = "sk-mesh-Ahphei7Aeb4ohquoh1iu"
WRONG = "sk-mesh-of-somebody-else-0001"
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


@dataclass
class Watch:
    """Collects what other users of this machine could see of some processes, while in the block."""

    pid: int
    seen: set[str] = field(default_factory=set)
    environments: dict[int, str] = field(default_factory=dict)
    is_over: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        while not self.is_over.wait(0.2):
            with contextlib.suppress(psutil.Error):
                family = psutil.Process(self.pid).children(recursive=True)
                for process in [psutil.Process(self.pid), *family]:
                    self._look_at(process)

    def _look_at(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.Error, OSError):
            command = process.cmdline()
            self.seen.add(" ".join(command))
            # Until a child runs its own program, the kernel shows its parent's command line and environment.
            if command != psutil.Process(self.pid).cmdline():
                self.environments[process.pid] = str(process.environ())


@dataclass(frozen=True)
class Served:
    url: str
    watch: Watch
    log: Path
    token: str


@pytest.fixture
def served(tmp_path: Path, stage_cache_dir: Path) -> Iterator[Served]:
    port = free_port("127.0.0.1")
    keys, token, log = tmp_path / "keys", tmp_path / "token", tmp_path / "log"
    add_key(keys, KeyRecord("alice", digest_of(KEY)))
    asked = ["--port", str(port), "--advertise", "127.0.0.1", "--stages", "1", "--ctx-size", "256"]
    files = ["--api-key-file", str(keys), "--token-file", str(token)]
    with log.open("w") as stderr, (tmp_path / "out").open("w") as stdout:
        process = subprocess.Popen(
            [MESH, "-v", "serve", *asked, *files],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=os.environ | {"XDG_CACHE_HOME": str(stage_cache_dir), "MESH_API_KEY": KEY},
        )
    watch = Watch(process.pid)
    thread = threading.Thread(target=watch.look)
    thread.start()
    try:
        deadline_s = time.monotonic() + 120
        url = f"http://127.0.0.1:{port}"
        while not is_healthy(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.2)
        yield Served(url, watch, log, token.read_text().strip())
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
        watch.is_over.set()
        thread.join()


def is_healthy(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", verify=NO_AUTHORITIES).status_code == 200
    return False


def test_no_secret_is_seen_from_outside(served: Served) -> None:
    said = []
    for headers, path in (
        ({"authorization": f"Bearer {KEY}"}, "/v1/chat/completions"),
        ({"authorization": f"Bearer {WRONG}"}, "/v1/chat/completions"),
        ({"authorization": f"Basic {KEY}"}, "/v1/chat/completions"),
        ({"x-api-key": WRONG}, f"/v1/chat/completions?api_key={KEY}"),
        ({"x-api-key": KEY}, "/v1/chat/completions"),
        ({"authorization": f"Bearer {KEY}"}, "/mesh/status"),
    ):
        method = "GET" if path.endswith("status") else "POST"
        answer = httpx.request(method, served.url + path, json=CHAT, headers=headers, timeout=60)
        said.append(f"{answer.status_code} {answer.headers} {answer.text}")
    assert [text[:3] for text in said] == ["200", "401", "401", "401", "200", "200"]
    # Malformed, and with the secret in its middle.
    joined = subprocess.run(
        [MESH, "join", "--token-file", "-"],
        input=served.token[:-20],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert joined.returncode == 1
    said.append(joined.stderr)

    environments = list(served.watch.environments.values())
    (token_path,) = {
        text.partition("'RAY_AUTH_TOKEN_PATH': '")[2].partition("'")[0]
        for text in environments
        if "RAY_AUTH_TOKEN_PATH" in text
    }
    assert Path(token_path).stat().st_mode & 0o777 == 0o600
    secrets = {
        "the API key": KEY,
        "a wrong API key": WRONG,
        "the join token": served.token,
        "the join token's secret": decode(served.token).secret,
        "Ray's token": Path(token_path).read_text().strip(),
    }
    ray_logs = [
        path for path in Path(token_path).parent.rglob("*") if path.suffix in {".log", ".out", ".err"}
    ]
    assert len(ray_logs) > 3
    places = {
        "a command line": "\n".join(served.watch.seen),
        "the log": served.log.read_text(),
        "an answer": "\n".join(said),
        "Ray's logs": "\n".join(path.read_text(errors="replace") for path in ray_logs),
        "an environment": "\n".join(environments),
    }
    assert len(served.watch.seen) > 5
    found = [
        f"{name} is in {place}"
        for name, secret in secrets.items()
        for place, text in places.items()
        if secret in text
    ]
    assert found == []
