from spanmesh_proto import windows_pb2 as _windows_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FactsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Facts(_message.Message):
    __slots__ = ("kind", "width", "most_at_once", "identity", "device")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    MOST_AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    width: int
    most_at_once: int
    identity: str
    device: str
    def __init__(self, kind: _Optional[str] = ..., width: _Optional[int] = ..., most_at_once: _Optional[int] = ..., identity: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class PartsRequest(_message.Message):
    __slots__ = ("width", "height")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    width: int
    height: int
    def __init__(self, width: _Optional[int] = ..., height: _Optional[int] = ...) -> None: ...

class Parts(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("tokens", "chunk")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    chunk: _windows_pb2.ImageChunk
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., chunk: _Optional[_Union[_windows_pb2.ImageChunk, _Mapping]] = ...) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("width", "height", "rgb")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    RGB_FIELD_NUMBER: _ClassVar[int]
    width: int
    height: int
    rgb: bytes
    def __init__(self, width: _Optional[int] = ..., height: _Optional[int] = ..., rgb: _Optional[bytes] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("data", "identity")
    DATA_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    identity: str
    def __init__(self, data: _Optional[bytes] = ..., identity: _Optional[str] = ...) -> None: ...
