from services.wire.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_WAIT: _ClassVar[PauseMode]
    PAUSE_MODE_IN_PLACE: _ClassVar[PauseMode]
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_WAIT: PauseMode
PAUSE_MODE_IN_PLACE: PauseMode

class GroupRequest(_message.Message):
    __slots__ = ("group", "prompt_ids", "index", "attempt")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    group: _types_pb2.GroupId
    prompt_ids: bytes
    index: _containers.RepeatedScalarFieldContainer[int]
    attempt: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[_Union[_types_pb2.GroupId, _Mapping]] = ..., prompt_ids: _Optional[bytes] = ..., index: _Optional[_Iterable[int]] = ..., attempt: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "sampling", "groups")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    model: str
    sampling: _types_pb2.Sampling
    groups: _containers.RepeatedCompositeFieldContainer[GroupRequest]
    def __init__(self, model: _Optional[str] = ..., sampling: _Optional[_Union[_types_pb2.Sampling, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[GroupRequest, _Mapping]]] = ...) -> None: ...

class GenerateReply(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[_types_pb2.Samples]
    def __init__(self, samples: _Optional[_Iterable[_Union[_types_pb2.Samples, _Mapping]]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("id_prefix",)
    ID_PREFIX_FIELD_NUMBER: _ClassVar[int]
    id_prefix: str
    def __init__(self, id_prefix: _Optional[str] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("mode",)
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: PauseMode
    def __init__(self, mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class PauseReply(_message.Message):
    __slots__ = ("running",)
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    running: int
    def __init__(self, running: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReceiveWeightsRequest(_message.Message):
    __slots__ = ("version", "streams")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    version: _types_pb2.Version
    streams: _containers.RepeatedCompositeFieldContainer[_types_pb2.StreamManifest]
    def __init__(self, version: _Optional[_Union[_types_pb2.Version, _Mapping]] = ..., streams: _Optional[_Iterable[_Union[_types_pb2.StreamManifest, _Mapping]]] = ...) -> None: ...

class ReceiveWeightsReply(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class CommitWeightsRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: _types_pb2.Version
    def __init__(self, version: _Optional[_Union[_types_pb2.Version, _Mapping]] = ...) -> None: ...

class CommitWeightsReply(_message.Message):
    __slots__ = ("stall_s",)
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    stall_s: float
    def __init__(self, stall_s: _Optional[float] = ...) -> None: ...

class RollbackWeightsRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: _types_pb2.Version
    def __init__(self, version: _Optional[_Union[_types_pb2.Version, _Mapping]] = ...) -> None: ...

class RollbackWeightsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChecksumsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChecksumsReply(_message.Message):
    __slots__ = ("version", "tensors", "checksums")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    version: _types_pb2.Version
    tensors: _containers.RepeatedScalarFieldContainer[str]
    checksums: _types_pb2.Tensor
    def __init__(self, version: _Optional[_Union[_types_pb2.Version, _Mapping]] = ..., tensors: _Optional[_Iterable[str]] = ..., checksums: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ...) -> None: ...

class RolloutInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RolloutInfoReply(_message.Message):
    __slots__ = ("name", "incarnation", "version", "vocab_size", "max_length", "slots", "dtype", "boxes", "running", "queued", "tokens_generated")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    version: _types_pb2.Version
    vocab_size: int
    max_length: int
    slots: int
    dtype: str
    boxes: _types_pb2.Boxes
    running: int
    queued: int
    tokens_generated: int
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ..., version: _Optional[_Union[_types_pb2.Version, _Mapping]] = ..., vocab_size: _Optional[int] = ..., max_length: _Optional[int] = ..., slots: _Optional[int] = ..., dtype: _Optional[str] = ..., boxes: _Optional[_Union[_types_pb2.Boxes, _Mapping]] = ..., running: _Optional[int] = ..., queued: _Optional[int] = ..., tokens_generated: _Optional[int] = ...) -> None: ...
