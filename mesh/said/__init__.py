"""What a model said, told apart as it comes: content, reasoning, calls of functions. Pure."""

from mesh.said.formats import MARKS, CallFormat, call_format_of, knows_tools
from mesh.said.message_reader import MessageReader, Reading
from mesh.said.pieces import CallArguments, CallBegun, Content, Reasoning, Said, calls_of, joined
from mesh.said.reasoning import end_of_reasoning

__all__ = [
    "MARKS",
    "CallArguments",
    "CallBegun",
    "CallFormat",
    "Content",
    "MessageReader",
    "Reading",
    "Reasoning",
    "Said",
    "call_format_of",
    "calls_of",
    "end_of_reasoning",
    "joined",
    "knows_tools",
]
