"""Stands in for a service process: `fake_service.py BEHAVIOUR NAME [COORDINATOR] --ready-fd N`."""

import argparse
import asyncio
import os
import signal
import sys
from functools import partial

from atoll.config.load import access_token
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.process import announce
from atoll.runtime.server import Server
from atoll.wire.types import ServiceEntry
from atoll.wire.v1 import coordinator_pb2, coordinator_pb2_grpc


class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """Answers Status once `expected` services have registered; ends by StopRun, or not at all."""

    def __init__(self, expected: int, stubborn: bool, state: str) -> None:
        self.stopped = asyncio.Event()
        self._expected = expected
        self._stubborn = stubborn
        self._state = state
        self._complete = asyncio.Event()

    async def Register(self, request, context):  # noqa: N802
        self._expected -= 1
        if self._expected == 0:
            self._complete.set()
        return coordinator_pb2.RegisterReply(lease_s=10)

    async def Status(self, request, context):  # noqa: N802
        await self._complete.wait()
        if request.seen:
            await asyncio.Event().wait()
        return coordinator_pb2.StatusReply(run="fake", state=self._state, step=1, num_steps=2, revision=1)

    async def StopRun(self, request, context):  # noqa: N802
        if not self._stubborn:
            self.stopped.set()
        return coordinator_pb2.StopRunReply()


async def coordinate(ready_fd: int, expected: int, stubborn: bool, state: str) -> None:
    servicer = Coordinator(expected, stubborn, state)
    server = await Server.start(
        "atoll.v1.Coordinator",
        partial(coordinator_pb2_grpc.add_CoordinatorServicer_to_server, servicer),
        host="127.0.0.1",
        port=0,
        token=access_token(),
        setting="coordinator.port",
    )
    announce(ready_fd, server.address)
    await servicer.stopped.wait()
    await server.stop(0)


async def register(name: str, coordinator: str) -> None:
    client = CoordinatorClient(coordinator, Caller(token=access_token()))
    await client.register(ServiceEntry("fake", name, str(os.getpid()), "127.0.0.1:1"))
    await client.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour")
    parser.add_argument("name")
    parser.add_argument("coordinator", nargs="?")
    parser.add_argument("--expected", type=int, default=0)
    parser.add_argument("--ready-fd", type=int)
    args = parser.parse_args()
    print(f"pid {os.getpid()}", flush=True)
    match args.behaviour:
        case "refuses":
            sys.exit("the model folder /nowhere has no config.json")
        case "coordinates":
            asyncio.run(coordinate(args.ready_fd, args.expected, False, "training"))
        case "coordinates-stubbornly":
            asyncio.run(coordinate(args.ready_fd, args.expected, True, "training"))
        case "coordinates-the-start":
            asyncio.run(coordinate(args.ready_fd, args.expected, True, "starting"))
        case "silent":
            signal.pause()
        case "ends":
            announce(args.ready_fd, "127.0.0.1:1")
        case "dies":
            announce(args.ready_fd, "127.0.0.1:1")
            os.kill(os.getpid(), signal.SIGKILL)
        case "serves" | "serves-stubbornly":
            if args.behaviour == "serves-stubbornly":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            announce(args.ready_fd, "127.0.0.1:1")
            if args.coordinator:
                asyncio.run(register(args.name, args.coordinator))
            signal.pause()


if __name__ == "__main__":
    main()
