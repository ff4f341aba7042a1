"""Info types: what each service reports about itself."""

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.wire.types import ServerHealth, ServiceEntry, SessionId, ShardLayout, Version


@dataclass(frozen=True, slots=True, eq=False)
class RolloutInfo:
    name: str
    incarnation: str
    version: Version
    vocab_size: int
    max_length: int
    slots: int
    dtype: str
    shard_layouts: tuple[ShardLayout, ...]  # per tensor-parallel rank
    running: int
    queued: int
    tokens_generated: int
    tokens_prefilled: int  # of contexts, but for those that were kept
    route_shape: tuple[int, ...] = ()  # layers, experts of a token; (): experts are not recorded


@dataclass(frozen=True, slots=True, eq=False)
class TrainerInfo:
    model: str
    world_size: int
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    expert_parallel: int
    data_parallel: int
    num_parameters: int
    vocab_size: int
    tokenizer_digest: str
    shard_layouts: tuple[ShardLayout, ...]  # per rank; identical ones are the same object
    roles: tuple[str, ...]  # that the service holds


@dataclass(frozen=True, slots=True)
class RewardInfo:
    graders: tuple[str, ...]
    max_queued: int  # responses that it holds at once, over all calls; 0: it does not say
    sandbox: str = ""  # isolation of programs; "": no sandbox
    disk_bytes: int = 0  # largest working directory of a program; 0: it can write no file


@dataclass(frozen=True, slots=True)
class RunStatus:
    run: str
    state: str
    step: int
    num_steps: int
    version: int
    error: str
    services: tuple[ServiceEntry, ...]
    metrics: Mapping[str, float]
    revision: int  # changes with state, step, services and servers
    servers: tuple[ServerHealth, ...]
    seconds: float = 0.0  # that the run has taken, over all its starts
    replicas: int = 0  # that the launcher is to run, by `atoll scale`; 0: as the config says
    drained: tuple[str, ...] = ()  # services that operators have drained: the launcher does not restart them


@dataclass(frozen=True, slots=True)
class Renewal:
    """The reply to a heartbeat."""

    known: bool  # False: register again
    epoch: int  # of the coordinator
    drain: bool  # an operator wants the service to leave


@dataclass(frozen=True, slots=True)
class GatewayInfo:
    url: str  # for agents: chat APIs below /v1
    num_sessions: int  # open in this instance


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """An open session."""

    id: SessionId
    turns: int
    tokens: int  # that the policy produced
    opened: float  # Unix seconds
    branches: Mapping[str, int]  # by cause
    recomputed: int  # tokens of contexts that were computed before, elsewhere or by other weights


@dataclass(frozen=True, slots=True)
class AgentsInfo:
    concurrency: Mapping[str, int]  # concurrent sessions, by agent
    running: int  # sessions whose function runs
