"""External servers, as tests need them: one that sends bytes as it is told, and one for ASGI apps."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Answer = Callable[[Request], AsyncIterator[bytes]]


@dataclass
class Raw:
    url: str
    requests: list[Request] = field(default_factory=list)
    connections: int = 0


@asynccontextmanager
async def raw_http(answer: Answer) -> AsyncIterator[Raw]:
    """Sends what `answer` yields, whatever that is; a connection ends with an answer that yields b""."""
    raw = Raw("")
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        raw.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")[:-2]
                method, path, _ = first.split(" ")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                raw.requests.append(request := Request(method, path, headers, body))
                async for chunk in answer(request):
                    if not chunk:
                        return
                    writer.write(chunk)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the client left
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    raw.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield raw
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def reply(content: object, status: str = "200 OK", **headers: str) -> bytes:
    """One HTTP answer; what is not bytes goes as JSON."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = {"content_type": "application/json", "content_length": str(len(body))} | headers
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@contextmanager
def served(app: Any) -> Iterator[str]:
    """An ASGI app in a thread of its own, at the address that comes back."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listening.close()
        assert not thread.is_alive()
