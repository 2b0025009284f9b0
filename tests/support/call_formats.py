"""Formats of calls that many tests use, by the family that writes them."""

from dataclasses import replace

from mesh.text.answer_format import DEFAULT_REASONING, NOTE_FORMAT, texts_of
from mesh.text.known_formats import (
    BARE_OBJECTS,
    INVOCATIONS,
    KEY_TAGS,
    NAME_AND_MARKS,
    PARAMETER_TAGS,
)

HERMES = NOTE_FORMAT
LLAMA = BARE_OBJECTS
MISTRAL = NAME_AND_MARKS
QWEN = PARAMETER_TAGS
SEED = replace(
    PARAMETER_TAGS, call="<seed:tool_call>\n<function=", call_end="\n</function>\n</seed:tool_call>"
)
GLM = KEY_TAGS
MINIMAX = INVOCATIONS
TAGGED = (QWEN, GLM, MINIMAX)
ALL = (HERMES, LLAMA, MISTRAL, *TAGGED)
MARKS = frozenset(
    text.strip()
    for calls in ALL
    for text in (*texts_of(calls), "<tool_call>", "</tool_call>", "</function>")
    if text.strip(' \n{}":;,')
).union(text for each in DEFAULT_REASONING for text in (each.begin, each.end))
"""Marks of all these, and of reasoning."""
