"""A model hub on loopback: what is used of one, with redirects, ranges, tokens, and harm on request."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """What a test sees of it, and says."""

    url: str = ""
    """For `HF_ENDPOINT`."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Content of each file of `org/tiny-GGUF`."""
    token: str | None = None
    """What it takes to read anything; None lets everybody."""
    statuses: deque[tuple[int, str | None]] = field(default_factory=deque)
    """Of the next answers, before any is good: HTTP codes with their `Retry-After`."""
    breaks_after: deque[int] = field(default_factory=deque)
    """So many bytes into the next answers with content, the connection ends."""
    ignores_ranges: bool = False
    """Whether it sends whole files whatever is asked for."""
    commit: str = COMMIT
    """What it says that the repository's commit is."""
    page: bytes | None = None
    """What it answers instead of telling what a repository holds."""
    num_asked: int = 0
    """Requests for content."""
    sent_bytes: int = 0
    """Of content."""
    tokens_at_cdn: list[str | None] = field(default_factory=list)
    """What came along to where content lies."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serves while in the block."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        if path.startswith("/cdn/"):
            hub.tokens_at_cdn.append(self.headers.get("Authorization"))
            self._send(hub.files[path.removeprefix("/cdn/")])
            return
        if hub.statuses:
            status, retry_after = hub.statuses.popleft()
            self._refuse(status, retry_after)
        elif hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._refuse(401, None)
        elif path == "/api/models/org/tiny-GGUF/revision/main":
            self._tell()
        elif path.startswith(f"/org/tiny-GGUF/resolve/{COMMIT}/") and path.split("/", 5)[5] in hub.files:
            # As the real one does: what is large lies on another server.
            self.send_response(302)
            self.send_header(
                "Location", f"{hub.url.replace('127.0.0.1', 'localhost')}/cdn/{path.split('/', 5)[5]}"
            )
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._refuse(404, None)

    def _tell(self) -> None:
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "lfs": {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134},
            }
            for name, data in self.hub.files.items()
        ]
        siblings.append({"rfilename": "README.md", "size": 12})
        answer = json.dumps({"id": "org/tiny-GGUF", "sha": self.hub.commit, "siblings": siblings}).encode()
        if self.hub.page is not None:
            answer = self.hub.page
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _send(self, data: bytes) -> None:
        hub = self.hub
        hub.num_asked += 1
        start, stop = 0, len(data)
        asked = self.headers.get("Range")
        if asked and not hub.ignores_ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = int(first), int(last) + 1
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if hub.breaks_after:
            stop = min(stop, start + hub.breaks_after.popleft())
            self.close_connection = True
        hub.sent_bytes += stop - start
        self.wfile.write(data[start:stop])

    def _refuse(self, status: int, retry_after: str | None) -> None:
        self.send_response(status)
        if retry_after is not None:
            self.send_header("Retry-After", retry_after)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""
