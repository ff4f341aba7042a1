"""A reward server over gRPC: 1 for a response whose last number is the right one. See README.md."""

import os
import re
import secrets
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import reward_pb2
import reward_pb2_grpc

TOKEN = os.environ.get("REWARD_TOKEN", "")  # none: open to anyone who reaches the port


class Reward(reward_pb2_grpc.RewardServicer):
    def Score(self, request, context):
        """Streams verdicts as they are ready, each with the id of its item; their order is free."""
        authorize(context)
        for item in request.items:
            yield reward_pb2.ScoreReply(verdicts=[reward_pb2.Verdict(id=item.id, **grade(item))])

    def Describe(self, request, context):
        authorize(context)
        return reward_pb2.DescribeReply(graders=["last_number"])


def authorize(context):
    given = dict(context.invocation_metadata()).get("authorization", "")
    if TOKEN and not secrets.compare_digest(given.encode(), f"Bearer {TOKEN}".encode()):
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "expected the bearer token of REWARD_TOKEN")


def grade(item):
    """Either a reward, or why there is none: such an item is dropped and counted, a 0 is trained on."""
    try:
        expected = float(item.ground_truth)
    except ValueError:
        cause = f"ground truth {item.ground_truth!r} is not a number"
        return {"error": reward_pb2.GradingError(grader="last_number", cause=cause, retryable=False)}
    numbers = re.findall(r"-?\d+(?:\.\d+)?", item.response)
    value = float(bool(numbers) and float(numbers[-1]) == expected)
    reasons = {} if numbers else {"last_number": "no number"}
    return {"graded": reward_pb2.Graded(value=value, components={"last_number": value}, reasons=reasons)}


if __name__ == "__main__":
    server = grpc.server(ThreadPoolExecutor(max_workers=16))
    reward_pb2_grpc.add_RewardServicer_to_server(Reward(), server)
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    server.start()
    server.wait_for_termination()
