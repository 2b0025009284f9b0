"""A conversation to one prompt, by the Jinja template that the model carries."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import jinja2
import structlog
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from jinja2.parser import Parser

    from mesh.tokenizer import Tokenizer

log = structlog.get_logger()

MAX_PROMPT_CHARS: Final = 16 * 1024 * 1024

CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN: Final = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class ChatTemplate:
    """One model's way to write a conversation down.

    Templates see what Hugging Face's do: `messages`, `add_generation_prompt`, `bos_token`, `eos_token`,
    `raise_exception`, `strftime_now`, a `tojson` that leaves non-ASCII and HTML characters alone, loop
    controls and `{% generation %}` blocks. They come from a file, so they run in Jinja's sandbox and
    their output is bounded.

    Args:
        source: Jinja source.
        bos: Text of the token that begins a sequence.
        eos: Text of the token that ends a sequence.
        now: The local time, for templates that date their system prompt.
        max_chars: Bound of the prompt.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str,
        eos: str,
        now: Callable[[], datetime],
        max_chars: int = MAX_PROMPT_CHARS,
    ) -> None:
        self._source = source
        self._max_chars = max_chars
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlocks],
        )
        self._environment.filters["tojson"] = _to_json
        self._environment.globals.update(
            bos_token=bos,
            eos_token=eos,
            raise_exception=_raise_exception,
            strftime_now=lambda pattern: now().strftime(pattern),
        )
        self._template: jinja2.Template | None = None

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt, up to where the assistant's answer begins.

        Args:
            messages: Each with at least `role` and `content`, both text.
            variables: More for the template to see, such as `enable_thinking`.

        Raises:
            InvalidRequest: If the template cannot be parsed, fails, refuses the conversation, or writes
                more than the bound.
        """
        values = {**(variables or {}), "messages": messages, "add_generation_prompt": True}
        parts: list[str] = []
        num_chars = 0
        try:
            if self._template is None:
                self._template = self._environment.from_string(self._source)
            for part in self._template.generate(values):
                num_chars += len(part)
                if num_chars > self._max_chars:
                    break
                parts.append(part)
        except Exception as error:  # a template is a program: anything can come out of it
            reason = str(error) or type(error).__name__
            raise InvalidRequest(
                f"the model's chat template does not accept this conversation: {reason}", param="messages"
            ) from error
        if num_chars > self._max_chars:
            raise InvalidRequest(
                f"the model's chat template wrote more than {self._max_chars} characters: send less",
                param="messages",
            )
        return "".join(parts)


def chat_template_of(tokenizer: Tokenizer, now: Callable[[], datetime]) -> ChatTemplate:
    """The template that the model carries, or a plain one in its place.

    Without one, a model whose vocabulary has ChatML's two special tokens gets ChatML; any other gets
    lines of `role: text` and `assistant:` to go on from.
    """
    source = tokenizer.chat_template
    if source is None:
        has_chatml = all(tokenizer.special_token(text) is not None for text in ("<|im_start|>", "<|im_end|>"))
        source = CHATML if has_chatml else PLAIN
        log.info("chat_template_missing", using="chatml" if has_chatml else "plain")
    return ChatTemplate(source, bos=tokenizer.bos, eos=tokenizer.eos, now=now)


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Token ids of a rendered prompt, with one BOS where the template and the model both add one."""
    if tokenizer.adds_bos:
        prompt = prompt.removeprefix(tokenizer.bos)
    return tokenizer.encode(prompt, add_special=True, parse_special=True)


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
