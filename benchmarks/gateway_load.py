"""Agents for benchmarks/gateway.py, in a process of their own: each asks for its turns one after the other.

Reads a `Plan` as JSON from stdin; writes what came of it as JSON to stdout.
"""

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import orjson

REPLY = "Done."  # of every turn: the stand-in of the replicas draws nothing else


@dataclass(frozen=True, slots=True)
class Plan:
    port: int
    keys: list[str]  # of each session
    first: list[dict[str, Any]]  # messages
    tools: list[dict[str, Any]]
    next: str  # what the user says in the turns after it
    turns: int  # of a session
    watches_health: bool = False  # ask for /health all the while, and say how long it took


async def play(plan: Plan, key: str) -> int:
    """Returns the number of its turns that were answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", plan.port, limit=1 << 20)
    messages, answered = [*plan.first], 0
    for _ in range(plan.turns):
        body = orjson.dumps({"model": "policy", "messages": messages, "tools": plan.tools})
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % (key.encode(), len(body))
        )
        writer.write(body)
        status, content = await read_response(reader)
        if status != 200:
            raise RuntimeError(f"status {status}: {content.decode(errors='replace')[:500]}")
        answered += 1
        assert REPLY in content.decode()
        messages += [{"role": "assistant", "content": REPLY}, {"role": "user", "content": plan.next}]
    writer.close()
    return answered


async def read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head.split(b" ", 2)[1]), await reader.readexactly(length)


async def watch_health(plan: Plan) -> list[float]:
    """Seconds of each answer, one request every 5 ms, until cancelled."""
    reader, writer = await asyncio.open_connection("127.0.0.1", plan.port)
    waits: list[float] = []
    try:
        while True:
            begun = time.perf_counter()
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await read_response(reader)
            waits.append(time.perf_counter() - begun)
            await asyncio.sleep(0.005)
    except asyncio.CancelledError:
        return waits


async def run(plan: Plan) -> dict[str, Any]:
    begun = time.perf_counter()
    watching = asyncio.create_task(watch_health(plan)) if plan.watches_health else None
    answered = await asyncio.gather(*(play(plan, key) for key in plan.keys), return_exceptions=True)
    seconds = time.perf_counter() - begun
    if watching:
        watching.cancel()
    return {
        "answered": sum(count for count in answered if isinstance(count, int)),
        "errors": [repr(error) for error in answered if not isinstance(error, int)][:3],
        "seconds": seconds,
        "health": await watching if watching else [],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(Plan(**json.load(sys.stdin))))))
