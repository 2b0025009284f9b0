"""Somebody else's OpenAI server: a real HTTP server whose answers a test writes by hand."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = json.dumps({"data": [{"id": "theirs"}]})
WORD = 'data: {"choices": [{"delta": {"content": " word"}, "finish_reason": null}]}\n\n'
END = 'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\n'
USAGE = 'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}\n\n'
DONE = "data: [DONE]\n\n"
ANSWER = WORD + WORD + END + USAGE + DONE


@dataclass(frozen=True)
class Reply:
    """What one request gets."""

    body: str = ANSWER
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Peer:
    """A running server and what it was asked."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def peer_server(
    reply: Callable[[int], Reply],
    *,
    models: Reply | None = None,
    protocol: str = "HTTP/1.0",
    hangs_up: bool = False,
) -> Iterator[Peer]:
    """Serve until the block ends.

    Args:
        reply: From a request's number, counted from 0, to what it gets; called in the request's thread.
        models: What `/v1/models` says.
        protocol: With HTTP/1.0 each answer ends with its connection.
        hangs_up: Whether the server closes its connections after each answer without having said so.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = protocol

        def do_GET(self) -> None:
            self._send(models or Reply(MODELS))

        def do_POST(self) -> None:
            with lock:
                number = len(peer.bodies)
                peer.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                peer.headers.append({name.lower(): value for name, value in self.headers.items()})
            self._send(reply(number))

        def _send(self, reply: Reply) -> None:
            data = reply.body.encode()
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if protocol != "HTTP/1.0":
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            self.close_connection |= hangs_up

        def log_message(self, format: str, *args: object) -> None:
            pass

    lock = threading.Lock()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        peer = Peer(f"http://127.0.0.1:{running.server_port}")
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield peer
        finally:
            running.shutdown()
            thread.join()
