"""An OpenEnv environment: find a number of a range, told "higher" or "lower" after each guess.

    python examples/guess/server.py [PORT]

GET /schema says what an action is, and each WebSocket at /ws is an episode of its own. OpenEnv's own package
serves the same protocol; this server needs `websockets` alone.
"""

import asyncio
import json
import random
import sys
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.server import Request, Response, ServerConnection, serve

HOST, PORT = "127.0.0.1", 8902
SCHEMA = {
    "action": {"type": "object", "properties": {"guess": {"type": "string"}}, "required": ["guess"]},
    "observation": {"type": "object", "properties": {"text": {"type": "string"}}},
}


@dataclass
class Game:
    low: int
    high: int
    secret: int
    guesses: int  # that are left

    @classmethod
    def start(cls, state: dict[str, Any]) -> "Game":
        """As the dataset's row has it; by default 1 to 7, and three guesses."""
        low, high = state.get("low", 1), state.get("high", 7)
        return cls(low, high, state.get("secret", random.randint(low, high)), state.get("guesses", 3))

    def guess(self, text: str) -> tuple[str, float, bool]:
        """Returns the reply to the player, the reward, and whether the game is over."""
        self.guesses -= 1
        if text == str(self.secret):
            return "correct", 1.0, True
        told = "expected a number"
        if text.isdecimal():
            told = "higher" if int(text) < self.secret else "lower"
        return told, 0.0, self.guesses == 0


async def episode(socket: ServerConnection) -> None:
    """A frame's answer is an observation, until the client says close."""
    game = Game.start({})
    async for frame in socket:
        message = json.loads(frame)
        match message["type"]:
            case "reset":
                game = Game.start(message["data"])
                await socket.send(_observation(f"{game.low}-{game.high}", None, False))
            case "step" if set(message["data"]) == {"guess"}:
                await socket.send(_observation(*game.guess(message["data"]["guess"])))
            case "step":
                error = {"message": "expected one field: guess", "code": "VALIDATION_ERROR"}
                await socket.send(json.dumps({"type": "error", "data": error}))
            case "close":
                return


def _observation(text: str, reward: float | None, done: bool) -> str:
    data = {"observation": {"text": text}, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


def schema(socket: ServerConnection, request: Request) -> Response | None:
    """The answer to GET /schema; None lets a WebSocket open."""
    if request.path == "/ws":
        return None
    if request.path != "/schema":
        return socket.respond(404, "expected /schema or /ws\n")
    response = socket.respond(200, json.dumps(SCHEMA))
    del response.headers["Content-Type"]
    response.headers["Content-Type"] = "application/json"
    return response


async def main(port: int) -> None:
    async with serve(episode, HOST, port, process_request=schema) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else PORT))
