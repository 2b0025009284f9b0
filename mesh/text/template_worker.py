"""Sandboxed child process that renders chat templates with Jinja.

Reads a JSON object a line and answers each with one. The kernel bounds it: memory by a limit, time by an
alarm without a handler, which ends the process whatever a template does. It has no environment, can write no
file, and holds no secret.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import IO, TYPE_CHECKING, Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jinja2.parser import Parser


# The sandbox confines a template to its variables. It bounds neither time nor memory: the limits of this
# process do.
class TemplateRenderer:
    """A compiled chat template.

    Templates get what Hugging Face's do: `messages`, `add_generation_prompt`, `bos_token`, `eos_token`,
    `raise_exception`, `strftime_now`, a `tojson` that leaves non-ASCII and HTML characters alone, loop
    controls and `{% generation %}` blocks.

    Args:
        source: Jinja source.
        bos: Text of the token that begins a sequence.
        eos: Text of the token that ends a sequence.

    Raises:
        jinja2.TemplateError: If the source is invalid.
    """

    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlocks],
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(bos_token=bos, eos_token=eos, raise_exception=_raise_exception)
        self._template = environment.from_string(source)

    def render(self, variables: Mapping[str, Any], now: datetime, max_chars: int) -> str | None:
        """The prompt; None if it is longer than `max_chars`.

        Args:
            variables: `messages`, and others; `add_generation_prompt` is true unless they set it.
            now: The local time, for templates that date their system prompt.
            max_chars: Most characters of the prompt.

        Raises:
            Exception: Any exception, since a template is a program.
        """
        values = {"add_generation_prompt": True, **variables, "strftime_now": now.strftime}
        parts: list[str] = []
        num_chars = 0
        for part in self._template.generate(values):
            num_chars += len(part)
            if num_chars > max_chars:
                return None
            parts.append(part)
        return "".join(parts)


class _GenerationBlocks(Extension):
    """Treats `{% generation %}…{% endgeneration %}`, a mark for training, as its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own shape

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


# Beyond the interpreter's own memory: far more than any prompt needs.
_MEMORY_BYTES: Final = 1024 * 2**20
_NUM_FILES: Final = 32
_MAX_REASON_CHARS: Final = 300


def serve(requests: IO[bytes], answers: IO[bytes], limit_s: float) -> None:
    """Answer requests until there are no more.

    Args:
        requests: Lines of JSON: `source`, `bos`, `eos`, `variables`, `now`, `max_chars`.
        answers: Lines of JSON: `text`, which is null if it was too long, or `reason`.
        limit_s: Longest time for one request; a longer one ends the process.
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
        # Not every system has all of these limits.
        with suppress(ValueError, OSError):
            resource.setrlimit(which, (limit, limit))
    # Ctrl-C is handled by the parent, whose end closes our input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    _bound()
    serve(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[1]))
