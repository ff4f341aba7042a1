"""The environment of benchmarks/agent_load.py, as OpenEnv has them. A step takes STEP_S; the last one of an
episode is worth 1. `python -m benchmarks.agent_load_environment` prints its port.
"""

import asyncio
import json
from typing import Final

from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

STEP_S: Final = 0.05
OBSERVED: Final = "Nothing has changed. What do you do next?"
SCHEMA: Final = {"action": {"properties": {"move": {"type": "string"}}, "required": ["move"]}}


async def episode(socket: ServerConnection) -> None:
    left = 0
    async for frame in socket:
        message = json.loads(frame)
        match message["type"]:
            case "reset":
                left = message["data"].get("turns", 0)
                await socket.send(observation(None, False))
            case "step":
                await asyncio.sleep(STEP_S)
                left -= 1
                await socket.send(observation(1.0 if left == 0 else None, left == 0))
            case _:
                return


def observation(reward: float | None, done: bool) -> str:
    data = {"observation": {"text": OBSERVED}, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


def schema(socket: ServerConnection, request: Request) -> Response | None:
    if request.path == "/ws":
        return None
    response = socket.respond(200, json.dumps(SCHEMA))
    del response.headers["Content-Type"]
    response.headers["Content-Type"] = "application/json"
    return response


async def main() -> None:
    async with serve(episode, "127.0.0.1", 0, process_request=schema, compression=None) as server:
        print(next(iter(server.sockets)).getsockname()[1], flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
