"""`atoll health`: asks a service whether it serves. It imports little, since containers run it often."""

import argparse

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from atoll.runtime.errors import ServiceUnavailableError

DEFAULT_ADDRESS = "127.0.0.1:7000"  # of the only service in a container
TIMEOUT_S = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "address",
        nargs="?",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help="address of any service of a run, which needs no token; default: %(default)s",
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises ServiceUnavailableError if the service does not serve."""
    address: str = arguments.address
    # a proxy from the environment might answer in the service's place
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise ServiceUnavailableError(
                f"{address} does not answer: {error.code().name}: {error.details()}"
            ) from None
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
        raise ServiceUnavailableError(f"{address} is {status}, expected SERVING")
    print(f"{address} is SERVING")
    return 0
