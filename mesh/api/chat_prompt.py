"""Chat prompt: a conversation as prompt tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mesh.api.structured_output import ToolUse, call_grammar
from mesh.text.chat_template import Ending
from mesh.text.output_parser import OutputFormat
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.api.backend import Backend
    from mesh.api.structured_output import AlternativeSchema, CallGrammar
    from mesh.text.message_parts import CallFormat


@dataclass(frozen=True)
class Conversation:
    """A conversation as endpoints read it from their requests."""

    messages: Sequence[Mapping[str, Any]]
    """Messages in the form of chat templates."""
    tools: ToolUse | None = None
    """Functions that the answer may call; None for none."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    ending: Ending = Ending.ANSWER
    """Where the prompt ends."""
    splits_reasoning: bool = True
    """Whether reasoning is split from content; if not, its marks stay there with it."""
    param: str = "messages"
    """The field that the messages came from, for errors."""


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation, and how its answer is read."""

    tokens: list[int]
    """Token ids."""
    output_format: OutputFormat
    """Format of the answer."""
    tools: ToolUse | None
    """Functions that it may call; None for none."""
    call_format: CallFormat
    """Format of calls."""
    thought_end: str | None
    """End mark of the reasoning that the prompt begins, if it does."""

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


async def render_prompt(backend: Backend, conversation: Conversation, client: str | None) -> ChatPrompt:
    """Render a conversation and tokenize it.

    Args:
        backend: The served model.
        conversation: The conversation.
        client: Identity of the API key, or None; used for fairness.

    Raises:
        InvalidRequest: If the template rejects it, or it took too much time or memory.
        ContextLengthExceeded: If it is far too long.
        Overloaded: If too many texts wait.
    """
    tools = conversation.tools
    prompt = await backend.texts.prompt(
        conversation.messages,
        variables=conversation.variables,
        tools=[] if tools is None else tools.for_template(),
        ending=conversation.ending.name,
        now=backend.now(),
        most_tokens=backend.engine.context_length,
        param=conversation.param,
        client=client,
    )
    output_format = OutputFormat(
        call_format=None if tools is None else backend.call_format,
        names=frozenset() if tools is None else tools.names,
        # A template that takes one call a message could not show two in the next turn.
        has_one_call=tools is not None and (tools.has_one_call or prompt.has_one_call),
        splits_reasoning=conversation.splits_reasoning,
        is_in_reasoning=prompt.thought_end is not None,
        shows_think_marks=not conversation.splits_reasoning,
        parameters={} if tools is None else tools.parameters,
    )
    return ChatPrompt(prompt.tokens, output_format, tools, backend.call_format, prompt.thought_end)
