"""The reward service's door: Score and Describe of package atoll.v1."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc.aio

from services.config.schema import GraderConfig
from services.reward.grading import GradingProcess, GradingStoppedError
from services.reward.score import WeightedGrader, score
from services.runtime.process import ServiceContext
from services.wire import codec
from services.wire.v1 import reward_pb2, reward_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class RewardService(reward_pb2_grpc.RewardServicer):
    """Grades one request after the other, in a process of its own, so that this one always answers."""

    def __init__(self, graders: Sequence[GraderConfig], timeout_s: float) -> None:
        """`timeout_s` bounds the grading of one request. Raises UserError where a grader cannot be loaded."""
        self._names = [grader.name for grader in graders]
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grading")
        # started by the thread that asks it: the process dies with that thread
        self._process = self._thread.submit(GradingProcess, graders, answer).result()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def build(cls, context: ServiceContext) -> Self:
        return cls(context.config.reward.graders, context.config.reward.timeout_s)

    def add_to(self, server: grpc.aio.Server) -> None:
        reward_pb2_grpc.add_RewardServicer_to_server(self, server)

    async def Score(
        self, request: reward_pb2.ScoreRequest, context: Context
    ) -> AsyncIterator[reward_pb2.ScoreReply]:
        """A response on which a grader hangs or crashes costs its own verdict, no other's."""
        try:
            yield await self._grade(request)
        except GradingStoppedError as stopped:
            if len(request.items) == 1:
                yield self._ungraded(request.items[0], stopped)
            else:
                for item in request.items:
                    async for reply in self.Score(reward_pb2.ScoreRequest(items=[item]), context):
                        yield reply

    async def Describe(
        self, request: reward_pb2.DescribeRequest, context: Context
    ) -> reward_pb2.DescribeReply:
        return reward_pb2.DescribeReply(graders=self._names)

    async def failed(self) -> None:
        await self._failed

    async def close(self) -> None:
        self._process.kill()  # a grader that hangs must not hold up the end
        await asyncio.get_running_loop().run_in_executor(self._thread, self._process.close)
        self._thread.shutdown()

    async def _grade(self, request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreReply:
        try:
            reply = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._process.ask, request.SerializeToString(), self._timeout_s
            )
        except GradingStoppedError:
            raise
        except Exception as error:  # there is no grading process any more
            if not self._failed.done():
                self._failed.set_exception(error)
            raise
        return reward_pb2.ScoreReply.FromString(reply)

    def _ungraded(self, item: reward_pb2.ScoreItem, stopped: GradingStoppedError) -> reward_pb2.ScoreReply:
        error = reward_pb2.GradingError(grader=", ".join(self._names), cause=str(stopped), retryable=True)
        return reward_pb2.ScoreReply(verdicts=[reward_pb2.Verdict(id=item.id, error=error)])


def answer(request: bytes, graders: Sequence[WeightedGrader]) -> bytes:
    """A serialized ScoreRequest to a serialized ScoreReply; runs in the grading process."""
    items = [codec.decode_score_item(item) for item in reward_pb2.ScoreRequest.FromString(request).items]
    verdicts = [codec.encode_verdict(score(item, graders)) for item in items]
    return reward_pb2.ScoreReply(verdicts=verdicts).SerializeToString()
