"""The process that renders chat templates, which come with models and may be anything: `python -m` this.

It reads a JSON object a line and answers each with one. The kernel bounds it: memory by a limit, time by an
alarm that nothing here handles, so that it ends the process in the middle of whatever a template makes it do.
It has no environment, can write no file, and holds no secret.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import IO, Any, Final

from mesh.template_renderer import TemplateRenderer

# Beside what the interpreter takes: far more than any prompt needs.
_MEMORY_BYTES: Final = 1024 * 2**20
_NUM_FILES: Final = 32
_MAX_REASON_CHARS: Final = 300


def serve(requests: IO[bytes], answers: IO[bytes], limit_s: float) -> None:
    """Answer until there are no more requests.

    Args:
        requests: Lines of JSON: `source`, `bos`, `eos`, `variables`, `now`, `max_chars`.
        answers: Where lines of JSON go: `text`, which is null if it was too long, or `reason`.
        limit_s: How long one request may take; longer ends the process.
    """
    for line in requests:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            answer = {"text": _rendered(json.loads(line))}
        except Exception as error:  # noqa: BLE001 - a template is a program: anything can come out of it
            answer = {"reason": (str(error) or type(error).__name__)[:_MAX_REASON_CHARS]}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


def _rendered(asked: dict[str, Any]) -> str | None:
    renderer = _renderer(asked["source"], asked["bos"], asked["eos"])
    return renderer.render(asked["variables"], datetime.fromisoformat(asked["now"]), asked["max_chars"])


@lru_cache(maxsize=4)
def _renderer(source: str, bos: str, eos: str) -> TemplateRenderer:
    return TemplateRenderer(source, bos=bos, eos=eos)


def _bound() -> None:
    limits = {
        resource.RLIMIT_AS: _MEMORY_BYTES,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _NUM_FILES,
    }
    for which, limit in limits.items():
        # Not every system knows all of them.
        with suppress(ValueError, OSError):
            resource.setrlimit(which, (limit, limit))
    # Ctrl-C is for the parent, whose end is the end of our input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    _bound()
    serve(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[1]))
