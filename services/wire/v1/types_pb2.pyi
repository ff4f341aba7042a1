from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("lineage", "number")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    number: int
    def __init__(self, lineage: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "start", "end")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    version: Version
    start: int
    end: int
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class GroupId(_message.Message):
    __slots__ = ("run", "epoch", "prompt")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    run: str
    epoch: int
    prompt: int
    def __init__(self, run: _Optional[str] = ..., epoch: _Optional[int] = ..., prompt: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_new_tokens", "stop_token_ids", "stop", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ...) -> None: ...

class Provenance(_message.Message):
    __slots__ = ("replica", "incarnation", "started", "finished")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    replica: str
    incarnation: str
    started: float
    finished: float
    def __init__(self, replica: _Optional[str] = ..., incarnation: _Optional[str] = ..., started: _Optional[float] = ..., finished: _Optional[float] = ...) -> None: ...

class TurnReward(_message.Message):
    __slots__ = ("node", "value", "components")
    class ComponentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    node: int
    value: float
    components: _containers.ScalarMap[str, float]
    def __init__(self, node: _Optional[int] = ..., value: _Optional[float] = ..., components: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Samples(_message.Message):
    __slots__ = ("group", "index", "attempt", "finish_reason", "text", "provenance", "node_offsets", "node_parent", "token_offsets", "token_ids", "loss_mask", "logprobs", "span_offsets", "spans", "rewards")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    NODE_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    NODE_PARENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPAN_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    group: GroupId
    index: _containers.RepeatedScalarFieldContainer[int]
    attempt: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _containers.RepeatedScalarFieldContainer[FinishReason]
    text: _containers.RepeatedScalarFieldContainer[str]
    provenance: _containers.RepeatedCompositeFieldContainer[Provenance]
    node_offsets: _containers.RepeatedScalarFieldContainer[int]
    node_parent: _containers.RepeatedScalarFieldContainer[int]
    token_offsets: _containers.RepeatedScalarFieldContainer[int]
    token_ids: bytes
    loss_mask: bytes
    logprobs: bytes
    span_offsets: _containers.RepeatedScalarFieldContainer[int]
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    rewards: _containers.RepeatedCompositeFieldContainer[Rewards]
    def __init__(self, group: _Optional[_Union[GroupId, _Mapping]] = ..., index: _Optional[_Iterable[int]] = ..., attempt: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Iterable[_Union[FinishReason, str]]] = ..., text: _Optional[_Iterable[str]] = ..., provenance: _Optional[_Iterable[_Union[Provenance, _Mapping]]] = ..., node_offsets: _Optional[_Iterable[int]] = ..., node_parent: _Optional[_Iterable[int]] = ..., token_offsets: _Optional[_Iterable[int]] = ..., token_ids: _Optional[bytes] = ..., loss_mask: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., span_offsets: _Optional[_Iterable[int]] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., rewards: _Optional[_Iterable[_Union[Rewards, _Mapping]]] = ...) -> None: ...

class Rewards(_message.Message):
    __slots__ = ("reward",)
    REWARD_FIELD_NUMBER: _ClassVar[int]
    reward: _containers.RepeatedCompositeFieldContainer[TurnReward]
    def __init__(self, reward: _Optional[_Iterable[_Union[TurnReward, _Mapping]]] = ...) -> None: ...

class Segments(_message.Message):
    __slots__ = ("token_ids", "offsets", "parents", "groups")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    token_ids: Tensor
    offsets: Tensor
    parents: Tensor
    groups: Tensor
    def __init__(self, token_ids: _Optional[_Union[Tensor, _Mapping]] = ..., offsets: _Optional[_Union[Tensor, _Mapping]] = ..., parents: _Optional[_Union[Tensor, _Mapping]] = ..., groups: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class Boxes(_message.Message):
    __slots__ = ("tensors", "rows")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedScalarFieldContainer[str]
    rows: Tensor
    def __init__(self, tensors: _Optional[_Iterable[str]] = ..., rows: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class StreamManifest(_message.Message):
    __slots__ = ("source", "location", "offset", "transfers", "plan_id", "checksums")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    source: int
    location: str
    offset: int
    transfers: Boxes
    plan_id: str
    checksums: Tensor
    def __init__(self, source: _Optional[int] = ..., location: _Optional[str] = ..., offset: _Optional[int] = ..., transfers: _Optional[_Union[Boxes, _Mapping]] = ..., plan_id: _Optional[str] = ..., checksums: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...
