"""Typed async clients of the four services; the one place where calls are made.

Every call has a deadline and carries the caller's fence and token. `_translate` turns transport
errors into our exceptions. Calls that are safe to repeat are retried while the peer is unavailable.

long because every RPC has its typed method here.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import grpc
import grpc.aio
import numpy as np

from atoll.runtime import errors
from atoll.runtime.patience import while_it_progresses
from atoll.wire.codec.batches import (
    MAX_CHUNK_BYTES,
    encode_forward_backward,
    encode_step_key,
    put_segments,
    split_by_groups,
)
from atoll.wire.codec.fleet import decode_server_health, decode_service, encode_server, encode_service
from atoll.wire.codec.rewards import decode_execution, decode_verdict, encode_execute, put_score_item
from atoll.wire.codec.rollout import encode_turn_request
from atoll.wire.codec.trajectories import decode_trajectories, parse_trajectories
from atoll.wire.codec.values import decode_tensor, decode_version, encode_version
from atoll.wire.codec.weights import (
    decode_catalog,
    decode_published,
    encode_catalog,
    encode_membership,
    encode_plan,
    encode_stream,
)
from atoll.wire.types import (
    BELOW_PROMPT,
    Batch,
    Catalog,
    Execution,
    ExternalServer,
    Float32,
    Int32,
    Limits,
    Membership,
    PauseMode,
    Plan,
    Published,
    ScoreItem,
    Segments,
    ServerHealth,
    ServerKind,
    ServiceEntry,
    StepKey,
    StreamManifest,
    Trajectory,
    TurnRequest,
    Verdict,
    Version,
    Written,
)
from atoll.wire.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)

T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 << 20
FENCE_KEY = "atoll-fence"
CEILING_S = 30 * 86400.0  # of calls that take as long as their work: it is their silence that is bounded
ABORT_S = 5.0  # for an abort, which saves work and nothing else
ERROR_KEY = "atoll-error"  # trailing metadata: the class in runtime/errors.py

_ERRORS = {
    cls.__name__: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.AtollError)
}

# grpc.aio's own words, with status INTERNAL, where a peer dies while a stream of requests is on its way
_SEND_FAILED = "Internal error from Core"

# Generate joins what runs or has finished, and every trainer call is keyed, so all may be repeated.
_RETRY = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.05s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 3,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: the coordinator's lease epoch (None: not a coordinator) and the shared token."""

    fence: int | None = None
    token: str | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        fence = () if self.fence is None else ((FENCE_KEY, str(self.fence)),)
        token = () if self.token is None else (("authorization", f"Bearer {self.token}"),)
        return fence + token


class _Client:
    def __init__(self, address: str, caller: Caller, timeout_s: float) -> None:
        self.address = address
        self._metadata = caller.metadata
        self._timeout_s = timeout_s
        self._closed = False
        self._channel = grpc.aio.insecure_channel(
            address,
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.enable_http_proxy", 0),  # one that the environment names would see the token
                ("grpc.max_reconnect_backoff_ms", 2000),  # else two minutes after a long absence
                ("grpc.service_config", _RETRY),
            ],
        )

    async def close(self) -> None:
        self._closed = True
        await self._channel.close(None)

    async def _next(self, call: grpc.aio.UnaryStreamCall[Any, T], method: str) -> T | None:
        """The next message of a stream, None at its end. Raises ServiceUnavailableError after silence for the
        client's timeout."""
        try:
            async with asyncio.timeout(self._timeout_s):
                message = await call.read()
        except TimeoutError:
            raise errors.ServiceUnavailableError(
                f"{method} at {self.address}: nothing came for {self._timeout_s:g} s"
            ) from None
        return None if message is grpc.aio.EOF else cast(T, message)

    @contextmanager
    def _translate(self, method: str) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._exception(method, error) from error
        except (asyncio.CancelledError, grpc.aio.UsageError) as error:
            # closing a channel cancels its calls: to the caller that is a lost peer, not its own cancellation
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            raise errors.ServiceUnavailableError(f"{method} at {self.address}: the client closed") from error
        except errors.AtollError:
            raise
        except Exception as error:  # of what is done under it only decoding can fail: the answer is garbled
            raise errors.BadAnswerError(
                f"{self._where(method)}: its answer cannot be read: {type(error).__name__}: {error}"
            ) from error

    def _where(self, method: str) -> str:
        return f"{type(self).__name__.removesuffix('Client')}.{method} at {self.address}"

    def _exception(self, method: str, error: grpc.aio.AioRpcError) -> errors.AtollError:
        where = self._where(method)
        name = cast(grpc.aio.Metadata, error.trailing_metadata()).get(ERROR_KEY)
        if isinstance(name, str) and name in _ERRORS:
            return _ERRORS[name](f"{where}: {error.details()}")
        reason = {
            grpc.StatusCode.UNAVAILABLE: "the connection failed; the service may have died: see its log",
            grpc.StatusCode.DEADLINE_EXCEEDED: f"no answer within {self._timeout_s:g} s",
            grpc.StatusCode.CANCELLED: "the service ends, and calls in progress with it",
        }.get(error.code())
        if error.details() == _SEND_FAILED:
            reason = "the connection failed during the request; the service may have died: see its log"
        if reason:
            return errors.ServiceUnavailableError(f"{where}: {reason} ({error.details()})")
        return errors.AtollError(f"{where}: {error.code().name}: {error.details()}")


@dataclass(frozen=True, slots=True, eq=False)
class RolloutInfo:
    name: str
    incarnation: str
    version: Version
    vocab_size: int
    max_length: int
    slots: int
    dtype: str
    catalogs: tuple[Catalog, ...]  # per tensor-parallel rank
    running: int
    queued: int
    tokens_generated: int


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """Samples that finished together, and the bytes that they came in, as the journal keeps them."""

    samples: list[Trajectory]
    versions: tuple[Version, ...]  # that made their tokens
    num_tokens: int
    largest_id: int  # of all their tokens; -1: they have none
    payload: bytes

    @classmethod
    def parse(cls, payload: bytes) -> Self:
        """Raises BadAnswerError for what `decode_trajectories` refuses."""
        try:
            message = parse_trajectories(payload)
            samples = decode_trajectories(message)
            _check_single_turns(message)
            token_ids = np.frombuffer(message.token_ids, "<i4")  # one look costs less than one per sample
            versions = tuple(map(decode_version, message.versions))
            return cls(samples, versions, len(token_ids), int(token_ids.max(initial=-1)), payload)
        except ValueError as error:
            raise errors.BadAnswerError(str(error)) from error


def _check_single_turns(message: types_pb2.Trajectories) -> None:
    """Raises ValueError for what a replica has no say in: how turns hang together, and rewards."""
    others = message.turn_offsets, message.rewards, message.status, message.reason, message.conversation
    if any(others) or message.node_parent != [BELOW_PROMPT] * len(message.group):
        raise ValueError(
            "samples: a tree, rewards or a status, expected a single turn of each and no rewards"
        )


class RolloutClient(_Client):
    def __init__(self, address: str, caller: Caller, timeout_s: float = 600.0) -> None:
        super().__init__(address, caller, timeout_s)
        self._stub: rollout_pb2_grpc.RolloutAsyncStub = rollout_pb2_grpc.RolloutStub(self._channel)

    async def generate(self, model: str, requests: Sequence[TurnRequest]) -> AsyncGenerator[Arrival, None]:
        """Turns of any of the requests as they finish, each a trajectory of its own, those of one message
        together. Raises BadAnswerError for a message that does not make sense in itself."""
        request = rollout_pb2.GenerateRequest(
            model=model,
            turns=map(encode_turn_request, requests),
        )
        with self._translate("Generate"):
            # as long as the responses take: silence is for the caller to judge
            call = self._stub.Generate(request, timeout=CEILING_S, metadata=self._metadata)
            async for reply in call:
                yield Arrival.parse(reply.turns)

    async def abort(self, id_prefix: str) -> int:
        with self._translate("Abort"):
            reply = await self._stub.Abort(
                rollout_pb2.AbortRequest(id_prefix=id_prefix),
                timeout=min(ABORT_S, self._timeout_s),
                metadata=self._metadata,
            )
        return reply.aborted

    async def pause(self, mode: PauseMode) -> None:
        request = rollout_pb2.PauseRequest(mode=rollout_pb2.PauseMode.ValueType(mode.value))
        with self._translate("Pause"):
            # until running sequences end, in one of the modes
            await self._stub.Pause(request, timeout=CEILING_S, metadata=self._metadata)

    async def resume(self) -> None:
        with self._translate("Resume"):
            await self._stub.Resume(
                rollout_pb2.ResumeRequest(), timeout=self._timeout_s, metadata=self._metadata
            )

    async def receive_weights(
        self,
        version: Version,
        streams: Sequence[StreamManifest],
        plan: Plan | None,
        membership: Membership,
    ) -> int:
        """Stages a part of `version`, or all of it; `plan` goes with the first push. Returns bytes copied."""
        request = _receive_request(version, streams, plan, membership)
        with self._translate("ReceiveWeights"):
            reply = await self._stub.ReceiveWeights(request, timeout=self._timeout_s, metadata=self._metadata)
        return reply.num_bytes

    async def commit_weights(self, version: Version, *, finish_running: bool) -> float:
        """Makes the staged version live; returns the seconds that generation stood still.

        `finish_running`: first the running sequences end; else they go on with the new weights.
        """
        request = rollout_pb2.CommitWeightsRequest(
            version=encode_version(version), finish_running=finish_running
        )
        with self._translate("CommitWeights"):
            # as long as running sequences take: silence is for the caller to judge
            reply = await self._stub.CommitWeights(request, timeout=CEILING_S, metadata=self._metadata)
        return reply.stall_s

    async def rollback_weights(self, version: Version) -> None:
        request = rollout_pb2.RollbackWeightsRequest(version=encode_version(version))
        with self._translate("RollbackWeights"):
            await self._stub.RollbackWeights(request, timeout=self._timeout_s, metadata=self._metadata)

    async def score_tokens(self, sequences: Sequence[Int32]) -> list[Float32]:
        """Of each sequence [T], float32 [T-1]: log-probability of each token but the first, untempered."""
        request = rollout_pb2.ScoreTokensRequest(
            sequences=[ids.astype("<i4", copy=False).tobytes() for ids in sequences]
        )
        with self._translate("ScoreTokens"):
            # it may wait until running sequences leave room: silence is for the caller to judge
            reply = await self._stub.ScoreTokens(request, timeout=CEILING_S, metadata=self._metadata)
            logprobs = decode_tensor(reply.logprobs).astype(np.float32, copy=False)
        ends = np.cumsum([len(ids) - 1 for ids in sequences])
        if logprobs.shape != (ends[-1],):
            raise errors.BadAnswerError(
                f"{self._where('ScoreTokens')}: got log-probabilities of shape {logprobs.shape}, expected "
                f"({ends[-1]},)"
            )
        return np.split(logprobs, ends[:-1])

    async def checksums(self) -> tuple[Version, dict[str, int]]:
        """The live version, and xxh3-64 of each canonical tensor's bytes in the serving dtype."""
        with self._translate("Checksums"):
            reply = await self._stub.Checksums(
                rollout_pb2.ChecksumsRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
            sums = decode_tensor(reply.checksums).tolist()
            return decode_version(reply.version), dict(zip(reply.tensors, sums, strict=True))

    async def progress(self) -> int:
        """Another number for as long as it produces tokens."""
        with self._translate("Progress"):
            reply = await self._stub.Progress(
                types_pb2.ProgressRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
        return reply.count

    async def info(self) -> RolloutInfo:
        with self._translate("Info"):
            reply = await self._stub.Info(
                rollout_pb2.RolloutInfoRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
            return RolloutInfo(
                name=reply.name,
                incarnation=reply.incarnation,
                version=decode_version(reply.version),
                vocab_size=reply.vocab_size,
                max_length=reply.max_length,
                slots=reply.slots,
                dtype=reply.dtype,
                catalogs=tuple(decode_catalog(boxes) for boxes in reply.boxes),
                running=reply.running,
                queued=reply.queued,
                tokens_generated=reply.tokens_generated,
            )


def _receive_request(
    version: Version, streams: Sequence[StreamManifest], plan: Plan | None, membership: Membership
) -> rollout_pb2.ReceiveWeightsRequest:
    return rollout_pb2.ReceiveWeightsRequest(
        version=encode_version(version),
        streams=[encode_stream(stream) for stream in streams],
        plan=None if plan is None else encode_plan(plan),
        membership=encode_membership(membership),
    )


class WorkerClient(_Client):
    """The receiver inside one tensor-parallel rank of an SGLang server."""

    def __init__(self, address: str, timeout_s: float) -> None:
        super().__init__(address, Caller(), timeout_s)
        self._stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(self._channel)

    async def attach(
        self, version: Version, transport: str, deadline_s: float, lora: str
    ) -> tuple[Catalog, str]:
        """`version` names the weights that it has loaded; `lora` is trainer.lora as JSON where adapters alone
        are pushed, "" else. Returns the rank's catalog and its dtype."""
        request = worker_pb2.AttachRequest(
            version=encode_version(version), transport=transport, deadline_s=deadline_s, lora=lora
        )
        with self._translate("Attach"):
            reply = await self._stub.Attach(request, timeout=self._timeout_s)
            return decode_catalog(reply.boxes), reply.dtype

    async def receive(
        self,
        version: Version,
        streams: Sequence[StreamManifest],
        plan: Plan | None,
        membership: Membership,
    ) -> int:
        """As RolloutClient.receive_weights, for one rank. Each stream may take the client's deadline."""
        request = _receive_request(version, streams, plan, membership)
        with self._translate("Receive"):
            reply = await self._stub.Receive(request, timeout=self._timeout_s * (len(streams) + 1))
        return reply.num_bytes

    async def rollback(self, version: Version) -> None:
        request = rollout_pb2.RollbackWeightsRequest(version=encode_version(version))
        with self._translate("Rollback"):
            await self._stub.Rollback(request, timeout=self._timeout_s)

    async def prepare(self, version: Version) -> None:
        """The next call on SGLang's scheduler thread commits it. Raises where it is not staged whole."""
        request = worker_pb2.PrepareRequest(version=encode_version(version))
        with self._translate("Prepare"):
            await self._stub.Prepare(request, timeout=self._timeout_s)

    async def read(self, boxes: Catalog) -> bytes:
        """The live bytes, box after box, each row-major and dense."""
        request = worker_pb2.ReadRequest(boxes=encode_catalog(boxes))
        with self._translate("Read"):
            reply = await self._stub.Read(request, timeout=self._timeout_s)
        return reply.data


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
    shards: tuple[Catalog, ...]  # per rank; those that several keep alike are the same object
    roles: tuple[str, ...]  # that the service holds


class TrainerClient(_Client):
    """`role` is the model's part in the algorithm: actor, critic, reference, reward model.

    Its calls take as long as their work does, or wait for another's: `timeout_s` is the longest silence.
    """

    def __init__(self, address: str, caller: Caller, timeout_s: float = 600.0, role: str = "actor") -> None:
        super().__init__(address, caller, timeout_s)
        self._role = role
        self._stub: trainer_pb2_grpc.TrainerAsyncStub = trainer_pb2_grpc.TrainerStub(self._channel)

    async def progress(self) -> int:
        """Another number for as long as it gets on with its work."""
        with self._translate("Progress"):
            reply = await self._stub.Progress(
                types_pb2.ProgressRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
        return reply.count

    async def _patiently(self, method: Callable[..., Awaitable[T]], request: object) -> T:
        call = method(request, timeout=CEILING_S, metadata=self._metadata)
        return await while_it_progresses(call, self.progress, self._timeout_s)

    async def info(self) -> TrainerInfo:
        with self._translate("Info"):
            request = trainer_pb2.TrainerInfoRequest(role=self._role)
            reply = await self._patiently(self._stub.Info, request)
            shards = [decode_catalog(boxes) for boxes in reply.shards]
            return TrainerInfo(
                model=reply.model,
                world_size=reply.world_size,
                tensor_parallel=reply.tensor_parallel,
                pipeline_parallel=reply.pipeline_parallel,
                context_parallel=reply.context_parallel,
                expert_parallel=reply.expert_parallel,
                data_parallel=reply.data_parallel,
                num_parameters=reply.num_parameters,
                vocab_size=reply.vocab_size,
                tokenizer_digest=reply.tokenizer_digest,
                shards=tuple(shards[i] for i in reply.shard_of_rank),
                roles=tuple(reply.roles),
            )

    async def compute_logprobs(self, segments: Segments, temperature: float | None = None) -> Float32:
        """float32 [T]: log-probability of each token given those before it; 0 for a root's first.

        `temperature` is that of the distribution; None: that of the run's samples.
        """
        requests = []
        for part, _ in split_by_groups(segments, MAX_CHUNK_BYTES // 4):
            requests.append(trainer_pb2.ComputeLogprobsRequest(role=self._role, temperature=temperature))
            put_segments(requests[-1].segments, part)
        with self._translate("ComputeLogprobs"):
            replies = await self._patiently(_collected(self._stub.ComputeLogprobs), iter(requests))
            parts = [decode_tensor(reply.logprobs).astype(np.float32) for reply in replies]
        return np.concatenate(parts)

    async def compute_values(self, segments: Segments) -> Float32:
        """float32 [T]: what the value head says after each token."""
        requests = []
        for part, _ in split_by_groups(segments, MAX_CHUNK_BYTES // 4):
            requests.append(trainer_pb2.ComputeValuesRequest(role=self._role))
            put_segments(requests[-1].segments, part)
        with self._translate("ComputeValues"):
            replies = await self._patiently(_collected(self._stub.ComputeValues), iter(requests))
            parts = [decode_tensor(reply.values).astype(np.float32) for reply in replies]
        return np.concatenate(parts)

    async def forward_backward(self, key: StepKey, batch: Batch) -> Mapping[str, float]:
        """Accumulates gradients of sum(loss_weights * token loss); returns metrics."""
        chunks = list(encode_forward_backward(key, batch))
        with self._translate("ForwardBackward"):
            reply = await self._patiently(self._stub.ForwardBackward, iter(chunks))
        return dict(reply.metrics)

    async def optim_step(self, key: StepKey, learning_rate: float) -> Mapping[str, float]:
        request = trainer_pb2.OptimStepRequest(key=encode_step_key(key), learning_rate=learning_rate)
        with self._translate("OptimStep"):
            reply = await self._patiently(self._stub.OptimStep, request)
        return dict(reply.metrics)

    async def publish_weights(
        self,
        version: Version,
        dtype: str,
        members: Mapping[str, Membership],
        new_plans: Sequence[Plan],
        part: int,
    ) -> Published:
        """Sends round `part` of the current weights, cast to `dtype`, to the members of each plan, by its id.

        Returns once readers may read; a transport that both ends enter goes on in the background.
        """
        request = trainer_pb2.PublishWeightsRequest(
            role=self._role,
            version=encode_version(version),
            dtype=dtype,
            plan_ids=list(members),
            members=[encode_membership(membership) for membership in members.values()],
            plans=[encode_plan(plan) for plan in new_plans],
            part=part,
        )
        with self._translate("PublishWeights"):
            reply = await self._patiently(self._stub.PublishWeights, request)
            return decode_published(reply)

    async def save_checkpoint(self, path: Path) -> None:
        """Begins to write a folder, in place of one of that name; the state is that of now."""
        request = trainer_pb2.SaveCheckpointRequest(role=self._role, path=str(path))
        with self._translate("SaveCheckpoint"):
            await self._patiently(self._stub.SaveCheckpoint, request)

    async def wait_checkpoint(self, path: Path) -> Written:
        """Returns once the folder is written. Raises CheckpointError where it cannot be."""
        request = trainer_pb2.WaitCheckpointRequest(role=self._role, path=str(path))
        with self._translate("WaitCheckpoint"):
            reply = await self._patiently(self._stub.WaitCheckpoint, request)
        return Written(reply.num_bytes, reply.seconds)

    async def load_checkpoint(self, path: Path | None) -> None:
        """None: goes back to what the model was when the service started."""
        request = trainer_pb2.LoadCheckpointRequest(role=self._role, path=str(path or ""))
        with self._translate("LoadCheckpoint"):
            await self._patiently(self._stub.LoadCheckpoint, request)

    async def export_hf(self, path: Path) -> int:
        request = trainer_pb2.ExportHFRequest(role=self._role, path=str(path))
        with self._translate("ExportHF"):
            reply = await self._patiently(self._stub.ExportHF, request)
        return reply.num_bytes

    async def load_hf(self, path: Path) -> None:
        """Takes the weights of a Hugging Face folder, such as another role has exported."""
        request = trainer_pb2.LoadHFRequest(role=self._role, path=str(path))
        with self._translate("LoadHF"):
            await self._patiently(self._stub.LoadHF, request)

    async def offload(self) -> int:
        """Moves the model to host memory until a call needs it; returns the bytes freed on all ranks."""
        request = trainer_pb2.OffloadRequest(role=self._role)
        with self._translate("Offload"):
            reply = await self._patiently(self._stub.Offload, request)
        return reply.num_bytes


@dataclass(frozen=True, slots=True)
class RewardInfo:
    graders: tuple[str, ...]
    max_queued: int  # responses that it holds at once, over all calls; 0: it does not say


def _collected(method: Callable[..., AsyncIterable[T]]) -> Callable[..., Awaitable[list[T]]]:
    """The method, with a list of what it streams."""

    async def collect(*args: object, **kwargs: object) -> list[T]:
        return [reply async for reply in method(*args, **kwargs)]

    return collect


class RewardClient(_Client):
    def __init__(self, address: str, caller: Caller, timeout_s: float = 600.0) -> None:
        super().__init__(address, caller, timeout_s)
        self._stub: reward_pb2_grpc.RewardAsyncStub = reward_pb2_grpc.RewardStub(self._channel)

    async def verdicts(
        self, items: Sequence[ScoreItem], deadline_s: float = CEILING_S
    ) -> AsyncGenerator[list[Verdict], None]:
        """Verdicts as they come, those of one message together; none on other items than these. Raises
        ServiceUnavailableError if the service is silent for the client's timeout, and BadAnswerError if it
        keeps sending beyond MAX_MESSAGE_BYTES."""
        samples = {str(item.id): item.id for item in items}
        size = 0
        request = reward_pb2.ScoreRequest()
        for item in items:
            put_score_item(request.items.add(), item)
        with self._translate("Score"):
            call = self._stub.Score(request, timeout=deadline_s, metadata=self._metadata)
            try:
                while (reply := await self._next(call, "Score")) is not None:
                    size += reply.ByteSize()
                    if size > MAX_MESSAGE_BYTES:
                        raise errors.BadAnswerError(
                            f"Score at {self.address}: got more than {MAX_MESSAGE_BYTES:,} bytes of verdicts "
                            f"on {len(items)} items, expected less"
                        )
                    yield [
                        decode_verdict(verdict, sample)
                        for verdict in reply.verdicts
                        if (sample := samples.get(verdict.id))
                    ]
            finally:
                call.cancel()

    async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        """All verdicts, in the order of their completion, within the client's timeout."""
        async with aclosing(self.verdicts(items, self._timeout_s)) as stream:
            return [verdict async for some in stream for verdict in some]

    async def execute(self, source: str, stdin: bytes, limits: Limits) -> Execution:
        """Runs a Python program in a sandbox. Raises UserError where the service has none, SandboxError where
        it cannot be set up."""
        request = encode_execute(source, stdin, limits)
        with self._translate("Execute"):
            reply = await self._stub.Execute(request, timeout=self._timeout_s, metadata=self._metadata)
            return decode_execution(reply)

    async def describe(self) -> RewardInfo:
        with self._translate("Describe"):
            reply = await self._stub.Describe(
                reward_pb2.DescribeRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
        return RewardInfo(tuple(reply.graders), reply.max_queued)

    async def reload(self) -> None:
        """Raises UserError where a grader of the user's cannot be loaded; the old ones then stay."""
        with self._translate("Reload"):
            await self._stub.Reload(
                reward_pb2.ReloadRequest(), timeout=self._timeout_s, metadata=self._metadata
            )


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


class CoordinatorClient(_Client):
    def __init__(self, address: str, caller: Caller, timeout_s: float = 10.0) -> None:
        super().__init__(address, caller, timeout_s)
        self._stub: coordinator_pb2_grpc.CoordinatorAsyncStub = coordinator_pb2_grpc.CoordinatorStub(
            self._channel
        )

    async def register(self, entry: ServiceEntry) -> tuple[float, int]:
        """Returns the seconds that the lease lasts, and the coordinator's epoch."""
        request = coordinator_pb2.RegisterRequest(service=encode_service(entry))
        with self._translate("Register"):
            reply = await self._stub.Register(request, timeout=self._timeout_s, metadata=self._metadata)
        return reply.lease_s, reply.epoch

    async def heartbeat(self, entry: ServiceEntry) -> tuple[bool, int]:
        """Whether the coordinator knows this service, which else registers again, and its epoch."""
        request = coordinator_pb2.HeartbeatRequest(service=encode_service(entry))
        with self._translate("Heartbeat"):
            reply = await self._stub.Heartbeat(request, timeout=self._timeout_s, metadata=self._metadata)
        return reply.known, reply.epoch

    async def deregister(self, entry: ServiceEntry) -> None:
        request = coordinator_pb2.DeregisterRequest(service=encode_service(entry))
        with self._translate("Deregister"):
            await self._stub.Deregister(request, timeout=self._timeout_s, metadata=self._metadata)

    async def status(self, seen: int = 0) -> RunStatus:
        """Answers once the revision is not `seen` any more, at the latest shortly before the deadline."""
        request = coordinator_pb2.StatusRequest(seen=seen)
        with self._translate("Status"):
            reply = await self._stub.Status(request, timeout=self._timeout_s, metadata=self._metadata)
        return RunStatus(
            run=reply.run,
            state=reply.state,
            step=reply.step,
            num_steps=reply.num_steps,
            version=reply.version,
            error=reply.error,
            services=tuple(decode_service(service) for service in reply.services),
            metrics=dict(reply.metrics),
            revision=reply.revision,
            servers=tuple(decode_server_health(server) for server in reply.servers),
        )

    async def add_server(self, server: ExternalServer) -> None:
        """Raises UserError if it may not be registered, or does not answer properly."""
        request = coordinator_pb2.AddServerRequest(server=encode_server(server))
        timeout_s = 2 * server.timeout_s + self._timeout_s  # a connection, and a probe
        with self._translate("AddServer"):
            await self._stub.AddServer(request, timeout=timeout_s, metadata=self._metadata)

    async def remove_server(self, kind: ServerKind, name: str, url: str = "") -> int:
        """How many there were; without `url` all of that name go."""
        request = coordinator_pb2.RemoveServerRequest(kind=kind, name=name, url=url)
        with self._translate("RemoveServer"):
            reply = await self._stub.RemoveServer(request, timeout=self._timeout_s, metadata=self._metadata)
        return reply.removed

    async def pause_run(self) -> None:
        """The run stops between two steps."""
        with self._translate("PauseRun"):
            await self._stub.PauseRun(
                coordinator_pb2.PauseRunRequest(), timeout=self._timeout_s, metadata=self._metadata
            )

    async def resume_run(self) -> None:
        with self._translate("ResumeRun"):
            await self._stub.ResumeRun(
                coordinator_pb2.ResumeRunRequest(), timeout=self._timeout_s, metadata=self._metadata
            )

    async def stop_run(self) -> None:
        """The run ends after the step in progress, as if it had been the last."""
        with self._translate("StopRun"):
            await self._stub.StopRun(
                coordinator_pb2.StopRunRequest(), timeout=self._timeout_s, metadata=self._metadata
            )

    async def checkpoint(self, timeout_s: float = CEILING_S) -> str:
        """Saves after the step in progress; returns the checkpoint's path."""
        with self._translate("Checkpoint"):
            reply = await self._stub.Checkpoint(
                coordinator_pb2.CheckpointRequest(), timeout=timeout_s, metadata=self._metadata
            )
        return reply.path
