"""What commands say where no mesh answers, or one that refuses."""

from __future__ import annotations

import json
import re
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import click
import pytest

from mesh.cli import hosts
from mesh.cli.chat import ChatSession
from mesh.cli.head_client import ask_head, head_text
from mesh.cli.main import run
from mesh.cli.shared_options import key_of, read_first_key
from mesh.serve import head_state
from spanmesh_proto.errors import ClusterError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def answering(*sayings: bytes) -> Iterator[str]:
    """Says the first to the first who comes, whatever that one says, and so on; gives the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for said in sayings:
                there, _ = listener.accept()
                with there:
                    there.recv(4096)
                    there.sendall(said)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


def refusing(status: str, message: str) -> bytes:
    body = json.dumps({"error": {"message": message}}).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 500 No\r\nContent-Length: 99\r\n\r\n{}",
    ],
)
def test_what_is_no_mesh_is_said_in_one_line(said: bytes) -> None:
    with answering(said) as url, pytest.raises(ClusterError, match=re.escape(url)) as raised:
        ask_head(f"{url}/mesh/status", None)
    assert "\n" not in raised.value.message
    assert "\r" not in raised.value.message


@contextmanager
def silent() -> Iterator[str]:
    """Takes connections and says nothing; gives the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_head_that_does_not_answer_in_time_is_not_said_to_be_missing() -> None:
    with silent() as url:
        advices: tuple[tuple[Literal["GET", "POST"], str], ...] = (
            ("GET", "it is busy or hangs"),
            ("POST", "may still be done; see `mesh status`"),
        )
        for method, advice in advices:
            with pytest.raises(ClusterError, match=r"/mesh/status did not answer within 0\.2 s") as raised:
                ask_head(f"{url}/mesh/status", None, method=method, timeout_s=0.2)
            assert advice in raised.value.message
            assert "start one" not in raised.value.message
        with pytest.raises(ClusterError, match=r"/metrics did not answer within 0\.2 s: it is busy"):
            head_text(f"{url}/metrics", None, timeout_s=0.2)


def test_a_head_that_takes_no_connections_is_not_said_to_be_missing() -> None:
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        # A queue for one, which is full.
        listener.listen(0)
        for waiting in (first, second):
            waiting.settimeout(0)
            waiting.connect_ex(listener.getsockname())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ClusterError, match=r"did not answer within 0\.2 s: it hangs") as raised:
            ask_head(f"{url}/mesh/status", None, timeout_s=0.2)
    assert "start one" not in raised.value.message


def test_an_evicting_head_is_waited_for_until_its_disk_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hosts._EVICT_TIMEOUT_S >= 2 * head_state._PATIENCE_S
    monkeypatch.setattr(hosts, "_EVICT_TIMEOUT_S", 0.2)
    with silent() as url:
        assert run(["evict", "beta", "--url", url]) == 1
    said = capsys.readouterr().err
    assert f"{url}/mesh/evict?host=beta did not answer within 0.2 s" in said
    assert "`mesh status`" in said


def test_a_port_that_is_none_is_said_in_one_line() -> None:
    with pytest.raises(ClusterError, match=r"no mesh answers at http://127\.0\.0\.1:abc/"):
        ask_head("http://127.0.0.1:abc/mesh/status", None)
    for url in ("http://127.0.0.1:99999", "http://127.0.0.1:abc", "http://[::1"):
        with pytest.raises(click.BadParameter, match="is not an address"):
            ChatSession(url, None, model="default", system=None, fields={}, write=print)


def test_a_refusal_that_no_key_would_mend_is_passed_on() -> None:
    elsewhere = "hosts are removed from the head's own machine only: run the command there"
    with answering(refusing("401 No", elsewhere)) as url, pytest.raises(Unauthorized) as raised:
        ask_head(f"{url}/mesh/drain?host=b", "a-key", method="POST")
    assert raised.value.message == elsewhere
    with (
        answering(refusing("401 No", "the API key is not one of this server's")) as url,
        pytest.raises(Unauthorized, match="needs another API key; give it with --api-key-file"),
    ):
        ask_head(f"{url}/mesh/status", "a-key")


def test_a_key_file_that_is_no_text_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="not text"):
        read_first_key(path)


@pytest.mark.parametrize("key", ["sk-secret\rb", "sk-secret\nb", "sk-secret b", "sk-sécret", "sk-secret\x1b"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESH_API_KEY", key)
    with pytest.raises(ClusterError, match="API key of MESH_API_KEY holds a space") as raised:
        key_of(None)
    assert "cret" not in raised.value.message
    assert raised.value.param is None
    path = tmp_path / "key"
    path.write_text("sk-sécret")
    with pytest.raises(ClusterError, match=re.escape(str(path))) as raised:
        key_of(path)
    assert raised.value.param == "--api-key-file"
    assert "cret" not in raised.value.message.replace(str(path), "")


def test_the_end_of_the_line_is_no_part_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_API_KEY", "sk-secret\r\n")
    assert key_of(None) == "sk-secret"
    monkeypatch.delenv("MESH_API_KEY")
    assert key_of(None) is None


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary", "308 Permanent"])
def test_a_key_is_not_sent_to_where_a_server_points(status: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        there = f"http://localhost:{elsewhere.getsockname()[1]}/mesh/status"
        said = f"HTTP/1.1 {status}\r\nLocation: {there}\r\nContent-Length: 0\r\n\r\n".encode()
        with answering(said) as url, pytest.raises(ClusterError, match=re.escape(there)):
            ask_head(f"{url}/mesh/status", "a-key", timeout_s=1.0)
        elsewhere.settimeout(0)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


def test_a_retry_that_fails_loses_nothing() -> None:
    event = json.dumps({"choices": [{"delta": {"content": "Hello, Ada."}}]})
    answer = f"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: {event}\n\ndata: [DONE]\n\n".encode()
    shown: list[str] = []
    with answering(answer, refusing("503 No", "no host has room")) as url:
        chat = ChatSession(url, None, model="default", system=None, fields={}, write=shown.append)
        for line in ("I am Ada.", "/retry", "/show"):
            assert chat.take(line)
    assert "error: the server answered 503: no host has room\n" in shown
    assert shown[-2:] == ["user: I am Ada.\n", "assistant: Hello, Ada.\n"]


def test_what_came_before_a_server_broke_off_stays_with_its_reason() -> None:
    events = ({"choices": [{"delta": {"content": "Hello"}}]}, {"error": {"message": "stage 2 went away"}})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    shown: list[str] = []
    with answering(f"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{body}".encode()) as url:
        chat = ChatSession(url, None, model="default", system=None, fields={}, write=shown.append)
        for line in ("I am Ada.", "/show"):
            assert chat.take(line)
    assert shown == ["Hello", "\nerror: stage 2 went away\n", "user: I am Ada.\n", "assistant: Hello\n"]


def test_an_answer_controls_no_terminal() -> None:
    said = "Füße\n\t日本 👩\u200d👧\x1b]0;owned\x07\x9b2J\u202e\ud83d"
    events = ({"choices": [{"delta": {"content": said}}]}, {"error": {"message": "lost \x1b[2J"}})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    shown: list[str] = []
    with answering(f"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{body}".encode()) as url:
        chat = ChatSession(url, None, model="default", system=None, fields={}, write=shown.append)
        for line in ("I am Ada.", "/show"):
            assert chat.take(line)
    escaped = "Füße\n\t日本 👩\u200d👧" + r"\u001b]0;owned\u0007\u009b2J\u202e\ud83d"
    assert shown[:2] == [escaped, "\nerror: lost \\u001b[2J\n"]
    assert shown[-1] == f"assistant: {escaped}\n"


def test_what_a_server_says_controls_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(refusing("400 No", "no host \x1b[2J\x9b2J\u202e")) as url:
        assert run(["drain", "b", "--url", url]) == 1
    assert run(["drain", "b", "--url", "ftp://\x1b[2J"]) == 2
    assert run(["drain", "--no\x1b[2J"]) == 2
    said = capsys.readouterr().err
    assert "error: no host \\u001b[2J\\u009b2J\\u202e\n" in said
    assert "\x1b" not in said


def test_a_head_that_is_no_url_is_named_whatever_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    for call in (
        ["load", "x"],
        ["unload", "x"],
        ["drain", "b"],
        ["evict", "b"],
        ["status"],
        ["top"],
    ):
        assert run([*call, "--url", "nonsense"]) == 2
        assert "Error: Invalid value for --url: 'nonsense" in capsys.readouterr().err
