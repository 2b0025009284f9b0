"""Rendering of chat templates with Jinja's sandbox, as Hugging Face's tokenizers do."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any, Final

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime

    from jinja2.compiler import Frame
    from jinja2.parser import Parser
    from jinja2.runtime import Context

    from mesh.text.client_text import Marking

_MAX_REASON_CHARS: Final = 300


class TemplateRefusal(Exception):
    """A template's own error: of this conversation, in this form.

    Args:
        reason: The template's message.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


# The sandbox confines a template to its variables. It bounds neither time nor memory: the process does.
class TemplateRenderer:
    """A compiled chat template.

    Templates get what Hugging Face's do: `messages`, `add_generation_prompt`, `bos_token`, `eos_token`,
    `raise_exception`, `strftime_now`, a `tojson` that leaves non-ASCII and HTML characters alone, loop
    controls and `{% generation %}` blocks.

    Args:
        source: Jinja source.
        bos: Text of the token that begins a sequence.
        eos: Text of the token that ends a sequence.
        marking: Tells texts of clients from the template's own.

    Raises:
        TemplateRefusal: If the source is invalid.
    """

    def __init__(self, source: str, *, bos: str, eos: str, marking: Marking) -> None:
        self._marking = marking
        environment = _Environment(marking)
        environment.globals.update(bos_token=bos, eos_token=eos, raise_exception=_raise_exception)
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # noqa: BLE001 - a source may also be too deep for the parser
            raise self._refusal(error) from None

    def render(self, variables: Mapping[str, Any], now: datetime, max_chars: int) -> str | None:
        """The prompt, with the stand-ins of clients' texts; None if it is longer than `max_chars`.

        Args:
            variables: `messages`, and others; `add_generation_prompt` is true unless they set it.
            now: The local time, for templates that date their system prompt.
            max_chars: Most characters of the prompt.

        Raises:
            TemplateRefusal: If the template fails, as it may in any way: it is a program.
        """
        try:
            return self._rendered(variables, now, max_chars)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a template is a program: anything can come out of it
            raise self._refusal(error) from None

    def _refusal(self, error: Exception) -> TemplateRefusal:
        reason = self._marking.unmarked(str(error) or type(error).__name__)
        return TemplateRefusal(reason[:_MAX_REASON_CHARS])

    def _rendered(self, variables: Mapping[str, Any], now: datetime, max_chars: int) -> str | None:
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


class _JoiningGenerator(CodeGenerator):
    """Joins by the environment where a template has `~`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's own name
        self.write("environment.concat(map(str, (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write(")))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        """Whether a text is in another one, by the originals of both."""
        (first, *others) = node.ops
        if others or first.op not in {"in", "notin"}:
            super().visit_Compare(node, frame)
            return
        self.write("(" if first.op == "in" else "(not ")
        self.write("environment.has(")
        self.visit(node.expr, frame)
        self.write(", ")
        self.visit(first.expr, frame)
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """Sandbox in which what is computed from texts of clients stays theirs.

    Args:
        marking: Tells texts of clients from the template's own.
    """

    intercepted_binops = frozenset({"+", "*", "%"})
    code_generator_class = _JoiningGenerator

    def __init__(self, marking: Marking) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlocks],
        )
        self._marking = marking
        self.filters["tojson"] = functools.partial(_to_json, marking)
        self.filters["safe"] = _mark_safe
        self.filters = {name: self._recognising(made) for name, made in self.filters.items()}
        self.filters |= {name: self._of_original(self.filters[name]) for name in ("int", "float")}
        self.tests["in"] = self.has

    def concat(self, parts: Iterable[str]) -> str:
        """Texts one behind the other: of macros, blocks that are set, and `~`."""
        joined: str = self._marking.recognised("".join(parts))
        return joined

    def has(self, value: Any, container: Any) -> bool:
        """Whether a container has a value; a text of the template's knows nothing of stand-ins."""
        if type(container) is str and isinstance(value, str):
            value = self._marking.unmarked(value)
        return value in container

    def call(self, context: Context, made: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call, as of `', '.join`."""
        return self._marking.recognised(super().call(context, made, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator, as `%` between a text and its values."""
        return self._marking.recognised(super().call_binop(context, operator, left, right))

    def _of_original(self, made: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(made)
        def convert(value: Any, *args: Any, **kwargs: Any) -> Any:
            return made(self._marking.original_of(value), *args, **kwargs)

        return convert

    def _recognising(self, made: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(made)
        def recognise(*args: Any, **kwargs: Any) -> Any:
            return self._marking.recognised(made(*args, **kwargs))

        return recognise


def _mark_safe(value: Any) -> Markup:
    # Jinja's own would escape a client's text, which can tell its HTML.
    return Markup(str.__str__(value) if isinstance(value, str) else value)  # noqa: S704 - of no page


def _to_json(  # noqa: PLR0917
    marking: Marking,
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    # Escapes would hide the stand-ins: the whole is then a client's text.
    text = json.dumps(
        marking.original_of(value) if ensure_ascii else value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return marking.marked(text) if ensure_ascii else text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
