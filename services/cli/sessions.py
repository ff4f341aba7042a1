"""`atoll sessions`: shows what the agents of a run are doing, and one session turn by turn."""

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from atoll.cli.launch import active_runs
from atoll.config.load import read_resolved
from atoll.runtime.clients.gateway import GatewayClient
from atoll.runtime.errors import UserError
from atoll.wire.info import SessionSummary
from atoll.wire.types import Int32, SessionId, SessionReward, TurnRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    active_runs.add_run(parser)
    parser.add_argument("session", nargs="?", metavar="SESSION", help="show this session turn by turn")


def run(arguments: argparse.Namespace) -> int:
    if arguments.session is None:
        print(describe(*asyncio.run(list_sessions(arguments.run))))
        return 0
    try:
        id = SessionId.parse(arguments.session)
    except ValueError:
        raise UserError(
            f"SESSION: got {arguments.session!r}, expected RUN/EPOCH/PROMPT/INDEX/ATTEMPT, as "
            f"`atoll sessions {arguments.run}` lists them"
        ) from None
    records, rewards = asyncio.run(show(arguments.run, id))
    tokenizer = Tokenizer.from_file(
        str(read_resolved(arguments.run / "config.json").model.path / "tokenizer.json")
    )
    print(describe_turns(records, rewards, tokenizer))
    return 0


async def list_sessions(folder: Path) -> tuple[list[SessionSummary], Counter[str]]:
    """The open sessions of all gateways, and their counters added up."""
    sessions: list[SessionSummary] = []
    counters: Counter[str] = Counter()
    for gateway in await _gateways(folder):
        try:
            some, counts = await gateway.sessions()
            sessions += some
            counters.update(counts)
        finally:
            await gateway.close()
    return sessions, counters


async def show(folder: Path, id: SessionId) -> tuple[list[TurnRecord], list[SessionReward]]:
    gateway, *others = await _gateways(folder)  # any of them: they read the same store
    try:
        return await gateway.show(id)
    finally:
        for client in (gateway, *others):
            await client.close()


async def _gateways(folder: Path) -> list[GatewayClient]:
    run = active_runs.run_in(folder, in_full=True)
    async with active_runs.connect_to(run) as client:
        status = await client.status()
    gateways = [
        GatewayClient(entry.address, run.caller) for entry in status.services if entry.role == "gateway"
    ]
    if not gateways:
        raise UserError(f"{folder}: the run has no gateway; only data sets with an agent have sessions")
    return gateways


def describe(sessions: Sequence[SessionSummary], counters: Counter[str]) -> str:
    now = time.time()
    lines = [f"{len(sessions)} open sessions"]
    for session in sorted(sessions, key=lambda session: session.opened):
        branches = ", ".join(f"{count} {cause}" for cause, count in session.branches.items())
        lines.append(
            f"  {session.id}  {now - session.opened:6.0f} s  {session.turns:4} turns  "
            f"{session.tokens:7} tokens  {session.recomputed:7} recomputed"
            f"{'  branches: ' if branches else ''}{branches}"
        )
    lines += [f"  {name:40} {count}" for name, count in sorted(counters.items())]
    return "\n".join(lines)


def describe_turns(
    records: Sequence[TurnRecord], rewards: Sequence[SessionReward], tokenizer: Tokenizer
) -> str:
    """What was inserted (mask 0) and what the policy produced (mask 1), with its versions."""
    lines = []
    for position, record in enumerate(records):
        above = "a new conversation" if record.parent < 0 else f"after {record.parent}.{record.parent_branch}"
        why = f", {record.cause}" if record.cause else ""
        lines.append(f"{position}: {above}{why}")
        lines.append(f"  mask 0 {_text(tokenizer, record.inserted_ids)}")
        for drawn in record.drawn:
            node, turn = drawn.nodes[0], drawn.turns[0]
            versions = " ".join(f"{span.version}[{span.start}:{span.end}]" for span in node.spans)
            lines.append(
                f"  mask 1 {_text(tokenizer, node.token_ids)}  {len(node.token_ids)} tokens, "
                f"{turn.finish_reason.value}, {versions}, {turn.origin.replica}"
            )
    for reward in rewards:
        whose = "session" if reward.turn is None else f"turn {reward.turn[0]}.{reward.turn[1]}"
        lines.append(f"reward {reward.component} = {reward.value:g} for the {whose}")
    return "\n".join(lines)


def _text(tokenizer: Tokenizer, ids: Int32) -> str:
    return repr(tokenizer.decode(ids.tolist(), skip_special_tokens=False))
