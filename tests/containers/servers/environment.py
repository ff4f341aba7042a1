"""The tests' OpenEnv environment, at every address of its container."""

import asyncio

from openenv_server import Theirs
from websockets.asyncio.server import serve


async def main() -> None:
    app = Theirs("")
    async with serve(app.episode, "0.0.0.0", 8000, process_request=app.http) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
