from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreItem(_message.Message):
    __slots__ = ("id", "prompt", "response", "ground_truth", "data_source", "finish_reason", "response_length", "extra")
    class ExtraEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    GROUND_TRUTH_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    id: str
    prompt: str
    response: str
    ground_truth: str
    data_source: str
    finish_reason: str
    response_length: int
    extra: _containers.ScalarMap[str, str]
    def __init__(self, id: _Optional[str] = ..., prompt: _Optional[str] = ..., response: _Optional[str] = ..., ground_truth: _Optional[str] = ..., data_source: _Optional[str] = ..., finish_reason: _Optional[str] = ..., response_length: _Optional[int] = ..., extra: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ScoreItem]
    def __init__(self, items: _Optional[_Iterable[_Union[ScoreItem, _Mapping]]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("id", "graded", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    GRADED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: str
    graded: Graded
    error: GradingError
    def __init__(self, id: _Optional[str] = ..., graded: _Optional[_Union[Graded, _Mapping]] = ..., error: _Optional[_Union[GradingError, _Mapping]] = ...) -> None: ...

class Graded(_message.Message):
    __slots__ = ("value", "components")
    class ComponentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUE_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    value: float
    components: _containers.ScalarMap[str, float]
    def __init__(self, value: _Optional[float] = ..., components: _Optional[_Mapping[str, float]] = ...) -> None: ...

class GradingError(_message.Message):
    __slots__ = ("grader", "cause", "retryable")
    GRADER_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    grader: str
    cause: str
    retryable: bool
    def __init__(self, grader: _Optional[str] = ..., cause: _Optional[str] = ..., retryable: bool = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("verdicts",)
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    def __init__(self, verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("graders",)
    GRADERS_FIELD_NUMBER: _ClassVar[int]
    graders: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, graders: _Optional[_Iterable[str]] = ...) -> None: ...
