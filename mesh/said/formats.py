"""How models write calls of functions down, and which of the ways a chat template teaches.

- Hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Hermes, Qwen 2.5 and 3, and our own note.
- Llama: `{"name": …, "parameters": {…}}` as the whole answer, with `<|python_tag|>` before it or without.
  Llama 3.1 and later.
- Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]name[ARGS]{…}` in newer ones.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final


class CallFormat(Enum):
    """A way to write calls down; the value is the text that one begins with."""

    HERMES = "<tool_call>"
    LLAMA = "<|python_tag|>"
    MISTRAL = "[TOOL_CALLS]"


CALL_END: Final = "</tool_call>"
ARGUMENTS_MARK: Final = "[ARGS]"
CALL_ID_MARK: Final = "[CALL_ID]"
THINK_MARKS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))

# In many vocabularies these are control tokens, which have no text; whoever reads calls must see them.
MARKS: Final = (
    *(call_format.value for call_format in CallFormat),
    CALL_END,
    ARGUMENTS_MARK,
    CALL_ID_MARK,
    *(mark for pair in THINK_MARKS for mark in pair),
)

_TOOLS: Final = re.compile(r"\btools\b")


def knows_tools(template: str) -> bool:
    """Whether a chat template does anything with the tools that it is given."""
    return _TOOLS.search(template) is not None


def call_format_of(template: str) -> CallFormat:
    """The format that a template teaches; Hermes where it teaches none, as our own note does."""
    if not knows_tools(template):
        return CallFormat.HERMES
    for call_format in (CallFormat.MISTRAL, CallFormat.HERMES):
        if call_format.value in template:
            return call_format
    is_llama = CallFormat.LLAMA.value in template or '"parameters"' in template
    return CallFormat.LLAMA if is_llama else CallFormat.HERMES
