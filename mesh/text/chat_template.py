"""Chat template: messages as a prompt, rendered in a sandbox, with a note on tools where it has none."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import jinja2
import structlog
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension
from jinja2.sandbox import SandboxedEnvironment, modifies_known_mutable
from markupsafe import Markup

from mesh.text.answer_format import NOTE_FORMAT, AnswerFormat
from mesh.text.client_text import Marking
from mesh.text.conversation_repair import (
    EVERY,
    PROBED_TOOL,
    Repair,
    ThoughtForm,
    content_forms_of,
    hides_calls,
    needs_of,
    repaired,
    thought_form_of,
)
from mesh.text.format_probes import found_format
from mesh.text.known_formats import format_by_words
from mesh.text.message_parts import knows_tools
from mesh.text.reasoning_switches import switches_of
from mesh.text.written_calls import written_calls
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from datetime import datetime

    from jinja2.compiler import Frame
    from jinja2.parser import Parser
    from jinja2.runtime import Context

    from mesh.text.answer_format import CallFormat
    from mesh.text.conversation_repair import ContentForms, Needs
    from mesh.text.reasoning_switches import ReasoningSwitches
    from mesh.text.tokenizer import Tokenizer

_MAX_REASON_CHARS: Final = 300
# The format is that of Hermes Function Calling (Nous Research): models whose template supports no tools
# follow it better than any other, since it is JSON between tags.
_BEFORE: Final = (
    "These are functions that you can call, each with the JSON schema of its parameters:\n<tools>\n"
)
_AFTER: Final = (
    "\n</tools>\nTo call one, write nothing but its name and its arguments as JSON between these tags:\n"
    '<tool_call>\n{"name": "…", "arguments": {…}}\n</tool_call>\n'
    "You will be told the result between <tool_response> and </tool_response>."
)
_ASKED: Final[tuple[tuple[Mapping[str, Any], ...], ...]] = (
    ({"role": "user", "content": "Hello"},),
    ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}),
)
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
log = structlog.get_logger()


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
        self._environments = (_Environment(marking), _Environment(marking, undefined=_Nothing))
        for environment in self._environments:
            environment.globals.update(bos_token=bos, eos_token=eos, raise_exception=_raise_exception)
        try:
            self._template, self._lenient = (each.from_string(source) for each in self._environments)
        except Exception as error:  # noqa: BLE001 - a source may also be too deep for the parser
            raise self._refusal(error) from None

    def render(
        self, variables: Mapping[str, Any], now: datetime, max_chars: int, *, is_lenient: bool = False
    ) -> str | None:
        """The prompt, with the stand-ins of clients' texts; None if it is longer than `max_chars`.

        Args:
            variables: `messages`, and others; `add_generation_prompt` is true unless they set it.
            now: The local time, for templates that date their system prompt.
            max_chars: Most characters of the prompt.
            is_lenient: Whether what is not there is nothing, wherever it is used, as llama.cpp has it, and a
                number that is added to a text becomes one.

        Raises:
            TemplateRefusal: If the template fails, as it may in any way: it is a program.
        """
        try:
            return self._rendered(self._lenient if is_lenient else self._template, variables, now, max_chars)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a template is a program: anything can come out of it
            raise self._refusal(error) from None

    def _refusal(self, error: Exception) -> TemplateRefusal:
        reason = self._marking.unmarked(str(error) or type(error).__name__)
        return TemplateRefusal(reason[:_MAX_REASON_CHARS])

    def _rendered(
        self, template: jinja2.Template, variables: Mapping[str, Any], now: datetime, max_chars: int
    ) -> str | None:
        given = frozenset(_containers(variables))
        for environment in self._environments:
            environment.given = given
        values = {"add_generation_prompt": True, **variables, "strftime_now": now.strftime}
        parts: list[str] = []
        num_chars = 0
        for part in template.generate(values):
            num_chars += len(part)
            if num_chars > max_chars:
                return None
            parts.append(part)
        return "".join(parts)


class _Nothing(jinja2.ChainableUndefined):
    """What is not there: it has nothing, and adds nothing to a text."""

    def __add__(self, other: Any) -> Any:
        return other

    def __radd__(self, other: Any) -> Any:
        return other


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


class _Environment(SandboxedEnvironment):
    """Sandbox in which what is computed from texts of clients stays theirs.

    A template may change lists and objects that it has made itself, and none that it was given.

    Args:
        marking: Tells texts of clients from the template's own.
        undefined: What is not there.

    Attributes:
        given: Identities of the lists and objects that the template was given.
    """

    intercepted_binops = frozenset({"+", "*", "%"})
    code_generator_class = _JoiningGenerator

    def __init__(self, marking: Marking, undefined: type[jinja2.Undefined] = jinja2.Undefined) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=undefined,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlocks],
        )
        self._marking = marking
        self._is_lenient = undefined is _Nothing
        self.given: frozenset[int] = frozenset()
        self.filters["tojson"] = functools.partial(_to_json, marking)
        self.filters["safe"] = _mark_safe
        self.filters = {name: self._recognising(made) for name, made in self.filters.items()}
        self.filters |= {name: self._of_original(self.filters[name]) for name in ("int", "float")}
        self.tests["in"] = self.has

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute, as `append` of a list."""
        is_changing = modifies_known_mutable(obj, attr) and id(obj) in self.given
        # `dict.update` would change whatever it is called with.
        return not is_changing and not isinstance(obj, type) and super().is_safe_attribute(obj, attr, value)

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
        if self._is_lenient and operator == "+" and isinstance(left, str) and isinstance(right, int | float):
            # As a schema's default behind its description.
            right = _json_text(right)
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


class Ending(Enum):
    """Ending of a prompt."""

    ANSWER = auto()
    """Position where the assistant's answer begins."""
    MESSAGES = auto()
    """Behind the last message."""
    CONTINUED = auto()
    """Within the last message, behind its text."""


class ChatTemplate:
    """Chat template of one model; see `TemplateRenderer` for the features of templates.

    Templates come from a file, so they run in Jinja's sandbox, and in a process with bounds on time and
    memory: see `mesh.text.text_worker`.

    Args:
        source: Jinja source.
        bos: Text of the token that begins a sequence.
        eos: Text of the token that ends a sequence.
        now: Returns the local time, for templates that date their system prompt.
        ends: Names of further tokens that end answers.
        max_chars: Most characters of the prompt.
        marking: Tells texts of clients from the template's own; by default nothing is told apart.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str,
        eos: str,
        now: Callable[[], datetime],
        ends: Collection[str] = (),
        max_chars: int = MAX_PROMPT_CHARS,
        marking: Marking | None = None,
    ) -> None:
        self._source = source
        self._bos = bos
        self._eos = eos
        self._now = now
        self._ends = ends
        self._max_chars = max_chars
        self._marking = Marking(()) if marking is None else marking

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """Format of the model's answers, by what the template writes; see `found_format`."""
        found = found_format(self.probed, self._source, (self._eos, *self._ends))
        # Without tools in the prompt, calls are those of our own note.
        return found if knows_tools(self._source) else replace(found, calls=NOTE_FORMAT, is_found=False)

    @cached_property
    def needs(self) -> Needs:
        """Repairs of conversations that the template needs; see `needs_of`.

        Raises:
            InvalidRequest: If the template writes more than the bound.
        """
        return needs_of(self._tried, knows_tools=knows_tools(self._source))

    @cached_property
    def reasoning_switches(self) -> ReasoningSwitches:
        """Variables that set the amount of reasoning; see `switches_of`."""

        def render(variables: Mapping[str, Any]) -> str | None:
            prompts = [self.probed(messages, (), variables, adds_prompt=True) for messages in _ASKED]
            return None if prompts[0] is None else "".join(filter(None, prompts))

        return switches_of(render)

    @property
    def hidden_roles(self) -> frozenset[str]:
        """Roles of messages whose texts the template shows in no form; see `content_forms_of`."""
        return self._content_forms.hidden - (frozenset() if knows_tools(self._source) else {"tool"})

    @property
    def has_short_ids(self) -> bool:
        """Whether ids of calls are nine letters and digits for this template; see `needs`."""
        return Repair.SHORT_IDS in self.needs.with_tools

    @property
    def has_one_call(self) -> bool:
        """Whether a message holds at most one call for this template; see `needs`."""
        return Repair.SPLIT_CALLS in self.needs.with_tools

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        ending: Ending = Ending.ANSWER,
    ) -> str:
        """The prompt, up to where the assistant's answer begins or continues; it has `marking`'s stand-ins.

        Templates without support for tools get them, calls and results as text: see `with_tool_note`. Of
        shapes that a template does not take, the conversation is repaired; others stay as they are.

        Args:
            messages: Each with at least `role` and `content`, both text; the arguments of calls are values.
            variables: Further template variables, such as `enable_thinking`; JSON-serialisable.
            tools: Functions that the model may call, in the form of chat templates.
            ending: Ending of the prompt.

        Raises:
            InvalidRequest: If the template cannot be parsed, fails, rejects the conversation, or writes more
                than the bound.
        """
        if not knows_tools(self._source):
            messages, tools = with_tool_note(messages, tools), ()
        if ending is Ending.CONTINUED:
            mark = _unused_mark(messages)
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": last["content"] + mark}]
        values = {
            **(variables or {}),
            "add_generation_prompt": ending is Ending.ANSWER,
        }
        text = self._accepted(messages, tools, values)
        if ending is Ending.CONTINUED:
            place = self._marking.unmarked(text).rfind(mark)
            if place < 0:
                raise InvalidRequest(
                    "the model's chat template does not write the last message as it is: it cannot be"
                    " continued, leave continue_final_message out",
                    param="continue_final_message",
                )
            return text[:place]
        goes_on = ending is Ending.ANSWER and messages[-1]["role"] != "assistant"
        return text + self._left_out(text, values) if goes_on else text

    def _left_out(self, prompt: str, values: Mapping[str, Any]) -> str:
        """What begins an answer, where a template ends a turn and does not begin the next one.

        Some do so behind results with text beside their calls.
        """
        ends = tuple(filter(None, (self._eos, *self._ends)))
        if not prompt.rstrip().endswith(ends):
            return ""
        given = {**values, "messages": _ASKED[0], "tools": self._no_tools}
        try:
            before, whole = (
                self._rendered({**given, "add_generation_prompt": adds}, is_lenient=True)
                for adds in (False, True)
            )
        except (TemplateRefusal, InvalidRequest):
            return ""
        return whole.removeprefix(before) if whole.startswith(before) else ""

    def _accepted(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        values: Mapping[str, Any],
    ) -> str:
        """The prompt of the first form of a conversation that the template takes."""
        refusals = []
        forms = list(self._forms(messages, has_tools=bool(tools)))
        completed = _completed(tools)
        for is_lenient in (False, True):
            for offered in [tools] if completed == list(tools) else [tools, completed]:
                for form in forms:
                    given = {**values, "messages": form, "tools": offered or self._no_tools}
                    try:
                        return self._rendered(given, is_lenient=is_lenient)
                    except TemplateRefusal as refusal:
                        refusals.append(refusal.reason)
        raise InvalidRequest(
            f"the model's chat template does not accept this conversation: {refusals[0]}", param="messages"
        )

    def _forms(
        self, messages: Sequence[Mapping[str, Any]], *, has_tools: bool
    ) -> Iterator[Sequence[Mapping[str, Any]]]:
        """Forms of a conversation: with the repairs that the template needs, then with more."""
        if repaired(messages, ~Repair(0)) == list(messages):
            yield from _with_other_arguments(messages)
            return
        needs = self.needs.with_tools if has_tools else self.needs.without_tools
        most = EVERY | needs
        form: Sequence[Mapping[str, Any]] = repaired(messages, needs)
        yield from _with_other_arguments(form)
        # For shapes that nothing was found out about, and for templates that take no calls at all.
        seen = [form]
        written_out = with_tool_note(messages, ())
        for form in (
            repaired(messages, most & ~Repair.FOLD_SYSTEM),
            repaired(messages, most),
            repaired(written_out, needs),
            repaired(written_out, most & ~Repair.FOLD_SYSTEM),
            repaired(written_out, most),
        ):
            if form not in seen:
                seen.append(form)
                yield from _with_other_arguments(form)

    def _tried(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str | None:
        """The prompt of a conversation as it is; None if the template refuses it."""
        for form in _with_other_arguments(messages):
            try:
                return self._rendered(
                    {"messages": form, "tools": tools or self._no_tools, "add_generation_prompt": True}
                )
            except TemplateRefusal:
                continue
        return None

    def probed(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        adds_prompt: bool,
    ) -> str | None:
        """The prompt of a conversation as it is, to find out about the template; None if it is refused.

        Args:
            messages: Messages in the form of chat templates.
            tools: Functions that the model may call.
            variables: Further variables of the template.
            adds_prompt: Whether an answer begins behind the last message.
        """
        values = {**variables, "tools": tools or self._no_tools, "add_generation_prompt": adds_prompt}
        for is_lenient in (False, True):
            for form in _with_other_arguments(messages):
                try:
                    text = self._rendered({**values, "messages": form}, is_lenient=is_lenient)
                except (TemplateRefusal, InvalidRequest):
                    continue
                return self._marking.unmarked(text)
        return None

    @cached_property
    def _no_tools(self) -> Sequence[Mapping[str, Any]] | None:
        """`tools` of a conversation without any: none, or an empty list if the template lists them anyhow."""
        for nothing in (None, ()):
            values = {"messages": _ASKED[0], "tools": nothing, "add_generation_prompt": True}
            try:
                self._in_forms(values, frozenset(), ThoughtForm(), is_lenient=True)
            except (TemplateRefusal, InvalidRequest):
                continue
            return nothing
        return None

    @cached_property
    def _content_forms(self) -> ContentForms:
        def render(
            messages: Sequence[Mapping[str, Any]],
            tools: Sequence[Mapping[str, Any]],
            in_parts: frozenset[str],
        ) -> str | None:
            values = {"messages": messages, "tools": tools or self._no_tools, "add_generation_prompt": True}
            try:
                return self._in_forms(values, in_parts, ThoughtForm())
            except TemplateRefusal:
                return None

        return content_forms_of(render)

    @cached_property
    def _thought_form(self) -> ThoughtForm:
        return thought_form_of(self._in_thought_form)

    @cached_property
    def _silent_format(self) -> CallFormat | None:
        """Format of calls that the template tells of and leaves out; None if it writes calls."""
        told = format_by_words(self._source) if knows_tools(self._source) else None
        return told if told is not None and hides_calls(self._in_thought_form) else None

    def _in_thought_form(self, form: ThoughtForm, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """The prompt of a conversation with a tool; None if the template refuses it."""
        values = {"tools": (PROBED_TOOL,), "add_generation_prompt": True}
        for same in _with_other_arguments(messages):
            try:
                return self._in_forms({**values, "messages": same}, self._content_forms.in_parts, form)
            except TemplateRefusal:
                continue
        return None

    def _rendered(self, values: Mapping[str, Any], *, is_lenient: bool = False) -> str:
        return self._in_forms(
            values,
            self._content_forms.in_parts,
            self._thought_form,
            silent=self._silent_format,
            is_lenient=is_lenient,
        )

    def _in_forms(
        self,
        values: Mapping[str, Any],
        in_parts: frozenset[str],
        thoughts: ThoughtForm,
        *,
        silent: CallFormat | None = None,
        is_lenient: bool = False,
    ) -> str:
        """The prompt of a conversation in certain forms.

        Args:
            values: Variables of the template.
            in_parts: Roles whose messages have their texts as parts.
            thoughts: Form of reasoning.
            silent: Format in which calls become text; None for calls as such.
            is_lenient: See `TemplateRenderer.render`.
        """
        messages = [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if message["role"] in in_parts
            else message
            for message in values["messages"]
        ]
        values = {**values, "messages": list(map(thoughts.apply, messages))}
        marked = self._marking.marked_all(values)
        # Roles are names of ours: a template may make marks of them.
        marked["messages"] = [
            {**theirs, "role": message["role"]}
            for theirs, message in zip(marked["messages"], values["messages"], strict=True)
        ]
        if silent is not None:
            marked["messages"] = [self._with_text_of_calls(each, silent) for each in marked["messages"]]
        text = self._renderer.render(marked, self._now(), self._max_chars, is_lenient=is_lenient)
        if text is None:
            raise InvalidRequest(
                f"the model's chat template wrote more than {self._max_chars} characters: send less",
                param="messages",
            )
        return text

    def _with_text_of_calls(self, message: Mapping[str, Any], calls: CallFormat) -> Mapping[str, Any]:
        """A message with its calls as text, whose marks are those of the template."""
        made = message.get("tool_calls")
        if not made:
            return message
        text = self._marking.recognised(written_calls(calls, made))
        content = message["content"] or ""
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        if isinstance(content, list):
            return {**rest, "content": [*content, {"type": "text", "text": text}]}
        return {**rest, "content": self._marking.recognised(f"{content}{text}")}

    @cached_property
    def _renderer(self) -> TemplateRenderer:
        return TemplateRenderer(self._source, bos=self._bos, eos=self._eos, marking=self._marking)


def _completed(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Functions with a description and properties, if empty ones, which some templates take for granted."""
    found = []
    for tool in tools:
        function = {"name": tool["function"]["name"], "description": "", **tool["function"]}
        parameters = {"type": "object", "properties": {}, **function.get("parameters", {})}
        found.append({**tool, "function": {**function, "parameters": parameters}})
    return found


def _containers(value: Any) -> Iterator[int]:
    """Identities of a value's lists and objects, at all depths."""
    if isinstance(value, Mapping | list | tuple):
        yield id(value)
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _containers(each)


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
        # What filters such as `map` return.
        default=_as_list,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return marking.marked(text) if ensure_ascii else text


def _as_list(value: Any) -> list[Any]:
    if not isinstance(value, Iterator):
        raise TypeError(f"{type(value).__name__} is no JSON")
    return list(value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def with_tool_note(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A conversation whose tools, calls and results are written out as text.

    Results of one turn become one message of the user, as templates want alternating turns.

    Args:
        messages: Messages in the form of chat templates.
        tools: Functions in that form; if empty, only calls and results are written out.
    """
    found: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if was_result:
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text})
        else:
            found.append(_written_out(message))
        was_result = is_result
    return _noted(found, tools) if tools else found


def _noted(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    note = f"{_BEFORE}{lines}{_AFTER}"
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return [{**first, "content": f"{first['content']}\n\n{note}".lstrip()}, *messages[1:]]
    return [{"role": "system", "content": note}, *messages]


def _written_out(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    texts = [message["content"]] if message["content"] else []
    texts.append(written_calls(NOTE_FORMAT, calls))
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(texts)}


def template_source_of(tokenizer: Tokenizer) -> str:
    """Jinja source of the model's file, or a default.

    Without one, a model whose vocabulary has ChatML's two special tokens gets ChatML; any other gets lines of
    `role: text`, with `assistant:` last.
    """
    source = tokenizer.chat_template
    if source is None:
        has_chatml = all(tokenizer.special_token(text) is not None for text in ("<|im_start|>", "<|im_end|>"))
        source = CHATML if has_chatml else PLAIN
        log.info("chat_template_missing", using="chatml" if has_chatml else "plain")
    return source


def arguments_as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """The conversation with the arguments of its calls as JSON texts; None if there are none."""
    if not any(message.get("tool_calls") for message in messages):
        return None
    return _with_arguments(messages, _json_text)


def arguments_as_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the arguments of its calls as objects, with one member if they are none."""
    return _with_arguments(messages, lambda value: value if isinstance(value, dict) else {"arguments": value})


def _with_arguments(
    messages: Sequence[Mapping[str, Any]], convert: Callable[[Any], Any]
) -> list[dict[str, Any]]:
    found = []
    for message in messages:
        calls = [
            {**call, "function": {**function, "arguments": convert(function["arguments"])}}
            for call in message.get("tool_calls") or ()
            for function in (call["function"],)
        ]
        found.append({**message, "tool_calls": calls} if calls else dict(message))
    return found


def _with_other_arguments(
    messages: Sequence[Mapping[str, Any]],
) -> Iterator[Sequence[Mapping[str, Any]]]:
    """A conversation, and the same with arguments of calls in other forms, if there are any.

    Some templates print them as they are, so as text. Others write each by its name, which those of a call
    that was cut do not have.
    """
    yield messages
    in_text = arguments_as_text(messages)
    if in_text is not None:
        yield in_text
        in_objects = arguments_as_objects(messages)
        if in_objects != list(messages):
            yield in_objects


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _unused_mark(messages: Sequence[Mapping[str, Any]]) -> str:
    """A text that does not occur in the conversation."""
    text = json.dumps(messages)
    number = 0
    while (mark := f"[the-text-ends-here-{number}]") in text:
        number += 1
    return mark
