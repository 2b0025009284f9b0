"""What a model said, told apart as it comes: content, reasoning, calls of functions. Pure."""

from mesh.said.formats import CallFormat, call_format_of, knows_tools
from mesh.said.message_reader import MessageReader, Reading
from mesh.said.pieces import CallArguments, CallBegun, Content, Reasoning, Said, joined

__all__ = [
    "CallArguments",
    "CallBegun",
    "CallFormat",
    "Content",
    "MessageReader",
    "Reading",
    "Reasoning",
    "Said",
    "call_format_of",
    "joined",
    "knows_tools",
]
