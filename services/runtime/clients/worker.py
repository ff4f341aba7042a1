"""The client of the receiver inside one tensor-parallel rank of an SGLang server."""

from atoll.runtime.clients.base import Caller, Client
from atoll.wire.codec.values import encode_version
from atoll.wire.codec.weights import decode_shard_layout, encode_attach, encode_push_part, encode_shard_layout
from atoll.wire.types import PushPart, ReceiverSetup, ShardLayout, Version
from atoll.wire.v1 import rollout_pb2, worker_pb2, worker_pb2_grpc


class WorkerClient(Client):
    def __init__(self, address: str, timeout_s: float) -> None:
        super().__init__(address, Caller(), timeout_s)
        self._stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(self._channel)

    async def attach(self, version: Version, setup: ReceiverSetup) -> tuple[ShardLayout, str]:
        """`version` names the weights that it has loaded. Returns the rank's shard layout and its dtype."""
        return await self._query(
            self._stub.Attach,
            encode_attach(version, setup),
            lambda reply: (decode_shard_layout(reply.shard_layout), reply.dtype),
        )

    async def receive(self, part: PushPart) -> int:
        """As RolloutClient.receive_weights, for one rank. Each stream may take the client's deadline."""
        timeout_s = self._timeout_s * (len(part.streams) + 1)
        return (await self._call(self._stub.Receive, encode_push_part(part), timeout_s)).num_bytes

    async def rollback(self, version: Version) -> None:
        request = rollout_pb2.RollbackWeightsRequest(version=encode_version(version))
        await self._call(self._stub.Rollback, request)

    async def release(self) -> None:
        await self._call(self._stub.Release, rollout_pb2.ReleaseRequest())

    async def restore(self) -> None:
        request = rollout_pb2.RestoreRequest(memory=rollout_pb2.ENGINE_MEMORY_WEIGHTS)
        await self._call(self._stub.Restore, request)

    async def prepare(self, version: Version) -> None:
        """The next call on SGLang's scheduler thread commits it. Raises if it is not staged whole."""
        await self._call(self._stub.Prepare, worker_pb2.PrepareRequest(version=encode_version(version)))

    async def read(self, boxes: ShardLayout) -> bytes:
        """The live bytes, box after box, each row-major and dense."""
        return (
            await self._call(self._stub.Read, worker_pb2.ReadRequest(boxes=encode_shard_layout(boxes)))
        ).data
