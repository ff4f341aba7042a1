"""Stand-ins for a run's other services, all in this process: real gRPC, nothing computed.

Replicas finish the samples that they hold one by one, the oldest first, at a rate. What they answer is
encoded beforehand, except for ids and versions. They linger as the rollout service does.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import grpc
import grpc.aio
import numpy as np

from atoll.rollout.generate import MAX_LINGER_S, linger_for
from atoll.runtime.clients.base import MAX_MESSAGE_BYTES, Caller
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.errors import AtollError, ServiceUnavailableError
from atoll.runtime.process import new_incarnation
from atoll.wire.codec.weights import encode_shard_layout
from atoll.wire.types import BOX, ServiceEntry, ShardLayout
from atoll.wire.v1 import reward_pb2, rollout_pb2, trainer_pb2, types_pb2

# Generic in the stubs alone, so these are strings at run time.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Method: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Handler: TypeAlias = Callable[[Any, Context], Any]

INCARNATION = new_incarnation()  # of all services
TICK_S = 0.01  # between two looks at what is to finish by now
WEIGHTS = ShardLayout(("w",), np.array([(0, 0, 1, 0, 1, 0, 0, 1)], BOX))  # one number
TEXT_PER_TOKEN = "word"
TOKEN = 3  # in any vocabulary
REWARDS = [reward_pb2.Graded(value=value, components={"exact_match": value}) for value in (0.0, 1.0)]


@cache
def frame(num_samples: int, num_tokens: int) -> bytes:
    """The columns of atoll.v1.Trajectories that are alike in all messages: tokens, texts, spans."""
    ones, counts = [1] * num_samples, list(range(num_samples + 1))
    tokens = np.full(num_samples * num_tokens, TOKEN, "<i4")
    return types_pb2.Trajectories(
        finish_reason=[types_pb2.FINISH_REASON_LENGTH] * num_samples,
        text=[TEXT_PER_TOKEN * num_tokens] * num_samples,
        origin=[0] * num_samples,
        started=ones,
        finished=ones,
        node_offsets=counts,
        node_parent=[-1] * num_samples,
        token_offsets=[count * num_tokens for count in counts],
        token_ids=tokens.tobytes(),
        loss_mask=np.ones(len(tokens), np.bool_).tobytes(),
        logprobs=np.full(len(tokens), -0.5, "<f4").tobytes(),
        span_offsets=counts,
        span_version=[0] * num_samples,
        span_start=[0] * num_samples,
        span_end=[num_tokens] * num_samples,
    ).SerializeToString()


def reply(samples: bytes) -> bytes:
    """A GenerateReply: its one field, whatever that holds, is the samples' bytes."""
    length, prefix = len(samples), bytearray([1 << 3 | 2])
    while length >= 128:
        prefix.append(length & 127 | 128)
        length >>= 7
    return bytes([*prefix, length]) + samples


@dataclass(eq=False, slots=True)
class Call:
    """A Generate call: what it has still to answer, and what has finished since its last message."""

    missing: int
    linger_s: float
    finished: list[tuple[types_pb2.GroupId, int, int]] = field(default_factory=list)  # group, index, attempt
    outbox: asyncio.Queue[list[tuple[types_pb2.GroupId, int, int]]] = field(default_factory=asyncio.Queue)

    def finish(self, sample: tuple[types_pb2.GroupId, int, int]) -> None:
        """Lingers as the rollout service does."""
        if not self.finished:
            asyncio.get_running_loop().call_later(self.linger_s, self.send)
        self.finished.append(sample)
        if len(self.finished) == self.missing:
            self.send()

    def send(self) -> None:
        if self.finished:
            self.missing -= len(self.finished)
            self.outbox.put_nowait(self.finished)
            self.linger_s = min(2 * self.linger_s, MAX_LINGER_S)
            self.finished = []


class Replica:
    def __init__(self, fleet: "Fleet", name: str) -> None:
        self.name = name
        self._fleet = fleet
        self._version = types_pb2.Version()
        self._origin = types_pb2.Origin(replica=name, incarnation=INCARNATION)
        self._in_hand: deque[tuple[Call, tuple[types_pb2.GroupId, int, int]]] = deque()

    def handlers(self) -> dict[str, Method]:
        return {
            "Info": unary(self.info),
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.generate, request_deserializer=rollout_pb2.GenerateRequest.FromString
            ),
            "Abort": unary(done),
            "ReceiveWeights": unary(done),
            "CommitWeights": unary(self.commit, rollout_pb2.CommitWeightsRequest.FromString),
            "RollbackWeights": unary(done),
        }

    def finish_one(self) -> bool:
        """False if it has nothing in hand."""
        if not self._in_hand:
            return False
        call, sample = self._in_hand.popleft()
        call.finish(sample)
        return True

    async def generate(self, request: rollout_pb2.GenerateRequest, _: Context) -> AsyncIterator[bytes]:
        num_tokens = min(self._fleet.num_tokens, request.turns[0].sampling.max_new_tokens)
        samples = [
            (asked.group, index, attempt)
            for asked in request.turns
            for index, attempt in zip(asked.index, asked.attempt, strict=True)
        ]
        call = Call(len(samples), self._fleet.linger_s)
        if num_tokens < self._fleet.num_tokens:  # a probe
            for sample in samples:
                call.finish(sample)
        else:
            self._in_hand.extend((call, sample) for sample in samples)
        expected = len(samples)
        while expected:
            finished = await call.outbox.get()
            expected -= len(finished)
            yield reply(self._ids(finished) + frame(len(finished), num_tokens))

    def _ids(self, finished: list[tuple[types_pb2.GroupId, int, int]]) -> bytes:
        """The columns that differ from message to message; protobuf merges them with those of `frame`."""
        groups = {id(group): group for group, _, _ in finished}
        numbers = {key: number for number, key in enumerate(groups)}
        return types_pb2.Trajectories(
            groups=groups.values(),
            group=[numbers[id(group)] for group, _, _ in finished],
            index=[index for _, index, _ in finished],
            attempt=[attempt for _, _, attempt in finished],
            origins=[self._origin],
            versions=[self._version],
        ).SerializeToString()

    async def commit(self, request: rollout_pb2.CommitWeightsRequest, _: Context) -> bytes:
        self._version = request.version
        return rollout_pb2.CommitWeightsReply().SerializeToString()

    async def info(self, request: bytes, _: Context) -> bytes:
        return rollout_pb2.RolloutInfoReply(
            name=self.name,
            incarnation=INCARNATION,
            version=self._version,
            vocab_size=self._fleet.vocab_size,
            max_length=1 << 20,
            slots=self._fleet.slots,
            dtype="float32",
            shard_layouts=[encode_shard_layout(WEIGHTS)],
        ).SerializeToString()


def reward_handlers() -> dict[str, Method]:
    async def score(request: reward_pb2.ScoreRequest, _: Context) -> AsyncIterator[bytes]:
        yield reward_pb2.ScoreReply(
            verdicts=[
                reward_pb2.Verdict(id=item.id, graded=REWARDS[number % 2])
                for number, item in enumerate(request.items)
            ]
        ).SerializeToString()

    return {
        "Describe": unary(done),
        "Score": grpc.unary_stream_rpc_method_handler(
            score, request_deserializer=reward_pb2.ScoreRequest.FromString
        ),
    }


def trainer_handlers(tokenizer_digest: str) -> dict[str, Method]:
    info = trainer_pb2.TrainerInfoReply(
        tokenizer_digest=tokenizer_digest,
        shard_layouts=[encode_shard_layout(WEIGHTS)],
        shard_layout_of_rank=[0],
        roles=["actor"],
        world_size=1,
    ).SerializeToString()
    published = trainer_pb2.PublishWeightsReply(last=True).SerializeToString()

    async def forward_backward(chunks: AsyncIterator[bytes], _: Context) -> bytes:
        async for _chunk in chunks:
            pass
        return trainer_pb2.ForwardBackwardReply(metrics={"actor/pg_loss": 0.0}).SerializeToString()

    return {
        "Info": unary(answering(info)),
        "ForwardBackward": grpc.stream_unary_rpc_method_handler(forward_backward),
        "PublishWeights": unary(answering(published)),
        **dict.fromkeys(("OptimStep", "SaveCheckpoint", "WaitCheckpoint"), unary(done)),
    }


def answering(answer: bytes) -> Handler:
    async def handler(request: Any, _: Context) -> bytes:
        return answer

    return handler


done = answering(b"")  # a message whose fields all have their default


def unary(handler: Handler, parse: Callable[[bytes], Any] | None = None) -> Method:
    return grpc.unary_unary_rpc_method_handler(handler, request_deserializer=parse)


class StandIns:
    """Serves stand-ins, and holds their leases at the coordinator."""

    def __init__(self, coordinator: str, token: str) -> None:
        self._client = CoordinatorClient(coordinator, Caller(token=token))
        self._servers: list[grpc.aio.Server] = []

    async def listen(self, service: str, handlers: dict[str, Method]) -> str:
        """Returns its address."""
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ]
        )
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(f"atoll.v1.{service}", handlers)]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._servers.append(server)
        return f"127.0.0.1:{port}"

    async def serve(self, service: str, role: str, name: str, handlers: dict[str, Method]) -> None:
        """Until it is cancelled."""
        entry = ServiceEntry(role, name, INCARNATION, await self.listen(service, handlers))
        lease_s, _ = await self._client.register(entry)
        while True:
            await asyncio.sleep(lease_s / 3)
            with suppress(ServiceUnavailableError):  # the coordinator is ending
                if not await self._client.heartbeat(entry):
                    raise AtollError(
                        f"{name} lost its lease: this machine cannot drive the load; lower --rate"
                    )

    async def close(self) -> None:
        await asyncio.gather(*(server.stop(None) for server in self._servers))
        await self._client.close()


class Fleet:
    """All services of a run that has no agents."""

    def __init__(
        self, coordinator: str, token: str, *, rate: float, slots: int, num_tokens: int, vocab_size: int
    ) -> None:
        """`rate`: samples that all replicas together finish per second."""
        self.slots = slots
        self.num_tokens = num_tokens
        self.vocab_size = vocab_size
        self.num_finished = 0
        self.linger_s = 0.0
        self._stand_ins = StandIns(coordinator, token)
        self._rate = rate
        self._replicas: list[Replica] = []

    async def run(self, num_replicas: int, num_rewards: int, tokenizer_digest: str) -> None:
        """Until it is cancelled."""
        self._replicas = [Replica(self, f"rollout-{i}") for i in range(num_replicas)]
        self.linger_s = linger_for(num_replicas)
        serve = self._stand_ins.serve
        try:
            async with asyncio.TaskGroup() as tasks:
                start = tasks.create_task
                start(serve("Trainer", "actor", "actor-0", trainer_handlers(tokenizer_digest)))
                for i in range(num_rewards):
                    start(serve("Reward", "reward", f"reward-{i}", reward_handlers()))
                for replica in self._replicas:
                    start(serve("Rollout", "rollout", replica.name, replica.handlers()))
                start(self._finish())
        finally:
            await self._stand_ins.close()

    async def _finish(self) -> None:
        """Consumes what replicas hold, at the rate; what could not finish, as none held any, is forgone."""
        number, due, before = 0, 0.0, time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            due, before = due + (now - before) * self._rate, now
            idle = 0
            while due >= 1 and idle < len(self._replicas):
                number = (number + 1) % len(self._replicas)
                if self._replicas[number].finish_one():
                    self.num_finished += 1
                    due, idle = due - 1, 0
                else:
                    idle += 1
            due = min(due, 1.0)
