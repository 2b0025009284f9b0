from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Probe(_message.Message):
    __slots__ = ("payload", "answer_bytes")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ANSWER_BYTES_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    answer_bytes: int
    def __init__(self, payload: _Optional[bytes] = ..., answer_bytes: _Optional[int] = ...) -> None: ...

class PortCheck(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenedPorts(_message.Message):
    __slots__ = ("ports", "nonce", "first", "last")
    PORTS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ports: _containers.RepeatedScalarFieldContainer[int]
    nonce: bytes
    first: int
    last: int
    def __init__(self, ports: _Optional[_Iterable[int]] = ..., nonce: _Optional[bytes] = ..., first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...
