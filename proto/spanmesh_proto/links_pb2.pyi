from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Probe(_message.Message):
    __slots__ = ("payload", "answer_bytes")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ANSWER_BYTES_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    answer_bytes: int
    def __init__(self, payload: _Optional[bytes] = ..., answer_bytes: _Optional[int] = ...) -> None: ...
