"""A gRPC reward server built from the .proto files alone: 1 for an answer as even or odd as the ground truth,
with a reason; only for those who know the token, its first argument."""

import sys
from concurrent.futures import ThreadPoolExecutor

import grpc

from atoll.wire.v1 import reward_pb2, reward_pb2_grpc


class Parity(reward_pb2_grpc.RewardServicer):
    def __init__(self, token: str) -> None:
        self._token = token

    def Describe(self, request, context):  # noqa: N802
        self._check(context)
        return reward_pb2.DescribeReply(graders=["parity"])

    def Score(self, request, context):  # noqa: N802
        self._check(context)
        yield reward_pb2.ScoreReply(verdicts=[verdict(item) for item in request.items])

    def _check(self, context) -> None:
        if ("authorization", f"Bearer {self._token}") not in context.invocation_metadata():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")


def verdict(item: reward_pb2.ScoreItem) -> reward_pb2.Verdict:
    if not item.response.isdecimal():
        value, reason = 0.0, f"no number: {item.response!r}"
    elif (int(item.response) - int(item.ground_truth)) % 2:
        value, reason = 0.0, "wrong"
    else:
        value, reason = 1.0, "right"
    graded = reward_pb2.Graded(value=value, components={"parity": value}, reasons={"parity": reason})
    return reward_pb2.Verdict(id=item.id, graded=graded)


if __name__ == "__main__":
    server = grpc.server(ThreadPoolExecutor(8))
    reward_pb2_grpc.add_RewardServicer_to_server(Parity(sys.argv[1]), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    server.wait_for_termination()
