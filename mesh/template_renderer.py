"""A conversation written down by a Jinja template, in Jinja's sandbox. Pure.

The sandbox bars a template from everything but its variables. It bars it neither from running for ever nor
from filling memory: that is `template_child`'s part.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from jinja2.parser import Parser


class TemplateRenderer:
    """One model's way to write a conversation down.

    Templates see what Hugging Face's do: `messages`, `add_generation_prompt`, `bos_token`, `eos_token`,
    `raise_exception`, `strftime_now`, a `tojson` that leaves non-ASCII and HTML characters alone, loop
    controls and `{% generation %}` blocks.

    Args:
        source: Jinja source.
        bos: Text of the token that begins a sequence.
        eos: Text of the token that ends a sequence.

    Raises:
        jinja2.TemplateError: If the source is no template.
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
            variables: `messages`, and more for the template to see; `add_generation_prompt` is true unless
                they say otherwise.
            now: The local time, for templates that date their system prompt.
            max_chars: Bound of the prompt.

        Raises:
            Exception: A template is a program: anything can come out of it.
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
    """Reads `{% generation %}…{% endgeneration %}`, a mark for training, as its body."""

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
