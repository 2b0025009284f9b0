"""Chat prompt: a conversation as prompt tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mesh.api.structured_output import ToolUse, call_grammar
from mesh.text.chat_template import Ending, encode_prompt
from mesh.text.output_parser import OutputFormat
from mesh.text.reasoning_parser import end_of_reasoning
from spanmesh_proto.errors import ContextLengthExceeded, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.api.backend import Backend
    from mesh.api.structured_output import AlternativeSchema, CallGrammar
    from mesh.text.message_parts import CallFormat
    from mesh.text.tokenizer import Tokenizer


# Below this number of characters per position tokenizing is cheap, and most texts have fewer.
_SUSPICIOUS: Final = 8


def refuse_too_long_text(
    tokenizer: Tokenizer, num_chars: int, context_length: int, *, param: str, what: str
) -> None:
    """Check that a text could fit the context, by the longest token of the vocabulary.

    Texts that pass are counted exactly later; no text that fits is refused.

    Args:
        tokenizer: Tokenizer of the served model.
        num_chars: Length of the text.
        context_length: Positions of a session.
        param: The field that the text came from.
        what: Name of the text, for the error.

    Raises:
        ContextLengthExceeded: With the numbers.
    """
    if num_chars <= _SUSPICIOUS * context_length:
        return
    least_tokens = -(-num_chars // tokenizer.longest_piece_bytes)
    if least_tokens >= context_length:
        raise ContextLengthExceeded(
            f"{what} has {num_chars} characters, which are {least_tokens} tokens or more, and this model's "
            f"context holds {context_length}: send less, or serve it with a larger --ctx-size",
            param=param,
        )


@dataclass(frozen=True)
class Conversation:
    """A conversation as endpoints read it from their requests.

    Attributes:
        messages: Messages in the form of chat templates.
        tools: Functions that the answer may call; None for none.
        variables: Further variables of the template.
        ending: Where the prompt ends.
        splits_reasoning: Whether reasoning is split from content; if not, its marks stay there with it.
        param: The field that the messages came from, for errors.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: ToolUse | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    ending: Ending = Ending.ANSWER
    splits_reasoning: bool = True
    param: str = "messages"


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation, and how its answer is read.

    Attributes:
        tokens: Token ids.
        output_format: Format of the answer.
        tools: Functions that it may call; None for none.
        call_format: Format of calls.
        thought_end: End mark of the reasoning that the prompt begins, if it does.
    """

    tokens: list[int]
    output_format: OutputFormat
    tools: ToolUse | None
    call_format: CallFormat
    thought_end: str | None

    def call_grammar(self, alternative: AlternativeSchema | None = None) -> CallGrammar:
        """Grammar of answers that call a function, or that follow an alternative schema.

        Raises:
            InvalidRequest: If a schema cannot be expressed as a grammar.
        """
        return call_grammar(
            ToolUse(()) if self.tools is None else self.tools,
            self.call_format,
            has_one_call=self.output_format.has_one_call,
            thought_end=self.thought_end,
            alternative=alternative,
        )


def ending_of(
    messages: Sequence[Mapping[str, Any]],
    *,
    adds_generation_prompt: bool | None,
    continues_final_message: bool | None,
) -> Ending:
    """Ending of the prompt, by vLLM's two fields.

    Raises:
        InvalidRequest: If they contradict each other, or there is no last message to continue.
    """
    if not continues_final_message:
        return Ending.MESSAGES if adds_generation_prompt is False else Ending.ANSWER
    if adds_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both true: an answer goes on with the last"
            " message or begins a new one, send one of them",
            param="continue_final_message",
        )
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise InvalidRequest(
            "continue_final_message is true, but the last message is not a text of the assistant: put one"
            " there, or leave the field out",
            param="continue_final_message",
        )
    return Ending.CONTINUED


def thinking_variables(effort: str | None) -> dict[str, Any]:
    """Template variables that set the amount of reasoning."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def render_prompt(backend: Backend, conversation: Conversation) -> ChatPrompt:
    """Render a conversation and tokenize it. Blocks.

    Args:
        backend: The served model.
        conversation: The conversation.

    Raises:
        InvalidRequest: If the template rejects it.
        ContextLengthExceeded: If it is far too long.
        Overloaded: If the template is busy with other conversations.
    """
    template, tools = backend.chat_template, conversation.tools
    try:
        rendered = template.render(
            conversation.messages,
            conversation.variables,
            tools=[] if tools is None else tools.for_template(),
            ending=conversation.ending,
        )
        # A template that takes one call a message could not show two in the next turn.
        has_one_call = tools is not None and (tools.has_one_call or template.has_one_call)
    except InvalidRequest as error:
        # The template reports `messages`, whichever field they came from.
        param = conversation.param if error.param == "messages" else error.param
        raise InvalidRequest(error.message, param=param) from None
    refuse_too_long_text(
        backend.tokenizer,
        len(rendered),
        backend.engine.context_length,
        param=conversation.param,
        what="the prompt",
    )
    thought_end = end_of_reasoning(rendered)
    output_format = OutputFormat(
        call_format=None if tools is None else template.call_format,
        names=frozenset() if tools is None else tools.names,
        has_one_call=has_one_call,
        splits_reasoning=conversation.splits_reasoning,
        is_in_reasoning=thought_end is not None,
        shows_think_marks=not conversation.splits_reasoning,
        parameters={} if tools is None else tools.parameters,
    )
    tokens = encode_prompt(backend.tokenizer, rendered)
    return ChatPrompt(tokens, output_format, tools, template.call_format, thought_end)
