"""Gateways and replicas are killed while agents play: no finished turn is lost, none is sampled again, and
the sessions go on.

GATEWAY_KILLS is how many processes are killed.
"""

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from atoll.cli.launch.launcher import launch
from atoll.config.load import validate
from atoll.config.resolve import resolve
from atoll.config.schema import RunConfig
from atoll.gateway.session_store import SessionStore
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.dump import dumps, read_dump
from atoll.runtime.store import Store
from atoll.wire.types import SessionId, Trajectory, TurnRecord
from tests.builders import NO_GPUS
from tests.gateway import agent_runs, told

pytestmark = pytest.mark.long

NUM_KILLS = int(os.environ.get("GATEWAY_KILLS", "10"))
NUM_TURNS = 8  # of a session
VICTIMS = ("gateway-0", "rollout-0", "gateway-1", "rollout-1")
CALL = '<tool_call>\n{{"name": "add", "arguments": {{"a": {0}, "b": {0}}}}}\n</tool_call>'


@dataclass
class Witness:
    """What agents say that they asked for and were told."""

    answers: dict[SessionId, dict[str, Any]] = field(default_factory=dict)  # tokens, by answer id in order
    waiting: dict[SessionId, str] = field(default_factory=dict)  # the gateway's URL, of those that wait
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def num_answers(self) -> int:
        return sum(map(len, self.answers.values()))

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for line in reader:
            said = json.loads(line)
            id = SessionId.parse(said["session"])
            answers = self.answers.setdefault(id, {})
            if "answer" in said:
                assert said["answer"] not in answers, "an answer's id is one turn's"
                answers[said["answer"]] = said["tokens"]
                del self.waiting[id]
            else:
                self.waiting[id] = said["url"]
            async with self.changed:
                self.changed.notify_all()
        writer.close()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(condition)


@dataclass
class Killer:
    """Follows a run: kills one process after the other, and stops the run once all is seen to be well."""

    config: RunConfig
    witness: Witness
    seconds: dict[str, list[float]] = field(default_factory=dict)  # until sessions went on, by victim
    finished: dict[SessionId, dict[int, TurnRecord]] = field(default_factory=dict)  # at the time of a kill
    at_last: dict[SessionId, list[TurnRecord]] = field(default_factory=dict)  # of these sessions, at the end
    _dead: set[str] = field(default_factory=set)  # incarnations
    _told: dict[SessionId, int] = field(default_factory=dict)  # answers, of those that waited at the kill
    _killed_at: float = 0.0

    async def __call__(self, client: CoordinatorClient) -> None:
        rng = random.Random(0)
        path = os.environ[told.SOCKET]
        async with await asyncio.start_unix_server(self.witness.hear, path, limit=1 << 24):
            await _served_by(client, {"gateway-0", "gateway-1"}, self._dead)
            store = SessionStore(Store(_store_url(), self.config.run.name))
            for number in range(NUM_KILLS):
                victim = f"{('gateway', 'rollout')[number % 2]}-{rng.randrange(2)}"
                await self._kill(client, victim, rng.randrange(1, 16))
                for id in await store.open_ids():
                    self._note(id, (await store.show(id))[0])
                await self._see_them_go_on(victim)
            await self._see_the_end(client)
            for id in self.finished:
                self.at_last[id], _ = await store.show(id)
            await client.stop_run()
            await asyncio.Event().wait()

    async def _kill(self, client: CoordinatorClient, name: str, num_answers: int) -> None:
        """Once it serves, agents wait for it, and were told this many answers more; of replicas, once the
        other one serves, too."""
        role = name.partition("-")[0]
        await _served_by(client, {name} if role == "gateway" else {"rollout-0", "rollout-1"}, self._dead)
        victim = _processes()[name]
        urls = _urls(victim) if role == "gateway" else set()
        target = self.witness.num_answers + num_answers
        await self.witness.wait_for(
            lambda: self.witness.num_answers >= target and bool(self._waiting_at(urls))
        )
        entries = (await client.status()).services
        self._dead |= {entry.incarnation for entry in entries if entry.name == name}
        self._told = {id: len(self.witness.answers[id]) for id in self._waiting_at(urls)}
        self._killed_at = time.monotonic()
        victim.kill()
        await asyncio.to_thread(victim.wait)

    def _waiting_at(self, urls: set[str]) -> list[SessionId]:
        """Sessions that wait for an answer of these gateways; none: of any."""
        return [id for id, url in self.witness.waiting.items() if not urls or url in urls]

    def _note(self, id: SessionId, records: list[TurnRecord]) -> None:
        known = self.finished.setdefault(id, {})
        for record in records:
            known.setdefault(record.number, record)

    async def _see_them_go_on(self, victim: str) -> None:
        await self.witness.wait_for(
            lambda: all(len(self.witness.answers[id]) > num for id, num in self._told.items())
        )
        self.seconds.setdefault(victim.partition("-")[0], []).append(time.monotonic() - self._killed_at)

    async def _see_the_end(self, client: CoordinatorClient) -> None:
        """Until all sessions that were open at a kill are consumed."""
        seen = 0
        while not self.finished.keys() <= consumed(self.config).keys():
            seen = (await client.status(seen)).revision


def consumed(config: RunConfig) -> dict[SessionId, Trajectory]:
    samples = [
        sample
        for path in dumps(config.folder / "dumps")
        for group in read_dump(path)[1]
        for sample in group.samples
    ]
    by_session = {SessionId(sample.id, sample.attempt): sample for sample in samples}
    assert len(by_session) == len(samples), "a sample is consumed once"
    return by_session


def _processes() -> dict[str, psutil.Process]:
    """Those of the run in this process, by name."""
    named = {}
    for process in psutil.Process().children():
        words = process.cmdline()
        if "--name" in words:
            named[words[words.index("--name") + 1]] = process
    return named


def _store_url() -> str:
    words = _processes()["gateway-0"].cmdline()
    return words[words.index("--store") + 1]


def _urls(process: psutil.Process) -> set[str]:
    """That it listens on; one is for agents."""
    return {
        f"http://127.0.0.1:{connection.laddr.port}"
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


async def _served_by(client: CoordinatorClient, names: set[str], dead: set[str]) -> None:
    """Waits until services of these names have registered since earlier ones died."""
    seen = 0
    while True:
        status = await client.status(seen)
        if names <= {entry.name for entry in status.services if entry.incarnation not in dead}:
            return
        seen = status.revision


def make(folder: Path) -> RunConfig:
    script = [*(CALL.format(number) for number in range(1, NUM_TURNS)), "That is all."]
    agent_runs.write_rows(folder / "rows.jsonl", [script] * 8)
    tree = agent_runs.config(
        folder,
        "qwen3",
        "openai_chat",
        run={"mode": "rollout_only", "steps": 100_000},
        coordinator={"prompts_per_step": 4, "samples_per_prompt": 2},
        gateway={"instances": 2, "max_restarts": 1000},
    )
    tree["rollout"] |= {"replicas": 2, "max_restarts": 1000}
    tree["agents"][0]["function"] = f"{told.__file__}:{told.witnessed_chat.__name__}"
    del tree["trainer"]
    return resolve(validate(tree, "test"), NO_GPUS)


def test_no_finished_turn_is_lost_or_sampled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(told.SOCKET, str(tmp_path / "witness"))
    config, witness = make(tmp_path), Witness()
    killer = Killer(config, witness)
    assert launch(config, killer, resume=False)
    samples = consumed(config)
    for id, finished in killer.finished.items():
        check_kept(samples[id], finished, killer.at_last[id])
    for id, sample in samples.items():
        check_told(sample, witness.answers[id])
    assert {id.attempt for id in witness.answers} == {0}, "no session was given up"
    report(killer.seconds)


def check_kept(sample: Trajectory, finished: dict[int, TurnRecord], at_last: list[TurnRecord]) -> None:
    """What was finished at a kill is consumed as it was, once; no request was sampled twice."""
    assert len({record.request for record in at_last}) == len(at_last)
    assert [record.parent for record in at_last] == [*range(-1, len(at_last) - 1)]
    turns = {turn.number: sample.nodes[turn.node] for turn in sample.turns}
    assert len(turns) == len(sample.turns) == len(at_last)
    for number, record in finished.items():
        [drawn] = record.drawn
        before, after = drawn.nodes[drawn.turns[0].node], turns[number]
        assert np.array_equal(before.token_ids, after.token_ids)
        assert np.array_equal(before.logprobs, after.logprobs)
        assert before.spans == after.spans


def check_told(sample: Trajectory, answers: dict[str, list[tuple[list[int], float]]]) -> None:
    """The agent was told the consumed tokens, each turn once and in their order."""
    assert len(sample.turns) == len(answers) == NUM_TURNS
    for turn, (answer, tokens) in zip(sample.turns, answers.items(), strict=True):
        node = sample.nodes[turn.node]
        assert answer.endswith(f"{turn.number:x}")
        assert [logprob for _, logprob in tokens] == node.logprobs.tolist()
        told_text = b"".join(bytes(token) for token, _ in tokens).decode()
        assert told_text.removesuffix("<|im_end|>") == turn.text


def report(seconds: dict[str, list[float]]) -> None:
    for role, each in seconds.items():
        median = statistics.median(each)
        print(
            f"{len(each)} x {role}: sessions went on after {median:.1f} s (median), {max(each):.1f} s at most"
        )
