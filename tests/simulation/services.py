"""Trainer, replicas and graders as the coordinator's clients show them, with the faults that peers have.

A response's tokens name the sample that it is, so the trainer can record by itself what it trained on.
"""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from atoll.runtime.clients.rollout import Arrival
from atoll.runtime.errors import ServiceUnavailableError, UserError
from atoll.wire.codec.trajectories import encode_trajectories
from atoll.wire.info import RewardInfo
from atoll.wire.types import (
    CheckpointWrite,
    FinishReason,
    Float32,
    Graded,
    GradingError,
    GroupId,
    PolicyBatch,
    SampleId,
    ScoreItem,
    Segments,
    StepKey,
    Trajectory,
    TurnRequest,
    Verdict,
    Version,
)
from tests import builders

BASE = 40  # of the numbers that a response spells; its digits are the tokens from FIRST on
FIRST = 3
HISTORY = "history.json"  # what a checkpoint has of the model
MAX_QUEUED = 64  # responses that a grader takes at once

History = list[tuple[int, list[str]]]  # each step and the samples "epoch/prompt/index" that it trained on


def spelled(id: SampleId) -> list[int]:
    """The tokens of a response."""
    epoch, prompt = id.group.epoch, id.group.prompt
    return [FIRST + digit for digit in (epoch, *divmod(prompt, BASE), id.index)]


def read(tokens: Sequence[int]) -> str:
    epoch, high, low, index = (int(token) - FIRST for token in tokens)
    return f"{epoch}/{high * BASE + low}/{index}"


@dataclass
class Fate:
    """What befalls which prompt, by the seed alone, and what may therefore be dropped."""

    seed: int
    ungradable: float  # shares of all prompts
    flat: float
    refused: float
    may_drop: set[str] = field(default_factory=set)  # "epoch/prompt"
    refused_steps: set[int] = field(default_factory=set)

    def draw(self, what: str, group: GroupId) -> float:
        return random.Random(f"{self.seed} {what} {group.epoch}/{group.prompt}").random()

    def excuse(self, group: GroupId) -> None:
        self.may_drop.add(f"{group.epoch}/{group.prompt}")


class FakeTrainer:
    """Its weights are its history: which samples each step trained on, back to the start."""

    def __init__(
        self,
        fate: Fate,
        dice: random.Random,
        digest: str,
        death_rate: float,
        begins: Callable[[int], None],
    ) -> None:
        """`begins` is told of each step."""
        self._begins = begins
        self._fate = fate
        self._dice = dice
        self._digest = digest
        self._death_rate = death_rate
        self._gradients: list[str] = []
        self._saving: dict[Path, str] = {}
        self.history: History = []
        self.died = asyncio.Event()

    async def info(self) -> SimpleNamespace:
        return SimpleNamespace(tokenizer_digest=self._digest, model="fake", vocab_size=64)

    async def compute_logprobs(self, segments: Segments, temperature: float | None = None) -> Float32:
        await self._work(0.3)
        return np.zeros(len(segments.token_ids), np.float32)

    async def forward_backward(self, key: StepKey, batch: PolicyBatch) -> Mapping[str, float]:
        self._begins(key.step)
        await self._work(1.0)
        samples = list(self._trained(batch))
        if any(self._fate.draw("refused", id.group) < self._fate.refused for id in samples):
            for id in samples:
                self._fate.excuse(id.group)
            self._fate.refused_steps.add(key.step)
            raise UserError(f"step {key.step}: this batch does not fit")
        self._gradients = [str(id).partition("/")[2] for id in samples]
        return {"actor/pg_loss": 0.0, "perf/total_num_tokens": 1.0}

    async def optim_step(self, key: StepKey, learning_rate: float) -> Mapping[str, float]:
        await self._work(0.2)
        if not self.history or self.history[-1][0] != key.step:
            self.history.append((key.step, []))
        self.history[-1][1].extend(self._gradients)
        return {"actor/grad_norm": 1.0}

    async def save_checkpoint(self, path: Path) -> None:
        await self._work(0.2)
        self._saving[path] = json.dumps(self.history)

    async def wait_checkpoint(self, path: Path) -> CheckpointWrite:
        await self._work(self._dice.choice((0.1, 3.0, 12.0)))
        write_history(path, self._saving.pop(path))
        return CheckpointWrite(1, 0.1)

    async def load_checkpoint(self, path: Path | None) -> None:
        await self._work(0.5)
        self.history = [] if path is None else read_history(path)

    async def offload(self) -> int:
        return 0

    async def close(self) -> None: ...

    def _trained(self, batch: PolicyBatch) -> Iterator[SampleId]:
        """Of the samples that have a weight in the loss."""
        for number in np.unique(batch.samples[batch.loss_weights > 0]):
            yield SampleId.parse("toy/" + read(batch.segments.token_ids[batch.samples == number]))

    async def _work(self, seconds: float) -> None:
        await asyncio.sleep(seconds * (0.5 + self._dice.random()))
        if self._dice.random() < self._death_rate:
            self.died.set()
        if self.died.is_set():
            raise ServiceUnavailableError("the fake trainer died")


def write_history(folder: Path, content: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HISTORY).write_text(content)


def read_history(folder: Path) -> History:
    return [(step, samples) for step, samples in json.loads((folder / HISTORY).read_text())]


class FakeReplica:
    """Samples take their time, some much longer than most. Streams are lost while their samples continue and
    may be asked for again; samples are aborted, sent twice, or sent when others are asked for."""

    def __init__(self, name: str, dice: random.Random, fault_rate: float) -> None:
        self.name = name
        self._dice = dice
        self._fault_rate = fault_rate
        self._version = Version("", 0)
        self._samples: dict[
            tuple[SampleId, int], asyncio.Task[Trajectory]
        ] = {}  # of this lineage, by attempt

    async def commit(self, version: Version, *, finish_running: bool) -> None:
        running = [task for task in self._samples.values() if not task.done()]
        if finish_running and running:
            await asyncio.wait(running)
        if version.lineage != self._version.lineage:
            await self.abort("")
            self._samples.clear()
        self._version = version

    async def generate(self, model: str, requests: Sequence[TurnRequest]) -> AsyncGenerator[Arrival, None]:
        asked = [(id.sample, id.attempt) for request in requests for id in request.ids]
        missing = {self._begun(*key) for key in asked}
        while missing:
            done, missing = await asyncio.wait(missing, return_when=asyncio.FIRST_COMPLETED)
            samples = [task.result() for task in done if not task.cancelled()]
            if self._strikes():
                raise ServiceUnavailableError(f"{self.name} was lost")
            if samples:
                yield arrival(samples)
            if samples and self._strikes():
                yield arrival([self._dice.choice(samples)])  # once more
            late = [old.result() for old in map(self._earlier, samples) if old and old.done()]
            if late and self._strikes():
                yield arrival(late)

    async def abort(self, id_prefix: str) -> int:
        chosen = [task for key, task in self._samples.items() if f"{key[0]}/".startswith(id_prefix)]
        return sum(task.cancel() for task in chosen)

    async def close(self) -> None: ...

    def _begun(self, id: SampleId, attempt: int) -> asyncio.Task[Trajectory]:
        known = self._samples.get((id, attempt))
        if known is None or known.cancelled():
            known = self._samples[id, attempt] = asyncio.create_task(self._sample(id, attempt))
        return known

    async def _sample(self, id: SampleId, attempt: int) -> Trajectory:
        tokens, begun = spelled(id), self._version
        await asyncio.sleep(self._dice.choice((0.2, 0.3, 0.5, 1.0, 1.0, 1.5, 6.0)))
        versions = [begun, begun, *([self._version] * (len(tokens) - 2))]  # a push may have come between
        reason = FinishReason.ABORT if self._strikes() else FinishReason.STOP
        node = builders.node(tokens, versions=begun if begun == self._version else versions)
        return builders.sample(id, node, attempt=attempt, reason=reason, replica=self.name)

    def _earlier(self, sample: Trajectory) -> asyncio.Task[Trajectory] | None:
        """What an earlier attempt at it has become."""
        return self._samples.get((sample.id, sample.attempt - 1))

    def _strikes(self) -> bool:
        return self._dice.random() < self._fault_rate


def arrival(samples: Sequence[Trajectory]) -> Arrival:
    return Arrival.parse(encode_trajectories(samples).SerializeToString())


class FakeGrader:
    """Some prompts can never be graded, some responses not at the first time."""

    def __init__(self, fate: Fate, dice: random.Random, fault_rate: float) -> None:
        self._fate = fate
        self._dice = dice
        self._fault_rate = fault_rate

    async def verdicts(self, items: Sequence[ScoreItem]) -> AsyncGenerator[list[Verdict], None]:
        waiting = list(items)
        self._dice.shuffle(waiting)
        while waiting:
            await asyncio.sleep(self._dice.choice((0.01, 0.1, 0.1, 2.0)))
            if self._dice.random() < self._fault_rate:
                raise ServiceUnavailableError("the grader was lost")
            number = self._dice.randint(1, len(waiting))
            ready, waiting = waiting[:number], waiting[number:]
            yield [self._verdict(item.id) for item in ready]

    async def describe(self) -> RewardInfo:
        return RewardInfo(("exact_match",), MAX_QUEUED)

    async def close(self) -> None: ...

    def _verdict(self, id: SampleId) -> Verdict:
        fate = self._fate
        if fate.draw("ungradable", id.group) < fate.ungradable:
            fate.excuse(id.group)
            return GradingError(id, "exact_match", "ZeroDivisionError", retryable=False)
        if self._dice.random() < self._fault_rate:
            fate.excuse(id.group)  # it may be asked again in vain
            return GradingError(id, "exact_match", "busy", retryable=True)
        if fate.draw("flat", id.group) < fate.flat:
            fate.excuse(id.group)
            return Graded(id, 1.0, {"exact_match": 1.0})
        return Graded(id, float(id.index % 2), {"exact_match": float(id.index % 2)})
