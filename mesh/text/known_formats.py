"""Formats that rendering cannot show.

They are of templates that tell of calls and write none, and of models that call otherwise than their template
says.
"""

from __future__ import annotations

from typing import Final

from mesh.text.answer_format import CALL_ID, NOTE_FORMAT, ArgumentTags, CallForm, CallFormat

PARAMETER_TAGS: Final = CallFormat(
    CallForm.TAGGED,
    "<tool_call>\n<function=",
    ">\n",
    "\n</function>\n</tool_call>",
    separator="\n",
    tags=ArgumentTags("<parameter=", ">", "", "</parameter>", "\n", is_padded=True),
)
"""Of Qwen3-Coder, Qwen3.5 and later, Nemotron 3, Step 3.5."""
KEY_TAGS: Final = CallFormat(
    CallForm.TAGGED,
    "<tool_call>",
    "\n",
    "\n</tool_call>",
    separator="\n",
    tags=ArgumentTags("<arg_key>", "</arg_key>", "\n<arg_value>", "</arg_value>", "\n"),
)
"""Of GLM 4.5 and later."""
INVOCATIONS: Final = CallFormat(
    CallForm.TAGGED,
    '<invoke name="',
    '">\n',
    "\n</invoke>\n",
    "<minimax:tool_call>\n",
    end="</minimax:tool_call>",
    tags=ArgumentTags('<parameter name="', '">', "", "</parameter>", "\n"),
)
"""Of MiniMax M2."""
NAME_AND_MARKS: Final = CallFormat(CallForm.NAMED, "[TOOL_CALLS]", f"[CALL_ID]{CALL_ID}[ARGS]", "", quote='"')
"""Of Mistral's models, which write lists of objects, too."""
BARE_OBJECTS: Final = CallFormat(CallForm.OBJECT, '{"name": "', '", "parameters": ', "}", separator="; ")
"""Of Llama 3.1 and later."""
_OBJECTS: Final = ('{"name": "', '", "arguments": ', "}")
_BY_WORDS: Final = (
    (
        "<|tool_call|> followed by a JSON list",
        CallFormat(CallForm.OBJECT, *_OBJECTS, "<|tool_call|>[", ", ", "]"),
    ),
    (" functools[", CallFormat(CallForm.OBJECT, *_OBJECTS, " functools[", ", ", "]")),
    (
        "List of tools: ",
        CallFormat(
            CallForm.FUNCTION, "", "(", ")", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", quote="'"
        ),
    ),
    ("[TOOL_CALLS]", NAME_AND_MARKS),
    ("<minimax:tool_call>", INVOCATIONS),
    ("<function=", PARAMETER_TAGS),
    ("<arg_key>", KEY_TAGS),
    ("<tool_call>", NOTE_FORMAT),
    ("<|python_tag|>", BARE_OBJECTS),
    ('"parameters"', BARE_OBJECTS),
)


def has_short_ids(calls: CallFormat) -> bool:
    """Whether ids of calls are nine letters and digits, as Mistral's templates want them in histories."""
    return "[TOOL_CALLS]" in calls.begin + calls.call


def format_by_words(source: str) -> CallFormat | None:
    """Format of calls that a template tells of, though it writes none; None if it tells of none.

    Args:
        source: Source of the template.
    """
    return next((calls for text, calls in _BY_WORDS if text in source), None)
