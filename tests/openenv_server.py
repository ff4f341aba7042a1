"""A server of an OpenEnv environment, as openenv-core 0.3 has it, which does what an action asks for."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from websockets.asyncio.server import Request, Response, ServerConnection, serve
from websockets.datastructures import Headers

SCHEMA = {
    "action": {
        "additionalProperties": False,
        "properties": {"metadata": {"type": "object"}, "answer": {"type": "string"}},
        "required": ["answer"],
    },
    "observation": {},
    "state": {},
}


class Theirs:
    """As openenv-core: an environment per connection, GET /schema beside it."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.open = self.most = self.farewells = 0
        self.capacity = 100
        self.lenient = False  # takes actions of any form
        self.authorizations: list[str | None] = []
        self.status: HTTPStatus | None = None
        self.schema: object = SCHEMA

    def http(self, socket: ServerConnection, request: Request) -> Response | None:
        self.authorizations.append(request.headers.get("authorization"))
        if self.status is not None:
            headers = Headers({"location": "ws://other/ws", "retry-after": "3", "content-length": "0"})
            return Response(self.status, "", headers, b"")
        if request.path == "/schema":
            body = json.dumps(self.schema).encode()
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
            }
            return Response(200, "OK", Headers(headers), body)
        return (
            None
            if request.path == "/ws"
            else Response(404, "Not Found", Headers({"content-length": "0"}), b"")
        )

    async def episode(self, socket: ServerConnection) -> None:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            if self.open > self.capacity:
                await socket.send(self.error("Server at capacity", "CAPACITY_REACHED"))
                return
            async for frame in socket:
                message = json.loads(frame)
                if message["type"] == "close":
                    self.farewells += 1
                    return
                if message["type"] == "reset":
                    await socket.send(self.observation({"given": message["data"]}))
                    truth = message["data"].get("ground_truth")
                elif set(message["data"]) != {"answer"} and not self.lenient:
                    await socket.send(self.error("Invalid message", "VALIDATION_ERROR"))
                elif not await self.step(socket, message["data"].get("answer", ""), truth):
                    return
        finally:
            self.open -= 1

    async def step(self, socket: ServerConnection, answer: str, truth: str) -> bool:
        match answer:
            case "die":
                socket.transport.abort()
                return False
            case "leave":
                return False
            case "raise":
                await socket.send(self.error(f"boom {self.token}", "EXECUTION_ERROR"))
            case "broken":
                await socket.send(self.error("no more", "SESSION_ERROR"))
            case "hang":
                await asyncio.sleep(0.4)
                await socket.send(self.observation({"late": True}, reward=9.0))
            case "flood":
                await socket.send("x" * 200_000)
            case "yes" | "None":
                await socket.send(self.observation({}, reward={"yes": True, "None": None}[answer], done=True))
            case _ if answer.startswith("{"):
                await socket.send(answer)
            case _:
                await socket.send(
                    self.observation({"said": answer}, reward=float(answer == truth), done=True)
                )
        return True

    @staticmethod
    def observation(content: object, reward: float | None = None, done: bool = False) -> str:
        return json.dumps(
            {"type": "observation", "data": {"observation": content, "reward": reward, "done": done}}
        )

    @staticmethod
    def error(message: str, code: str) -> str:
        return json.dumps({"type": "error", "data": {"message": message, "code": code}})


@asynccontextmanager
async def openenv_server(token: str) -> AsyncIterator[tuple[str, Theirs]]:
    app = Theirs(token)
    async with serve(app.episode, "127.0.0.1", 0, process_request=app.http) as server:
        yield f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}", app
