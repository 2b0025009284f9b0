"""Formats of calls that many tests use, by the family that writes them."""

from dataclasses import replace

from mesh.text.answer_format import (
    DEFAULT_REASONING,
    INDEX,
    KEY,
    NOTE_FORMAT,
    ArgumentTags,
    CallForm,
    CallFormat,
    texts_of,
)
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
KIMI = CallFormat(
    CallForm.NAMED,
    "<|tool_call_begin|>functions.",
    f":{INDEX}<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
)
GEMMA = CallFormat(CallForm.NAMED, "<|tool_call>call:", "", "<tool_call|>", quote='<|"|>')
LFM = CallFormat(
    CallForm.FUNCTION, "", "(", ")", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", quote="'"
)
APERTUS = CallFormat(CallForm.OBJECT, '{"', '": ', "}", "<|tools_prefix|>[", ", ", "]<|tools_suffix|>")
DSML = CallFormat(
    CallForm.TAGGED,
    '<｜DSML｜invoke name="',
    '">\n',
    "\n</｜DSML｜invoke>\n",
    "<｜DSML｜tool_calls>\n",
    end="</｜DSML｜tool_calls>",
    tags=ArgumentTags(
        '<｜DSML｜parameter name="',
        '" string="true">',
        value_end="</｜DSML｜parameter>",
        separator="\n",
        types=(("string", '" string="true">'), ("integer", '" string="false">')),
    ),
)
NESTED = CallFormat(
    CallForm.TAGGED,
    '<invoke name="',
    '">',
    "</invoke>",
    "<calls>",
    end="</calls>",
    tags=ArgumentTags("[<", ">", value_end=f"[</{KEY}>", item="item"),
)
MORE = (SEED, KIMI, GEMMA, LFM, APERTUS, DSML, NESTED)
"""Formats of other forms."""
