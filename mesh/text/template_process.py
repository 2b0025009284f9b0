"""Client of the sandboxed process that renders chat templates."""

from __future__ import annotations

import atexit
import json
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import structlog

from spanmesh_proto.errors import InvalidRequest, Overloaded

if TYPE_CHECKING:
    from collections.abc import Mapping

log = structlog.get_logger()

LIMIT_S: Final = 5.0
_RETRY_AFTER_S: Final = 2


class TemplateRefusal(Exception):
    """A template's own error: of this conversation, in this form.

    Args:
        reason: The template's message.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Rendering:
    """A request to render.

    Attributes:
        source: Jinja source.
        bos: Text of the token that begins a sequence.
        eos: Text of the token that ends a sequence.
        variables: `messages` and others, JSON-serialisable.
        now: The local time, in ISO 8601.
        max_chars: Most characters of the prompt.
    """

    source: str
    bos: str
    eos: str
    variables: Mapping[str, Any]
    now: str
    max_chars: int


class TemplateProcess:
    """Process for templates, started at the first request and again after it ended. Thread-safe.

    Args:
        limit_s: Longest time for one template, and longest wait for others, in seconds.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, asked: Rendering) -> str | None:
        """The prompt; None if it is longer than the bound. Blocks.

        Raises:
            TemplateRefusal: If the template fails.
            InvalidRequest: If it takes too long, or ends its process.
            Overloaded: If others took too long.
        """
        line = json.dumps(vars(asked)).encode() + b"\n"
        if not self._lock.acquire(timeout=self._limit_s):
            raise Overloaded(
                "the model's chat template is busy with other conversations: try again in a moment",
                retry_after_s=_RETRY_AFTER_S,
            )
        try:
            answer = self._ask(line)
        finally:
            self._lock.release()
        if "reason" in answer:
            raise TemplateRefusal(answer["reason"])
        text: str | None = answer["text"]
        return text

    def close(self) -> None:
        """End the process, if it runs."""
        with self._lock:
            self._end()

    def _ask(self, line: bytes) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = _start(self._limit_s)
        assert self._process.stdin is not None  # noqa: S101 - both are pipes
        assert self._process.stdout is not None  # noqa: S101
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer.endswith(b"\n"):
            raise InvalidRequest(self._crash_message(), param="messages")
        found: dict[str, Any] = json.loads(answer)
        return found

    def _crash_message(self) -> str:
        assert self._process is not None  # noqa: S101 - somebody has just asked it
        code = self._process.wait()
        log.warning("chat_template_ended_its_process", exit_code=code, limit_s=self._limit_s)
        if code == -signal.SIGALRM:
            return f"the model's chat template ran for more than {self._limit_s:g} s: send fewer messages"
        return f"the model's chat template ended its process (code {code}): send fewer messages"

    def _end(self) -> None:
        if self._process is not None:
            # Closing the pipe writes unread data once more.
            with suppress(BrokenPipeError), self._process:
                self._process.kill()
            self._process = None


@cache
def shared_template_process() -> TemplateProcess:
    """The process for all templates; ends with this one."""
    process = TemplateProcess()
    atexit.register(process.close)
    return process


def _start(limit_s: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # Isolated, and without our environment, which may hold secrets.
        [sys.executable, "-I", "-m", "mesh.text.template_worker", f"{limit_s:g}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
    )
