"""A real gateway over the real store, asked by agents in another process; a stand-in draws every turn in
200 ms."""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import psutil

from atoll.coordinator.algorithm.experience import lay_out
from atoll.coordinator.fleet.gateways import GatewayLink, Want
from atoll.gateway.apis.chat import ChatApi
from atoll.gateway.apis.json_body import parse_json
from atoll.gateway.history.canonical import digest_request
from atoll.runtime.store import run_embedded_server
from atoll.wire.types import Group, GroupId, Int32, Prompt, Trajectory, TurnRequest
from benchmarks.gateway_load import REPLY, Plan
from tests.gateway.model_folders import make_folder
from tests.gateway.processes import (
    GatewayProcess,
    drawn_turn,
    end_session,
    new_session,
    running_gateways,
)

DRAW_S: Final = 0.2
TURNS: Final = 4  # of a session
MAX_LENGTH: Final = 200_000
NEXT: Final = "and now?"
WORD: Final = "lorem "  # one token


@dataclass(frozen=True, slots=True)
class Result:
    """Of sessions that were played to their end."""

    sessions: int
    turns: int
    lost: int  # turns that were not answered, or are in no trajectory
    cpu_ms_per_turn: float  # of all gateways
    turns_per_s: float
    trajectories: list[Trajectory]
    health_s: list[float]
    memory_bytes: int  # that the gateways grew by, before the sessions ended
    errors: list[str]


class Bench:
    def __init__(self, gateways: Sequence[GatewayProcess]) -> None:
        self._gateways = gateways

    async def play(
        self,
        num_sessions: int,
        first: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        *,
        turns: int = TURNS,
        watches_health: bool = False,
        ends: bool = True,
    ) -> Result:
        """Opens sessions, has agents play them, and ends them, or leaves them open."""
        specs = [new_session() for _ in range(num_sessions)]
        shares = [specs[number :: len(self._gateways)] for number in range(len(self._gateways))]
        before = self._memory()
        for gateway, share in zip(self._gateways, shares, strict=True):
            for spec in share:
                await gateway.link.client.open(spec)
        cpu = self._cpu_s()
        loads = await asyncio.gather(
            *(
                load(Plan(g.port, [s.agent_key for s in share], first, tools, NEXT, turns, watches_health))
                for g, share in zip(self._gateways, shares, strict=True)
            )
        )
        cpu = self._cpu_s() - cpu
        memory = self._memory() - before
        answered = sum(each["answered"] for each in loads)
        trajectories = []
        for gateway, share in zip(self._gateways, shares, strict=True):
            for spec in share if ends else []:
                if trajectory := await end_session(gateway, spec.id):
                    trajectories.append(trajectory)
        num_kept = sum(len(trajectory.turns) for trajectory in trajectories)
        seconds = max(each["seconds"] for each in loads)
        return Result(
            sessions=num_sessions,
            turns=answered,
            lost=num_sessions * turns - min(answered, num_kept),
            cpu_ms_per_turn=1000 * cpu / max(answered, 1),
            turns_per_s=answered / seconds,
            trajectories=trajectories,
            health_s=[wait for each in loads for wait in each["health"]],
            memory_bytes=memory,
            errors=[error for each in loads for error in each["errors"]],
        )

    def _cpu_s(self) -> float:
        times = [psutil.Process(gateway.pid).cpu_times() for gateway in self._gateways]
        return sum(each.user + each.system for each in times)

    def _memory(self) -> int:
        return sum(gateway.rss for gateway in self._gateways)


def drawing(reply_ids: Int32) -> Want:
    """The coordinator's end of the stream: the same reply to everything, after DRAW_S."""

    def want(link: GatewayLink, requests: Sequence[TurnRequest]) -> None:
        turns = [drawn_turn(id, reply_ids) for request in requests for id in request.ids]
        asyncio.get_running_loop().call_later(DRAW_S, link.answer, turns, [])

    return want


async def load(plan: Plan) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.gateway_load"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate(json.dumps(asdict(plan)).encode())
    result: dict[str, Any] = json.loads(output)
    return result


def run(sessions: int, tokens: int) -> dict[str, Any]:
    """`sessions`: of one instance, and twice as many of two. `tokens`: of a long history."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(folder / "model", "qwen2.5")
        with run_embedded_server(folder / "store") as store:
            return asyncio.run(measure(folder, store.url, sessions, tokens))


async def measure(folder: Path, store_url: str, sessions: int, tokens: int) -> dict[str, Any]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    stop = json.loads((folder / "model" / "config.json").read_text())["eos_token_id"]
    reply_ids = np.array([*tokenizer.encode(REPLY).ids, stop], np.int32)
    small, tools = prompt(1 << 10), list[dict[str, Any]]()
    large, large_tools = prompt(25 << 10), some_tools(25 << 10)
    result: dict[str, Any] = {}
    start = partial(running_gateways, folder, store_url, drawing(reply_ids), max_length=MAX_LENGTH)
    async with start(number=1) as gateways:
        bench = Bench(gateways)
        await bench.play(50, small, tools)  # caches
        await bench.play(2 * sessions, small, tools, ends=False)  # they fill what the start left free
        many = await bench.play(sessions, small, tools)  # so that this is the memory of its own sessions
        one_kb = await bench.play(500, small, tools)
        fifty_kb = await bench.play(500, large, large_tools)
        result["cpu_ms_per_turn"] = {"1_KB": one_kb.cpu_ms_per_turn, "50_KB": fifty_kb.cpu_ms_per_turn}
        result["history"] = await measure_history(bench, tokens)
        result["one_instance"] = describe(many)
        unique, computed = count_tokens(many.trajectories[:200])
        result["computed_over_unique_tokens"] = computed / unique
        tokens_each = sum(len(n.token_ids) for n in many.trajectories[0].nodes)
        result["memory"] = {
            "bytes_per_session": many.memory_bytes / sessions,
            "aim": 32 << 10,
            "aim_with_tokens": (32 << 10) + 12 * tokens_each,
        }
        stalls = await bench.play(8, prompt(128_000 * len(WORD)), tools, turns=1, watches_health=True)
        waits = np.array(stalls.health_s) * 1000
        result["stall_ms"] = {"p99": float(np.percentile(waits, 99)), "max": float(waits.max())}
        result["errors"] = [*one_kb.errors, *fifty_kb.errors, *many.errors, *stalls.errors]
    async with start(number=2) as gateways:
        result["two_instances"] = describe(await Bench(gateways).play(2 * sessions, small, tools))
    return result


async def measure_history(bench: Bench, tokens: int) -> dict[str, float]:
    """CPU per turn behind 1k tokens and behind `tokens`, without parsing and hashing the body."""
    result = {}
    for name, num_tokens in (("1k", 1000), (f"{tokens // 1000}k", tokens)):
        first = prompt(num_tokens * len(WORD))
        whole = [await bench.play(64, first, [], turns=turns) for turns in (2, 12)]
        cpu = [each.cpu_ms_per_turn * each.turns for each in whole]
        per_turn = (cpu[1] - cpu[0]) / (whole[1].turns - whole[0].turns)
        result[name] = per_turn
        result[f"{name}_without_body"] = per_turn - body_ms(first)
    result["ratio"] = result[f"{tokens // 1000}k_without_body"] / result["1k_without_body"]
    return result


def body_ms(first: list[dict[str, Any]]) -> float:
    """To read a body of this history: parse it and hash it, for what it says and for what it is."""
    body, api = orjson.dumps({"model": "policy", "messages": first}), ChatApi()
    begun, times = time.process_time(), 50
    for _ in range(times):
        request = api.parse(parse_json(body))
        digest_request(request.chat.messages, request.chat.tools)
        blake2b(body, digest_size=16).digest()
    return 1000 * (time.process_time() - begun) / times


def prompt(num_bytes: int) -> list[dict[str, Any]]:
    text = WORD * (num_bytes // len(WORD))
    return [{"role": "system", "content": text}, {"role": "user", "content": "What now?"}]


def some_tools(num_bytes: int) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"path": {"type": "string", "description": WORD * 150}}}
    tool = {"name": "read_file", "description": WORD * 50, "parameters": parameters}
    count = num_bytes // len(orjson.dumps(tool))
    return [{"type": "function", "function": {**tool, "name": f"{tool['name']}_{n}"}} for n in range(count)]


def describe(result: Result) -> dict[str, Any]:
    return {
        "sessions": result.sessions,
        "turns": result.turns,
        "lost": result.lost,
        "turns_per_s": result.turns_per_s,
        "cpu_ms_per_turn": result.cpu_ms_per_turn,
        "errors": result.errors,
    }


def count_tokens(trajectories: Sequence[Trajectory]) -> tuple[int, int]:
    """Distinct tokens of the trajectories' trees, each a group of its own, and tokens that are laid out."""
    unique = computed = 0
    for number, trajectory in enumerate(trajectories):
        paths: set[bytes] = set()
        above: list[bytes] = []
        for node in trajectory.nodes:
            path = above[node.parent] if node.parent >= 0 else b""
            for token in node.token_ids:
                path = blake2b(path + int(token).to_bytes(4, "little"), digest_size=16).digest()
                paths.add(path)
            above.append(path)
        unique += len(paths)
        group_prompt = Prompt(GroupId("bench", 0, number), np.zeros(0, np.int32), "", "", "")
        layout = lay_out([Group(group_prompt, (trajectory,))])
        computed += len(layout.segments.token_ids)
    return unique, computed
