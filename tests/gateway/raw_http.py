"""HTTP as an attacker writes it: any bytes, in any pieces."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import orjson

ANSWERED_S = 30.0  # only a hang takes longer


class Answer(NamedTuple):
    status: int  # 0: the connection was closed without an answer
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


CLOSED = Answer(0, b"")


def post(path: str, body: Any, key: str = "", *headers: str) -> bytes:
    """A request. `body`: bytes, or what is written as JSON."""
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(content)}", *headers]
    return head(*lines, *([f"authorization: Bearer {key}"] if key else [])) + content


def head(*lines: str) -> bytes:
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n"


async def exchange(port: int, *parts: bytes) -> Answer:
    """Sends the parts, and reads one answer."""
    async with connection(port) as (reader, writer):
        reading = asyncio.create_task(read_answer(reader))
        await write(writer, parts, reading)
        return await asyncio.wait_for(reading, ANSWERED_S)


async def write(writer: asyncio.StreamWriter, parts: Iterable[bytes], until: asyncio.Task[Answer]) -> None:
    """Stops as soon as there is an answer."""
    with suppress(ConnectionError):
        for part in parts:
            if until.done():
                break
            writer.write(part)
            await writer.drain()


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in lines[1:-2])
        status = int(lines[0].split(b" ")[1])
        if b"content-length" in headers:
            return Answer(status, await reader.readexactly(int(headers[b"content-length"])))
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
        return Answer(status, body)
    except (asyncio.IncompleteReadError, ConnectionError):
        return CLOSED


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
