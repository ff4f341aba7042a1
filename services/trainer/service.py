"""The trainer servicer: package atoll.v1's Trainer, served by rank 0. Free of torch.

What crosses it stays bytes: rank 0 gives each call's requests to all ranks as they came (rank.py), and passes
a reply on as it is. So a method is declared in proto/ and answered in rank.py, and has no code here.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias

import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from atoll.runtime.errors import AtollError, ServiceUnavailableError, UserError
from atoll.trainer import progress
from atoll.trainer.folders import AllowedFolders
from atoll.wire.codec.trainer import join_trainer_infos
from atoll.wire.types import CheckpointWrite
from atoll.wire.v1 import trainer_pb2 as pb
from atoll.wire.v1 import types_pb2

_log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Trainer"]

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in the stubs alone


class Leader(Protocol):
    """Rank 0 (rank.Rank), as it is led from here: all but `writing` in the compute thread."""

    def lead(self, method: str, requests: Sequence[bytes], *, ask_all: bool) -> list[list[bytes]]:
        """Runs a command on every rank; returns this rank's reply, and with `ask_all` the others', too."""
        ...

    def writing(self, role: str, path: str) -> "Future[CheckpointWrite]": ...

    def dismiss(self) -> None: ...

    def close(self) -> None: ...


class TrainerService:
    """Runs one command at a time on all ranks. Every mutating call is safe to repeat."""

    def __init__(self, thread: ThreadPoolExecutor, rank: Leader, folders: AllowedFolders) -> None:
        """`thread`: the one in which `rank` was built."""
        self._thread = thread
        self._folders = folders
        self._rank = rank
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._is_broken = False  # known to the compute thread at once

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers = {method.name: self._handler(method) for method in SERVICE.methods}
        # beside the commands, of which one may take hours
        handlers["Progress"] = grpc.unary_unary_rpc_method_handler(
            self._progress, types_pb2.ProgressRequest.FromString, types_pb2.ProgressReply.SerializeToString
        )
        handlers["WaitCheckpoint"] = grpc.unary_unary_rpc_method_handler(
            self._wait_checkpoint,
            pb.WaitCheckpointRequest.FromString,
            pb.WaitCheckpointReply.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))

    async def wait_for_failure(self) -> None:
        await self._failed

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    async def run(self, method: str, requests: Sequence[bytes]) -> list[bytes]:
        """Runs a command on all ranks: one request, or a stream's; returns one reply, or a stream's."""
        if not requests:
            raise UserError("the stream of chunks is empty: send at least one")
        if message := _NAMES_A_FOLDER.get(method):
            path = message.FromString(requests[0]).path
            if path:
                self._folders.check(path)
        return await self._loop.run_in_executor(self._thread, self._lead, method, requests)

    def _handler(self, method: MethodDescriptor) -> Handler:
        """Without (de)serializers: the messages are bytes."""

        async def unary(request: bytes, context: Context) -> bytes:
            [reply] = await self.run(method.name, [request])
            return reply

        async def client_streaming(chunks: AsyncIterator[bytes], context: Context) -> bytes:
            [reply] = await self.run(method.name, [chunk async for chunk in chunks])
            return reply

        async def streaming(chunks: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
            for reply in await self.run(method.name, [chunk async for chunk in chunks]):
                yield reply

        if not method.client_streaming:
            return grpc.unary_unary_rpc_method_handler(unary)
        if not method.server_streaming:
            return grpc.stream_unary_rpc_method_handler(client_streaming)
        return grpc.stream_stream_rpc_method_handler(streaming)

    async def _progress(
        self, request: types_pb2.ProgressRequest, context: Context
    ) -> types_pb2.ProgressReply:
        """Ranks wait for each other: one speaks for all."""
        return types_pb2.ProgressReply(count=progress.num_done())

    async def _wait_checkpoint(
        self, request: pb.WaitCheckpointRequest, context: Context
    ) -> pb.WaitCheckpointReply:
        """This rank knows when all have written."""
        writing = asyncio.wrap_future(self._rank.writing(request.role, request.path))
        written = await asyncio.shield(writing)  # cancelling a caller ends only its own wait
        return pb.WaitCheckpointReply(num_bytes=written.num_bytes, seconds=written.seconds)

    def _lead(self, method: str, requests: Sequence[bytes]) -> list[bytes]:
        """A rank that failed may hold half an update, so the whole fleet ends, also if the caller has left
        by then."""
        if self._is_broken:
            raise ServiceUnavailableError("this trainer is shutting down: an earlier call failed midway")
        merge = _MERGES.get(method)
        try:
            replies = self._rank.lead(method, requests, ask_all=merge is not None)
        except AtollError:
            raise
        except Exception as error:
            _log.critical("%s failed midway: this trainer exits, restart it from a checkpoint", method)
            self._is_broken = True
            self._loop.call_soon_threadsafe(self._fail, error)
            raise ServiceUnavailableError(f"{method} failed midway, this trainer exits: {error}") from error
        if merge is None:
            return replies[0]
        return [merge([reply for [reply] in replies]).SerializeToString()]

    def _fail(self, error: Exception) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    def _close(self) -> None:
        if not self._is_broken:  # else the others wait in what has failed, until the connections close
            self._rank.dismiss()
        self._rank.close()


def _merge_info(replies: Sequence[bytes]) -> Message:
    return join_trainer_infos([pb.TrainerInfoReply.FromString(reply) for reply in replies])


def _merge_published(replies: Sequence[bytes]) -> Message:
    parts = [pb.PublishWeightsReply.FromString(reply) for reply in replies]
    return pb.PublishWeightsReply(
        streams=[stream for part in parts for stream in part.streams],
        num_bytes=sum(part.num_bytes for part in parts),
        last=all(part.last for part in parts),
    )


def _merge_offloaded(replies: Sequence[bytes]) -> Message:
    return pb.OffloadReply(num_bytes=sum(pb.OffloadReply.FromString(reply).num_bytes for reply in replies))


# Methods of which every rank's reply is read. Of all others rank 0's is the answer, and the other ranks send
# none.
_MERGES: Mapping[str, Callable[[Sequence[bytes]], Message]] = {
    "Info": _merge_info,
    "PublishWeights": _merge_published,
    "Offload": _merge_offloaded,
}

_NAMES_A_FOLDER: Mapping[
    str, type[pb.SaveCheckpointRequest | pb.LoadCheckpointRequest | pb.ExportHFRequest | pb.LoadHFRequest]
] = {
    "SaveCheckpoint": pb.SaveCheckpointRequest,
    "LoadCheckpoint": pb.LoadCheckpointRequest,
    "ExportHF": pb.ExportHFRequest,
    "LoadHF": pb.LoadHFRequest,
}
