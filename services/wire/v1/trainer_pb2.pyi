from services.wire.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StepKey(_message.Message):
    __slots__ = ("lineage", "step", "minibatch", "role")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MINIBATCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    step: int
    minibatch: int
    role: str
    def __init__(self, lineage: _Optional[str] = ..., step: _Optional[int] = ..., minibatch: _Optional[int] = ..., role: _Optional[str] = ...) -> None: ...

class TrainerInfoRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: str
    def __init__(self, role: _Optional[str] = ...) -> None: ...

class TrainerInfoReply(_message.Message):
    __slots__ = ("model", "world_size", "tensor_parallel", "data_parallel", "num_parameters", "vocab_size", "tokenizer_digest", "shards")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    world_size: int
    tensor_parallel: int
    data_parallel: int
    num_parameters: int
    vocab_size: int
    tokenizer_digest: str
    shards: _containers.RepeatedCompositeFieldContainer[_types_pb2.Boxes]
    def __init__(self, model: _Optional[str] = ..., world_size: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., data_parallel: _Optional[int] = ..., num_parameters: _Optional[int] = ..., vocab_size: _Optional[int] = ..., tokenizer_digest: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[_types_pb2.Boxes, _Mapping]]] = ...) -> None: ...

class ComputeLogprobsRequest(_message.Message):
    __slots__ = ("role", "temperature", "segments")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    role: str
    temperature: float
    segments: _types_pb2.Segments
    def __init__(self, role: _Optional[str] = ..., temperature: _Optional[float] = ..., segments: _Optional[_Union[_types_pb2.Segments, _Mapping]] = ...) -> None: ...

class ComputeLogprobsReply(_message.Message):
    __slots__ = ("logprobs",)
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _types_pb2.Tensor
    def __init__(self, logprobs: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ...) -> None: ...

class LossConfig(_message.Message):
    __slots__ = ("kind", "clip_low", "clip_high", "temperature")
    KIND_FIELD_NUMBER: _ClassVar[int]
    CLIP_LOW_FIELD_NUMBER: _ClassVar[int]
    CLIP_HIGH_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    clip_low: float
    clip_high: float
    temperature: float
    def __init__(self, kind: _Optional[str] = ..., clip_low: _Optional[float] = ..., clip_high: _Optional[float] = ..., temperature: _Optional[float] = ...) -> None: ...

class ForwardBackwardRequest(_message.Message):
    __slots__ = ("key", "loss", "segments", "loss_weights", "advantages", "rollout_logprobs", "old_logprobs")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    LOSS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OLD_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    key: StepKey
    loss: LossConfig
    segments: _types_pb2.Segments
    loss_weights: _types_pb2.Tensor
    advantages: _types_pb2.Tensor
    rollout_logprobs: _types_pb2.Tensor
    old_logprobs: _types_pb2.Tensor
    def __init__(self, key: _Optional[_Union[StepKey, _Mapping]] = ..., loss: _Optional[_Union[LossConfig, _Mapping]] = ..., segments: _Optional[_Union[_types_pb2.Segments, _Mapping]] = ..., loss_weights: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., advantages: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., rollout_logprobs: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., old_logprobs: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ...) -> None: ...

class ForwardBackwardReply(_message.Message):
    __slots__ = ("metrics",)
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class OptimStepRequest(_message.Message):
    __slots__ = ("key", "learning_rate")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    key: StepKey
    learning_rate: float
    def __init__(self, key: _Optional[_Union[StepKey, _Mapping]] = ..., learning_rate: _Optional[float] = ...) -> None: ...

class OptimStepReply(_message.Message):
    __slots__ = ("metrics",)
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class PublishWeightsRequest(_message.Message):
    __slots__ = ("version", "dtype", "classes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    version: _types_pb2.Version
    dtype: str
    classes: _containers.RepeatedCompositeFieldContainer[ReplicaClass]
    def __init__(self, version: _Optional[_Union[_types_pb2.Version, _Mapping]] = ..., dtype: _Optional[str] = ..., classes: _Optional[_Iterable[_Union[ReplicaClass, _Mapping]]] = ...) -> None: ...

class ReplicaClass(_message.Message):
    __slots__ = ("plan_id", "boxes")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    plan_id: str
    boxes: _types_pb2.Boxes
    def __init__(self, plan_id: _Optional[str] = ..., boxes: _Optional[_Union[_types_pb2.Boxes, _Mapping]] = ...) -> None: ...

class PublishWeightsReply(_message.Message):
    __slots__ = ("classes", "num_bytes", "unchanged")
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    classes: _containers.RepeatedCompositeFieldContainer[ClassManifest]
    num_bytes: int
    unchanged: bool
    def __init__(self, classes: _Optional[_Iterable[_Union[ClassManifest, _Mapping]]] = ..., num_bytes: _Optional[int] = ..., unchanged: bool = ...) -> None: ...

class ClassManifest(_message.Message):
    __slots__ = ("plan_id", "streams")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    plan_id: str
    streams: _containers.RepeatedCompositeFieldContainer[_types_pb2.StreamManifest]
    def __init__(self, plan_id: _Optional[str] = ..., streams: _Optional[_Iterable[_Union[_types_pb2.StreamManifest, _Mapping]]] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("role", "path")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    role: str
    path: str
    def __init__(self, role: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class SaveCheckpointReply(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class LoadCheckpointRequest(_message.Message):
    __slots__ = ("role", "path")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    role: str
    path: str
    def __init__(self, role: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadCheckpointReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExportHFRequest(_message.Message):
    __slots__ = ("role", "path")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    role: str
    path: str
    def __init__(self, role: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class ExportHFReply(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...
