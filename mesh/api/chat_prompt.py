"""Prompt of a chat: its conversation rendered and tokenized, and how the answer is read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from mesh.api.call_grammar import call_grammar, grammar_in_format
from mesh.api.picture_parts import PicturedText
from mesh.api.pictures import ShownConversation, shown
from mesh.api.structured_output import CallGrammar, ToolUse, tool_use_of
from mesh.structured_output.free_text import Spelling, Thoughts
from mesh.text.answer_format import DEFAULT_REASONING
from mesh.text.chat_template import Ending
from mesh.text.output_parser import OutputFormat
from mesh.text.reasoning_switches import ReasoningWish
from spanmesh_proto.errors import InvalidRequest
from spanmesh_proto.row_ids import FIRST_ROW_ID, has_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.api.backend import Backend
    from mesh.api.message_bodies import ConversationBody
    from mesh.api.structured_output import AlternativeSchema
    from mesh.engine import RowInput
    from mesh.text.answer_format import AnswerFormat
    from mesh.text.tokenizer import Tokenizer

# A client puts a line about itself into its instructions, another one with each request; routers pass it on.
_BILLING: Final = "x-anthropic-billing-header:"
_BILLING_LINES: Final = re.compile(rf"^{_BILLING}[^\n]*(?:\n+|\Z)", re.MULTILINE)

NO_TOKEN: Final = -1
"""Told in place of the id of a row of a picture."""


@dataclass(frozen=True)
class Conversation:
    """A conversation as endpoints read it from their requests."""

    messages: Sequence[Mapping[str, Any]]
    """Messages in the form of chat templates."""
    tools: ToolUse | None = None
    """Functions that the answer may call; None for none."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    reasoning: ReasoningWish = field(default_factory=ReasoningWish)
    """Wanted amount of reasoning."""
    effort_param: str | None = None
    """The field with the amount of reasoning, if there is one."""
    budget_param: str | None = None
    """The field with the most tokens of reasoning, if the template must know them."""
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
    """Ids of tokens, and of rows of pictures."""
    output_format: OutputFormat
    """Format of the answer."""
    tools: ToolUse | None
    """Functions that it may call; None for none."""
    answer_format: AnswerFormat
    """Format of the model's answers."""
    thought_end: str | None
    """End mark of the reasoning that the prompt begins, if it does."""
    may_think: bool
    """Whether the answer may begin with reasoning."""
    tokenizer: Tokenizer
    """Vocabulary of the model."""
    warnings: tuple[str, ...] = ()
    """What of the request has no effect."""
    beginning: str = ""
    """Content that the answer continues."""
    opening: Sequence[Mapping[str, Any]] = ()
    """Messages up to the first of the user, which further turns of the chat share."""
    inputs: tuple[RowInput, ...] = ()
    """Rows of pictures in it, which have ids among `tokens`."""

    @property
    def thoughts(self) -> Thoughts:
        """Reasoning ahead of the answer: free, as far as the model's template knows any."""
        others = self.answer_format.header_marks
        if self.thought_end is not None:
            return Thoughts((("", self.thought_end),), is_begun=True, others=others)
        known = self.answer_format.reasoning
        if not self.may_think or known == DEFAULT_REASONING:
            return Thoughts()
        return Thoughts(
            tuple((each.begin, each.end) for each in known if each.begin and each.end), others=others
        )

    @property
    def spelling(self) -> Spelling:
        """Control tokens, which marks of the format may be."""
        tokens = self.tokenizer.control_tokens(self.answer_format.texts)
        return Spelling(tuple(tokens.items()), self.tokenizer.end_tokens)

    def held_to(self, gbnf: str, param: str, client: str | None) -> CallGrammar:
        """Grammar of answers whose content matches a grammar.

        Args:
            gbnf: The grammar.
            param: The request's field with it, for errors.
            client: Identity of the API key, or None.

        Raises:
            InvalidRequest: If the whole is too large for a grammar.
        """
        return CallGrammar(
            grammar_in_format(
                gbnf,
                self.answer_format,
                thoughts=self.thoughts,
                spelling=self.spelling,
                param=param,
                client=client,
                beginning=self.beginning,
            )
        )

    def call_grammar(self, tools: ToolUse, alternative: AlternativeSchema | None) -> CallGrammar:
        """Grammar of answers that call a function, or that follow an alternative schema.

        Raises:
            InvalidRequest: If a schema cannot be expressed as a grammar.
        """
        return call_grammar(
            tools,
            self.answer_format,
            has_one_call=self.output_format.has_one_call,
            thoughts=self.thoughts,
            spelling=self.spelling,
            alternative=alternative,
        )


def conversation_of(body: ConversationBody) -> Conversation:
    """The conversation of a chat request, checked for contradictions.

    Raises:
        InvalidRequest: If fields contradict each other.
    """
    messages = [message.for_template(f"messages[{index}]") for index, message in enumerate(body.messages)]
    continued = [index for index, message in enumerate(body.messages) if message.is_continued]
    if continued and (continued[0] < len(messages) - 1 or body.messages[-1].role != "assistant"):
        where = f"messages[{continued[0]}]"
        raise InvalidRequest(
            f"{where} is to be continued, and is not the assistant's last message: leave prefix or partial"
            " out",
            param=where,
        )
    return Conversation(
        messages=messages,
        tools=tool_use_of(
            body.offered,
            body.choice,
            is_parallel=False if body.has_functions else body.parallel_tool_calls,
            name_param="functions[{}].name" if body.has_functions else "tools[{}].function.name",
        ),
        variables=body.chat_template_kwargs or {},
        reasoning=body.reasoning_wish,
        effort_param=body.effort_field,
        budget_param=body.budget_field,
        ending=ending_of(
            messages,
            adds_generation_prompt=body.add_generation_prompt,
            continues_final_message=body.continue_final_message or bool(continued),
        ),
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


def without_changing_lines(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation without lines of instructions that are others with each request.

    With them no prefix of a prompt would ever be in a cache. Instructions that hold nothing else are left
    out.
    """
    found = []
    for message in messages:
        content = message.get("content")
        if message["role"] == "system" and isinstance(content, str) and _BILLING in content:
            content = _BILLING_LINES.sub("", content)
            if not content.strip():
                continue
            message = {**message, "content": content}  # noqa: PLW2901 - the same without the line
        found.append(message)
    return found


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
    messages = without_changing_lines(conversation.messages)
    given = ShownConversation(messages, messages)
    if any(isinstance(message.get("content"), PicturedText) for message in messages):
        given = await shown(
            messages,
            backend.pictures,
            param=conversation.param,
            client=client,
            random_bits=backend.api.random_bits,
        )
    prompt = await backend.texts.prompt(
        given.messages,
        variables=conversation.variables,
        reasoning=conversation.reasoning,
        tools=[] if tools is None else tools.for_template(),
        ending=conversation.ending.name,
        now=backend.now(),
        most_tokens=backend.engine.context_length,
        param=conversation.param,
        client=client,
        gaps=tuple(given.layouts),
    )
    if conversation.budget_param is not None and not prompt.knows_budget:
        raise InvalidRequest(
            f"{conversation.budget_param}: this model's chat template has no setting for it: leave it out"
            + (", or send reasoning_effort" if prompt.knows_reasoning else ""),
            param=conversation.budget_param,
        )
    told = (await backend.texts.answer_format(backend.now(), client=client)).format
    output_format = OutputFormat(
        call_format=None if tools is None else told.calls,
        reasoning=told.reasoning,
        content=told.content,
        headers=told.headers,
        end=told.end,
        # A prompt that ends otherwise has no beginning of a call.
        primer=told.primer if conversation.ending is Ending.ANSWER else "",
        names=frozenset() if tools is None else tools.names,
        # A template that takes one call a message could not show two in the next turn.
        has_one_call=tools is not None and (tools.has_one_call or prompt.has_one_call),
        splits_reasoning=conversation.splits_reasoning,
        is_in_reasoning=prompt.thought_end is not None,
        shows_think_marks=not conversation.splits_reasoning,
        parameters={} if tools is None else tools.parameters,
    )
    if conversation.ending is not Ending.ANSWER:
        # The answer goes on within what these begin.
        told = replace(told, primer="", content=replace(told.content, begin=""))
    tokens, inputs = given.inserted(prompt.tokens, prompt.places) if prompt.places else (prompt.tokens, ())
    return ChatPrompt(
        tokens,
        output_format,
        tools,
        told,
        prompt.thought_end,
        prompt.may_think,
        backend.tokenizer,
        () if prompt.knows_reasoning else _without_effect(conversation.effort_param),
        _continued(conversation, told) if prompt.thought_end is None else "",
        opening_of(given.named),
        inputs,
    )


def opening_of(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Messages up to the first of the user; all if there is none."""
    users = (number for number, message in enumerate(messages, 1) if message["role"] == "user")
    return messages[: next(users, len(messages))]


def _without_effect(param: str | None) -> tuple[str, ...]:
    why = "this model's chat template has no setting for it"
    return () if param is None else (f"{param} has no effect: {why}",)


def _continued(conversation: Conversation, answer_format: AnswerFormat) -> str:
    """Content that an answer continues, behind its reasoning."""
    if conversation.ending is not Ending.CONTINUED:
        return ""
    text: str = conversation.messages[-1]["content"]
    starts = [text.rfind(each.end) + len(each.end) for each in answer_format.reasoning if each.end in text]
    return text[max(starts) :].lstrip() if starts else text


def shown_ids(ids: Sequence[int]) -> Sequence[int]:
    """Ids of a prompt as clients are told them: -1 for each row of a picture, which is no token."""
    return [NO_TOKEN if each >= FIRST_ROW_ID else each for each in ids] if has_rows(ids) else ids
